# SPDX-License-Identifier: Apache-2.0
"""Loads data sets in any known form as parsed rows: checked, measured, mixed, perhaps streamed.

No image is written on the way: a row is parsed when it is read.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import LlavaProcessor

from ..rows.checks import ABOUT, Checks, DataReport, SourceReport, not_read
from ..rows.images import ImageRules
from ..rows.parse import FEATURES
from .arguments import DataArguments, DataSource
from .source import AnyData, Source, open_held_out, open_source
from .streams import endless_rows, has_images, stream, valid_rows
from .table import RowReader, measure, only_valid, rows_on_access, valid_table


logger = logging.getLogger(__name__)


@dataclass
class TrainingData:
    """Parsed rows with the columns `FEATURES`; `eval` is None unless held-out data is asked for."""

    train: AnyData
    eval: AnyData | None
    report: DataReport


def load_data(
    arguments: DataArguments,
    processor: LlavaProcessor,
    *,
    seed: int,
    with_eval: bool,
    need_images: bool = False,
    **options: Any,
) -> TrainingData:
    """Loads and mixes the data sets of `arguments`, checks every row, and drops those too long.

    In memory, images are decoded as [`check_rows`] says; the processes share the work, so all must
    call this at the same time. With fractions, the mixture is the largest one with these shares in
    which no row comes twice. A stream is checked while it is read, and its first rows here. For
    training it is shuffled in a buffer and endless; each process reads all, and takes its part.

    `need_images` makes it an error if no training row, or none of the first of a stream, has an
    image; `options` are those of [`Checks`] that are not in `arguments`. Raises ValueError if a
    data set cannot be read, has too many bad rows, or no row left.
    """
    streaming = arguments.dataset_streaming
    fractions = _fractions(arguments.sources)
    splitting = bool(with_eval and arguments.test_split_size and not arguments.eval_dataset_name)
    if streaming and splitting:
        raise ValueError("test_split_size needs data in memory, no stream. Give eval_dataset_name.")
    options |= {"bad_rows": arguments.bad_rows, "check_images": arguments.check_images}
    checks = Checks(processor, **options)
    held_out = open_held_out(arguments, checks.processes) if with_eval and not splitting else None
    sources = [open_source(source, streaming, checks.processes) for source in arguments.sources]
    reports = [SourceReport(source.name, "train", dataset=source.dataset) for source in sources]
    held_report = SourceReport("held out of training", "eval")
    held: AnyData | None = None
    if streaming:
        pairs = zip(sources, reports, strict=True)
        with_images = any([has_images(*pair, checks) for pair in pairs])
        drawn = {"sources": tuple(sources), "checks": checks, "fractions": fractions, "seed": seed}
        # Endless: the Trainer counts batches from the start, and resumes no stream in a later pass.
        train = stream(endless_rows, drawn | {"size": arguments.shuffle_buffer_size})
    else:
        reader = RowReader(tuple(sources))
        parts = [valid_table(reader, part, checks, report) for part, report in enumerate(reports)]
        sizes = (len(part) / share for part, share in zip(parts, fractions, strict=False))
        most = min(sizes, default=0)
        for number, fraction in enumerate(fractions):
            order = np.random.default_rng([seed, number]).permutation(len(parts[number]))
            parts[number] = parts[number].select(sorted(order[: round(most * fraction)]))
            reports[number].used = len(parts[number])
        table = concatenate_datasets(parts)
        if splitting:
            numbers = Dataset.from_dict({"number": list(range(len(table)))})  # cached in no file
            split = numbers.train_test_split(arguments.test_split_size, seed=seed)
            table, out = (table.select(split[name]["number"][:]) for name in ("train", "test"))
            counts = np.bincount(table["part"][:], minlength=len(reports))
            for report, count in zip(reports, counts, strict=True):
                report.used = int(count)
            # With any file allowed: links that leave the image folder were checked with all rows.
            mixed = Source(held_report.source, ImageRules(), out)
            held = rows_on_access(only_valid(out, reader, mixed, checks, held_report), reader)
        train = rows_on_access(table, reader)
        with_images = any(report.images for report in reports)
    if held_out:
        held_report = SourceReport(held_out.name, "eval", dataset=held_out.dataset)
        held, _ = _prepared(held_out, checks, held_report)
    if need_images and not with_images:
        raise _no_images(source.name for source in sources)
    reports += [held_report] if with_eval else []
    _record_dropped(checks, reports)
    return TrainingData(train, held, DataReport(reports))


def prepare_rows(
    data: AnyData,
    checks: Checks,
    *,
    name: str = "train_dataset",
    split: Literal["train", "eval"] = "train",
    need_images: bool = False,
) -> tuple[AnyData, SourceReport]:
    """Parsed rows, checked and measured, of a data set that is open, in any form that files have.

    Images may also be PIL images, or any local files. A stream is neither shuffled nor repeated.
    What this or [`load_data`] returned comes back unchanged. All processes must call it together.
    """
    report = SourceReport(name, split)
    if is_prepared(data):
        if isinstance(data, Dataset):
            measure(data, report)
        return data, report
    prepared, with_images = _prepared(Source(name, ImageRules(), data), checks, report)
    if need_images and not with_images:
        raise _no_images([name])
    for title, text in not_read(report.left_out, report.changed).items():
        logger.log(logging.INFO if title == ABOUT else logging.WARNING, f"{name}: {title}: {text}")
    if report.dropped:
        count = f"{len(report.dropped):,} of {report.found:,} rows"
        logger.warning(f"{name}: {count} dropped. First: {report.dropped[0]}")
    _record_dropped(checks, [report])
    return prepared, report


def is_prepared(data: AnyData) -> bool:
    """Whether rows are what [`prepare_rows`] or [`load_data`] returned."""
    transform = data.format["format_kwargs"].get("transform") if isinstance(data, Dataset) else None
    return data.features == FEATURES or isinstance(transform, RowReader)


def _prepared(source: Source, checks: Checks, report: SourceReport) -> tuple[AnyData, bool]:
    """The valid rows of a source, and whether they have images: of a stream, the first ones."""
    if isinstance(source.data, IterableDataset):
        rows = stream(valid_rows, {"source": source, "checks": checks})
        return rows, has_images(source, report, checks)
    reader = RowReader((source,))
    return rows_on_access(valid_table(reader, 0, checks, report), reader), bool(report.images)


def _no_images(names: Iterable[str]) -> ValueError:
    return ValueError(
        f"The rows read of {', '.join(names)} have no image, without which nothing is trained if "
        "the language model is frozen, as in stage align. docs/data.md shows how images are read."
    )


def _record_dropped(checks: Checks, reports: list[SourceReport]) -> None:
    if checks.dropped_rows and PartialState().is_main_process:
        for dropped in (row for report in reports for row in report.dropped):
            checks.dropped_rows.add(dropped)


def _fractions(sources: list[DataSource]) -> tuple[float, ...]:
    """Shares that sum to 1; empty without fractions."""
    shares: list[Any] = [source.fraction for source in sources]
    if shares.count(None) == len(shares):
        return ()
    if not all(isinstance(share, (int, float)) and 0 < share < math.inf for share in shares):
        raise ValueError(f"Give all data sets a fraction, a number above 0, or none; got {shares}.")
    return tuple(share / sum(shares) for share in shares)
