# SPDX-License-Identifier: Apache-2.0
"""Rows of JSON, JSON lines, CSV and TSV files, whose columns may mix types, unlike in `datasets`.

So a row is kept as its JSON text, which [`loaded`] parses.
"""

import codecs
import csv
import functools
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from accelerate import PartialState
from datasets import Dataset, Features, Image, IterableDataset, List, Value
from datasets.fingerprint import Hasher

from ..rows.forms import FORMS, renamed
from ..rows.images import SUFFIXES, short
from ..rows.turns import is_empty


METADATA = "metadata"  # name of a file of rows about the images beside it, by their `file_name`
_TEXT, _IMAGES = Value("string"), List(Image(decode=False))
# Columns of rows kept as JSON: with the number in their file, or, of shards, with their images.
ROWS = Features(file=_TEXT, number=Value("int64"), json=_TEXT, images=_IMAGES)
_HELD_OUT_WORDS = {"test", "validation", "valid", "val", "dev", "eval"}
_LIST_START = re.compile(r"\s*\[\s*")
_SEPARATOR = re.compile(r"\s*[,\]]\s*")  # of the elements of a JSON list, or its end
_TABLES = {".parquet", ".arrow"}
_COCO = {"images", "annotations"}  # lists of a file of COCO, whose images have these keys:
_COCO_IMAGE = {"id", "file_name"}
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SEPARATORS = (",", ";", "\t", "|")  # of cells, by the countries and programs that write them
_NAMED_SEPARATOR = re.compile(r"sep=(.)\s*")  # a first line that Excel reads

logger = logging.getLogger(__name__)


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
                # A column of the known name is not replaced; the other is told as not used.
                own = {key: name for key, name in names.items() if is_empty(raw.get(name))}
                text = json.dumps(renamed(raw, {own[key]: key for key in own if key in raw}))
            yield {"file": file, "number": number, "json": text, "images": None}


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning in the main process, the first time."""
    if PartialState().is_main_process:
        logger.warning(message)


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
    try:
        text = Path(file).read_text(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}. Save it as UTF-8.") from error
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
        remedy = "Correct it."
        if "Extra data" in str(error):
            command = f"jq -c . {shlex.quote(file)} > rows.jsonl"
            remedy = f"Write each row in one line: `{command}`"
        raise ValueError(f"{file} is not valid JSON: {error}. {remedy}") from error
    if content != []:
        yield from map(json.dumps, _rows_of_object(content, file))


def _rows_of_object(content: Any, file: str) -> Iterable[Any]:
    """The rows of a file whose JSON is no list: one row, COCO's, or an object with a list of them.

    Raises ValueError, with a command that writes the rows if there is one, in other cases.
    """
    problem = f"{file} is no JSON list of rows"
    if not isinstance(content, dict):
        raise ValueError(f"{problem} but {short(content)}. Correct it, or name another file.")
    if any(content.get(str(form[0] or form[1])) for form in FORMS):
        return [content]
    lists = {key: value for key, value in content.items() if _are_objects(value)}
    if lists.keys() >= _COCO and all(image.keys() >= _COCO_IMAGE for image in lists["images"]):
        return _rows_of_coco(lists["images"], lists["annotations"], file)
    if len(lists) == 1:
        return next(iter(lists.values()))
    held = f"an object with {short(', '.join(map(str, content)) or 'nothing')}"
    if lists:
        chosen = f"[{json.dumps(next(iter(lists)))}]"
        advice = "Write those that you want one a line, here the first:"
    elif _are_objects([*content.values()]):
        chosen = ".values()"
        advice = "If its values are the rows, write them one a line:"
    else:
        raise ValueError(f"{problem} but {held}. Correct it, or name another file.")
    code = f"import json, sys; [print(json.dumps(r)) for r in json.load(open(sys.argv[1])){chosen}]"
    command = f"python -c {shlex.quote(code)} {shlex.quote(file)} > rows.jsonl"
    raise ValueError(f"{problem} but {held}. {advice} `{command}`. Or name another file.")


def _are_objects(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(element, dict) for element in value)


def _rows_of_coco(images: list[dict], annotations: list[dict], file: str) -> Iterator[dict]:
    """A row for each annotation, with the file of its image; captions, or any columns of a row."""
    files = {str(image["id"]): image["file_name"] for image in images}
    used = set[str]()
    for annotation in annotations:
        key = str(annotation.get("image_id"))
        used.add(key)
        row = {name: value for name, value in annotation.items() if name != "image_id"}
        # A row without its image is a bad one: as text alone it would be learned.
        row["image"] = files.get(key, f"(images has no id {key})")
        yield row
    if unused := len(files.keys() - used):
        warn_once(f"{file}: {unused:,} of {len(files):,} images have no annotation: left out.")


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
    if _is_utf_16(file):
        with open(file, encoding="utf-16") as decoded:
            yield from filter(None, map(str.strip, decoded))
        return
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
    usual = "\t" if file.lower().endswith(".tsv") else ","
    encoding = "utf-16" if _is_utf_16(file) else "utf-8-sig"
    with open(file, newline="", encoding=encoding) as lines:
        try:
            separator = _separator(lines, usual)
            rows = csv.DictReader(lines, delimiter=separator, strict=True)
            names = rows.fieldnames = [name.strip() for name in rows.fieldnames or [""]]
            if len({*names}) < len(names):
                raise ValueError(f"{file} has columns of one name: {', '.join(names)}. Rename one.")
            for row in rows:
                broken = ("\t" in cell and "\n" in cell for cell in map(str, row.values()))
                if separator == "\t" and any(broken):
                    near = f"near line {rows.line_num}; are quotes text?"
                    raise csv.Error(f"a cell has tabs and line breaks, {near}")
                # Lists stay texts: which columns hold lists is for the row's form to say.
                cells = {name: cell or None for name, cell in row.items()}
                # More cells than the header: a comma in a text without quotes.
                yield json.dumps(list(row.values()) if None in row else cells)
        except (csv.Error, UnicodeError) as error:
            remedy = " Save it as UTF-8." if isinstance(error, UnicodeError) else ""
            raise ValueError(f"{file} is not valid CSV in UTF-8: {error}.{remedy}") from error


def _separator(lines: TextIO, usual: str) -> str:
    """What separates the cells of a table: what divides its first line into most, or the usual.

    The file is left where its header begins.
    """
    if named := _NAMED_SEPARATOR.fullmatch(lines.readline()):
        return named[1]
    cells = dict[str, int]()
    for separator in (usual, *_SEPARATORS):
        lines.seek(0)
        try:
            cells[separator] = len(next(csv.reader(lines, delimiter=separator, strict=True), []))
        except csv.Error:  # quotes that do not fit to this separator
            continue
    lines.seek(0)
    return max(cells, key=lambda separator: cells[separator], default=usual)


def _is_utf_16(file: str) -> bool:
    """Whether a file begins with the mark of UTF-16, as Excel's "Unicode Text"."""
    with open(file, "rb") as start:
        return start.read(2) in _UTF_16


# By the suffix of a file of rows.
READERS = {".json": _json, ".jsonl": _json_lines, ".csv": _csv, ".tsv": _csv}
