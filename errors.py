# SPDX-License-Identifier: Apache-2.0
"""Output of commands: foreign text cannot control the terminal; an error is one sentence and exit status 1."""

import errno
import hashlib
import os
import re
import signal
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

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
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


class Printed(JupyterMixin):
    """What a terminal prints and a notebook shows as its `renderable()`, foreign text as [`Console`] prints it."""

    def renderable(self) -> RenderableType:
        """What `rich` prints of it; of a dataclass by default a table of its fields."""
        table = Table(show_header=False)
        for name, value in vars(self).items():
            if not isinstance(value, dict | list):
                table.add_row(name, format(value, {int: ",", float: ".4g"}.get(type(value), "")))
        return table

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> Iterable[Segment]:
        return Console().render(self.renderable(), options)


def escaped(text: str) -> str:
    """`text` with control and invisible characters written as in Python, `\\x1b`.

    Line breaks, tabs and the joiners of letters and emoji stay.
    """
    # Control (C0, C1), format (bidirectional, of no width), half of a surrogate pair, line or paragraph separator.
    hidden = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    hidden -= {"\n", "\t", "\u200c", "\u200d"}
    return text.translate({ord(letter): ascii(letter)[1:-1] for letter in hidden})


class Terminated(SystemExit):
    """SIGTERM. What the command has begun and not finished is removed, and it ends with status 143."""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust crashed, such as tokenizers at a text. That is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


_FULL = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory", re.I)
_DEVICE = re.compile(
    r"\b(CUDA|cuDNN|CUBLAS\w*|HIP|NVIDIA|XPU)\b|no kernel image|Could not run '\S+' with arguments from"
)
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
_KERNELS = re.compile(
    r"(?:-packages[\\/]|[\\/](?=bitsandbytes|flash_attn))(bitsandbytes|triton|flash_attn|kernels)[\\/]"
)


def device_error(error: BaseException, remedy: str = "Use a machine with more.") -> str | None:
    """A sentence about full memory, or an error of a GPU or of a library of kernels; None for other errors.

    Args:
        remedy: What to do if memory is full, as a sentence.
    """
    if isinstance(error, OSError | ImportError) or not isinstance(error, Exception):
        return None
    text, where = first_cause(error)
    of_torch = isinstance(error, RuntimeError | AssertionError)
    if isinstance(error, MemoryError) or of_torch and _FULL.search(text):
        size = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.I)
        tried = "".join(f" in {note}" for note in getattr(error, "__notes__", ())[:1])  # where it was raised
        asked = f"{size[1]} more were asked for, after a peak" if size else "The peak was"
        return f"Out of memory{tried}: {asked} of {_peak()}. {remedy}"
    text = text.partition("\n")[0].rstrip(".")
    if kernels := _KERNELS.findall(where):
        return f"{kernels[-1]} failed: {text or type(error).__name__}. Does its version fit torch and this machine?"
    if type(error).__name__ == "AcceleratorError" or of_torch and _DEVICE.search(text):
        return f"The GPU failed: {text}. Does this build of torch fit the GPU and its driver?"
    return None


def first_cause(error: BaseException) -> tuple[str, str]:
    """An error's message, and the files through which it was raised.

    Of errors in quantizing or placing weights, transformers logs a traceback and raises another that names no cause.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in frames:
        for where in getattr(frame.f_locals.get("loading_info"), "conversion_errors", {}).values():
            said = [text for name, text in re.findall(r"^([\w.]+): (.+)$", where, re.M) if name != "Error"]
            return (said or [where])[0], where
    return str(error), "\n".join(frame.f_code.co_filename for frame in frames)


def _peak() -> str:
    """The most memory that this process has used: of the GPU, once it is used, or else of this machine."""
    torch: Any = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        size, whole = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
        return f"{size / 2**30:,.2f} of the {whole / 2**30:,.2f} GiB of {torch.cuda.get_device_name()}"
    if sys.platform == "win32":
        return "what this machine has"
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"{size / 2**30:,.2f} GiB"


@contextmanager
def errors_for_people(
    extra: str | None = None, stopped: str = "", full: str = "Use a machine with more."
) -> Iterator[None]:
    """Prints errors that a user can fix as a message without a traceback, and exits with status 1.

    Ctrl-C and SIGTERM end the block too, with the words "Stopped." and status 130 or 143. Of the processes of a run on
    one machine, one prints what several would, and what is an error only because another process has ended is a line.

    Args:
        extra: The extra of this package that a missing module belongs to.
        stopped: What to say of a command that was stopped, unless the exception has notes of it.
        full: What to do if memory is full.
    """
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, _stop)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        if os.environ.get("RANK", "0") == "0":
            Console(stderr=True).print("Stopped.", *getattr(error, "__notes__", [stopped]), soft_wrap=True)
        raise typer.Exit(143 if isinstance(error, Terminated) else 130) from None
    except (SystemExit, typer.Exit):
        raise
    except BrokenPipeError:  # `| head` has read what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        raise typer.Exit(1) from None
    except BaseException as error:
        message, is_first = _message(error, extra, full), _is_first("error")
        text = message or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        is_new = _is_first(hashlib.sha256(text.encode(errors="replace")).hexdigest())
        if message is None and is_first:
            raise
        if is_new:
            process = f" in process {os.environ.get('RANK')}" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
            head = (f"Error{process}:", "bold red") if message else f"Then{process}:"
            line = Text.assemble(head, " ", escaped(text))  # one write, or another process writes between
            Console(stderr=True).print(line, soft_wrap=True)  # paths stay whole
        raise typer.Exit(1) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _message(error: BaseException, extra: str | None, full: str) -> str | None:
    """What to print of an error that a user can do something about; None for others."""
    if is_panic(error):
        return f"A native library crashed while it read a file: {error}. Use another checkpoint."
    if extra and isinstance(error, ModuleNotFoundError):
        return f"{error}. {install(extra)}"
    known = isinstance(error, ValueError | OSError | ImportError | FloatingPointError)
    return device_error(error, full) or (str(error) if known else None)


def _is_first(name: str) -> bool:
    """Whether this process of a run is the first on its machine to ask for `name`; alone it always is.

    torch's launcher gives the processes a folder in common, which it removes. With other launchers all are first.
    """
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    try:
        if file.name == "error.json":
            file.parents[1].joinpath(f"first-{name}").touch(exist_ok=False)
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt the removal of what is unfinished
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    raise Terminated(128 + number)


class NotWritable(OSError):
    """A folder cannot be written to."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raises [`NotWritable`] in place of an error of the block that comes of a read-only folder or a full disk."""
    try:
        yield
    except NotWritable:
        raise
    except Exception as error:
        cause = write_failure(error)
        if isinstance(error, OSError) and error.errno in _DENIED and error.filename is not None:
            file = Path(os.fsdecode(error.filename))
            cause = error.strerror if file in folder.parents or folder in (file, *file.parents) else cause
        if cause is None:
            raise
        raise NotWritable(
            f"{folder} cannot be written to: {cause}. Make room there, or write to another folder with --output (of "
            "training, --output_dir)."
        ) from error


def write_failure(error: BaseException | None) -> str | None:
    """Why a file could not be written, if `error` or its cause is that a disk or a quota is full; otherwise None.

    safetensors, tokenizers and torch raise errors of their own, which are not OSErrors.
    """
    while error is not None:
        text = str(error)
        numbers = {int(number) for number in re.findall(r"(?:\[Errno |\(os error )(\d+)", text)}
        if known := numbers & _DISK_FULL:
            return os.strerror(known.pop())
        if "PytorchStreamWriter failed writing" in text or ("inline_container" in text and "unexpected pos" in text):
            return "a file could not be written to its end"  # torch.save gives no reason
        error = error.__cause__ or error.__context__
    return None


def check_installed(module: str, extra: str, what: str) -> None:
    """Raises ImportError, which names the extra, if `what` needs a module that is not installed."""
    if find_spec(module) is None:
        raise ImportError(f"{what} needs the package {module}, which is not installed. {install(extra)}.")


def install(extra: str) -> str:
    """How to install an extra of this package, which is not on PyPI."""
    return f"Install it: pip install '.[{extra}]' in a checkout, or pip install 'normalign-llava[{extra}] @ git+URL'"
