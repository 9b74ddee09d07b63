# SPDX-License-Identifier: Apache-2.0
"""The cache folder, and atomic writing of files and folders."""

import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import writing_to
from .lock import LOCK, busy, check_free, only_writer, writer_of


_YOUNG = 60  # seconds; a process may be about to take its lock

OLD = ".replaced"
"""The folder that is replaced, in the temporary folder of the new one."""


def cache_dir() -> Path:
    """The cache folder: `$NORMALIGN_CACHE`, or `normalign-llava` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if override := os.environ.get("NORMALIGN_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normalign-llava"


@contextmanager
def atomic_write(target: str | os.PathLike) -> Iterator[Path]:
    """Yields the path of a temporary file that becomes `target` when the block ends without an error.

    It lies in a folder of its own, whose name nobody can foresee, and so has the mode of any new file.
    """
    target = Path(target)
    remove_unfinished(target)
    with _temporary(target) as temporary:
        yield temporary / target.name
        os.replace(temporary / target.name, target)


@contextmanager
def finished_folder(target: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` when the block ends without an error, and is removed otherwise.

    Raises:
        ValueError: Another process is making `target`.
        FileExistsError: `target` was filled meanwhile. What was made is kept in a folder that the message names.
    """
    target = Path(target).resolve()
    with _staging(target) as temporary:
        yield temporary / target.name
        try:
            os.replace(temporary / target.name, target)
        except OSError as error:
            if not target.exists():
                raise
            raise FileExistsError(f"{target} was filled meanwhile, and stays. {_kept(temporary, target)}") from error


def check_new(output: str | os.PathLike) -> None:
    """Raises ValueError if `output` is a file, or a folder that is not empty."""
    output = Path(output).resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"The output {output} exists and is not an empty folder. Choose another, or remove it first.")


@contextmanager
def replaced_folder(target: str | os.PathLike, written: Callable[[Path], Collection[str]]) -> Iterator[Path]:
    """[`finished_folder`] for a folder within a checkpoint that replaces its earlier version as a whole.

    If it is interrupted between its two steps, the next run makes the second.

    Given `target`, `written` has the names in its earlier version; a folder with anything else is not replaced.
    """
    target = Path(target).resolve()

    def foreign() -> str:
        names = {path.name for path in target.iterdir()} if target.exists() else set()
        others = sorted(names - set(written(target)))
        return f"{target} holds {others[0]}, which no earlier run has written there." if others else ""

    check_free(target.parent)
    with _staging(target) as temporary:
        if problem := foreign():
            raise ValueError(f"{problem} Choose another folder, or move that away first.")
        yield temporary / target.name
        if problem := foreign():
            raise FileExistsError(f"{problem} {_kept(temporary, target)}")
        if target.exists():
            os.replace(target, temporary / OLD)
        os.replace(temporary / target.name, target)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target` with an empty folder of its name. Nobody else may make `target`."""
    if writers := remove_unfinished(target):
        raise ValueError(busy(target, writers[0]))
    with _temporary(target) as temporary:
        (temporary / target.name).mkdir()
        yield temporary


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yields a new folder beside `target`, with a lock, and clears it up."""
    with writing_to(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            with only_writer(temporary):
                yield temporary
        finally:
            _clear(temporary, target)


def remove_unfinished(target: Path) -> list[str]:
    """Removes the temporary folders that killed processes left for `target`.

    They are known by their names, with eight letters of `tempfile`'s, and by what alone is in them. Returns the
    processes that still write to others, which stay.
    """
    writers = []
    for unfinished in target.parent.glob(f".{glob.escape(target.name)}-" + "[a-z0-9_]" * 8):
        if unfinished.is_symlink() or not unfinished.is_dir():
            continue
        try:
            names, age = {path.name for path in unfinished.iterdir()}, time.time() - unfinished.stat().st_mtime
        except OSError:  # another user's, or removed by now
            continue
        if names and names <= {target.name, OLD, LOCK} and (names != {LOCK} or age > _YOUNG):
            if writer := writer_of(unfinished):
                writers.append(writer)
            else:
                _clear(unfinished, target)
    return writers


def _clear(temporary: Path, target: Path) -> None:
    """Takes the second step of a replacement whose first one was taken, and removes what is left."""
    if (temporary / OLD).exists() and not target.exists():
        os.replace(temporary / target.name, target)
    shutil.rmtree(temporary, ignore_errors=True)


def _kept(temporary: Path, target: Path) -> str:
    """Keeps what was made for `target` beside it, and says where."""
    kept = temporary.with_name(f"{target.name}-{temporary.name[-8:]}")
    os.replace(temporary / target.name, kept)
    return f"What was made is in {kept}."


def json_or_none(path: Path) -> Any:
    """The content of a JSON file, or None if it does not exist or is not valid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path` atomically."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
