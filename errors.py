# SPDX-License-Identifier: Apache-2.0
"""Output of commands.

Foreign text cannot control the terminal. An error is one sentence, and the exit status is then 1.
Messages of other libraries are hidden if a user can do nothing about them.
"""

import errno
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from unicodedata import category

import rich.console
import typer
from rich.console import ConsoleOptions, RenderableType
from rich.jupyter import JupyterMixin
from rich.segment import Segment
from rich.table import Table
from rich.text import Text


class Console(rich.console.Console):
    """Rich's console without markup, and with control characters escaped."""

    def __init__(self, **options):
        super().__init__(markup=False, highlight=False, **options)

    def render_str(self, text: str, **options):
        return super().render_str(escaped(text), **options)  # before its width is measured

    def render(self, renderable, options=None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control:
                segment = segment._replace(text=escaped(segment.text))
            yield segment


class Printed(JupyterMixin):
    """An object whose `renderable()` terminals and notebooks show, with foreign text escaped."""

    labels: ClassVar[dict[str, str]] = {}
    """Names in the table for fields whose own names do not say what they are."""

    def renderable(self) -> RenderableType:
        """Returns what `rich` prints. By default, this is a table of a dataclass' fields.

        Fields that are None, lists and mappings are left out.
        """
        table = Table(show_header=False)
        for field_name, field_value in vars(self).items():
            if field_value is not None and not isinstance(field_value, dict | list):
                table.add_row(self.labels.get(field_name, field_name), _cell(field_value))
        return table

    def __rich_console__(
        self, console: rich.console.Console, options: ConsoleOptions
    ) -> Iterable[Segment]:
        return Console().render(self.renderable(), options)


def _cell(value: Any) -> str:
    """Writes a number or a word for a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


# Control, format (direction, no width), half a surrogate pair, line or paragraph separator.
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def escaped(text: str) -> str:
    """Escapes invisible characters as in `\\x1b`, except line breaks, tabs and joiners."""
    invisible = {character for character in text if category(character) in _INVISIBLE}
    for character in invisible - {"\n", "\t", "\u200c", "\u200d"}:
        text = text.replace(character, ascii(character)[1:-1])
    return text


def printable(text: str) -> str:
    """Writes question marks for half surrogate pairs: JSON may have them, UTF-8 cannot."""
    return text.encode(errors="replace").decode()


class Terminated(SystemExit):
    """SIGTERM was received. Unfinished files are removed, and the exit status is 143."""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust crashed, such as tokenizers. It raises no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


MORE = "Use a machine with more."
TRACEBACK = "NORMALIGN_TRACEBACK"  # 1 in the environment: errors are printed with their traceback
_FULL = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.I)
_KERNELS = re.compile(r"[\\/](bitsandbytes|flash_attn|(?<=-packages[\\/])(?:triton|kernels))[\\/]")
_DISK_FULL = f"{errno.ENOSPC}|{errno.EDQUOT}|{errno.EFBIG}"
_TORCH_WRITE_FAILED = "PytorchStreamWriter failed writing|inline_container.*unexpected pos"
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def device_error(error: BaseException, remedy: str = MORE) -> str | None:
    """Returns a sentence about full memory, with a remedy, or about failed kernels or a failed GPU.

    Returns None for other errors.
    """
    if isinstance(error, OSError | ImportError) or not isinstance(error, Exception):
        return None
    message, traceback_text = first_cause(error)
    may_be_torch = isinstance(error, RuntimeError | AssertionError)
    if isinstance(error, MemoryError) or (may_be_torch and _FULL.search(message)):
        return _memory_error(error, message, remedy)
    first_line = message.partition("\n")[0].rstrip(".")
    if not first_line:
        first_line = type(error).__name__
    kernels = _KERNELS.findall(traceback_text)
    if kernels:
        return f"{kernels[-1]} failed: {first_line}. Does its version fit torch and this machine?"
    if may_be_torch and re.search(r"\b(CUDA|cuDNN|CUBLAS\w*|HIP|NVIDIA|XPU)\b", first_line):
        return f"The GPU failed: {first_line}. Does this build of torch fit the GPU and its driver?"
    return None


def _memory_error(error: Exception, text: str, remedy: str) -> str:
    """Says where memory was full, by the error's first note, and how much was asked for."""
    place = ""
    for note in getattr(error, "__notes__", [])[:1]:
        place = f" in {note}"
    amount = re.search(r"tried to allocate [\d.]+ \w+(\. GPU \d+ has .*? is free)?", text, re.I)
    if amount:
        place += f": {amount[0]}"
    return f"Out of memory{place}. {remedy}"


def first_cause(error: BaseException) -> tuple[str, str]:
    """Returns message and traceback of an error, or of the error in loading that it reports.

    transformers keeps the latter in a local variable.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        loading_info = frame.f_locals.get("loading_info")
        for report in getattr(loading_info, "conversion_errors", {}).values():
            cause = re.search(r"^[\w.]+: (.+)$", report, re.M)
            return (cause[1] if cause else report), report
    return str(error), "".join(traceback.format_tb(error.__traceback__))


@contextmanager
def errors_for_people(extra: str = "", stopped: str = "", full: str = MORE) -> Iterator[None]:
    """Prints errors that a user can fix without a traceback, and exits with status 1.

    Ctrl-C and SIGTERM exit with status 130 and 143. Only the first process to fail on a machine
    prints its error: others fail since it has ended. With `TRACEBACK` in the environment, the
    traceback is printed first.

    Args:
        extra: The extra of this package that a missing module belongs to.
        stopped: A sentence to print after Ctrl-C or SIGTERM.
        full: A sentence that says what to do if memory is full.
    """
    handlers = _stop_on_signals()
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
        if _is_first():
            message = _message(error, extra, full)
            if message is None:
                raise
            _print_error(error, message)
        raise typer.Exit(1) from error
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)


def _stop_on_signals() -> dict[int, Any]:
    """Lets SIGINT and SIGTERM stop the command, unless they are ignored.

    Returns their handlers before.
    """
    previous_handlers: dict[int, Any] = {}
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(signal_number)
        if handler not in (signal.SIG_IGN, None):
            previous_handlers[signal_number] = handler
            signal.signal(signal_number, _stop)
    return previous_handlers


def _message(error: BaseException, extra: str, full: str) -> str | None:
    """Returns a sentence about an error that a user can fix; None for another error."""
    if extra and isinstance(error, ModuleNotFoundError):
        return f"{error}. {install(extra)}"
    if is_panic(error):
        return f"A native library crashed: {error}. Use another checkpoint, or other data."
    message = device_error(error, full)
    if message is None and isinstance(
        error, ValueError | OSError | ImportError | FloatingPointError
    ):
        message = str(error)
    return message


def _print_error(error: BaseException, message: str) -> None:
    """Prints an error's message, with the process if there are several."""
    if os.environ.get(TRACEBACK) == "1":
        traceback_text = "".join(traceback.format_exception(error))
        Console(stderr=True).print(traceback_text.rstrip())
    process_suffix = ""
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        process_suffix = f" in process {os.environ['RANK']}"
    error_line = Text.assemble((f"Error{process_suffix}:", "bold red"), " ", escaped(message))
    Console(stderr=True).print(error_line, soft_wrap=True)  # paths stay whole


def _is_first() -> bool:
    """Whether no other process of this run has failed on this machine.

    True if the launcher is not torch's.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in a folder common to the processes
    if not error_file:
        return True
    try:
        (Path(error_file).parents[1] / "failed").touch(exist_ok=False)
    except OSError as error:  # no FileExistsError if the launcher has removed the folder
        return not isinstance(error, FileExistsError)
    return True


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt cleaning up
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(128 + number)


class NotWritable(OSError):
    """A folder cannot be written to."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raises [`NotWritable`] instead of the block's error of a read-only folder or a full disk."""
    try:
        yield
    except NotWritable:
        raise
    except Exception as error:
        reason = write_failure(error)
        if isinstance(error, OSError) and _is_denied(error, folder):
            reason = error.strerror
        if reason is None:
            raise
        remedy = "Make room, or write to another folder."
        raise NotWritable(f"{folder} cannot be written to: {reason}. {remedy}") from error


def _is_denied(error: OSError, folder: Path) -> bool:
    """Whether an error forbids writing in a folder, into a file of it, or in a folder above."""
    if error.errno not in _DENIED or error.filename is None:
        return False
    file = Path(os.fsdecode(error.filename))
    return file in folder.parents or folder in (file, *file.parents)


def write_failure(error: BaseException | None) -> str | None:
    """Returns why a file was not written, if the reason or its cause is a full disk or quota."""
    # Searched in the text, since safetensors and torch raise no OSErrors.
    traceback_text = "".join(traceback.format_exception(error))
    full_disk = re.search(rf"(?:\[Errno |\(os error )({_DISK_FULL})\b", traceback_text)
    if full_disk:
        return os.strerror(int(full_disk[1]))
    if re.search(_TORCH_WRITE_FAILED, traceback_text):
        return "a file could not be written to its end"  # torch.save gives no reason
    return None


def check_installed(module: str, extra: str, what: str) -> None:
    """Raises ImportError that names the extra, if `what` needs a module that is not installed."""
    if find_spec(module) is None:
        raise ImportError(f"{what} needs {module}, which is not installed. {install(extra)}.")


def install(extra: str) -> str:
    """Says how to install an extra of this package, which is not on PyPI."""
    requirement = f"'normalign-llava[{extra}] @ git+URL'"
    return f"Install it: pip install '.[{extra}]' in a checkout, or pip install {requirement}"


NOTICES = {
    "DeepSpeed": "Setting accelerator to CPU",  # on standard output, with and without it in use
    "accelerate.accelerator": "Gradient accumulation steps mismatch",  # the Trainer counts them
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "datasets.builder": "Setting num_proc from",  # for a split of fewer files
    "transformers.configuration_utils": "must be `None` or an integer within the vocabulary",
    "transformers.modeling_utils": "| CONVERSION",  # the error that follows has what matters
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
    "transformers.utils.import_utils": "requires torchvision (not installed)",  # Pillow serves
}


def hide_notices() -> None:
    """Hides `NOTICES`, and deprecation warnings of later imports, unless `python -W` is given."""
    if sys.warnoptions:
        return
    for logger_name in NOTICES:
        logging.getLogger(logger_name).addFilter(_is_no_notice)
    warnings.filterwarnings("ignore", "", FutureWarning, r"(torch|transformers|trl|peft)\.")
    warnings.filterwarnings("ignore", "", UserWarning, "_distutils_hack")  # of DeepSpeed's imports


def _is_no_notice(record: logging.LogRecord) -> bool:
    return NOTICES[record.name] not in str(record.msg)
