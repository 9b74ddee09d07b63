# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Guards around libraries that read other people's files: clear errors, limits."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import is_panic
from .limits import limited_memory


AGAIN = "Save or fetch the checkpoint again, or use another."
"""The remedy for a checkpoint that is broken, or made to look so."""

TEMPLATE_SECONDS = 2
"""CPU time in which a chat template has to render a conversation; ordinary ones take milliseconds."""


@contextmanager
def loading(what: str, *, memory: int | None = None, remedy: str = AGAIN) -> Iterator[None]:
    """Guards a call that reads other people's files: whatever it raises becomes one clear sentence.

    Args:
        what: What is read, as the subject of the sentence: "The processor of FOLDER".
        memory: Bytes it may take; None if that depends on the size of the model.
        remedy: What to do, as a sentence.

    Raises:
        ValueError: It cannot be read.
        OSError: It does not exist.
        ImportError, torch.OutOfMemoryError: Unchanged.
    """
    try:
        with limited_memory(memory):
            yield
    except (OSError, ImportError, torch.OutOfMemoryError):
        raise
    except MemoryError:
        raise ValueError(f"{what} takes too much memory. {remedy}") from None
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply. {remedy}") from None
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if isinstance(error, ValueError) and _is_ours(error):
            raise
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            raise ValueError(f"{what} needs code that comes with it, which this command does not run.") from error
        if "ignore_mismatched_sizes" in reason:
            reason = "tensors have other shapes than config.json asks for, which are listed above"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{what} cannot be loaded: {kind}{reason[:600].rstrip('.')}. {remedy}") from error


@contextmanager
def limited(what: str, seconds: int, memory: int | None = None) -> Iterator[None]:
    """Stops a block that takes too much CPU time or memory.

    The limit of time acts in the main thread, and not on Windows; that of memory on Linux.

    Args:
        what: What is stopped, as the subject of a sentence.
        seconds: CPU time of the thread.
        memory: Bytes beyond what the process has; None for no limit.

    Raises:
        ValueError: The block took longer, ran out of memory, or met something nested too deeply.
    """
    try:
        with _timer(seconds), limited_memory(memory):
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


class _Stopped(BaseException):  # not an Exception, so that no `except Exception` catches it
    pass


@contextmanager
def _timer(seconds: int) -> Iterator[None]:
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    end = time.thread_time() + seconds

    def stop(*_: object) -> None:
        if (left := end - time.thread_time()) <= 0:
            raise _Stopped
        signal.setitimer(signal.ITIMER_VIRTUAL, left)  # which counts other threads too

    handler = signal.signal(signal.SIGVTALRM, stop)
    outer, _ = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        signal.setitimer(signal.ITIMER_VIRTUAL, outer)
