# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The cache folder; atomic writing of files and folders, and the reason if writing fails."""

import errno
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        partial = Path(temporary) / target.name
        yield partial
        os.replace(partial, target)


@contextmanager
def finished_folder(target: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` when the block ends without an error, and is removed otherwise.

    If another process has filled `target` in the meantime, that folder stays.
    """
    target = Path(target).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        staging = Path(temporary) / target.name
        staging.mkdir()
        yield staging
        if not target.exists() or not any(target.iterdir()):
            os.replace(staging, target)


def check_new(output: str | os.PathLike) -> None:
    """Raises ValueError if `output` is a file, or a folder that is not empty."""
    output = Path(output).resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"The output {output} exists and is not an empty folder. Choose another, or remove it first.")


@contextmanager
def replaced_folder(target: str | os.PathLike, written: Callable[[Path], Collection[str]]) -> Iterator[Path]:
    """[`finished_folder`] for a folder that replaces its earlier version as a whole.

    Given `target`, `written` has the names in its earlier version; a folder with anything else is not replaced.
    """
    target = Path(target).resolve()
    found = {each.name for each in target.iterdir()} if target.exists() else set()
    if others := sorted(found - set(written(target))):
        raise ValueError(
            f"{target} holds {others[0]}, which no earlier run has written there. Choose another folder, or move that "
            "away first."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        staging, old = Path(temporary) / target.name, Path(temporary) / "old"
        staging.mkdir()
        yield staging
        if target.exists():
            os.replace(target, old)
        os.replace(staging, target)
        remove_unfinished(target)


def remove_unfinished(target: Path) -> None:
    """Removes the temporary folders that killed runs of [`finished_folder`] or [`replaced_folder`] left for `target`.

    They are known by their names, with eight letters of `tempfile`'s, and by what alone is in them. Only one run at a
    time may write `target`, or the folder of another is removed.
    """
    for unfinished in target.parent.glob(f".{glob.escape(target.name)}-" + "[a-z0-9_]" * 8):
        if unfinished.is_symlink() or not unfinished.is_dir():
            continue
        if {target.name} <= {each.name for each in unfinished.iterdir()} <= {target.name, "old"}:
            shutil.rmtree(unfinished, ignore_errors=True)


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


def write_failure(error: BaseException | None) -> str | None:
    """Why a file could not be written, if `error` or its cause is that a disk or a quota is full; otherwise None.

    safetensors, tokenizers and torch raise errors of their own, which are not OSErrors.
    """
    while error is not None:
        text = str(error)
        numbers = {int(number) for number in re.findall(r"(?:\[Errno |\(os error )(\d+)", text)}
        if known := numbers & DISK_FULL:
            return os.strerror(known.pop())
        if "PytorchStreamWriter failed writing" in text or ("inline_container" in text and "unexpected pos" in text):
            return "a file could not be written to its end"  # torch.save gives no reason
        error = error.__cause__ or error.__context__
    return None
