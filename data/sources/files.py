# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Rows of JSON, JSON lines and CSV files, whose columns may mix types, which `datasets` cannot read."""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..rows.forms import SUFFIXES


METADATA = "metadata"
"""Name, without suffix, of a file of rows about the images beside it, named in its column `file_name`."""

_HELD_OUT_WORDS = {"test", "validation", "valid", "val", "dev", "eval"}
_TABLES = {".parquet", ".arrow"}


def rows_of_file(file: str) -> Iterator[Any]:
    """The rows of a file in `READERS`, as stored; what is not a row comes too, and is reported by the check of rows.

    Raises:
        ValueError: The file as a whole cannot be read.
    """
    is_metadata = Path(file).stem == METADATA
    for raw in READERS[Path(file).suffix.lower()](file):
        if is_metadata and isinstance(raw, dict):
            names = {"file_name": "image", "file_names": "images"}
            raw = {names.get(column, column): value for column, value in raw.items()}
        yield raw


def files_of_folder(folder: Path, split: str) -> list[str]:
    """The files of rows in a folder whose names belong to a split; empty if `datasets` has to read the folder.

    Metadata files come before others. Without files at the top of the folder, they are searched in all of it.

    Raises:
        ValueError: There are files, but none of this split.
    """
    top = sorted(path for path in folder.glob("*") if path.is_file())
    files = [path for path in top if path.suffix.lower() in READERS and not path.stem.startswith("dataset_info")]
    tables = any(path.suffix.lower() in _TABLES for path in top)
    within = files if files or tables else sorted(folder.rglob(f"{METADATA}.*"))
    metadata = [path for path in within if path.stem == METADATA and path.suffix.lower() in READERS and path.is_file()]
    files = metadata or ([] if tables else files)
    words = {file: set(re.split(r"[\W_]+", str(file.relative_to(folder).with_suffix("")).lower())) for file in files}
    chosen = [file for file in files if split in words[file]]
    if not chosen and split == "train":
        chosen = [file for file in files if not words[file] & _HELD_OUT_WORDS]
    if files and not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in files)
        raise ValueError(f"no file in {folder} has {split!r} in its name: {names}.")
    return list(map(str, chosen))


def images_of_folder(folder: Path) -> list[str]:
    """Paths of the images in a folder, relative to it; empty if it has metadata or other files of rows."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if any(file.suffix.lower() in {*READERS, *_TABLES} for file in files):
        return []
    return [str(file.relative_to(folder)) for file in files if file.suffix.lower() in SUFFIXES]


def _json(file: str) -> Iterator[Any]:
    with open(file, "rb") as content:
        try:
            rows = json.load(content)
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{file} is nested too deeply to be rows of data.") from error
    if not isinstance(rows, list):
        raise ValueError(f"{file} must be a JSON list of rows, got {type(rows).__name__}. One row a line is .jsonl.")
    yield from rows


def _json_lines(file: str) -> Iterator[Any]:
    with open(file, "rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield line  # bytes are not a row; the check reports them with their number


def _csv(file: str) -> Iterator[Any]:
    csv.field_size_limit(sys.maxsize)
    with open(file, newline="", encoding="utf-8-sig") as lines:
        try:
            for row in csv.DictReader(lines):
                # More cells than the header: a comma in a text without quotes.
                yield list(row.values()) if None in row else {column: cell or None for column, cell in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not valid CSV: {error}") from error


READERS: dict[str, Callable[[str], Iterator[Any]]] = {".json": _json, ".jsonl": _json_lines, ".csv": _csv}
"""Readers of files of rows, by suffix."""
