# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""One run at a time writes to an output folder."""

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

from ..checkpoint.files import read_json


LOCK, OWNER = ".train.lock", ".train.json"
"""The file that is locked, and the one that says by whom: what is locked cannot be read everywhere."""


@contextmanager
def only_run(output_dir: str | os.PathLike) -> Iterator[None]:
    """Keeps other runs out of a folder. If it was made for that and nothing was written to it, it is removed again.

    The processes of one run are one: the first holds the lock, and all of them must call this. The operating system
    releases the lock when that process ends, however it ends, so a run that was killed keeps nobody out.

    Args:
        output_dir: The folder; made if it is not there.

    Raises:
        ValueError: Another run holds it, or it cannot be written to.
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
                with suppress(OSError):  # there is something in it
                    folder.rmdir()


def _acquire(lock: FileLock, folder: Path) -> str | None:
    """Takes the lock, and writes down whose it is; or says why not."""
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        (folder / OWNER).write_text(json.dumps({"pid": os.getpid(), "host": platform.node(), "since": now}))
    except Timeout:
        try:
            whose = "process {pid} on {host}, since {since}".format_map(read_json(folder / OWNER))
        except (TypeError, KeyError):  # not written yet, or damaged
            whose = "whose process is not known"
        return (
            f"Another run is training in {folder}: {whose}. Wait for its end, stop it, or choose another --output_dir."
        )
    except OSError as error:
        return f"The --output_dir {folder} cannot be written to: {error}. Choose another."
    return None
