# SPDX-License-Identifier: Apache-2.0
"""Data sets in memory: a cached table has facts of each row. A row is parsed when it is read."""

import gc
import os
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher
from filelock import FileLock
from transformers import LlavaProcessor

from ...assembly import chat_template
from ..rows.checks import (
    MANY_ROWS,
    Checks,
    SourceReport,
    by_kind,
    check_images_are_read,
    check_share,
    image_problems,
    parse_rows,
    share_of_bad_rows,
    tokens_per_image,
    too_many,
    unopened_image_problems,
    warn_of_captions,
)
from ..rows.forms import image_name
from ..rows.images import Problem
from ..rows.parse import DroppedRow, control_tokens, parse_row
from . import source as source_module
from .arguments import cores
from .source import CHUNK, Source


_TEXT = Value("string")
_NUMBER = Value("int32")
TABLE_COLUMNS = Features(
    source=_TEXT,
    file=_TEXT,
    reason=_TEXT,
    form=_TEXT,
    unread=_TEXT,
    left_out=List(_TEXT),
    changed=List(_TEXT),
    paths=List(_TEXT),
    index=_NUMBER,
    row=_NUMBER,
    image_count=_NUMBER,
    length=_NUMBER,
)
"""Columns of the cached table.

`index` is a row's number in its source, `row` its number in its file. `file` names the image of a
row that has a `reason` not to be trained on; the names of the others would be a third of the table.
"""

_ROWS = Path(__file__).parents[1] / "rows"
_CHUNKS_PER_PROCESS = 10  # fewer are checked before another process has started


@dataclass(frozen=True)
class RowReader:
    """A transform for `datasets` that reads the rows of a table from their sources and parses them.

    Attributes:
        sources: The sources. The column `part` of a table says which one a row is from.
    """

    sources: tuple[Source, ...]

    def __call__(self, table: dict[str, list]) -> dict[str, list]:
        """Reads and parses rows. Raises ValueError if one cannot be parsed any more."""
        rows = []
        places = zip(table["part"], table["index"], strict=True)
        for part, places_in_source in groupby(places, key=itemgetter(0)):
            source = self.sources[part]
            for stored_row in source.rows_at([index for _, index in places_in_source]):
                rows.append(parse_row(stored_row.content, source.rules))
        columns = {"row": table["row"]}
        for column in ("images", "messages", "learned"):
            columns[column] = [row[column] for row in rows]
        return columns


@dataclass(frozen=True)
class CheckedTable:
    """The valid rows of a source.

    Attributes:
        table: A table with the columns `TABLE_COLUMNS` and `part`.
        report: Counts of all rows of the source.
    """

    table: Dataset
    report: SourceReport


def require_valid_table(reader: RowReader, part: int, checks: Checks, split: str) -> CheckedTable:
    """Reads and checks one of the reader's sources.

    Args:
        reader: Reads rows of all sources.
        part: The number of the source in the reader.
        checks: Options of the checks.
        split: What the rows are used for, "train" or "eval".

    Raises:
        ValueError: The source has no rows, too many are bad, none is left, or most show images that
            are not read.
    """
    source = reader.sources[part]
    checked = sift_rows(all_rows(source, part, checks), reader, source, checks, split)
    require_valid_rows(checked, source, checks)
    report = checked.report
    warn_of_captions(source.name, report.forms)
    check_images_are_read(source.name, len(checked.table), report.images or 0, report.unread)
    return checked


def rows_on_access(table: Dataset, reader: RowReader) -> Dataset:
    """Returns the rows of a table, each parsed when it is read.

    `rows.with_format(None)` reads the columns `length` and `image_count` without parsing rows.

    Args:
        table: Rows of the reader's sources, with the columns `TABLE_COLUMNS` and `part`.
        reader: Reads and parses them.
    """
    needed = ["part", "index", "row"]
    table = table.select_columns(["source", *needed, "image_count", "length"])
    return table.with_transform(reader, columns=needed, output_all_columns=True)


def require_valid_rows(checked: CheckedTable, source: Source, checks: Checks) -> None:
    """Raises ValueError if more rows are bad than `bad_rows` allows, or if no row is left."""
    report = checked.report
    row_count = len(checked.table) + len(report.dropped)
    bad_rows = [row for row in report.dropped if row.tokens is None]
    allowed_share = share_of_bad_rows(checks.bad_rows, source, row_count)
    check_share(source, bad_rows, row_count, allowed_share)
    if not len(checked.table):
        message = (
            f"{source.name}: no row is left. {row_count} rows, {report.bad} bad, "
            f"{report.too_long} longer than max_length {checks.max_length}."
        )
        raise ValueError("\n".join([message, *by_kind(report.dropped, 5)]))


def sift_rows(
    table: Dataset, reader: RowReader, source: Source, checks: Checks, split: str
) -> CheckedTable:
    """Leaves out bad and too long rows. Returns the others, perhaps none, and a report of all.

    It raises nothing for bad rows: see [`require_valid_rows`].

    All images are opened if no bad row is allowed, `check_images` is set, the rows are held out, or
    there are at most `MANY_ROWS` rows with images. Otherwise `MANY_ROWS` rows are drawn at random,
    and their images are opened. If so many of them are bad that the whole table may have more than
    the allowed share, the other images are opened too.

    Args:
        table: All rows of the source, from [`all_rows`].
        reader: Reads the rows.
        source: What the rows are from.
        checks: Options of the checks.
        split: What the rows are used for, "train" or "eval".

    Returns:
        The valid rows, and counts of all rows by what became of them.
    """
    allowed_share = share_of_bad_rows(checks.bad_rows, source, len(table))
    # Of a sample of the images, or 0 if all are opened.
    sampled_share = 0.0 if split != "train" or checks.check_images else allowed_share
    is_refused = pc.is_valid(_column(table, "reason")).to_numpy()
    has_images = pc.greater(_column(table, "image_count"), 0).to_numpy()
    problems = _image_problems(
        np.flatnonzero(has_images & ~is_refused), table, reader, source, sampled_share
    )
    bad_numbers = sorted({*np.flatnonzero(is_refused).tolist(), *problems})
    dropped_rows = []
    for number in bad_numbers:
        row = table[number]
        problem = (row["file"], row["reason"])
        if row["reason"] is None:
            problem = problems[number]
        dropped_rows.append(DroppedRow(row["source"], row["row"], *problem))
    long_numbers = np.array([], int)
    if checks.max_length is not None:
        is_long = pc.greater(_column(table, "length"), checks.max_length)
        long_numbers = np.setdiff1d(np.flatnonzero(is_long), bad_numbers)
        table_rows = table.select(long_numbers)
        stored_rows = source.rows_at(table_rows["index"][:])
        for row, stored_row in zip(table_rows, stored_rows, strict=True):
            long_row = checks.too_long({**row, "file": image_name(stored_row.content)})
            assert long_row is not None
            dropped_rows.append(long_row)
    valid_rows = table
    if dropped_rows:
        valid_rows = table.select(np.delete(np.arange(len(table)), [*bad_numbers, *long_numbers]))
    rows_by_file = _counts(table, "source")
    if len(rows_by_file) == 1:
        rows_by_file = {}
    report = SourceReport(
        source.name,
        split,
        found=len(table),
        bad=len(bad_numbers),
        too_long=len(long_numbers),
        dropped=dropped_rows,
        dataset=source.dataset,
        forms=_counts(valid_rows, "form"),
        unread=_counts(valid_rows, "unread"),
        left_out=_counts(valid_rows, "left_out"),
        changed=_counts(valid_rows, "changed"),
        files=rows_by_file,
        skippable=max(0, int(allowed_share * len(table)) - len(bad_numbers)),
        **measure(valid_rows),
    )
    return CheckedTable(valid_rows, report)


def _image_problems(
    row_numbers: np.ndarray, table: Dataset, reader: RowReader, source: Source, share: float
) -> dict[int, Problem]:
    """Returns by number the rows with images that cannot be read, if at most `share` may be bad.

    [`sift_rows`] says which images of the rows of these numbers are opened: all if `share` is 0.
    The files of the others are only looked for.
    """
    if len(row_numbers) <= MANY_ROWS or share == 0:
        return _problems_of_opened(row_numbers, table, reader, source)
    generator = np.random.default_rng(0)
    sampled_numbers = np.sort(generator.choice(row_numbers, MANY_ROWS, replace=False))
    problems = _problems_of_opened(sampled_numbers, table, reader, source)
    if too_many(len(problems), MANY_ROWS, share, deviations=3):
        other_numbers = np.setdiff1d(row_numbers, sampled_numbers, assume_unique=True)
        return problems | _problems_of_opened(other_numbers, table, reader, source)
    return unopened_image_problems(table["paths"], source.rules) | problems


def _problems_of_opened(
    row_numbers: np.ndarray, table: Dataset, reader: RowReader, source: Source
) -> dict[int, Problem]:
    """Opens the images of the rows of these numbers."""
    opened_rows = rows_on_access(table.select(row_numbers), reader)
    problems = image_problems(opened_rows, source.name, source.rules)
    return {int(row_numbers[position]): problem for position, problem in problems.items()}


def measure(rows: Dataset) -> dict[str, Any]:
    """Returns the numbers of rows, images and tokens of a table, or of parsed rows in memory.

    The keys are fields of [`SourceReport`]. Without rows there are none.
    """
    if not len(rows):
        return {}
    lengths = _column(rows, "length").to_numpy()
    image_counts = _column(rows, "image_count").to_numpy()
    return {
        "valid": len(rows),
        "used": len(rows),
        "images": int(image_counts.sum()),
        "text_only": int((image_counts == 0).sum()),
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "longest": int(lengths.max()),
    }


def _counts(table: Dataset, name: str) -> dict[str, int]:
    """Counts the values of a column, or the values in its lists, without nulls."""
    values = _column(table, name)
    if pa.types.is_list(values.type):
        values = pc.list_flatten(values)
    counts = pc.value_counts(values.drop_null()).to_pylist()
    return {pair["values"]: pair["counts"] for pair in counts}


def _column(table: Dataset, name: str) -> pa.ChunkedArray:
    """Reads a column of a table in Arrow's form."""
    return table.with_format("arrow")[name][:]


def all_rows(source: Source, part: int, checks: Checks) -> Dataset:
    """Returns the table of all rows of a source, from the cache of `datasets`.

    If several processes call it, the first one parses the rows, in `checks.processes` processes of
    its own. The others wait.

    Args:
        source: A source in memory.
        part: The number of the source in its reader.
        checks: Options of the checks.

    Raises:
        ValueError: The source has no rows.
    """
    assert isinstance(source.data, Dataset)
    if not len(source.data):
        raise ValueError(f"{source.name} has no rows.")
    # The cache depends on all that the facts of rows do: rows, rules, processor and code.
    row_facts = [source.name, source.data._fingerprint, source.columns, source.rules]
    image_folder = os.path.abspath(source.rules.folder or "")
    token_facts: list[Any] = []
    processor = checks.processor
    if processor:
        tokenizer = processor.tokenizer
        token_facts = [
            processor.chat_template,
            processor.image_token,
            tokens_per_image(processor),
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.special_tokens_map,
            control_tokens(tokenizer).pattern,
        ]
    modules = [__file__, chat_template.__file__, source_module.__file__, *_ROWS.glob("*.py")]
    module_code = [Path(module).read_bytes() for module in sorted(map(str, modules))]
    cache_key = Hasher.hash([row_facts, image_folder, token_facts, module_code])
    chunks = Dataset.from_dict({"start": list(range(0, len(source.data), CHUNK))})
    processes = min(checks.processes or cores(), len(chunks) // _CHUNKS_PER_PROCESS)
    cache_folder = Path(datasets.config.HF_DATASETS_CACHE) / "normalign_llava"
    cache_folder.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_folder / f"{cache_key}.lock"), ExitStack() as stack:
        # Rows leave no garbage of cycles, but each collection, here and in processes that start
        # within, would look at the million objects that libraries have: a fifth of the time.
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        table = chunks.map(
            _facts,
            fn_kwargs={"data": source, "processor": processor},
            batched=True,
            batch_size=1,
            num_proc=processes if processes > 1 else None,
            remove_columns=chunks.column_names,
            features=TABLE_COLUMNS,
            new_fingerprint=cache_key,
            cache_file_name=str(cache_folder / f"{cache_key}.arrow"),
            desc=f"Checking {Path(source.name).name}, {CHUNK} rows each",
        )
    return table.add_column("part", np.full(len(table), part, np.int32))


def _facts(chunk: dict, data: Source, processor: LlavaProcessor | None) -> dict[str, list]:
    """Parses a chunk of rows, and returns the columns of the table for them."""
    (start,) = chunk["start"]
    row_numbers = range(len(data.data))[start : start + CHUNK]
    rows = parse_rows(data.rows_at(row_numbers), data.rules, processor)
    for index, row in enumerate(rows, start):
        row["index"] = index
        if row["reason"] is None:
            row["file"] = None
    return {column: [row[column] for row in rows] for column in TABLE_COLUMNS}
