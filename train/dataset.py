# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Data sets in any known form as canonical rows, checked, measured and mixed; in memory or streamed.

LLaVA's JSON is read here, since its columns do not have one type each; `datasets` reads everything else. No picture is
decoded on the way. In memory, canonical rows are an Arrow file in the cache of `datasets`, pictures that the source
holds inside included; a stream keeps nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
)
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from transformers import LlavaProcessor

from . import checks as checking
from . import rows
from .arguments import DataArguments, DataSource
from .checks import Checks, checked_rows, kept_rows, picture_problems, stopped, tokens_per_image
from .rows import FEATURES, DroppedRow, DroppedRows
from .sources import Source, open_held_out, open_source


_CHECKED = Features({**FEATURES, "paths": List(Value("string")), "file": Value("string"), "reason": Value("string")})


@dataclass
class SourceReport:
    """What became of one data set.

    Attributes:
        source: Its name.
        split: `"train"` or `"eval"`.
        found: Rows in it. None for a stream, as are all numbers below: what it drops is in the file of dropped rows.
        bad: Rows that cannot be trained on.
        too_long: Rows with more than `max_length` tokens.
        kept: Rows that are left.
        used: Rows of those that the mixture takes and that are not held out of it.
        images: Pictures in the rows kept.
        text_only: Rows kept that have no picture.
        shortest, median, longest: Tokens in a kept row, image tokens included.
        dropped: Every row that was bad or too long.
        dataset: Of a data set of the Hub, which it is, and its licence: see [`hub_dataset`].
    """

    source: str
    split: str
    found: int | None = None
    bad: int | None = None
    too_long: int | None = None
    kept: int | None = None
    used: int | None = None
    images: int | None = None
    text_only: int | None = None
    shortest: int | None = None
    median: float | None = None
    longest: int | None = None
    dropped: list[DroppedRow] = field(default_factory=list)
    dataset: dict[str, Any] | None = None


@dataclass
class DataReport:
    """What became of all data sets, training data first."""

    sources: list[SourceReport]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every dropped row included."""
        return asdict(self)


@dataclass
class TrainingData:
    """Canonical rows with the columns of `FEATURES`; `eval` is None where none is asked for."""

    train: Dataset | IterableDataset
    eval: Dataset | IterableDataset | None
    report: DataReport


def load_data(
    arguments: DataArguments,
    processor: LlavaProcessor,
    *,
    max_length: int | None,
    seed: int,
    with_eval: bool,
    dropped_rows: DroppedRows | None = None,
) -> TrainingData:
    """Loads what `arguments` names, checks every row, drops what is too long, and mixes.

    In memory, structure, lengths and the presence of picture files are checked here, with `check_images` also every
    picture; of held-out data every picture always, since a row that loses its labels later makes the loss too low. All
    processes must call this at the same time, since they share that work. With fractions, the mixture is the largest
    with these shares in which no row comes twice; its rows are drawn by `seed`.

    A stream is checked as it is read. For training it is shuffled in a buffer and has no end: with fractions each row
    is from a source drawn at random, and a source that ends begins again; without, all sources come one after the
    other, then again. It is a single shard, so that rows and their numbers do not depend on the number of processes:
    each reads all of it and takes its part, in one worker at most. A held-out stream ends.

    Args:
        arguments: Data sets, and what to do with bad rows.
        processor: Decides the length of a row.
        max_length: Tokens, image tokens included, above which a row is dropped; None for no limit.
        seed: Of mixture, shuffle buffer and held-out split.
        with_eval: Whether to load held-out data.
        dropped_rows: Where dropped rows are recorded: of data in memory by the main process, of streams when met.

    Raises:
        ValueError: A data set cannot be read, has bad rows and `bad_rows` is "stop", or has none left; fractions are
            no numbers above 0, or given for some sources only; held-out data is asked for and not found. A stream
            raises when read, at a bad row or after a source that gave no row.
    """
    streaming = arguments.dataset_streaming
    fractions = _fractions(arguments.sources)
    parting = bool(with_eval and arguments.test_split_size and not arguments.eval_dataset_name)
    if streaming and parting:
        raise ValueError("test_split_size needs data in memory, and dataset_streaming is set. Give eval_dataset_name.")
    held_out = open_held_out(arguments) if with_eval and not parting else None
    sources = [open_source(source, streaming) for source in arguments.sources]
    checks = Checks(processor, max_length, arguments, dropped_rows)
    reports = [SourceReport(source.name, "train", dataset=source.dataset) for source in sources]
    held_report = SourceReport(held_out.name if held_out else "held out of training", "eval")
    held_report.dataset = held_out.dataset if held_out else None
    train: Dataset | IterableDataset
    held: Dataset | IterableDataset | None = None
    if streaming:
        mixed = {"sources": tuple(sources), "checks": checks, "fractions": fractions, "seed": seed}
        # Without end, since the Trainer cannot resume a stream in a later pass: it counts batches from the beginning.
        train = _stream(_endless_rows, mixed).shuffle(seed=seed, buffer_size=arguments.shuffle_buffer_size)
        held = _stream(kept_rows, {"source": held_out, "checks": checks}) if held_out else None
    else:
        parts = [_in_memory(source, checks, report) for source, report in zip(sources, reports, strict=True)]
        train = _mixture(parts, fractions, seed, reports)
        if held_out:
            held = _in_memory(held_out, checks, held_report)
        elif parting:
            train, held = _parted(train, checks, seed, reports, held_report)
        train = train.select_columns(list(FEATURES))
        held = held.select_columns(list(FEATURES)) if held else None
    reports += [held_report] if with_eval else []
    if dropped_rows and PartialState().is_main_process:
        for dropped in (row for report in reports for row in report.dropped):
            dropped_rows.add(dropped)
    return TrainingData(train, held, DataReport(reports))


def _stream(rows: Callable[..., Iterator[dict[str, Any]]], given: dict[str, Any]) -> IterableDataset:
    # One generator, and no list among its arguments, makes one shard: `datasets` and accelerate would deal several out
    # to workers and processes, each of which would then see other sources, number rows anew and end at another time.
    return IterableDataset.from_generator(rows, features=FEATURES, gen_kwargs=given)


def _endless_rows(
    sources: tuple[Source, ...], checks: Checks, fractions: tuple[float, ...], seed: int
) -> Iterator[dict[str, Any]]:
    # Drawn row by row, so that skipping rows after a resumption leads to the same ones.
    groups = [(source,) for source in sources] if fractions else [sources]
    streams = [_again_and_again(group, checks) for group in groups]
    random = np.random.default_rng(seed)
    while True:
        yield next(streams[random.choice(len(streams), p=fractions or None)])


def _again_and_again(sources: tuple[Source, ...], checks: Checks) -> Iterator[dict[str, Any]]:
    while True:
        for source in sources:
            yield from kept_rows(source, checks)


def _in_memory(source: Source, checks: Checks, report: SourceReport) -> Dataset:
    processor = checks.processor
    known = [source.identity(), processor.chat_template, processor.tokenizer.get_vocab(), type(processor.tokenizer)]
    code = [Path(module).read_bytes() for module in (checking.__file__, rows.__file__)]
    try:
        # Processes that start together wait for the first, and find its file in the cache.
        checked = Dataset.from_generator(
            checked_rows,
            features=_CHECKED,
            gen_kwargs={"source": source, "processor": processor},
            fingerprint=Hasher.hash([known, tokens_per_image(processor), processor.image_token, code]),
        )
    except DatasetGenerationError as error:
        raise error.__cause__ if isinstance(error.__cause__, (ValueError, OSError)) else error from None
    except ValueError as error:  # what `datasets` says of no rows; errors of ours come in one of its own
        raise ValueError(f"{source.name} has no rows.") from error
    return _without_dropped(checked, source.image_folder, checks, report)


def _without_dropped(rows: Dataset, image_folder: str | None, checks: Checks, report: SourceReport) -> Dataset:
    """The good ones of rows with the columns of `_CHECKED`; what became of the others is reported."""
    decoded = checks.arguments.check_images or report.split == "eval"
    max_pixels = checks.arguments.max_image_pixels if decoded else None
    problems = picture_problems(rows, report.source, image_folder, max_pixels)
    about = rows.select_columns(["source", "row", "file", "reason", "length", "image_count"]).to_list()
    bad, long, kept = [], [], []
    for number, row in enumerate(about):
        if row["reason"] or number in problems:
            file, reason = problems.get(number, (row["file"], row["reason"]))
            bad.append(DroppedRow(row["source"], row["row"], file, reason))
        elif dropped := checks.too_long(row):
            long.append(dropped)
        else:
            kept.append(number)
    if bad and checks.arguments.bad_rows == "stop":
        raise ValueError(stopped(bad))
    if not kept:
        first = f" The first: {(bad + long)[0]}." if bad or long else ""
        raise ValueError(
            f"{report.source}: no row is left. {len(about)} found, {len(bad)} bad, {len(long)} longer than max_length "
            f"{checks.max_length}.{first}"
        )
    report.found, report.bad, report.too_long, report.dropped = len(about), len(bad), len(long), bad + long
    _measure(report, [about[number] for number in kept])
    return rows.select(kept)


def _measure(report: SourceReport, kept: list[dict[str, Any]]) -> None:
    lengths, images = (np.array([row[column] for row in kept]) for column in ("length", "image_count"))
    report.kept = report.used = len(kept)
    report.images, report.text_only = int(images.sum()), int((images == 0).sum())
    report.shortest, report.median, report.longest = int(lengths.min()), float(np.median(lengths)), int(lengths.max())


def _fractions(sources: list[DataSource]) -> tuple[float, ...]:
    """Shares that sum to 1, or none."""
    for source in sources:
        if source.fraction is not None and not isinstance(source.fraction, (int, float)):
            raise ValueError(f"The fraction of {source.path} must be a number above 0, got {source.fraction!r}.")
    given = [source.fraction for source in sources]
    if all(fraction is None for fraction in given):
        return ()
    if any(fraction is None or not 0 < fraction < math.inf for fraction in given):
        raise ValueError(f"Every data set of a mixture has a fraction above 0, or none has one; got {given}.")
    return tuple(fraction / sum(filter(None, given)) for fraction in given if fraction)


def _mixture(parts: list[Dataset], fractions: tuple[float, ...], seed: int, reports: list[SourceReport]) -> Dataset:
    if fractions:
        total = min(len(part) / fraction for part, fraction in zip(parts, fractions, strict=True))
        for number, (part, fraction) in enumerate(zip(parts, fractions, strict=True)):
            drawn = np.random.default_rng([seed, number]).permutation(len(part))[: round(total * fraction)]
            parts[number] = part.select(sorted(drawn))
            reports[number].used = len(drawn)
    return concatenate_datasets(parts)


def _parted(
    mixture: Dataset, checks: Checks, seed: int, reports: list[SourceReport], held_report: SourceReport
) -> tuple[Dataset, Dataset]:
    """Training rows and held-out rows. The reports of the sources say how many rows of each are left to train on."""
    numbers = Dataset.from_dict({"number": list(range(len(mixture)))})
    parts = numbers.train_test_split(test_size=checks.arguments.test_split_size, seed=seed)
    left, out = parts["train"]["number"][:], parts["test"]["number"][:]
    starts = np.cumsum([0] + [report.used for report in reports])
    for report, count in zip(reports, np.histogram(left, starts)[0], strict=True):
        report.used = int(count)
    # Links that leave an image folder were looked for when the rows were read.
    return mixture.select(left), _without_dropped(mixture.select(out), None, checks, held_report)
