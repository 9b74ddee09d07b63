# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of any vision-language model. `probe` is imported on first use: training has none."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .measure.probe import probe


def __getattr__(name: str) -> Any:
    if name == "probe":
        from .measure.probe import probe

        return probe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
