# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end a command as exceptions, so that unfinished files are removed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(SystemExit):
    """SIGTERM was received. The exit status is 143."""


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Makes SIGINT raise `KeyboardInterrupt` and SIGTERM raise [`Terminated`] in the block.

    A signal that is ignored stays ignored.
    """
    previous_handlers = {}
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(signal_number)
        if handler not in (signal.SIG_IGN, None):
            previous_handlers[signal_number] = handler
            signal.signal(signal_number, _raise_for_signal)
    try:
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


def _raise_for_signal(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would interrupt cleaning up
    if signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(128 + signal_number)
