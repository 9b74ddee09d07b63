# SPDX-License-Identifier: Apache-2.0
"""Reads JSON, JSON lines, CSV and TSV files. Unlike in `datasets`, a column may mix types.

So a row is kept as its JSON text, and [`row_of_json`] parses it.
"""

import codecs
import csv
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from datasets import Dataset, Features, Image, IterableDataset, List, Value
from datasets.fingerprint import Hasher

from ..rows.checks import warn_once
from ..rows.forms import ROW_FORMS, renamed
from ..rows.images import SUFFIXES, short
from ..rows.turns import is_empty


METADATA = "metadata"  # name of a file of rows about the images beside it, by their `file_name`
ROWS = Features(
    file=Value("string"),
    number=Value("int64"),
    json=Value("string"),
    images=List(Image(decode=False)),
)
"""Columns of rows kept as JSON, with the number in their file, or their images if from shards."""

_HELD_OUT_WORDS = {"test", "validation", "valid", "val", "dev", "eval"}
_LIST_START = re.compile(r"\s*\[\s*")
_SEPARATOR = re.compile(r"\s*[,\]]\s*")  # of the elements of a JSON list, or its end
_TABLES = {".parquet", ".arrow"}
_SEPARATORS = (",", ";", "\t", "|")  # of cells, by the countries and programs that write them
_NAMED_SEPARATOR = re.compile(r"sep=(.)\s*")  # a first line that Excel reads

logger = logging.getLogger(__name__)


def open_files(files: tuple[str, ...], streaming: bool) -> Dataset | IterableDataset:
    """Returns the rows of files, with the columns `ROWS`.

    Args:
        files: Paths of files with the suffixes in `READERS`.
        streaming: Whether rows are read only when they are needed.
    """
    arguments = {"files": files}  # a tuple, since each element of a list would be a shard
    if streaming:
        return IterableDataset.from_generator(_rows, ROWS, arguments)
    versions = [(file, os.path.getsize(file), os.stat(file).st_mtime_ns) for file in files]
    fingerprint = Hasher.hash([versions, Path(__file__).read_bytes()])
    try:
        return Dataset.from_generator(
            _rows,
            ROWS,
            gen_kwargs=arguments,
            fingerprint=fingerprint,
            writer_batch_size=200,  # few wait in memory, since they may have images in base64
        )
    except ValueError:  # `datasets` raises it without rows, and wraps errors of `_rows`
        return Dataset.from_dict({column: [] for column in ROWS}, features=ROWS)


def _rows(files: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Reads the rows of files, in the columns `ROWS`. Raises ValueError if a file is not valid.

    In rows of metadata, the columns of images get their known names. A column that already has the
    known name is not replaced. The other is then reported as unused.
    """
    for file in files:
        path = Path(file)
        for number, json_text in enumerate(READERS[path.suffix.lower()](file)):
            content = row_of_json(json_text) if path.stem == METADATA else None
            if isinstance(content, dict):
                own_columns = {
                    known: own_column
                    for own_column, known in (("file_name", "image"), ("file_names", "images"))
                    if own_column in content and is_empty(content.get(known))
                }
                json_text = json.dumps(renamed(content, own_columns))
            yield {"file": file, "number": number, "json": json_text, "images": None}


def row_of_json(text: str) -> Any:
    """Returns the row of a JSON text. A text that is not valid is returned as bytes: a bad row."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.encode(errors="replace")


def files_of_folder(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """Chooses the files of rows of a split in a folder, by their names.

    WebDataset's shards come first, since programs write tables of their content beside them. Files
    of metadata come second. If a folder has no files of rows, its folders may have metadata.

    Args:
        folder: The folder.
        split: The name of the split. Files that name no split belong to "train".

    Returns:
        The files to read, and the other files of rows. Without files to read, `datasets` has to
        read the folder.

    Raises:
        ValueError: The names of all files belong to other splits.
    """
    row_files = []
    table_files = []
    shard_files = []
    for path in sorted(folder.glob("*")):
        if not path.is_file() or path.stem.startswith("dataset_info"):
            continue
        suffix = path.suffix.lower()
        if suffix in READERS:
            row_files.append(path)
        elif suffix in _TABLES:
            table_files.append(path)
        elif suffix == ".tar":
            shard_files.append(path)
    metadata_candidates = row_files
    if not row_files and not table_files:
        shard_files = []  # `datasets` finds shards that have nothing beside them
        metadata_candidates = sorted(folder.rglob(f"{METADATA}.*"))
    files_to_read = shard_files or [
        path
        for path in metadata_candidates
        if path.stem == METADATA and path.suffix.lower() in READERS and path.is_file()
    ]
    if not files_to_read and not table_files:
        files_to_read = row_files
    unread_files = [path for path in row_files if path not in files_to_read]
    if files_to_read:
        unread_files += table_files
    split_files = _files_of_split(files_to_read, folder, split)
    return list(map(str, split_files)), list(map(str, unread_files))


def _files_of_split(files: list[Path], folder: Path, split: str) -> list[Path]:
    """Returns the files with a split in their names, for "train" perhaps the files without a split.

    Raises ValueError if there are none.
    """
    split_files = []
    files_without_split = []
    for file in files:
        words_in_name = re.split(r"[\W_]+", str(file.relative_to(folder).with_suffix("")).lower())
        if split in words_in_name:
            split_files.append(file)
        elif _HELD_OUT_WORDS.isdisjoint(words_in_name):
            files_without_split.append(file)
    if not split_files and split == "train":
        split_files = files_without_split
    if files and not split_files:
        file_names = ", ".join(str(file.relative_to(folder)) for file in files)
        raise ValueError(f"no file in {folder} has {split!r} in its name: {file_names}.")
    return split_files


def images_of_folder(folder: Path) -> list[str]:
    """Returns the paths of the images in a folder, relative to it.

    There are none if the folder has files of rows.
    """
    image_paths = []
    for path in sorted(folder.rglob("*")):
        suffix = path.suffix.lower()
        if not path.is_file():
            continue
        if suffix in READERS or suffix in _TABLES:
            return []
        if suffix in SUFFIXES:
            image_paths.append(str(path.relative_to(folder)))
    return image_paths


def _json(file: str) -> Iterator[str]:
    """Yields the texts of the rows in a JSON file: a list, an object, or in fact JSON lines.

    Raises ValueError if it is none of them, or not valid.
    """
    try:
        content = Path(file).read_bytes()
        text = content.decode(json.detect_encoding(content))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}. Save it as UTF-8.") from error
    try:
        yield from _elements(text)
        return
    except (ValueError, RecursionError):
        pass  # it is not a list of rows, or has an error: `json.loads` says where
    json_lines = [line for line in map(str.strip, text.split("\n")) if line]
    if len(json_lines) > 1 and isinstance(row_of_json(json_lines[0]), dict):
        yield from json_lines
        return
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        remedy = "Correct it."
        if "Extra data" in str(error):
            remedy = f"Write each row in one line: `jq -c . {shlex.quote(file)} > rows.jsonl`"
        raise ValueError(f"{file} is not valid JSON: {error}. {remedy}") from error
    if content != []:
        yield from map(json.dumps, _rows_of_object(content, file))


def _rows_of_object(content: Any, file: str) -> Iterable[Any]:
    """Returns the rows of JSON that is not a list: a row, COCO, or an object with a list of rows.

    Raises:
        ValueError: It is something else. If a command can write its rows, the message has it.
    """
    problem = f"{file} is not a JSON list of rows"
    if not isinstance(content, dict):
        raise ValueError(f"{problem} but {short(content)}. Correct it, or name another file.")
    if any(content.get(str(form[0] or form[1])) for form in ROW_FORMS):
        return [content]
    lists_of_rows = {key: value for key, value in content.items() if _are_objects(value)}
    if lists_of_rows.keys() >= {"images", "annotations"}:
        coco_images = lists_of_rows["images"]
        if all(image.keys() >= {"id", "file_name"} for image in coco_images):
            return _rows_of_coco(coco_images, lists_of_rows["annotations"], file)
    if len(lists_of_rows) == 1:
        (rows,) = lists_of_rows.values()
        return rows
    problem += f" but an object with {short(', '.join(map(str, content)) or 'nothing')}"
    if lists_of_rows:
        first_list = next(iter(lists_of_rows))
        key_in_python = f"[{json.dumps(first_list)}]"
        advice = "Write the list that you want, a row in each line. Here is the first:"
    elif _are_objects(list(content.values())):
        key_in_python = ".values()"
        advice = "If its values are the rows, write each in a line:"
    else:
        raise ValueError(f"{problem}. Correct it, or name another file.")
    rows_in_python = f"json.load(open(sys.argv[1])){key_in_python}"
    code = f"import json, sys; [print(json.dumps(r)) for r in {rows_in_python}]"
    command = f"python -c {shlex.quote(code)} {shlex.quote(file)} > rows.jsonl"
    raise ValueError(f"{problem}. {advice} `{command}`. Or name another file.")


def _are_objects(value: Any) -> bool:
    """Whether a value is a list of mappings that is not empty."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(element, dict) for element in value)


def _rows_of_coco(images: list[dict], annotations: list[dict], file: str) -> Iterator[dict]:
    """Yields a row for each annotation, with its image: captions, or any columns of a row."""
    files = {str(image["id"]): image["file_name"] for image in images}
    used_images = set[str]()
    for annotation in annotations:
        row = dict(annotation)
        image_id = str(row.pop("image_id", None))
        used_images.add(image_id)
        # Without an image, the text would be learned. With one that does not exist, a row is bad.
        row["image"] = files.get(image_id, f"(images has no id {image_id})")
        yield row
    unused_count = len(files.keys() - used_images)
    if unused_count:
        warn_once(
            f"{file}: {unused_count:,} of {len(files):,} images have no annotation and are left "
            "out."
        )


def _elements(text: str) -> Iterator[str]:
    """Yields the texts of the elements of a JSON list, parsed one by one.

    Raises ValueError if the text is anything else.
    """
    decoder = json.JSONDecoder()
    separator = _LIST_START.match(text)
    while separator and "]" not in separator[0]:
        element_start = separator.end()
        _, element_end = decoder.raw_decode(text, element_start)
        yield text[element_start:element_end]
        separator = _SEPARATOR.match(text, element_end)
    if not separator or separator.end() < len(text):
        raise ValueError("it is not a list, or goes on after it")


def _json_lines(file: str) -> Iterator[str]:
    """Yields the texts of the rows in a file of JSON lines. One that holds JSON is read as such."""
    # The escape that an invalid byte becomes is not valid in JSON.
    with open(file, encoding=_encoding(file), errors="backslashreplace", newline="\n") as lines:
        # A file may be several files in one, each with a mark at its beginning.
        json_lines = filter(None, (line.strip().removeprefix("\ufeff") for line in lines))
        first_line = next(json_lines, "")
        if first_line in ("{", "[") or first_line.startswith("[{"):
            yield from _json(file)
        elif first_line:
            yield first_line
            yield from json_lines


def _csv(file: str) -> Iterator[str]:
    """Yields the rows of a CSV or TSV file as JSON texts. Raises ValueError if it is not valid."""
    csv.field_size_limit(sys.maxsize)
    usual_separator = "\t" if file.lower().endswith(".tsv") else ","
    with open(file, newline="", encoding=_encoding(file)) as lines:
        try:
            separator = _separator(lines, usual_separator)
            yield from map(json.dumps, _rows_of_csv(lines, separator, file))
        except (csv.Error, UnicodeError) as error:
            remedy = " Save it as UTF-8." if isinstance(error, UnicodeError) else ""
            raise ValueError(f"{file} is not valid CSV in UTF-8: {error}.{remedy}") from error


def _rows_of_csv(lines: TextIO, separator: str, file: str) -> Iterator[Any]:
    """Yields the rows of a table. A row with more cells than the header is a list: a bad row.

    Raises ValueError if two columns have one name, and csv.Error if the table is damaged.
    """
    rows = csv.DictReader(lines, delimiter=separator, strict=True)
    column_names = [column_name.strip() for column_name in rows.fieldnames or [""]]
    rows.fieldnames = column_names
    if len(set(column_names)) < len(column_names):
        raise ValueError(f"{file} has columns of one name: {', '.join(column_names)}. Rename one.")
    for row in rows:
        cells = list(row.values())
        if separator == "\t":
            for cell in map(str, cells):
                if "\t" in cell and "\n" in cell:
                    raise csv.Error(
                        f"a cell has tabs and line breaks, near line {rows.line_num}; are quotes "
                        "text?"
                    )
        if None in row:  # more cells than the header, by a comma in a text without quotes
            yield cells
        else:
            # Lists stay texts: the row's form says which columns hold lists.
            yield {column_name: cell or None for column_name, cell in row.items()}


def _separator(lines: TextIO, usual_separator: str) -> str:
    """Returns the separator that divides the first line into most cells, or the usual one.

    Then the file is read on from its header.
    """
    named_separator = _NAMED_SEPARATOR.fullmatch(lines.readline())
    if named_separator:
        return named_separator[1]
    cell_counts = dict[str, int]()
    for separator in (usual_separator, *_SEPARATORS):
        lines.seek(0)
        try:
            cells = next(csv.reader(lines, delimiter=separator, strict=True), [])
        except csv.Error:  # the quotes do not fit this separator
            continue
        cell_counts[separator] = len(cells)
    lines.seek(0)
    return max(cell_counts, key=cell_counts.__getitem__, default=usual_separator)


def _encoding(file: str) -> str:
    """Reads which UTF a file of lines is in: UTF-16 with its mark, as in Excel, or UTF-8."""
    with open(file, "rb") as binary_file:
        has_mark = binary_file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if has_mark else "utf-8-sig"


# By the suffix of a file of rows.
READERS = {".json": _json, ".jsonl": _json_lines, ".csv": _csv, ".tsv": _csv}
