# SPDX-License-Identifier: Apache-2.0
"""Streams: rows that are parsed and checked as they come."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat, starmap, zip_longest
from typing import Any

import numpy as np
from datasets import IterableDataset

from ..rows.checks import (
    MANY_ROWS,
    Checks,
    SourceReport,
    check_images_are_read,
    check_share,
    parse_rows,
    share_of_bad_rows,
    warn_of_captions,
    warn_once,
)
from ..rows.forms import looks_like
from ..rows.images import Problem, open_and_find_problem
from ..rows.parse import FEATURES, DroppedRow, ParsedRow
from .source import Source


_CHUNK = 64  # rows that are parsed together
_FIRST = 100  # rows whose images are opened before training


def stream(rows: Callable[..., Iterator[dict]], **arguments: Any) -> IterableDataset:
    """Returns the data set of what a function yields.

    Args:
        rows: The function. It may be called again, for another pass.
        arguments: Its arguments.
    """
    # A generator without lists among its arguments is one shard. Several shards would be split
    # between workers and processes. Each would then read other sources, and end at another time.
    return IterableDataset.from_generator(rows, features=FEATURES, gen_kwargs=arguments)


def endless_rows(
    sources: tuple[Source, ...],
    checks: Checks,
    fractions: tuple[float, ...],
    seed: int,
    size: int,
) -> Iterator[ParsedRow]:
    """Yields valid rows without end, in a shuffled order.

    Args:
        sources: Streams of rows.
        checks: Options of the checks.
        fractions: The probabilities of the sources when a row is drawn. If empty, the sources take
            turns.
        seed: Decides what is drawn and how rows are shuffled.
        size: Number of rows in the buffer that shuffles them.
    """
    # Shuffled here, since `datasets` shuffles otherwise in a worker of the data loader.
    if fractions:
        rows = _drawn(sources, checks, fractions, seed)
    else:
        rows = chain.from_iterable(starmap(_in_turn, repeat((sources, checks))))
    generator = np.random.default_rng(seed)
    buffer = list(islice(rows, size))
    for row in rows:
        position = generator.integers(size)
        yield buffer[position]
        buffer[position] = row


def _drawn(
    sources: tuple[Source, ...], checks: Checks, fractions: tuple[float, ...], seed: int
) -> Iterator[ParsedRow]:
    """Draws rows one by one, so that a resumed run that skips rows continues with the same rows."""
    streams = [
        chain.from_iterable(starmap(valid_rows, repeat((source, checks)))) for source in sources
    ]
    generator = np.random.default_rng(seed)
    while True:
        yield next(streams[generator.choice(len(streams), p=fractions)])


def _in_turn(sources: tuple[Source, ...], checks: Checks) -> Iterator[ParsedRow]:
    """Returns one pass: a row of each source in turn, until every source has ended."""
    streams = [
        chain.from_iterable(starmap(valid_rows, repeat((source, checks), source.repeat)))
        for source in sources
    ]
    # A source that has ended gives None.
    return filter(None, chain.from_iterable(zip_longest(*streams)))


def valid_rows(source: Source, checks: Checks) -> Iterator[ParsedRow]:
    """Yields the rows of a source that pass all checks, in parsed form. Records the other rows.

    Warns of what a row has that is not read, and of what was changed in it.

    Raises:
        ValueError: Too many rows are bad, or no row is left.
    """
    is_empty = True
    for row in _checked_rows(source, checks):
        is_empty = False
        warnings = list(row["changed"])
        if row["unread"]:
            warnings.append(f"what looks like an image is not read: {row['unread']}")
        for column in row["left_out"]:
            known_column = looks_like(column)
            if known_column:
                warnings.append(f"column not used: {column}, like {known_column}")
        for warning in warnings:
            warn_once(f"{source.name}: {warning}.")
        yield {column: row[column] for column in FEATURES}
    if is_empty:  # repeated without end, it would never give a row
        raise ValueError(f"{source.name}: no row is left. It is empty, or all are dropped.")


def stream_report(source: Source, checks: Checks, split: str) -> SourceReport:
    """Returns the report of a stream. It only counts rows that may still turn out bad."""
    skippable = int(share_of_bad_rows(checks.bad_rows, source) * MANY_ROWS)
    return SourceReport(source.name, split, dataset=source.dataset, skippable=skippable)


def has_images(source: Source, checks: Checks) -> bool:
    """Returns whether one of the first rows of a stream has an image. All their images are opened.

    Raises:
        ValueError: Too many of these rows are bad, or most show images that are not read.
    """
    rows = list(_checked_rows(source, checks, _FIRST))
    image_count = sum(row["image_count"] for row in rows)
    unread_counts = Counter(row["unread"] for row in rows if row["unread"])
    check_images_are_read(source.name, len(rows), image_count, unread_counts)
    return image_count > 0


def _checked_rows(source: Source, checks: Checks, first: int | None = None) -> Iterator[ParsedRow]:
    """Yields the valid rows of a stream.

    If `first` is given, only so many rows are read, and their images are opened too. Records the
    dropped rows in their file.

    Raises ValueError if more rows are bad than may be skipped.
    """
    allowed_share = share_of_bad_rows(checks.bad_rows, source)
    bad_rows: list[DroppedRow] = []
    number = 0
    for number, row in enumerate(_parsed(source, checks, first), 1):
        dropped = checks.too_long(row)
        problem: Problem | None = (row["file"], row["reason"])
        if row["reason"] is None:
            problem = open_and_find_problem(row["images"], source.rules, decode=first is not None)
        if problem:
            dropped = DroppedRow(row["source"], row["row"], *problem)
            # If all may be bad, a list of them would grow for ever.
            if allowed_share < 1 or first:
                bad_rows.append(dropped)
            check_share(source, bad_rows, max(number, MANY_ROWS), allowed_share)
        if not dropped:
            warn_of_captions(source.name, [row["form"]])
            yield row
        elif checks.dropped_rows:
            checks.dropped_rows.add(dropped)
    # The first rows are a sample. By chance it may have a larger share of bad rows than the whole.
    deviations = -3 if number == first else 0
    check_share(source, bad_rows, number, allowed_share, deviations)


def _parsed(source: Source, checks: Checks, first: int | None) -> Iterator[ParsedRow]:
    """Yields the rows of a stream, or its `first` rows, parsed some at a time."""
    stored_rows = islice(source, first)
    while True:
        parsed_rows = parse_rows(islice(stored_rows, _CHUNK), source.rules, checks.processor)
        if not parsed_rows:
            return
        yield from parsed_rows
