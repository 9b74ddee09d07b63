# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""While libraries read what others made: errors become sentences, nothing asks at the terminal, nothing never ends."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch


AGAIN = "Save or fetch the checkpoint again, or use another."
"""What a person can do about a checkpoint that is broken, or made to look so."""

TEMPLATE_SECONDS = 2
"""Of computing, in which a chat template has to write a conversation. Those there are take milliseconds."""


@contextmanager
def loading(what: str, *, seconds: int | None = 50, remedy: str = AGAIN) -> Iterator[None]:
    """Around a call that reads files of others: whatever they make it raise becomes a sentence.

    Nothing in there gets an answer from the terminal.

    Args:
        what: Is read, as the subject of the sentence: "The processor of FOLDER".
        seconds: Of computing that it may take; None where that depends on how large the model is.
        remedy: What to do, a sentence.

    Raises:
        ValueError: It cannot be read.
        OSError: It is not there.
        Exception: Untouched, what a missing package or a full GPU makes raise.
    """
    terminal = sys.stdin
    try:
        with open(os.devnull) as sys.stdin, limited(what, seconds):
            yield
    except (OSError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and _is_ours(error):
            raise
        said = " ".join(str(error).split())
        if "trust_remote_code" in said:
            raise ValueError(f"{what} needs code that comes with it, which this command does not run.") from error
        if "ignore_mismatched_sizes" in said:
            said = "tensors have other shapes than config.json asks for, which are listed above"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{what} cannot be loaded: {kind}{said[:600].rstrip('.')}. {remedy}") from error
    finally:
        sys.stdin = terminal


@contextmanager
def limited(what: str, seconds: int | None, memory: int | None = None) -> Iterator[None]:
    """Stops what takes more computing, or memory, than it may. Acts in the main thread, and not on Windows.

    Args:
        what: Is stopped, as the subject of a sentence.
        seconds: Of computing, of the whole process.
        memory: In bytes, beside what the process has; on Linux.

    Raises:
        ValueError: It took more, or is nested too deeply.
    """
    try:
        with _seconds(seconds) if seconds else nullcontext(), _memory(memory) if memory else nullcontext():
            yield
    except _Stopped:
        raise ValueError(f"{what} takes more than {seconds} seconds. {AGAIN}") from None
    except MemoryError:
        raise ValueError(f"{what} takes too much memory. {AGAIN}") from None
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply. {AGAIN}") from None


def _is_ours(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # where it was raised
    return str(frame.f_globals.get("__name__")).startswith(f"{__package__.split('.')[0]}.")


class _Stopped(BaseException):  # no `except Exception` may catch it
    pass


@contextmanager
def _seconds(limit: int) -> Iterator[None]:
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _Stopped

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory(limit: int) -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min([used + limit, *(each for each in before if each >= 0)]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
