# SPDX-License-Identifier: Apache-2.0
"""Loads data sets in any known form as parsed rows: checked, measured, mixed, perhaps streamed.

No image is written on the way: a row is parsed when it is read.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import LlavaProcessor

from ..rows.checks import MANY_ROWS, Checks, DataReport, SourceReport, log_not_read
from ..rows.images import ImageRules
from ..rows.parse import FEATURES
from .arguments import DataArguments, DataSource
from .source import AnyData, Source, open_held_out, open_source, warn_once
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
    Without fractions it has a row of each data set in turn. `repeat` of a data set is how often
    each of its rows comes.

    `need_images` makes it an error if no training row, or none of the first of a stream, has an
    image; `options` are those of [`Checks`] that are not in `arguments`. Raises ValueError if a
    data set cannot be read, has too many bad rows, or no row left.
    """
    streaming = arguments.dataset_streaming
    fractions = _fractions(arguments.sources)
    splitting = bool(with_eval and arguments.test_split_size and not arguments.eval_dataset_name)
    if streaming and splitting:
        raise ValueError("test_split_size needs data in memory, no stream. Give eval_dataset_name.")
    repeats = tuple(source.repeat for source in arguments.sources)
    if streaming:
        _check_streams(arguments.sources, fractions)
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
        drawn: dict[str, Any] = {"sources": tuple(sources), "repeats": repeats, "checks": checks}
        drawn |= {"fractions": fractions, "seed": seed}
        # Endless: the Trainer counts batches from the start, and resumes no stream in a later pass.
        train = stream(endless_rows, drawn | {"size": arguments.shuffle_buffer_size})
    else:
        reader = RowReader(tuple(sources))
        parts = [valid_table(reader, part, checks, report) for part, report in enumerate(reports)]
        counts = [len(part) for part in parts]
        drawn_counts = _counts_of_mixture(counts, repeats, fractions)
        for number, (part, count) in enumerate(zip(parts, drawn_counts, strict=True)):
            if count != len(part):
                parts[number] = part.select(_drawn_rows(len(part), count, [seed, number]))
            reports[number].used = count
        names = [source.name for source in sources]
        if warning := _unused_rows(names, counts, repeats, fractions):
            logger.warning(warning)
        table = concatenate_datasets(parts)
        if splitting:
            table, out = _split(table, arguments.test_split_size, seed)
            trained = np.bincount(table["part"][:], minlength=len(reports))
            for report, count in zip(reports, trained, strict=True):
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
    What this or [`load_data`] returned comes back without rows longer than `checks.max_length`. All
    processes must call it together.
    """
    report = SourceReport(name, split)
    if is_prepared(data):
        prepared: AnyData = _without_long_rows(data, checks, report)
        with_images = True
    else:
        prepared, with_images = _prepared(Source(name, ImageRules(), data), checks, report)
    if need_images and not with_images:
        raise _no_images([name])
    log_not_read(logger, name, report.left_out, report.changed)
    if report.dropped:
        count = f"{len(report.dropped):,} of {report.found:,} rows"
        logger.warning(f"{name}: {count} dropped. First: {report.dropped[0]}")
    _record_dropped(checks, [report])
    return prepared, report


def _without_long_rows(data: AnyData, checks: Checks, report: SourceReport) -> AnyData:
    """Prepared rows that are not too long; fills in the report of rows in memory.

    Raises ValueError if no row is left.
    """
    if isinstance(data, IterableDataset):
        return data if checks.max_length is None else data.filter(ShortRows(report.source, checks))
    facts = data.with_format(None).select_columns(["source", "row", "length"])
    longest = checks.max_length or math.inf
    is_long = np.array(facts["length"][:]) > longest
    report.found = len(data)
    report.bad = 0
    for fact in facts.select(np.flatnonzero(is_long)):
        too_long = checks.too_long({**fact, "file": None})
        report.dropped += [too_long] if too_long else []
    report.too_long = len(report.dropped)
    if is_long.all():
        raise ValueError(_no_row_left(report.source, checks))
    short = data.select(np.flatnonzero(~is_long)) if is_long.any() else data
    measure(short, report)
    return short


class ShortRows:
    """Says of the prepared rows of a stream which are not too long, and records the others."""

    def __init__(self, name: str, checks: Checks):
        self._name = name
        self._checks = checks
        self._dropped = 0  # since the last row that is not too long

    def __call__(self, row: dict[str, Any]) -> bool:
        too_long = self._checks.too_long({**row, "file": None})
        if too_long is None:
            self._dropped = 0
            return True
        if self._checks.dropped_rows:
            self._checks.dropped_rows.add(too_long)
        warn_once(f"{self._name}: rows longer than {self._checks.max_length} tokens are dropped.")
        self._dropped += 1
        if self._dropped > MANY_ROWS:  # a stream may have no end
            raise ValueError(_no_row_left(self._name, self._checks))
        return False


def _no_row_left(name: str, checks: Checks) -> str:
    return f"{name}: no row is left. All are longer than max_length {checks.max_length}."


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


def _counts_of_mixture(
    counts: Sequence[int], repeats: Sequence[int], fractions: Sequence[float]
) -> list[int]:
    """How many rows of each source are in the largest mixture of these fractions, if any."""
    available = [count * times for count, times in zip(counts, repeats, strict=True)]
    if not fractions:
        return available
    sizes = [count / share for count, share in zip(available, fractions, strict=True)]
    return [round(min(sizes) * share) for share in fractions]


def _drawn_rows(rows: int, count: int, seed: list[int]) -> list[int]:
    """The numbers of `count` of so many rows, in order; each comes as often, but for a rest."""
    times, rest = divmod(count, rows)
    order = np.random.default_rng(seed).permutation(rows)
    return sorted([*range(rows)] * times + order[:rest].tolist())


def _unused_rows(
    names: Sequence[str], counts: Sequence[int], repeats: Sequence[int], fractions: Sequence[float]
) -> str | None:
    """A warning if fractions leave rows out, which names the source that has too few, or None."""
    used = _counts_of_mixture(counts, repeats, fractions)
    lost = [max(0, count - taken) for count, taken in zip(counts, used, strict=True)]
    if not any(lost):
        return None
    available = [count * times for count, times in zip(counts, repeats, strict=True)]
    sizes = [count / share for count, share in zip(available, fractions, strict=True)]
    least = sizes.index(min(sizes))
    left_out, remedies = [], []
    wanted = max(count / share for count, share in zip(counts, fractions, strict=True))
    for name, count, missing, times, share in zip(
        names, counts, lost, repeats, fractions, strict=True
    ):
        if missing:
            left_out.append(f"{missing:,} of the {count:,} rows of {name}")
        enough = math.ceil(wanted * share / count - 1e-9)
        if enough > times:
            remedies.append(f"repeat: {enough} for {name}")
    has = f"{counts[least]:,} rows of {names[least]}"
    if repeats[least] > 1:
        has += f", each {repeats[least]} times"
    return (
        f"fraction {fractions[least]:.3g} of the mixture is {has}. So the mixture has "
        f"{sum(used):,} rows, without {' and '.join(left_out)}. To train on all, set "
        f"{', '.join(remedies)}, or leave fraction out of all."
    )


def _split(table: Dataset, share: float | None, seed: int) -> tuple[Dataset, Dataset]:
    """A table without a share of its rows, and these, each once; copies of a row stay together."""
    part, index = (np.array(table[name][:]) for name in ("part", "index"))
    is_first = (np.diff(part, prepend=-1) != 0) | (np.diff(index, prepend=-1) != 0)
    starts = np.flatnonzero(is_first)  # copies of a row follow each other
    ends = [*starts[1:], len(table)]
    numbers = Dataset.from_dict({"number": list(range(len(starts)))})  # cached in no file
    split = numbers.train_test_split(share, seed=seed)
    kept = (range(starts[number], ends[number]) for number in split["train"]["number"][:])
    held_out = starts[split["test"]["number"][:]]
    return table.select(list(chain.from_iterable(kept))), table.select(held_out)


def _check_streams(sources: list[DataSource], fractions: Sequence[float]) -> None:
    """Raises ValueError if options of streams contradict; warns of what streams do otherwise."""
    repeated = [source.path for source in sources if source.repeat > 1]
    if fractions and repeated:
        problem = "A stream with fractions begins again whenever it ends, as often as they need."
        raise ValueError(f"{problem} Leave repeat of {', '.join(repeated)} out.")
    if len(sources) > 1 and not fractions:
        warn_once(
            "A stream of several data sets without fractions has a row of each in turn, until the "
            "last has ended; then it begins again. Give each a fraction to keep their shares."
        )


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
