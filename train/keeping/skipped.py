# SPDX-License-Identifier: Apache-2.0
"""The rows with bad images that training met, counted over all processes of a run."""

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
    """A set of rows in a file that all processes that read rows share.

    Workers of data loaders, forked or spawned, have a copy of this object with the same path, and
    so have the processes of a run with one `output_dir`. A resumed run finds the file again.

    Args:
        path: The file. It is created with the first row. By default it is a temporary file, and is
            removed with this object.
    """

    def __init__(self, path: str | os.PathLike | None = None):
        if path is None:
            self.path = Path(gettempdir(), f"normalign-skipped-{uuid4().hex}.jsonl")
            weakref.finalize(self, _remove_in_process, os.getpid(), self.path)
        else:
            self.path = Path(path)

    def add(self, source: str, row: int, allowed: float) -> int | None:
        """Adds a row, unless more than `allowed` rows would be in the set.

        Args:
            source: The source of the row.
            row: Its number there.
            allowed: How many rows may be in the set.

        Returns:
            None if the row is in the set now. Otherwise how many rows there would be. The row is
            then left out, because a run that is resumed after a repair of the row does not skip it.
        """
        if allowed < 1:
            return 1
        line = json.dumps([source, row]).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            file.seek(0)
            stored = set(file.read().splitlines())
            count = len(stored | {line})
            if count > allowed:
                return count
            if line not in stored:
                file.write(line + b"\n")
        return None

    def clear(self) -> None:
        """Removes all rows. Other processes must not add any before."""
        self.path.unlink(missing_ok=True)


def _remove_in_process(process_id: int, path: Path) -> None:
    """Removes the file, if this is the process that named it and not a fork of it."""
    if os.getpid() == process_id:
        with suppress(OSError):
            path.unlink()
