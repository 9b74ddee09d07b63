# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can fix. A command prints one sentence, and exits with status 1."""

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.text import Text

from .console import Console, escaped
from .devices import MORE, device_error
from .signals import Terminated, stop_on_signals


TRACEBACK = "NORMALIGN_TRACEBACK"
"""If this variable is 1 in the environment, errors are printed with their traceback."""

_NO_SPACE_NUMBERS = f"{errno.ENOSPC}|{errno.EDQUOT}|{errno.EFBIG}"
_CUT_OFF = (
    "PytorchStreamWriter failed writing|inline_container.*unexpected pos"  # torch.save
    r"|\d+ requested and \d+ written"  # numpy's tofile, by which gguf writes tensors
)
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def exit_on_error(extra: str = "", stopped: str = "", full: str = MORE) -> Iterator[None]:
    """Prints an error of the block that a user can fix, and exits with status 1.

    After Ctrl-C the status is 130, and after SIGTERM it is 143. Only the first process to fail on
    a machine prints its error, since the others fail because of it.

    Args:
        extra: The extra of this package that a missing module belongs to.
        stopped: A sentence to print after Ctrl-C or SIGTERM, unless the exception has notes.
        full: A sentence that says what to do if memory is full.

    Raises:
        typer.Exit: After a signal, or an error that a user can fix. Other errors stay as they are.
    """
    with stop_on_signals():
        try:
            yield
        except (KeyboardInterrupt, Terminated) as error:
            if os.environ.get("RANK", "0") == "0":
                notes = getattr(error, "__notes__", [stopped])
                Console(stderr=True).print("Stopped.", *notes, soft_wrap=True)
            raise typer.Exit(143 if isinstance(error, Terminated) else 130) from None
        except (SystemExit, typer.Exit, BrokenPipeError):  # the last if `| head` has read enough
            raise
        except BaseException as error:  # torch.distributed.checkpoint's own is not an Exception
            if not _fails_first():
                raise typer.Exit(1) from error
            message = _message(error, extra, full)
            if message is None:
                raise
            if os.environ.get(TRACEBACK) == "1":
                traceback_text = "".join(traceback.format_exception(error))
                Console(stderr=True).print(traceback_text.rstrip())
            process_suffix = ""
            if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
                process_suffix = f" in process {os.environ['RANK']}"
            error_line = Text.assemble(
                (f"Error{process_suffix}:", "bold red"), " ", escaped(message)
            )
            Console(stderr=True).print(error_line, soft_wrap=True)  # paths stay whole
            raise typer.Exit(1) from error


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust crashed, such as tokenizers. This is not an `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def _message(error: BaseException, extra: str, full: str) -> str | None:
    """Returns a sentence about an error that a user can fix, and None for another error."""
    if extra and isinstance(error, ModuleNotFoundError):
        return f"{error}. {how_to_install(extra)}"
    if is_panic(error):
        return f"A native library crashed: {error}. Use another checkpoint, or other data."
    message = device_error(error, full)
    if message:
        return message
    if isinstance(error, ValueError | OSError | ImportError | FloatingPointError):
        return str(error)
    return None


def _fails_first() -> bool:
    """Returns whether this process is the first to fail on this machine, and writes that down.

    Without torch's launcher, each process counts as the first.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in a folder common to the processes
    if not error_file:
        return True
    try:
        (Path(error_file).parents[1] / "failed").touch(exist_ok=False)
    except OSError as error:  # no FileExistsError if the launcher has removed the folder
        return not isinstance(error, FileExistsError)
    return True


class NotWritable(OSError):
    """A folder cannot be written to."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turns the block's error of a read-only folder or a full disk into [`NotWritable`]."""
    try:
        yield
    except NotWritable:
        raise
    except Exception as error:
        reason = write_failure(error)
        if isinstance(error, OSError) and error.errno in _DENIED and error.filename is not None:
            file = Path(os.fsdecode(error.filename))
            # It is in the folder, the folder itself, or above.
            if file in folder.parents or folder in (file, *file.parents):
                reason = error.strerror
        if reason is None:
            raise
        raise NotWritable(
            f"{folder} cannot be written to: {reason}. Make room, or write to another folder."
        ) from error


def write_failure(error: BaseException | None) -> str | None:
    """Returns why a file was not written, if the reason or its cause is a full disk or quota."""
    # Searched in the text, since safetensors and torch raise no OSErrors.
    traceback_text = "".join(traceback.format_exception(error))
    full_disk = re.search(rf"(?:\[Errno |\(os error )({_NO_SPACE_NUMBERS})\b", traceback_text)
    if full_disk:
        return os.strerror(int(full_disk[1]))
    if re.search(_CUT_OFF, traceback_text):
        return "a file could not be written to its end"  # these libraries give no reason
    return None


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
