# SPDX-License-Identifier: Apache-2.0
"""Rows of JSON, JSON lines, CSV and TSV files, whose columns may mix types, unlike in `datasets`.

So a row is kept as its JSON text, which [`loaded`] parses.
"""

import csv
import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, IterableDataset, List, Value
from datasets.fingerprint import Hasher

from ..rows.forms import FORMS
from ..rows.images import SUFFIXES
from ..rows.turns import parsed


METADATA = "metadata"  # name of a file of rows about the images beside it, by their `file_name`
_TEXT, _IMAGES = Value("string"), List(Image(decode=False))
# Columns of rows kept as JSON: with the number in their file, or, of shards, with their images.
ROWS = Features(file=_TEXT, number=Value("int64"), json=_TEXT, images=_IMAGES)
_HELD_OUT_WORDS = {"test", "validation", "valid", "val", "dev", "eval"}
_LIST_START = re.compile(r"\s*\[\s*")
_SEPARATOR = re.compile(r"\s*[,\]]\s*")  # of the elements of a JSON list, or its end
_TABLES = {".parquet", ".arrow"}
_ONE_A_LINE = "Write each row in one line, as `jq -c .` does."


def open_files(files: tuple[str, ...], streaming: bool) -> Dataset | IterableDataset:
    """The rows of files in `READERS`, with the columns `ROWS`."""
    # A tuple, since each element of a list would be a shard.
    options: dict[str, Any] = {"features": ROWS, "gen_kwargs": {"files": files}}
    if streaming:
        return IterableDataset.from_generator(_rows, **options)
    versions = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    options["fingerprint"] = Hasher.hash([versions, Path(__file__).read_bytes()])
    try:  # few rows wait in memory to be written, since they may have images in base64
        return Dataset.from_generator(_rows, writer_batch_size=200, **options)
    except ValueError:  # raised by `datasets` without rows; what `_rows` raises is wrapped
        return Dataset.from_dict({name: [] for name in ROWS}, features=ROWS)


def _rows(files: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    names = {"file_name": "image", "file_names": "images"}
    for file in files:
        is_metadata = Path(file).stem == METADATA
        for number, text in enumerate(READERS[Path(file).suffix.lower()](file)):
            if is_metadata and isinstance(raw := loaded(text), dict):
                text = json.dumps({names.get(key, key): value for key, value in raw.items()})
            yield {"file": file, "number": number, "json": text, "images": None}


def loaded(text: str) -> Any:
    """The row of a JSON text, or, which is no row, the text in bytes if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.encode(errors="replace")


def files_of_folder(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """The files of rows in a folder whose names belong to a split, and others, which are not read.

    WebDataset's shards come first, since programs write tables of their content beside them, then
    metadata, in all of the folder if its top has no files. Empty if `datasets` has to read it.
    """
    top = sorted(path for path in folder.glob("*") if path.is_file())
    top = [path for path in top if not path.stem.startswith("dataset_info")]
    files = [path for path in top if path.suffix.lower() in READERS]
    tables = [path for path in top if path.suffix.lower() in _TABLES]
    shards = [path for path in top if path.suffix.lower() == ".tar"] if files or tables else []
    within = files if files or tables else sorted(folder.rglob(f"{METADATA}.*"))
    within = [path for path in within if path.suffix.lower() in READERS and path.is_file()]
    metadata = [path for path in within if path.stem == METADATA]
    read = shards or metadata or ([] if tables else files)
    names = {file: str(file.relative_to(folder).with_suffix("")).lower() for file in read}
    words = {file: set(re.split(r"[\W_]+", name)) for file, name in names.items()}
    chosen = [file for file in read if split in words[file]]
    if not chosen and split == "train":
        chosen = [file for file in read if not words[file] & _HELD_OUT_WORDS]
    if read and not chosen:
        listed = ", ".join(str(file.relative_to(folder)) for file in read)
        raise ValueError(f"no file in {folder} has {split!r} in its name: {listed}.")
    others = [file for file in (*files, *(tables if read else ())) if file not in read]
    return list(map(str, chosen)), list(map(str, others))


def images_of_folder(folder: Path) -> list[str]:
    """Paths of the images in a folder, relative to it; empty if it has files of rows."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if any(file.suffix.lower() in {*READERS, *_TABLES} for file in files):
        return []
    return [str(file.relative_to(folder)) for file in files if file.suffix.lower() in SUFFIXES]


def _json(file: str) -> Iterator[str]:
    with open(file, "rb") as start:
        encoding = json.detect_encoding(start.read(4))
    text = Path(file).read_text(encoding)
    try:
        yield from _elements(text)
        return
    except (ValueError, RecursionError):
        pass  # no list of rows, or an error whose place `json.loads` tells
    lines = list(filter(None, map(str.strip, text.split("\n"))))
    if len(lines) > 1 and isinstance(loaded(lines[0]), dict):
        yield from lines
        return
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}. {_ONE_A_LINE}") from error
    if isinstance(content, dict) and any(content.get(str(form[0] or form[1])) for form in FORMS):
        yield json.dumps(content)  # the only row
    elif content != []:
        raise ValueError(f"{file} is no JSON list of rows. {_ONE_A_LINE} Or name another file.")


def _elements(text: str) -> Iterator[str]:
    """The texts of a JSON list's elements, parsed one by one; ValueError if there are none."""
    decoder, separator = json.JSONDecoder(), _LIST_START.match(text)
    while separator and "]" not in separator[0]:
        start = separator.end()
        _, end = decoder.raw_decode(text, start)
        yield text[start:end]
        separator = _SEPARATOR.match(text, end)
    if not separator or separator.end() < len(text):
        raise ValueError("it is no list, or goes on after it")


def _json_lines(file: str) -> Iterator[str]:
    with open(file, "rb") as lines:
        # No JSON has the escape that an invalid byte becomes.
        stripped = filter(None, map(bytes.strip, lines))
        texts = (line.decode("utf-8-sig", "backslashreplace") for line in stripped)
        first = next(texts, "")
        if first in ("{", "[") or first.startswith("[{"):
            yield from _json(file)
        else:
            yield from chain([first] if first else [], texts)


def _csv(file: str) -> Iterator[str]:
    csv.field_size_limit(sys.maxsize)
    separator = "\t" if file.lower().endswith(".tsv") else ","
    with open(file, newline="", encoding="utf-8-sig") as lines:
        try:
            rows = csv.DictReader(lines, delimiter=separator, strict=True)
            names = rows.fieldnames = [name.strip() for name in rows.fieldnames or [""]]
            if len({*names}) < len(names):
                raise ValueError(f"{file} has columns of one name: {', '.join(names)}. Rename one.")
            for row in rows:
                broken = ("\t" in cell and "\n" in cell for cell in map(str, row.values()))
                if separator == "\t" and any(broken):
                    near = f"near line {rows.line_num}; are quotes text?"
                    raise csv.Error(f"a cell has tabs and line breaks, {near}")
                cells = {name: _cell(cell) for name, cell in row.items()}
                # More cells than the header: a comma in a text without quotes.
                yield json.dumps(list(row.values()) if None in row else cells)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not valid CSV in UTF-8: {error}.") from error


def _cell(text: str | None) -> Any:
    """The text of a cell, or the list of texts that it holds; None if it is empty."""
    content = parsed(text)
    is_list = isinstance(content, list) and all(isinstance(element, str) for element in content)
    return content if content and is_list else text or None


# By the suffix of a file of rows.
READERS = {".json": _json, ".jsonl": _json_lines, ".csv": _csv, ".tsv": _csv}
