# SPDX-License-Identifier: Apache-2.0
"""Streams: rows that are parsed and checked as they come."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
from datasets import IterableDataset

from ..rows.checks import (
    MANY_ROWS,
    Checks,
    bad_rows_message,
    check_images_are_read,
    image_problem,
    parse_rows,
    share_of_bad_rows,
    warn_of_captions,
)
from ..rows.parse import FEATURES, BadRow, DroppedRow
from ..rows.reports import SourceReport, warn_once
from ..rows.unread import is_about
from .source import Source


_CHUNK = 64  # rows that are parsed together
_FIRST = 100  # rows whose images are opened before training


def stream(rows: Callable[..., Iterator[dict[str, Any]]], arguments: dict[str, Any]) -> IterableDataset:
    """The data set of what `rows` gives when it is called with `arguments`."""
    # One generator without lists among its arguments is one shard. Several would be split between workers and
    # processes, each of which would then see other sources, number rows differently and end at another time.
    return IterableDataset.from_generator(rows, features=FEATURES, gen_kwargs=arguments)


def endless_rows(
    sources: tuple[Source, ...], checks: Checks, fractions: tuple[float, ...], seed: int, buffer_size: int
) -> Iterator[dict[str, Any]]:
    """The valid rows of all sources without end, through a shuffle buffer of `buffer_size` rows.

    Sources follow each other, or are drawn row by row with the probabilities `fractions`.
    """
    # Shuffled here, since `datasets` shuffles otherwise in a worker of the data loader.
    rows, random = _drawn_rows(sources, checks, fractions, seed), np.random.default_rng(seed)
    buffer = list(islice(rows, buffer_size))
    for row in rows:
        place = random.integers(buffer_size)
        yield buffer[place]
        buffer[place] = row


def _drawn_rows(
    sources: tuple[Source, ...], checks: Checks, fractions: tuple[float, ...], seed: int
) -> Iterator[dict[str, Any]]:
    # Drawn row by row, so that a resumed run, which skips rows, continues with the same ones.
    groups = [(source,) for source in sources] if fractions else [sources]
    streams = [chain.from_iterable(valid_rows(source, checks) for source in cycle(group)) for group in groups]
    random = np.random.default_rng(seed)
    while True:
        yield next(streams[random.choice(len(streams), p=fractions or None)])


def valid_rows(source: Source, checks: Checks) -> Iterator[dict[str, Any]]:
    """The rows of a source that pass all checks, in parsed form; the others are recorded.

    Raises:
        ValueError: More rows are bad than `bad_rows` allows, or no row is left at the end.
    """
    empty = True
    for row in _valid(source, checks):
        empty = False
        if row["unread"]:
            warn_once(f"{source.name}: what looks like an image is not read: {row['unread']}.")
        for name in row["left_out"]:
            if not is_about(name):
                warn_once(f"{source.name}: left out: {name}.")
        for change in row["changed"]:
            warn_once(f"{source.name}: {change}.")
        yield {column: row[column] for column in FEATURES}
    if empty:  # repeated without end, it would never give a row
        raise ValueError(f"{source.name}: no row is left. It is empty, or all of its rows were dropped.")


def has_images(source: Source, checks: Checks, report: SourceReport) -> bool:
    """Whether one of the first rows of a stream has an image; all of their images are opened.

    Raises ValueError if too many rows are bad, or [`check_images_are_read`] finds unread images.
    """
    report.skippable = int(share_of_bad_rows(checks.bad_rows, source) * MANY_ROWS)
    rows = list(_valid(source, checks, _FIRST))
    images = sum(row["image_count"] for row in rows)
    check_images_are_read(source.name, len(rows), images, Counter(row["unread"] for row in rows if row["unread"]))
    return images > 0


def _valid(source: Source, checks: Checks, first: int | None = None) -> Iterator[dict[str, Any]]:
    """The valid rows of a stream; of the `first` alone, the images are opened too."""
    stored = islice(source, first)
    rows = iter(lambda: parse_rows(islice(stored, _CHUNK), source.rules, checks.processor), [])
    share, bad, number = share_of_bad_rows(checks.bad_rows, source), list[DroppedRow](), 0
    for number, row in enumerate(chain.from_iterable(rows), 1):
        dropped = checks.too_long(row)
        problem = (row["file"], row["reason"]) if row["reason"] else None
        pixels = checks.max_image_pixels if first else None
        if problem := problem or image_problem(row["images"], source.rules, pixels):
            dropped = DroppedRow(row["source"], row["row"], *problem)
            bad += [dropped] if share < 1 or first else []
            if len(bad) > share * max(number, MANY_ROWS):
                raise BadRow(bad_rows_message(source, bad, share=share))
        if not dropped:
            warn_of_captions(source.name, [row["form"]])
            yield row
        elif checks.dropped_rows:
            checks.dropped_rows.add(dropped)
    is_sample, likely = number == first, float(len(bad))
    if is_sample:  # three standard deviations less
        likely -= 3 * likely**0.5
    if len(bad) == number > 0 or likely > share * number:
        shown = f"\nThese are the first {number:,} rows of the stream." if is_sample else ""
        raise BadRow(bad_rows_message(source, bad, number, share=share) + shown)
