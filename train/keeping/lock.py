# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A lock, so that only one run at a time writes to an output folder."""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from ...checkpoint.files import json_or_none


LOCK, OWNER = ".train.lock", ".train.json"
"""The locked file, and one that says by whom: some systems cannot read a locked file."""


@contextmanager
def only_run(output_dir: str | os.PathLike) -> Iterator[None]:
    """Keeps other runs out of a folder. A folder created for that is removed again if nothing was written to it.

    All processes of a run must call this; the first holds the lock. The operating system releases it when that process
    ends, even if it is killed.
    """
    folder, is_first = Path(output_dir), PartialState().is_main_process
    is_new = not folder.exists()
    lock = FileLock(folder / LOCK)
    problem = [_acquire(lock, folder) if is_first else None]
    broadcast_object_list(problem)
    if problem[0]:
        raise ValueError(problem[0])
    try:
        yield
    finally:
        if is_first:
            (folder / OWNER).unlink(missing_ok=True)
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
            if is_new:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


def _acquire(lock: FileLock, folder: Path) -> str | None:
    """Takes the lock and writes down its owner; returns an error message if it cannot."""
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        (folder / OWNER).write_text(json.dumps({"pid": os.getpid(), "host": platform.node(), "since": now}))
    except Timeout:
        try:
            owner = "process {pid} on {host}, since {since}".format_map(json_or_none(folder / OWNER))
        except (TypeError, KeyError):  # not written yet, or damaged
            owner = "its process is not known"
        return (
            f"Another run is writing to {folder}: {owner}. Wait for its end, stop it, or choose another output folder."
        )
    except OSError as error:
        return f"The --output_dir {folder} cannot be written to: {error}. Choose another."
    return None
