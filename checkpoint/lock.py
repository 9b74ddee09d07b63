# SPDX-License-Identifier: Apache-2.0
"""One lock for each folder that commands write to, held by one process at a time, which the lock's file names."""

import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from textwrap import shorten

from filelock import FileLock, Timeout

from ..errors import writing_to


LOCK = ".normalign.lock"

_held: set[Path] = set()


@contextmanager
def only_writer(folder: str | os.PathLike, wait: float = 10.0) -> Iterator[None]:
    """Keeps other processes from writing to a folder, which is created, and removed again if it stays empty.

    A process that has the lock may ask for it again. The operating system releases it when the process ends, even if
    it is killed.

    Args:
        wait: Seconds for which to wait for another process. Results are written in less; training takes longer.

    Raises:
        ValueError: Another process has the lock; the message names it.
        NotWritable: The folder cannot be written to.
    """
    folder = Path(folder).resolve()
    if folder in _held:
        yield
        return
    is_new, file = not folder.exists(), folder / LOCK
    lock = FileLock(file, thread_local=False)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=wait)
        except Timeout as error:
            raise ValueError(busy(folder, _named(file))) from error
    _held.add(folder)
    try:
        command = shorten(shlex.join([Path(sys.argv[0]).name or "python", *sys.argv[1:]]), 120, placeholder=" ...")
        since = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        file.write_text(f"`{command}`, process {os.getpid()} on {socket.gethostname()}, since {since}", "utf-8")
        yield
    finally:
        _held.discard(folder)
        file.unlink(missing_ok=True)
        lock.release()
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def writer_of(folder: Path) -> str | None:
    """The process that has a folder's lock: command, id, host and since when. None if there is none."""
    file = folder.resolve() / LOCK
    if not file.exists():
        return None
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except OSError:  # a process has it, or it is another user's and may not even be tried
        return _named(file)
    file.unlink(missing_ok=True)  # of a process that was killed
    lock.release()
    return None


def check_free(folder: Path) -> None:
    """Raises ValueError if another process has a folder's lock, and keeps it. The folder may be read-only."""
    if folder.resolve() not in _held and os.access(folder, os.W_OK) and writer_of(folder):
        with only_writer(folder):
            pass


def busy(folder: Path, writer: str) -> str:
    """That another process writes to a folder, for an error."""
    return f"{folder} is being written to by {writer}. Wait for its end, or use another folder."


def _named(file: Path) -> str:
    with suppress(OSError, ValueError):
        return file.read_text("utf-8") or "another process"
    return "another process"
