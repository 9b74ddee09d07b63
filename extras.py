# SPDX-License-Identifier: Apache-2.0
"""Optional dependencies: the extras of this package."""

from importlib.util import find_spec


def check_installed(module: str, extra: str, what: str) -> None:
    """Raises ImportError with the name of the extra if `what` needs a module that is missing."""
    if find_spec(module) is None:
        raise ImportError(
            f"{what} needs {module}, but it is not installed. {how_to_install(extra)}."
        )


def how_to_install(extra: str) -> str:
    """Returns a sentence on how to install an extra of this package. It is not on PyPI."""
    requirement = f"'normalign-llava[{extra}] @ git+URL'"
    return f"Install it: pip install '.[{extra}]' in a checkout, or pip install {requirement}"
