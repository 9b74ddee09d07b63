# SPDX-License-Identifier: Apache-2.0
"""Output of commands: foreign text cannot control the terminal; an error is one sentence and exit status 1.

Messages of other libraries that a user can do nothing about are hidden.
"""

import errno
import logging
import os
import re
import signal
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

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
    """`text` with control and invisible characters as in Python, `\\x1b`, but for line breaks, tabs and joiners."""
    # Control (C0, C1), format (bidirectional, of no width), half of a surrogate pair, line or paragraph separator.
    hidden = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    hidden -= {"\n", "\t", "\u200c", "\u200d"}
    return text.translate({ord(letter): ascii(letter)[1:-1] for letter in hidden})


def printable(text: str) -> str:
    """The text with question marks for half surrogate pairs, which JSON may have and UTF-8 may not."""
    return text.encode(errors="replace").decode()


class Terminated(SystemExit):
    """SIGTERM. What the command has begun and not finished is removed, and it ends with status 143."""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust crashed, such as tokenizers at a text. That is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


MORE = "Use a machine with more."
_FULL = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.I)
_ASKED = re.compile(r"tried to allocate [\d.]+ \w+(\. GPU \d+ has .*? is free)?", re.I)
_DEVICE = re.compile(r"\b(CUDA|cuDNN|CUBLAS\w*|HIP|NVIDIA|XPU)\b")
_KERNELS = re.compile(r"[\\/](bitsandbytes|flash_attn|(?<=-packages[\\/])(?:triton|kernels))[\\/]")
_DISK_FULL = f"{errno.ENOSPC}|{errno.EDQUOT}|{errno.EFBIG}"
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def device_error(error: BaseException, remedy: str = MORE) -> str | None:
    """A sentence about full memory, with its remedy, or an error of a GPU or a library of kernels; else None."""
    if isinstance(error, OSError | ImportError) or not isinstance(error, Exception):
        return None
    text, frames = first_cause(error)
    of_torch = isinstance(error, RuntimeError | AssertionError)
    if isinstance(error, MemoryError) or of_torch and _FULL.search(text):
        place = "".join(f" in {note}" for note in getattr(error, "__notes__", ())[:1])
        asked = _ASKED.search(text)
        return f"Out of memory{place}{f': {asked[0]}' if asked else ''}. {remedy}"
    text = text.partition("\n")[0].rstrip(".")
    if kernels := _KERNELS.findall(frames):
        return f"{kernels[-1]} failed: {text or type(error).__name__}. Does its version fit torch and this machine?"
    if of_torch and _DEVICE.search(text):
        return f"The GPU failed: {text}. Does this build of torch fit the GPU and its driver?"
    return None


def first_cause(error: BaseException) -> tuple[str, str]:
    """An error's message and traceback; of one in quantizing or placing weights, which transformers keeps as text."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for report in getattr(frame.f_locals.get("loading_info"), "conversion_errors", {}).values():
            cause = re.search(r"^[\w.]+: (.+)$", report, re.M)
            return cause[1] if cause else report, report
    return str(error), "".join(traceback.format_tb(error.__traceback__))


@contextmanager
def errors_for_people(extra: str | None = None, stopped: str = "", full: str = MORE) -> Iterator[None]:
    """Prints errors that a user can fix as a message without a traceback, and exits with status 1; after Ctrl-C and
    SIGTERM with `stopped` and 130 or 143.

    Of the processes of a run on one machine, the first that fails prints its error: others fail since it has ended. A
    missing module belongs to `extra` of this package; `full` says what to do if memory is full.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _stop)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        if os.environ.get("RANK", "0") == "0":
            Console(stderr=True).print("Stopped.", *getattr(error, "__notes__", [stopped]), soft_wrap=True)
        raise typer.Exit(143 if isinstance(error, Terminated) else 130) from None
    except (SystemExit, typer.Exit, BrokenPipeError):  # typer ends without a word if `| head` has read enough
        raise
    except BaseException as error:  # torch.distributed.checkpoint's own is not an Exception
        if _is_first():
            message = device_error(error, full)
            if extra and isinstance(error, ModuleNotFoundError):
                message = f"{error}. {install(extra)}"
            elif isinstance(error, ValueError | OSError | ImportError | FloatingPointError):
                message = message or str(error)
            if message is None:
                raise
            process = f" in process {os.environ['RANK']}" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
            line = Text.assemble((f"Error{process}:", "bold red"), " ", escaped(message))
            Console(stderr=True).print(line, soft_wrap=True)  # paths stay whole
        raise typer.Exit(1) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_first() -> bool:
    """Whether no other process of this run on this machine has failed before; with launchers but torch's, True."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # in a folder that the processes have in common
        try:
            (Path(file).parents[1] / "failed").touch(exist_ok=False)
        except OSError as error:  # another than this one if the launcher has removed the folder
            return not isinstance(error, FileExistsError)
    return True


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt the removal of what is unfinished
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(128 + number)


class NotWritable(OSError):
    """A folder cannot be written to."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raises [`NotWritable`] in place of an error of the block that comes of a read-only folder or a full disk."""
    try:
        yield
    except Exception as error:
        cause = None if isinstance(error, NotWritable) else write_failure(error)
        if isinstance(error, OSError) and error.errno in _DENIED and error.filename is not None:
            file = Path(os.fsdecode(error.filename))
            if file in folder.parents or folder in (file, *file.parents):
                cause = error.strerror
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
    text = "".join(traceback.format_exception(error))
    if full := re.search(rf"(?:\[Errno |\(os error )({_DISK_FULL})\b", text):
        return os.strerror(int(full[1]))
    if re.search("PytorchStreamWriter failed writing|inline_container.*unexpected pos", text):
        return "a file could not be written to its end"  # torch.save gives no reason
    return None


def check_installed(module: str, extra: str, what: str) -> None:
    """Raises ImportError, which names the extra, if `what` needs a module that is not installed."""
    if find_spec(module) is None:
        raise ImportError(f"{what} needs the package {module}, which is not installed. {install(extra)}.")


def install(extra: str) -> str:
    """How to install an extra of this package, which is not on PyPI."""
    return f"Install it: pip install '.[{extra}]' in a checkout, or pip install 'normalign-llava[{extra}] @ git+URL'"


NOTICES = {
    "DeepSpeed": "Setting accelerator to CPU",  # on standard output, with and without it in use
    "accelerate.accelerator": "Gradient accumulation steps mismatch",  # the Trainer counts them itself
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "datasets.builder": "Setting num_proc from",  # for a split of fewer files
    "transformers.configuration_utils": "must be `None` or an integer within the vocabulary",  # of a CLIP's text part
    "transformers.modeling_utils": "| CONVERSION",  # an error follows, which has what matters of the report
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
    "transformers.utils.import_utils": "requires torchvision (not installed)",  # Pillow's serve as well
}


def hide_notices() -> None:
    """Hides `NOTICES`, and deprecation warnings of libraries imported later, unless `python -W` is given."""
    if sys.warnoptions:
        return
    for name in NOTICES:
        logging.getLogger(name).addFilter(lambda record: NOTICES[record.name] not in str(record.msg))
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|transformers|trl|peft)\.")
    warnings.filterwarnings("ignore", category=UserWarning, module="_distutils_hack")  # of DeepSpeed's imports
