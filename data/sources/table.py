# SPDX-License-Identifier: Apache-2.0
"""Data sets in memory: a cached table has facts of each row, which is parsed when it is read."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from ..rows import checks as row_checks
from ..rows.checks import (
    MANY_ROWS,
    Checks,
    SourceReport,
    file_problems,
    image_problems,
    tokens_per_image,
)
from ..rows.forms import image_name
from ..rows.parse import DroppedRow, control_tokens, parse_row
from . import source as source_module
from .arguments import cores
from .source import CHUNK, Source


TABLE_COLUMNS = Features(
    dict.fromkeys(("source", "file", "reason", "form", "unread"), Value("string"))
    | dict.fromkeys(("left_out", "changed", "paths"), List(Value("string")))
    | dict.fromkeys(("index", "row", "image_count", "length"), Value("int32"))
)
"""Columns of the cached table.

`index` is a row's number in its source, `row` that in its file. `file` names the image of a row
that has a `reason` not to be trained on; of the others it would be a third of the table.
"""

_ROWS = Path(__file__).parents[1] / "rows"
_CHUNKS_PER_PROCESS = 10  # fewer are checked before another process has started


@dataclass(frozen=True)
class RowReader:
    """A transform for `datasets`: reads the rows of a table from their sources, and parses them."""

    sources: tuple[Source, ...]

    def __call__(self, table: dict[str, list]) -> dict[str, list]:
        parts, indices = table["part"], table["index"]
        rows: list[dict[str, Any]] = [{} for _ in parts]
        for part in set(parts):
            source = self.sources[part]
            places = [place for place, other in enumerate(parts) if other == part]
            first = indices[places[0]]
            numbers: Sequence[int] = [indices[place] for place in places]
            if len(places) == 1:  # as in training; a slice is faster than a list
                numbers = range(first, first + 1)
            for place, (_, _, raw) in zip(places, source.rows_at(numbers), strict=True):
                rows[place] = parse_row(raw, source.rules)
        columns = {name: [row[name] for row in rows] for name in ("images", "messages", "learned")}
        return {"row": table["row"], **columns}


def valid_table(reader: RowReader, part: int, checks: Checks, report: SourceReport) -> Dataset:
    """The table of the valid rows of one of the reader's sources; errors as of what it calls."""
    source = reader.sources[part]
    valid = only_valid(all_rows(source, part, checks), reader, source, checks, report)
    row_checks.warn_of_captions(source.name, report.forms)
    row_checks.check_images_are_read(source.name, len(valid), report.images or 0, report.unread)
    return valid


def rows_on_access(table: Dataset, reader: RowReader) -> Dataset:
    """The rows of a table, each parsed when it is read.

    `rows.with_format(None)` reads the columns `length` and `image_count` without parsing rows.
    """
    needed = ["part", "index", "row"]
    table = table.select_columns(["source", *needed, "image_count", "length"])
    return table.with_transform(reader, columns=needed, output_all_columns=True)


def only_valid(
    table: Dataset, reader: RowReader, source: Source, checks: Checks, report: SourceReport
) -> Dataset:
    """[`check_rows`]; ValueError if more are bad than `bad_rows` allows, or no row is left."""
    valid = check_rows(table, reader, source, checks, report)
    share = row_checks.share_of_bad_rows(checks.bad_rows, source, len(table))
    bad = [row for row in report.dropped if row.tokens is None]
    row_checks.check_share(source, bad, len(table), share)
    report.skippable = max(0, int(share * len(table)) - len(bad))
    if not len(valid):
        longer = f"{report.too_long} longer than max_length {checks.max_length}"
        text = f"{report.source}: no row is left. {len(table)} rows, {len(bad)} bad, {longer}."
        raise ValueError("\n".join([text, *row_checks.by_kind(report.dropped, 5)]))
    return valid


def check_rows(
    table: Dataset, reader: RowReader, source: Source, checks: Checks, report: SourceReport
) -> Dataset:
    """The valid rows of a table of a source, which may be none; fills in the report.

    All images are opened if no bad row is allowed, `check_images` is set, the rows are held out, or
    there are few. Otherwise those of `MANY_ROWS` rows drawn at random are, and the others if so
    many of these are bad that all may have more than the allowed share.
    """
    is_refused = pc.is_valid(_column(table, "reason")).to_numpy()
    has_images = pc.greater(_column(table, "image_count"), 0).to_numpy()
    shows = np.flatnonzero(has_images & ~is_refused)
    sample = shows
    allowed = row_checks.share_of_bad_rows(checks.bad_rows, source, len(table))
    if len(shows) > MANY_ROWS and allowed and not checks.check_images and report.split == "train":
        sample = np.sort(np.random.default_rng(0).choice(shows, MANY_ROWS, replace=False))

    def opened(numbers: np.ndarray) -> dict[int, tuple[str | None, str]]:
        """The faults of images that are opened, by number of their row."""
        rows = rows_on_access(table.select(numbers), reader)

        def images(few: range) -> list[list[dict[str, Any]]]:
            return rows[few.start : few.stop]["images"]

        faults = image_problems(images, len(numbers), report.source, source.rules)
        return {int(numbers[number]): fault for number, fault in faults.items()}

    def looked_for(numbers: np.ndarray) -> dict[int, tuple[str | None, str]]:
        """The faults of files that are not opened, by number of their row."""
        is_asked = np.zeros(len(table), bool)
        is_asked[numbers] = True
        stored = table.with_format("arrow").select_columns("paths")

        def paths(few: range) -> list[list[str]]:  # whole slices: `datasets` gathers rows slowly
            lists = stored[few.start : few.stop]["paths"].to_pylist()
            asked = is_asked[few.start : few.stop].tolist()
            return [own if wanted else [] for own, wanted in zip(lists, asked, strict=True)]

        return file_problems(paths, len(table), source.rules)

    problems = opened(sample)
    may_be_many = row_checks.too_many(len(problems), len(sample), allowed, deviations=3)
    is_other = has_images & ~is_refused
    is_other[sample] = False
    others = np.flatnonzero(is_other)
    problems |= opened(others) if may_be_many else looked_for(others)
    bad = list[DroppedRow]()
    long = list[DroppedRow]()
    long_rows = list[int]()  # their numbers in the source
    dropped = {*problems, *np.flatnonzero(is_refused).tolist()}
    if checks.max_length is not None:
        is_longer = pc.greater(_column(table, "length"), checks.max_length)
        dropped.update(np.flatnonzero(is_longer).tolist())
    for number in sorted(dropped):
        row = table[number]
        if row["reason"] or number in problems:
            file, reason = problems.get(number, (row["file"], row["reason"]))
            bad.append(DroppedRow(row["source"], row["row"], file, reason))
        elif too_long := checks.too_long(row):
            long.append(too_long)
            long_rows.append(row["index"])
    raws = [raw for _, _, raw in source.rows_at(long_rows)]
    long = [replace(row, file=image_name(raw)) for row, raw in zip(long, raws, strict=True)]
    report.found, report.dropped = len(table), bad + long
    report.bad, report.too_long = len(bad), len(long)
    files = _counts(table, "source")
    report.files = files if len(files) > 1 else {}
    if dropped:
        table = table.select(np.delete(np.arange(len(table)), list(dropped)))
    report.forms, report.unread = (_counts(table, name) for name in ("form", "unread"))
    report.left_out, report.changed = (_counts(table, name) for name in ("left_out", "changed"))
    if len(table):
        measure(table, report)
    return table


def measure(rows: Dataset, report: SourceReport) -> None:
    """Fills in the numbers of rows, images and tokens of a table, or of parsed rows in memory."""
    lengths = _column(rows, "length").to_numpy()
    counts = _column(rows, "image_count").to_numpy()
    report.valid = report.used = len(rows)
    report.images, report.text_only = int(counts.sum()), int((counts == 0).sum())
    report.shortest, report.longest = int(lengths.min()), int(lengths.max())
    report.median = float(np.median(lengths))


def _counts(table: Dataset, name: str) -> dict[str, int]:
    """Counts of a column's values, or of those in its lists, without nulls."""
    values = _column(table, name)
    values = pc.list_flatten(values) if pa.types.is_list(values.type) else values
    counts = pc.value_counts(values.drop_null()).to_pylist()
    return {pair["values"]: pair["counts"] for pair in counts}


def _column(table: Dataset, name: str) -> pa.ChunkedArray:
    return table.with_format("arrow").select_columns(name)[:][name]


def all_rows(source: Source, part: int, checks: Checks) -> Dataset:
    """The table of all rows of a source, its reader's number `part`, from the cache of `datasets`.

    The first of several processes checks the rows, in `checks.processes` of its own; others wait.
    """
    processor, known = checks.processor, list[Any]()
    if processor:
        tokenizer = processor.tokenizer
        known = [processor.chat_template, processor.image_token, tokens_per_image(processor)]
        known += [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
        known.append(control_tokens(tokenizer).pattern)
    modules = [__file__, chat_template.__file__, source_module.__file__, *_ROWS.glob("*.py")]
    code = [Path(module).read_bytes() for module in sorted(map(str, modules))]
    rows = [source.name, source.data._fingerprint, source.columns, source.rules]
    facts = Hasher.hash([rows, os.path.abspath(source.rules.folder or ""), known, code])
    assert isinstance(source.data, Dataset)
    if not len(source.data):
        raise ValueError(f"{source.name} has no rows.")
    chunks = Dataset.from_dict({"start": list(range(0, len(source.data), CHUNK))})
    processes = min(checks.processes or cores(), len(chunks) // _CHUNKS_PER_PROCESS)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "normalign_llava"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{facts}.lock"), _no_collections():
        table = chunks.map(
            _facts,
            fn_kwargs={"data": source, "processor": processor},
            batched=True,
            batch_size=1,
            num_proc=processes if processes > 1 else None,
            remove_columns=chunks.column_names,
            features=TABLE_COLUMNS,
            new_fingerprint=facts,
            cache_file_name=str(cache / f"{facts}.arrow"),
            desc=f"Checking {Path(source.name).name}, {CHUNK} rows each",
        )
    return table.add_column("part", np.full(len(table), part, np.int32))


@contextmanager
def _no_collections() -> Iterator[None]:
    """Within, also in processes that start there, Python collects no garbage of cycles.

    Rows leave none, but each collection would look at the million objects that libraries have: a
    fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _facts(chunk: dict, data: Source, processor: LlavaProcessor | None) -> dict[str, list]:
    (start,) = chunk["start"]
    rows = row_checks.parse_rows(data.rows(start, CHUNK), data.rules, processor)
    for row in rows:
        if row["reason"] is None:
            row["file"] = None
    facts = {name: [row[name] for row in rows] for name in TABLE_COLUMNS if name != "index"}
    return {"index": list(range(start, start + len(rows))), **facts}
