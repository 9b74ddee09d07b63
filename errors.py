# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Output of commands: foreign text cannot control the terminal; an error is one sentence and exit status 1."""

import hashlib
import os
import re
import signal
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import rich.console
import typer
from rich.segment import Segment
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


def escaped(text: str) -> str:
    """`text` with control and invisible characters written as in Python, `\\x1b`.

    Line breaks, tabs and the joiners of letters and emoji stay.
    """
    # Control (C0, C1), format (bidirectional, of no width), half of a surrogate pair, line or paragraph separator.
    hidden = {each for each in text if unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    hidden -= {"\n", "\t", "\u200c", "\u200d"}
    return text.translate({ord(each): ascii(each)[1:-1] for each in hidden})


_FULL = "out of memory|can't allocate memory"
"""In a RuntimeError of torch: memory of a device, of the machine."""


class Terminated(SystemExit):
    """SIGTERM. What the command has begun and not finished is removed, and it ends with status 143."""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust stopped, such as a tokenizer at a text. That is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def errors_for_people(extra: str | None = None, stopped: str = "") -> Iterator[None]:
    """Prints errors that a user can fix as a message without a traceback, and exits with status 1.

    Ctrl-C and SIGTERM end the block too, with the words "Stopped." and status 130 or 143. Of the processes of a run on
    one machine, one prints what several would, and what is an error only because another process has ended is a line.

    Args:
        extra: The extra of this package that a missing module belongs to.
        stopped: What to say of a command that was stopped, unless the exception has notes of it.
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
    except (SystemExit, typer.Exit):
        raise
    except BaseException as error:
        message, is_first = _message(error, extra), _is_first("error")
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


def _message(error: BaseException, extra: str | None) -> str | None:
    """What to print of an error that a user can do something about; None for others."""
    if is_panic(error):
        return f"A library stopped, at a text or a file that it cannot read: {error}. Use another checkpoint."
    if extra and isinstance(error, ModuleNotFoundError):
        return f"{error}. {install(extra)}"
    text = str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and re.search(_FULL, text)):
        return f"Memory is full ({text.partition(chr(10))[0].rstrip('.')}). Use smaller batches, or fewer bits."
    return text if isinstance(error, ValueError | OSError | ImportError | FloatingPointError) else None


def _is_first(name: str) -> bool:
    """Whether this process of a run is the first on its machine to ask for `name`; alone it always is.

    torch's launcher gives the processes a folder in common, which it removes. With other launchers all are first.
    """
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if file.name == "error.json":
        try:
            file.parents[1].joinpath(f"first-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
    return True


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt the removal of what is unfinished
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    raise Terminated(128 + number)


def check_installed(module: str, extra: str, what: str) -> None:
    """Raises ImportError, which names the extra, if `what` needs a module that is not installed."""
    if find_spec(module) is None:
        raise ImportError(f"{what} needs the package {module}, which is not installed. {install(extra)}.")


def install(extra: str) -> str:
    """How to install an extra of this package, which is not on PyPI."""
    return f"Install it: pip install '.[{extra}]' in a checkout, or pip install 'normalign-llava[{extra}] @ git+URL'"
