# SPDX-License-Identifier: Apache-2.0
"""Streams: rows that are parsed and checked as they come."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
from datasets import IterableDataset

from ..rows import checks as row_checks
from ..rows.checks import MANY_ROWS, Checks, SourceReport, parse_rows, share_of_bad_rows
from ..rows.forms import looks_like
from ..rows.images import image_problem
from ..rows.parse import FEATURES, DroppedRow
from .source import Source, warn_once


_CHUNK = 64  # rows that are parsed together
_FIRST = 100  # rows whose images are opened before training


def stream(rows: Callable[..., Iterator[dict]], arguments: dict[str, Any]) -> IterableDataset:
    """The data set of what `rows` gives when it is called with `arguments`."""
    # One generator without lists among its arguments is one shard. Several would be split between
    # workers and processes, which would read other sources, number rows differently and end apart.
    return IterableDataset.from_generator(rows, features=FEATURES, gen_kwargs=arguments)


def endless_rows(
    sources: tuple[Source, ...],
    repeats: tuple[int, ...],
    checks: Checks,
    fractions: tuple[float, ...],
    seed: int,
    size: int,
) -> Iterator[dict[str, Any]]:
    """The valid rows without end, drawn by `fractions` or from one source after another in turn.

    In turn, a pass has each row of a source as often as `repeats` says. `size` rows are shuffled.
    """
    # Shuffled here, since `datasets` shuffles otherwise in a worker of the data loader.
    if fractions:
        rows = _drawn(sources, checks, fractions, seed)
    else:
        rows = chain.from_iterable(_in_turn(sources, repeats, checks) for _ in repeat(None))
    random = np.random.default_rng(seed)
    buffer = list(islice(rows, size))
    for row in rows:
        place = random.integers(size)
        yield buffer[place]
        buffer[place] = row


def _drawn(
    sources: tuple[Source, ...], checks: Checks, fractions: tuple[float, ...], seed: int
) -> Iterator[dict[str, Any]]:
    """Rows drawn one by one, so that a resumed run, which skips rows, continues with the same."""
    streams = [_passes(source, checks) for source in sources]
    random = np.random.default_rng(seed)
    while True:
        yield next(streams[random.choice(len(streams), p=fractions)])


def _passes(source: Source, checks: Checks) -> Iterator[dict[str, Any]]:
    """The valid rows of a source again and again."""
    while True:
        yield from valid_rows(source, checks)


def _in_turn(
    sources: tuple[Source, ...], repeats: tuple[int, ...], checks: Checks
) -> Iterator[dict[str, Any]]:
    """One pass: a row of each source in turn, until every source has ended."""
    waiting = []
    for source, count in zip(sources, repeats, strict=True):
        passes = map(valid_rows, repeat(source, count), repeat(checks))
        waiting.append(chain.from_iterable(passes))
    while waiting:
        for rows in tuple(waiting):
            row = next(rows, None)
            if row is None:
                waiting.remove(rows)
            else:
                yield row


def valid_rows(source: Source, checks: Checks) -> Iterator[dict[str, Any]]:
    """The rows of a source that pass all checks, in parsed form; the others are recorded."""
    empty = True
    for row in _valid(source, checks):
        empty = False
        unread = [f"what looks like an image is not read: {row['unread']}"] * bool(row["unread"])
        looks = {name: looks_like(name) for name in row["left_out"]}
        not_used = [f"column not used: {name}, like {like}" for name, like in looks.items() if like]
        for warning in (*unread, *not_used, *row["changed"]):
            warn_once(f"{source.name}: {warning}.")
        yield {column: row[column] for column in FEATURES}
    if empty:  # repeated without end, it would never give a row
        raise ValueError(f"{source.name}: no row is left. It is empty, or all are dropped.")


def has_images(source: Source, report: SourceReport, checks: Checks) -> bool:
    """Whether one of the first rows of a stream, whose images are opened, has an image."""
    report.skippable = int(share_of_bad_rows(checks.bad_rows, source) * MANY_ROWS)
    rows = list(_valid(source, checks, _FIRST))
    images = sum(row["image_count"] for row in rows)
    unread = Counter(row["unread"] for row in rows if row["unread"])
    row_checks.check_images_are_read(source.name, len(rows), images, unread)
    return images > 0


def _valid(source: Source, checks: Checks, first: int | None = None) -> Iterator[dict[str, Any]]:
    """The valid rows of a stream; of the `first` alone, the images are opened too."""
    stored = islice(source, first)
    chunks = iter(lambda: parse_rows(islice(stored, _CHUNK), source.rules, checks.processor), [])
    share, bad, number = share_of_bad_rows(checks.bad_rows, source), list[DroppedRow](), 0
    for number, row in enumerate(chain.from_iterable(chunks), 1):
        dropped = checks.too_long(row)
        problem = (row["file"], row["reason"]) if row["reason"] else None
        if problem := problem or image_problem(row["images"], source.rules, decode=bool(first)):
            dropped = DroppedRow(row["source"], row["row"], *problem)
            bad += [dropped] if share < 1 or first else []
            row_checks.check_share(source, bad, max(number, MANY_ROWS), share)
        if not dropped:
            row_checks.warn_of_captions(source.name, [row["form"]])
            yield row
        elif checks.dropped_rows:
            checks.dropped_rows.add(dropped)
    row_checks.check_share(source, bad, number, share, deviations=-3 if number == first else 0)
