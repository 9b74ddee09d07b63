# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Data sets in any known form as canonical rows, checked, measured and mixed; in memory or streamed.

No image is decoded on the way, and none is written anywhere: a row is built from its source when it is read.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import LlavaProcessor

from .arguments import DataArguments, DataSource
from .images import ImageRules
from .reports import DataReport, SourceReport
from .row_checks import Checks, has_images, kept_rows
from .rows import FEATURES, DroppedRows
from .sources import Source, open_held_out, open_source
from .table import RowBuilder, built_rows, good_rows, measure, without_dropped


logger = logging.getLogger(__name__)


@dataclass
class TrainingData:
    """Canonical rows, each with the columns of `FEATURES`; `eval` is None where none is asked for."""

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
    need_images: bool = False,
    dropped_rows: DroppedRows | None = None,
) -> TrainingData:
    """Loads what `arguments` names, checks every row, drops what is too long, and mixes.

    In memory, structure, lengths and the presence of image files are checked here, with `check_images` also every
    image; of held-out data every image always, since a row that loses its labels later makes the loss too low. All
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
        need_images: Whether it is an error if no row to train on has an image; of streams, none of the first rows.
        dropped_rows: Where dropped rows are recorded: of data in memory by the main process, of streams when met.

    Raises:
        ValueError: A data set cannot be read, has bad rows and `bad_rows` is "stop", or has none left; fractions are
            no numbers above 0, or given for some sources only; held-out data is asked for and not found; images are
            needed and there are none, or what looks like images is not read. A stream raises when read too, at a bad
            row or after a source that gave no row.
    """
    streaming = arguments.dataset_streaming
    fractions = _fractions(arguments.sources)
    parting = bool(with_eval and arguments.test_split_size and not arguments.eval_dataset_name)
    if streaming and parting:
        raise ValueError("test_split_size needs data in memory, and dataset_streaming is set. Give eval_dataset_name.")
    held_out = open_held_out(arguments) if with_eval and not parting else None
    sources = [open_source(source, streaming) for source in arguments.sources]
    checks = Checks(
        processor,
        max_length,
        arguments.bad_rows,
        arguments.check_images,
        arguments.max_image_pixels,
        dropped_rows,
    )
    reports = [SourceReport(source.name, "train", dataset=source.dataset) for source in sources]
    held_report = SourceReport(held_out.name if held_out else "held out of training", "eval")
    held_report.dataset = held_out.dataset if held_out else None
    train: Dataset | IterableDataset
    held: Dataset | IterableDataset | None = None
    if streaming:
        shown = any([has_images(source, checks) for source in sources])
        mixed = {"sources": tuple(sources), "checks": checks, "fractions": fractions, "seed": seed}
        # Without end, since the Trainer cannot resume a stream in a later pass: it counts batches from the beginning.
        train = _stream(_endless_rows, mixed).shuffle(seed=seed, buffer_size=arguments.shuffle_buffer_size)
        held = _stream(kept_rows, {"source": held_out, "checks": checks}) if held_out else None
    else:
        builder = RowBuilder((*sources, *([held_out] if held_out else [])))
        light = _mixture(
            [good_rows(builder, part, checks, report) for part, report in enumerate(reports)], fractions, seed, reports
        )
        if held_out:
            held = built_rows(good_rows(builder, len(sources), checks, held_report), builder)
        elif parting:
            left, out = _parted(light, arguments.test_split_size, seed, reports)
            # Links that leave an image folder were looked for when the rows were read.
            light, held_light = left, without_dropped(out, builder, ImageRules(), checks, held_report)
            held = built_rows(held_light, builder)
        train = built_rows(light, builder)
        shown = any(report.images for report in reports)
    if need_images and not shown:
        raise _no_images([source.name for source in sources], streaming)
    reports += [held_report] if with_eval else []
    _record_dropped(checks, reports)
    return TrainingData(train, held, DataReport(reports))


def prepare_rows(
    data: Dataset | IterableDataset,
    processor: LlavaProcessor,
    *,
    name: str = "train_dataset",
    split: Literal["train", "eval"] = "train",
    max_length: int | None = None,
    image_folder: str | None = None,
    bad_rows: Literal["stop", "skip"] = "stop",
    check_images: bool = False,
    max_image_pixels: int = DataArguments.max_image_pixels,
    need_images: bool = False,
    dropped_rows: DroppedRows | None = None,
) -> tuple[Dataset | IterableDataset, SourceReport]:
    """Makes of a data set that is open already what [`load_data`] makes of files: canonical rows, checked, measured.

    Rows are in any form that files may have, images decoded by PIL included. A stream is neither shuffled nor begun
    again when it ends. Data that went through here, or come from `load_data`, are returned as they are. All processes
    must call this at the same time.

    Args:
        data: Rows, in memory or streamed.
        processor: Decides the length of a row.
        name: What errors call the data.
        split: What it is for. Of held-out data every image is decoded now.
        max_length: Tokens, image tokens included, above which a row is dropped; None for no limit.
        image_folder: Folder that image paths start from and may not leave; by default any file of this machine.
        bad_rows: `"stop"` raises at a row that cannot be trained on, `"skip"` drops it.
        check_images: Whether to decode every image now.
        max_image_pixels: Images with more pixels are bad.
        need_images: Whether it is an error if no row has an image; of a stream, none of the first rows.
        dropped_rows: Where dropped rows are recorded.

    Raises:
        ValueError: There is a bad row, no row is left, images are needed and there are none, or what looks like
            images is not read. A stream raises when it is read, too.
    """
    report = SourceReport(name, split)
    if data.features == FEATURES or isinstance(_transform(data), RowBuilder):
        if isinstance(data, Dataset):
            measure(data, report)
        return data, report
    source = Source(name, ImageRules(image_folder), data=data)
    checks = Checks(processor, max_length, bad_rows, check_images, max_image_pixels, dropped_rows)
    prepared: Dataset | IterableDataset
    if isinstance(data, IterableDataset):
        shown = has_images(source, checks)
        prepared = _stream(kept_rows, {"source": source, "checks": checks})
    else:
        builder = RowBuilder((source,))
        prepared = built_rows(good_rows(builder, 0, checks, report), builder)
        shown = bool(report.images)
    if need_images and not shown:
        raise _no_images([name], isinstance(data, IterableDataset))
    if report.dropped:
        logger.warning(f"{name}: {len(report.dropped):,} of {report.found:,} rows dropped. First: {report.dropped[0]}")
    _record_dropped(checks, [report])
    return prepared, report


def _transform(data: Dataset | IterableDataset) -> Any:
    return data.format["format_kwargs"].get("transform") if isinstance(data, Dataset) else None


def _no_images(names: list[str], streaming: bool) -> ValueError:
    found = f"The first rows of {', '.join(names)} have" if streaming else f"{', '.join(names)}: the rows have"
    return ValueError(
        f"{found} no image, and without images nothing is trained where the language model is frozen, as in stage "
        "align. docs/data.md has the forms in which images are read."
    )


def _record_dropped(checks: Checks, reports: list[SourceReport]) -> None:
    if checks.dropped_rows and PartialState().is_main_process:
        for dropped in (row for report in reports for row in report.dropped):
            checks.dropped_rows.add(dropped)


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
    mixture: Dataset, test_size: float | None, seed: int, reports: list[SourceReport]
) -> tuple[Dataset, Dataset]:
    """Training rows and held-out rows. The reports of the sources say how many rows of each are left to train on."""
    numbers = Dataset.from_dict({"number": list(range(len(mixture)))})
    parts = numbers.train_test_split(test_size=test_size, seed=seed)
    left, out = parts["train"]["number"][:], parts["test"]["number"][:]
    starts = np.cumsum([0] + [report.used for report in reports])
    for report, count in zip(reports, np.histogram(left, starts)[0], strict=True):
        report.used = int(count)
    return mixture.select(left), mixture.select(out)
