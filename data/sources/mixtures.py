# SPDX-License-Identifier: Apache-2.0
"""Loads data sets in any known form as parsed rows: checked, measured, mixed, perhaps streamed.

No image is written on the way, because a row is parsed only when it is read.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import LlavaProcessor

from ...keywords import takes_fields
from ..rows.checks import (
    MANY_ROWS,
    Checks,
    DataReport,
    SourceReport,
    log_unused_and_changed,
    warn_once,
)
from ..rows.images import ImageRules
from ..rows.parse import FEATURES, DroppedRows, ParsedRow
from .arguments import DataArguments, DataSource
from .source import AnyData, Source, open_held_out, open_source
from .streams import endless_rows, has_images, stream, stream_report, valid_rows
from .table import (
    RowReader,
    measure,
    require_valid_rows,
    require_valid_table,
    rows_on_access,
    sift_rows,
)


logger = logging.getLogger(__name__)


@dataclass
class TrainingData:
    """Parsed rows with the columns `FEATURES`. `eval` is None unless held-out data is asked for."""

    train: AnyData
    eval: AnyData | None
    report: DataReport


@dataclass(frozen=True)
class _PreparedRows:
    """Valid rows and a report on each of their sources.

    `has_images` is whether rows have images that no report counts: the first rows of a stream, or
    rows that were prepared before.
    """

    rows: AnyData
    reports: list[SourceReport]
    has_images: bool = False


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of [`load_data`]. Its docstring explains them."""

    arguments: DataArguments
    processor: LlavaProcessor
    _: KW_ONLY
    seed: int
    with_eval: bool
    need_images: bool = False
    max_length: int | None = None
    dropped_rows: DroppedRows | None = None
    processes: int | None = None


@takes_fields(LoadOptions)
def load_data(options: LoadOptions) -> TrainingData:
    """Loads and mixes the data sets of `arguments`, checks every row, and drops rows too long.

    The images of data in memory are decoded as [`sift_rows`] says. The processes share this work,
    so all of them must call this function at the same time. If the data sets have fractions, the
    mixture is the largest one with these shares that repeats no row more often than `repeat` says.

    A stream is checked while it is read. Only its first rows are checked here. The stream of
    training rows is shuffled in a buffer and has no end. Each process reads all of its rows and
    takes a part of them. Without fractions, it has a row of each data set in turn. `repeat` of a
    data set is how often each of its rows comes.

    Args:
        arguments: Which data sets to read, and what to do with bad rows.
        processor: Counts the tokens of rows.
        seed: Decides which rows are drawn and held out.
        with_eval: Whether to load held-out data too.
        need_images: Whether it is an error if no training row has an image. For a stream, only the
            first rows count.
        max_length, dropped_rows, processes: As of [`Checks`].

    Raises:
        TypeError: An option does not exist.
        ValueError: A data set cannot be read, has too many bad rows, has no row left, or has no
            images where they are needed. Options of the data contradict each other.
    """
    arguments = options.arguments
    streaming = arguments.dataset_streaming
    fractions = _checked_fractions(arguments.sources)
    split_size = arguments.test_split_size
    if not options.with_eval or arguments.eval_dataset_name:
        split_size = None
    if streaming:
        _check_streams(arguments.sources, fractions, split_size)
    checks = Checks(
        options.processor,
        options.max_length,
        arguments.bad_rows,
        arguments.check_images,
        options.dropped_rows,
        options.processes,
    )
    held_out_source = None
    if options.with_eval and not split_size:
        held_out_source = open_held_out(arguments, checks.processes)
    sources = tuple(open_source(named, streaming, checks.processes) for named in arguments.sources)
    held_out = None
    if streaming:
        # The rows have no end, because the Trainer counts batches from the start, and resumes no
        # stream in a later pass.
        rows = stream(
            endless_rows,
            sources=sources,
            checks=checks,
            fractions=fractions,
            seed=options.seed,
            size=arguments.shuffle_buffer_size,
        )
        mixture = _prepared_stream(rows, sources, checks, "train")
    else:
        mixture, held_out = _mix_tables(sources, fractions, checks, options.seed, split_size)
    if held_out_source:
        held_out = _check_and_prepare(held_out_source, checks, "eval")
    if options.need_images:
        _require_images(mixture)
    held_out_rows = None
    reports = mixture.reports
    if held_out:
        held_out_rows = held_out.rows
        reports = reports + held_out.reports
    _record_dropped(checks, reports)
    return TrainingData(mixture.rows, held_out_rows, DataReport(reports))


def prepare_rows(
    data: AnyData,
    checks: Checks,
    *,
    name: str = "train_dataset",
    split: Literal["train", "eval"] = "train",
    need_images: bool = False,
) -> tuple[AnyData, SourceReport]:
    """Returns the parsed rows of an open data set, checked and measured, and their report.

    The data may have any form that files have. Images may also be PIL images, or any local files.
    A stream is neither shuffled nor repeated. Rows that this function or [`load_data`] has returned
    are not checked again: only rows longer than `checks.max_length` are dropped. All processes must
    call this function together.

    Args:
        data: Rows in memory or a stream.
        checks: Options of the checks.
        name: What messages call the data.
        split: What the rows are used for.
        need_images: Whether it is an error if no row, or no early row of a stream, has an image.

    Raises:
        ValueError: Too many rows are bad, no row is left, or images are missing where they are
            needed.
    """
    if not is_prepared(data):
        prepared = _check_and_prepare(Source(name, ImageRules(), data), checks, split)
    elif isinstance(data, Dataset):
        prepared = _without_long_rows(data, checks, name, split)
    else:
        if checks.max_length is not None:
            data = data.filter(ShortRows(name, checks))
        prepared = _PreparedRows(data, [SourceReport(name, split)], has_images=True)
    if need_images:
        _require_images(prepared)
    [report] = prepared.reports
    log_unused_and_changed(logger, name, report.left_out, report.changed)
    if report.dropped:
        logger.warning(
            f"{name}: {len(report.dropped):,} of {report.found:,} rows dropped. First: "
            f"{report.dropped[0]}"
        )
    _record_dropped(checks, [report])
    return prepared.rows, report


def _prepared_stream(
    rows: IterableDataset, sources: Sequence[Source], checks: Checks, split: str
) -> _PreparedRows:
    """Returns the rows of streams. Reads and checks the first ones of each.

    Raises ValueError if the first rows of a stream cannot be used.
    """
    # A list, since `any` of a generator would leave the streams after the first image unchecked.
    have_images = [has_images(source, checks) for source in sources]
    reports = [stream_report(source, checks, split) for source in sources]
    return _PreparedRows(rows, reports, any(have_images))


def _mix_tables(
    sources: tuple[Source, ...],
    fractions: tuple[float, ...],
    checks: Checks,
    seed: int,
    split_size: float | None,
) -> tuple[_PreparedRows, _PreparedRows | None]:
    """Draws rows in memory from each source, and holds out a share of them if asked to.

    Returns the rows to train on, and the held-out rows or None.

    Raises ValueError as [`require_valid_table`] does, also for the held-out rows.
    """
    reader = RowReader(sources)
    tables = []
    reports = []
    for part in range(len(sources)):
        checked = require_valid_table(reader, part, checks, "train")
        tables.append(checked.table)
        reports.append(checked.report)
    row_counts = list(map(len, tables))
    repeats = [source.repeat for source in sources]
    warning = _warning_of_unused_rows(
        [source.name for source in sources], row_counts, repeats, fractions
    )
    if warning:
        logger.warning(warning)
    used_counts = _counts_of_mixture(row_counts, repeats, fractions)
    for part, (row_count, drawn_count) in enumerate(zip(row_counts, used_counts, strict=True)):
        if drawn_count != row_count:
            tables[part] = tables[part].select(_drawn_rows(row_count, drawn_count, [seed, part]))
    mixed_table = concatenate_datasets(tables)
    held_out = None
    if split_size:
        mixed_table, held_out_table = _split(mixed_table, split_size, seed)
        # Any file is allowed here: links that leave the image folder were checked with all rows.
        held_out_source = Source("held out of training", ImageRules(), held_out_table)
        checked = sift_rows(held_out_table, reader, held_out_source, checks, "eval")
        require_valid_rows(checked, held_out_source, checks)
        held_out = _PreparedRows(rows_on_access(checked.table, reader), [checked.report])
        used_counts = np.bincount(mixed_table["part"][:], minlength=len(sources)).tolist()
    for report, used_count in zip(reports, used_counts, strict=True):
        report.used = used_count
    return _PreparedRows(rows_on_access(mixed_table, reader), reports), held_out


def _check_and_prepare(source: Source, checks: Checks, split: str) -> _PreparedRows:
    """Checks the rows of one source, or the first rows of a stream.

    Raises ValueError as [`require_valid_table`] and [`has_images`] do.
    """
    if isinstance(source.data, IterableDataset):
        rows = stream(valid_rows, source=source, checks=checks)
        return _prepared_stream(rows, [source], checks, split)
    reader = RowReader((source,))
    checked = require_valid_table(reader, 0, checks, split)
    return _PreparedRows(rows_on_access(checked.table, reader), [checked.report])


def _without_long_rows(data: Dataset, checks: Checks, name: str, split: str) -> _PreparedRows:
    """Drops rows that are too long from prepared rows. Raises ValueError if no row is left."""
    facts = data.with_format(None).select_columns(["source", "row", "length"])
    longest = math.inf if checks.max_length is None else checks.max_length
    is_long = np.array(facts["length"][:]) > longest
    if is_long.all():
        raise ValueError(_no_row_left(name, checks))
    dropped_rows = list(filter(None, map(checks.too_long, facts.select(np.flatnonzero(is_long)))))
    short_rows = data.select(np.flatnonzero(~is_long)) if dropped_rows else data
    report = SourceReport(
        name,
        split,
        found=len(data),
        bad=0,
        too_long=len(dropped_rows),
        dropped=dropped_rows,
        **measure(short_rows),
    )
    return _PreparedRows(short_rows, [report], has_images=True)


@dataclass
class ShortRows:
    """Says which prepared rows of a stream are not too long, and records the others.

    Calling it raises ValueError after more than `MANY_ROWS` long rows without another between them.
    """

    name: str  # what messages call the rows
    checks: Checks
    dropped: int = 0  # since the last row that is not too long

    def __call__(self, row: ParsedRow) -> bool:
        too_long = self.checks.too_long(row)
        if too_long is None:
            self.dropped = 0
            return True
        if self.checks.dropped_rows:
            self.checks.dropped_rows.add(too_long)
        warn_once(f"{self.name}: rows longer than {self.checks.max_length} tokens are dropped.")
        self.dropped += 1
        if self.dropped > MANY_ROWS:  # a stream may have no end
            raise ValueError(_no_row_left(self.name, self.checks))
        return False


def _no_row_left(name: str, checks: Checks) -> str:
    return f"{name}: no row is left. All are longer than max_length {checks.max_length}."


def is_prepared(data: AnyData) -> bool:
    """Returns whether [`prepare_rows`] or [`load_data`] returned these rows."""
    kwargs = data.format["format_kwargs"] if isinstance(data, Dataset) else {}
    return data.features == FEATURES or isinstance(kwargs.get("transform"), RowReader)


def _counts_of_mixture(
    counts: Sequence[int], repeats: Sequence[int], fractions: Sequence[float]
) -> list[int]:
    """Returns how many rows of each source are in the largest mixture of these fractions.

    Without fractions, each source has all of its rows, as often as `repeats` says.
    """
    used_counts = np.multiply(counts, repeats)
    if fractions:
        size = np.divide(used_counts, fractions).min()
        used_counts = np.rint(np.multiply(size, fractions)).astype(int)
    return used_counts.tolist()


def _drawn_rows(row_count: int, drawn_count: int, seed: list[int]) -> list[int]:
    """Draws numbers of rows below `row_count`, and returns them in order.

    Each number is drawn as often as the others, or once more.
    """
    repetitions, remainder = divmod(drawn_count, row_count)
    shuffled = np.random.default_rng(seed).permutation(row_count)
    return sorted([*range(row_count)] * repetitions + shuffled[:remainder].tolist())


def _warning_of_unused_rows(
    names: Sequence[str], counts: Sequence[int], repeats: Sequence[int], fractions: Sequence[float]
) -> str | None:
    """Returns a warning if fractions leave rows out, or None.

    The warning names the source that has too few rows.
    """
    used_counts = _counts_of_mixture(counts, repeats, fractions)
    left_out = [
        f"{row_count - drawn_count:,} of the {row_count:,} rows of {name}"
        for name, row_count, drawn_count in zip(names, counts, used_counts, strict=True)
        if drawn_count < row_count
    ]
    if not left_out:
        return None
    # For each source, how large the mixture must be for its fraction to be all of its rows once.
    sizes = np.divide(counts, fractions)
    limiting_source = int(np.multiply(sizes, repeats).argmin())
    limiting_rows = f"{counts[limiting_source]:,} rows of {names[limiting_source]}"
    if repeats[limiting_source] > 1:
        limiting_rows += f", each {repeats[limiting_source]} times"
    sufficient_repeats = np.ceil(sizes.max() / sizes - 1e-9).astype(int)
    remedies = [
        f"repeat: {sufficient} for {name}"
        for name, repeat, sufficient in zip(names, repeats, sufficient_repeats, strict=True)
        if sufficient > repeat
    ]
    return (
        f"fraction {fractions[limiting_source]:.3g} of the mixture is {limiting_rows}. So the "
        f"mixture has {sum(used_counts):,} rows, without {' and '.join(left_out)}. To train on "
        f"all, set {', '.join(remedies)}, or leave fraction out of all."
    )


def _split(table: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Splits a table into rows to train on and a share of its rows to hold out.

    Copies of a row stay together. A row that is held out comes only once.
    """
    row_keys = np.array(table["part"][:]) * 2**32 + np.array(table["index"][:])
    # Copies of a row follow each other.
    _, places, copies = np.unique(row_keys, return_index=True, return_counts=True)
    distinct_rows = Dataset.from_dict({"place": places, "copies": copies})  # cached in no file
    split = distinct_rows.train_test_split(share, seed=seed)
    training_places: list[int] = []
    training_rows = split["train"][:]
    for place, count in zip(training_rows["place"], training_rows["copies"], strict=True):
        training_places.extend(range(place, place + count))
    return table.select(training_places), table.select(split["test"]["place"][:])


def _check_streams(
    sources: list[DataSource], fractions: Sequence[float], split_size: float | None
) -> None:
    """Raises ValueError if options of streams contradict each other.

    Warns if the streams take turns.
    """
    if split_size:
        raise ValueError("test_split_size needs data in memory, no stream. Give eval_dataset_name.")
    repeated = [source.path for source in sources if source.repeat > 1]
    if fractions and repeated:
        raise ValueError(
            "A stream with fractions begins again whenever it ends, as often as they need. Leave "
            f"repeat of {', '.join(repeated)} out."
        )
    if len(sources) > 1 and not fractions:
        warn_once(
            "A stream of several data sets without fractions has a row of each in turn, until the "
            "last has ended; then it begins again. Give each a fraction to keep their shares."
        )


def _require_images(prepared: _PreparedRows) -> None:
    """Raises ValueError if no row has an image."""
    if not prepared.has_images and not any(report.images for report in prepared.reports):
        names = ", ".join(report.source for report in prepared.reports)
        raise ValueError(
            f"The rows read of {names} have no image. So nothing is trained if the language model "
            "is frozen, as in stage align. docs/data.md shows how images are read."
        )


def _record_dropped(checks: Checks, reports: list[SourceReport]) -> None:
    """Writes the dropped rows into their file, if there is one, in the main process."""
    if checks.dropped_rows and PartialState().is_main_process:
        for report in reports:
            for dropped in report.dropped:
                checks.dropped_rows.add(dropped)


def _checked_fractions(sources: list[DataSource]) -> tuple[float, ...]:
    """Returns shares that sum to 1, or nothing if no source has a fraction.

    Raises ValueError if a source has none, or one that is not a number above 0.
    """
    shares: list[Any] = [source.fraction for source in sources]
    if shares.count(None) == len(shares):
        return ()
    for share in shares:
        if not isinstance(share, (int, float)) or not 0 < share < math.inf:
            raise ValueError(
                f"Give all data sets a fraction, a number above 0, or none; got {shares}."
            )
    return tuple(share / sum(shares) for share in shares)
