# SPDX-License-Identifier: Apache-2.0
"""The rows with bad images that training met: one count for all that read rows in a run."""

import fcntl
import json
import os
import weakref
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from uuid import uuid4


SKIPPED_ROWS = ".skipped_rows.jsonl"
"""File in `output_dir` with the rows that [`SkippedRows`] counts."""


class SkippedRows:
    """A set of rows in a file, which every process that reads rows shares.

    Workers of data loaders, forked or spawned, have a copy of this object with the same path, and
    so have the processes of a run with one `output_dir`. A resumed run finds the file again.

    Args:
        path: The file, which is made with the first row. By default a temporary one, which ends
            with this object.
    """

    def __init__(self, path: str | os.PathLike | None = None):
        if path is None:
            self.path = Path(gettempdir(), f"normalign-skipped-{uuid4().hex}.jsonl")
            weakref.finalize(self, _remove_in, os.getpid(), self.path)
        else:
            self.path = Path(path)

    def add(self, source: str, row: int, allowed: float) -> int | None:
        """Adds a row, unless there would be more than `allowed`; None if it is one of them.

        If it is not, nothing is added, and the number that there would be is returned: a run that
        is resumed after this row was mended has it no more.
        """
        if allowed < 1:
            return 1
        line = json.dumps([source, row]).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            file.seek(0)
            known = set(file.read().splitlines())
            count = len(known | {line})
            if count > allowed:
                return count
            if line not in known:
                file.write(line + b"\n")
        return None

    def clear(self) -> None:
        """Forgets all rows, for a run that begins anew; other processes must not add any yet."""
        self.path.unlink(missing_ok=True)


def _remove_in(process: int, path: Path) -> None:
    """Removes the file in the process that named it, not in one that was forked from it."""
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink(missing_ok=True)
