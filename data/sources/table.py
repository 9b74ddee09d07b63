# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Data sets in memory: a cached table says where each row is and how long it is; a row is parsed when it is read."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from transformers import LlavaProcessor

from ..rows import checks, forms, images, parse
from ..rows.checks import (
    Checks,
    check_images_are_read,
    image_problems,
    parse_rows,
    stopped,
    tokens_per_image,
    warn_of_captions,
)
from ..rows.images import ImageRules
from ..rows.parse import DroppedRow, control_tokens, parse_row
from ..rows.reports import SourceReport
from .source import Source


COLUMNS = Features(
    {
        "source": Value("string"),
        "row": Value("int64"),
        "file": Value("string"),
        "reason": Value("string"),
        "form": Value("string"),
        "unread": Value("string"),
        "image_count": Value("int32"),
        "length": Value("int32"),
        "paths": List(Value("string")),
        "json": Value("string"),
    }
)
"""Columns of the cached table: no images; for files of rows, which have no index, the row as JSON."""


@dataclass(frozen=True)
class RowReader:
    """A transform for `datasets`: reads the rows of a table from their sources, and parses them."""

    sources: tuple[Source, ...]

    def __call__(self, table: dict[str, list]) -> dict[str, list]:
        parsed = [self._row(*where) for where in zip(table["part"], table["row"], table["json"], strict=True)]
        columns = {name: [row[name] for row in parsed] for name in ("images", "messages", "prompt_turns")}
        return {"row": table["row"], **columns}

    def _row(self, part: int, number: int, text: str | None) -> dict[str, Any]:
        source = self.sources[part]
        raw = source.row(number) if text is None else json.loads(text)
        return parse_row(raw, source.rules)


def valid_table(reader: RowReader, part: int, checks: Checks, report: SourceReport) -> Dataset:
    """The table of the valid rows of one of the reader's sources; see [`only_valid`].

    The table of all rows is cached in the cache of `datasets`.

    Raises:
        ValueError: The source cannot be read or has no rows; see also `only_valid` and
            [`check_images_are_read`].
    """
    source = reader.sources[part]
    table = _table(source, checks.processor)
    table = table.add_column("part", np.full(len(table), part))
    valid = only_valid(table, reader, source.rules, checks, report)
    report.forms = dict(Counter(valid["form"]))
    report.unread = dict(Counter(filter(None, valid["unread"])))
    warn_of_captions(source.name, report.forms)
    check_images_are_read(source.name, len(valid), report.images or 0, report.unread)
    return valid


def rows_on_access(table: Dataset, reader: RowReader) -> Dataset:
    """The rows of a table, each parsed when it is read.

    `rows.with_format(None)` reads the columns `length` and `image_count` without parsing rows.
    """
    needed = ["part", "row", "json"]
    table = table.select_columns(["source", *needed, "image_count", "length"])
    return table.with_transform(reader, columns=needed, output_all_columns=True)


def only_valid(table: Dataset, reader: RowReader, rules: ImageRules, checks: Checks, report: SourceReport) -> Dataset:
    """The valid rows of a table; fills in the report.

    Raises:
        ValueError: There is a bad row and `bad_rows` is "stop", or no row is left.
    """
    decoded = checks.check_images or report.split == "eval"
    rows = rows_on_access(table, reader) if decoded else table
    problems = image_problems(rows, report.source, rules, checks.max_image_pixels if decoded else None)
    found = table.remove_columns(["paths", "json", "part"]).to_list()
    bad, long, valid = [], [], []
    for number, row in enumerate(found):
        if row["reason"] or number in problems:
            file, reason = problems.get(number, (row["file"], row["reason"]))
            bad.append(DroppedRow(row["source"], row["row"], file, reason))
        elif dropped := checks.too_long(row):
            long.append(dropped)
        else:
            valid.append(number)
    if bad and checks.bad_rows == "stop":
        raise ValueError(stopped(bad, len(found)))
    if not valid:
        first = f" The first: {(bad + long)[0]}." if bad or long else ""
        raise ValueError(
            f"{report.source}: no row is left. {len(found)} found, {len(bad)} bad, {len(long)} longer than max_length "
            f"{checks.max_length}.{first}"
        )
    report.found, report.bad, report.too_long, report.dropped = len(found), len(bad), len(long), bad + long
    table = table.select(valid)
    measure(table, report)
    return table


def measure(rows: Dataset, report: SourceReport) -> None:
    """Fills in the numbers of rows, images and tokens of a table, or of parsed rows in memory."""
    columns = rows.with_format(None).select_columns(["length", "image_count"])
    lengths, counts = (np.array(columns[name][:]) for name in columns.column_names)
    report.valid = report.used = len(rows)
    report.images, report.text_only = int(counts.sum()), int((counts == 0).sum())
    report.shortest, report.median, report.longest = int(lengths.min()), float(np.median(lengths)), int(lengths.max())


def _table(source: Source, processor: LlavaProcessor) -> Dataset:
    known = [source.identity(), processor.chat_template, processor.tokenizer.get_vocab(), type(processor.tokenizer)]
    tokens = [tokens_per_image(processor), processor.image_token, control_tokens(processor.tokenizer).pattern]
    code = [Path(str(module.__file__)).read_bytes() for module in (checks, forms, images, parse)]
    try:
        # Processes that start together wait for the first, and then read its cached file.
        return Dataset.from_generator(
            _table_rows,
            features=COLUMNS,
            gen_kwargs={"source": source, "processor": processor},
            fingerprint=Hasher.hash([known, tokens, code]),
        )
    except DatasetGenerationError as error:
        raise error.__cause__ if isinstance(error.__cause__, (ValueError, OSError)) else error from None
    except (
        ValueError
    ) as error:  # raised by `datasets` without rows; this package's are wrapped in a DatasetGenerationError
        raise ValueError(f"{source.name} has no rows.") from error


def _table_rows(source: Source, processor: LlavaProcessor) -> Iterator[dict[str, Any]]:
    for row in parse_rows(source, processor):
        row["json"] = json.dumps(row["raw"]) if source.files and not row["reason"] else None
        yield {column: row[column] for column in COLUMNS}
