# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A lock, so that only one run at a time writes to an output folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout


LOCK = ".train.lock"


@contextmanager
def only_run(output_dir: str | os.PathLike) -> Iterator[None]:
    """Keeps other runs out of a folder. A folder created for that is removed again if nothing was written to it.

    All processes of a run must call this; the first holds the lock. The operating system releases it when that process
    ends, even if it is killed.
    """
    folder, is_first = Path(output_dir), PartialState().is_main_process
    is_new = not folder.exists()
    lock, problem = FileLock(folder / LOCK), [""]
    if is_first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            problem = [f"Another run is writing to {folder}. Wait for its end, or choose another output folder."]
        except OSError as error:
            problem = [f"The --output_dir {folder} cannot be written to: {error}. Choose another."]
    broadcast_object_list(problem)
    if problem[0]:
        raise ValueError(problem[0])
    try:
        yield
    finally:
        if is_first:
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
            if is_new:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
