# SPDX-License-Identifier: Apache-2.0
"""The guard around libraries that read other people's files: clear errors."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import device_error, first_cause, is_panic


AGAIN = "Save or fetch the checkpoint again, or use another."
"""The remedy for a checkpoint that is broken, or made to look so."""


@contextmanager
def loading(what: str, *, remedy: str = AGAIN) -> Iterator[None]:
    """Guards a call that reads other people's files: whatever it raises becomes one clear sentence.

    Args:
        what: What is read, as the subject of the sentence: "The processor of FOLDER".
        remedy: What to do, as a sentence.

    Raises:
        ValueError: It cannot be read.
        OSError: It does not exist.
        ImportError: Unchanged, as are errors of a device, of a library of kernels, and of memory.
    """
    try:
        yield
    except (OSError, ImportError):
        raise
    except BaseException as error:
        if device_error(error):  # which is no fault of the file
            error.add_note(f"loading {what[0].lower()}{what[1:]}")
            raise
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if isinstance(error, ValueError) and _is_raised_here(error):
            raise
        reason = " ".join(first_cause(error)[0].split())
        if "trust_remote_code" in reason:
            raise ValueError(f"{what} needs code that comes with it, which this command does not run.") from error
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{what} cannot be loaded: {kind}{reason[:600].rstrip('.')}. {remedy}") from error


def _is_raised_here(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # where it was raised
    return str(frame.f_globals.get("__name__")).startswith(f"{__package__.split('.')[0]}.")
