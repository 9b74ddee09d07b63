# SPDX-License-Identifier: Apache-2.0
"""Output of commands: foreign text cannot control the terminal; an error is one sentence, status 1.

Messages of other libraries that a user can do nothing about are hidden.
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
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


class Printed(JupyterMixin):
    """A terminal and a notebook show its `renderable()`, with foreign text escaped."""

    labels: ClassVar[dict[str, str]] = {}
    """What the table calls fields whose names do not say what they are."""

    def renderable(self) -> RenderableType:
        """What `rich` prints of it; of a dataclass by default a table of its fields.

        Fields that are None, lists and mappings are not in it.
        """
        table = Table(show_header=False)
        for name, value in vars(self).items():
            if value is not None and not isinstance(value, dict | list):
                table.add_row(self.labels.get(name, name), _cell(value))
        return table

    def __rich_console__(
        self, console: rich.console.Console, options: ConsoleOptions
    ) -> Iterable[Segment]:
        return Console().render(self.renderable(), options)


def _cell(value: Any) -> str:
    """A number or a word in a table of a report."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def escaped(text: str) -> str:
    """`text` with invisible characters escaped, `\\x1b`, but not line breaks, tabs and joiners."""
    # Control, format (direction, no width), half a surrogate pair, line or paragraph separator.
    hidden = {letter for letter in text if category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    hidden -= {"\n", "\t", "\u200c", "\u200d"}
    return text.translate({ord(letter): ascii(letter)[1:-1] for letter in hidden})


def printable(text: str) -> str:
    """The text with question marks for half surrogate pairs: JSON may have them, UTF-8 cannot."""
    return text.encode(errors="replace").decode()


class Terminated(SystemExit):
    """SIGTERM. What the command has not finished is removed, and it ends with status 143."""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust crashed, such as tokenizers. That is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


MORE = "Use a machine with more."
TRACEBACK = "NORMALIGN_TRACEBACK"  # 1 in the environment: errors are printed with their traceback
_FULL = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.I)
_KERNELS = re.compile(r"[\\/](bitsandbytes|flash_attn|(?<=-packages[\\/])(?:triton|kernels))[\\/]")
_DISK_FULL = f"{errno.ENOSPC}|{errno.EDQUOT}|{errno.EFBIG}"
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def device_error(error: BaseException, remedy: str = MORE) -> str | None:
    """A sentence about full memory, with a remedy, or failed kernels or a failed GPU; else None."""
    if isinstance(error, OSError | ImportError) or not isinstance(error, Exception):
        return None
    text, frames = first_cause(error)
    of_torch = isinstance(error, RuntimeError | AssertionError)
    if isinstance(error, MemoryError) or of_torch and _FULL.search(text):
        place = "".join(f" in {note}" for note in getattr(error, "__notes__", ())[:1])
        asked = re.search(r"tried to allocate [\d.]+ \w+(\. GPU \d+ has .*? is free)?", text, re.I)
        return f"Out of memory{place}{f': {asked[0]}' if asked else ''}. {remedy}"
    text = text.partition("\n")[0].rstrip(".") or type(error).__name__
    if kernels := _KERNELS.findall(frames):
        return f"{kernels[-1]} failed: {text}. Does its version fit torch and this machine?"
    if of_torch and re.search(r"\b(CUDA|cuDNN|CUBLAS\w*|HIP|NVIDIA|XPU)\b", text):
        return f"The GPU failed: {text}. Does this build of torch fit the GPU and its driver?"
    return None


def first_cause(error: BaseException) -> tuple[str, str]:
    """Message and traceback of `error`, or of its cause in loading, which transformers reports."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for report in getattr(frame.f_locals.get("loading_info"), "conversion_errors", {}).values():
            cause = re.search(r"^[\w.]+: (.+)$", report, re.M)
            return cause[1] if cause else report, report
    return str(error), "".join(traceback.format_tb(error.__traceback__))


@contextmanager
def errors_for_people(extra: str = "", stopped: str = "", full: str = MORE) -> Iterator[None]:
    """Prints errors that a user can fix without a traceback, and exits with status 1.

    Ctrl-C and SIGTERM print `stopped`, with status 130 and 143. Of a run's processes on a machine,
    the first that fails prints its error: others fail since it has ended. A missing module belongs
    to `extra` of this package; `full` says what to do if memory is full. With `TRACEBACK`, the
    traceback is printed first.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _stop)
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
            message = device_error(error, full)
            if extra and isinstance(error, ModuleNotFoundError):
                message = f"{error}. {install(extra)}"
            elif isinstance(error, ValueError | OSError | ImportError | FloatingPointError):
                message = message or str(error)
            elif is_panic(error):
                message = (
                    f"A native library crashed: {error}. Use another checkpoint, or other data."
                )
            if message is None:
                raise
            if os.environ.get(TRACEBACK) == "1":
                Console(stderr=True).print("".join(traceback.format_exception(error)).rstrip())
            several = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
            process = f" in process {os.environ['RANK']}" if several else ""
            line = Text.assemble((f"Error{process}:", "bold red"), " ", escaped(message))
            Console(stderr=True).print(line, soft_wrap=True)  # paths stay whole
        raise typer.Exit(1) from error
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _is_first() -> bool:
    """Whether no other process of this run here has failed; True with launchers but torch's."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # in a folder common to the processes
        try:
            (Path(file).parents[1] / "failed").touch(exist_ok=False)
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
    """Raises [`NotWritable`] in place of the block's error of a read-only folder or a full disk."""
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
        remedy = "Make room, or write to another folder."
        raise NotWritable(f"{folder} cannot be written to: {cause}. {remedy}") from error


def write_failure(error: BaseException | None) -> str | None:
    """Why a file was not written, if `error` or its cause is a full disk or quota; else None."""
    text = "".join(traceback.format_exception(error))  # safetensors and torch raise no OSErrors
    if full := re.search(rf"(?:\[Errno |\(os error )({_DISK_FULL})\b", text):
        return os.strerror(int(full[1]))
    if re.search("PytorchStreamWriter failed writing|inline_container.*unexpected pos", text):
        return "a file could not be written to its end"  # torch.save gives no reason
    return None


def check_installed(module: str, extra: str, what: str) -> None:
    """Raises ImportError, which names the extra, if `what` needs a module that is not installed."""
    if find_spec(module) is None:
        raise ImportError(f"{what} needs {module}, which is not installed. {install(extra)}.")


def install(extra: str) -> str:
    """How to install an extra of this package, which is not on PyPI."""
    name = f"'normalign-llava[{extra}] @ git+URL'"
    return f"Install it: pip install '.[{extra}]' in a checkout, or pip install {name}"


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
    for name in NOTICES:
        logging.getLogger(name).addFilter(lambda log: NOTICES[log.name] not in str(log.msg))
    warnings.filterwarnings("ignore", "", FutureWarning, r"(torch|transformers|trl|peft)\.")
    warnings.filterwarnings("ignore", "", UserWarning, "_distutils_hack")  # of DeepSpeed's imports
