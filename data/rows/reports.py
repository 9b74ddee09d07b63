# SPDX-License-Identifier: Apache-2.0
"""Counts of the rows of each data set."""

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate import PartialState

from .parse import DroppedRow
from .unread import is_about


logger = logging.getLogger(__name__)

ABOUT = "also not read"

_VALUES = re.compile(r"\d+|, got .*")  # in which reasons of a kind differ


@dataclass
class SourceReport:
    """Counts of the rows of one data set; None for a stream, whose dropped rows are in a file.

    The mappings have numbers of rows: of valid ones, but for `files`.
    """

    source: str
    split: str  # "train" or "eval"
    found: int | None = None  # all rows; valid without bad and too_long ones
    bad: int | None = None
    too_long: int | None = None
    valid: int | None = None
    used: int | None = None  # valid rows that are in the mixture and not held out of it
    images: int | None = None
    text_only: int | None = None
    shortest: int | None = None  # tokens in a valid row, image tokens included
    median: float | None = None
    longest: int | None = None
    dropped: list[DroppedRow] = field(default_factory=list)
    dataset: dict[str, Any] | None = None  # id, commit and licence: see [`hub_dataset`]
    forms: dict[str, int] = field(default_factory=dict)  # by the column that identifies it
    unread: dict[str, int] = field(default_factory=dict)  # by what looks like an image
    left_out: dict[str, int] = field(default_factory=dict)  # by column or key
    changed: dict[str, int] = field(default_factory=dict)  # by what was changed
    files: dict[str, int] = field(default_factory=dict)  # if there are several
    skippable: int = 0  # rows that may still turn out bad while training, by `bad_rows`


@dataclass
class DataReport:
    """Counts of all data sets, training data first."""

    sources: list[SourceReport]


def not_read(left_out: Mapping[str, int], changed: Mapping[str, int]) -> dict[str, str]:
    """Texts by title: what is left out, what was changed, and columns about rows, such as ids."""
    news = {name: count for name, count in left_out.items() if not is_about(name)}
    lines = {"left out": counted(news), "changed": counted(changed)}
    lines[ABOUT] = ", ".join(name for name in left_out if name not in news)
    return {title: text for title, text in lines.items() if text}


def counted(rows: Mapping[str, int]) -> str:
    """Numbers of rows, most first: "tools (12 rows), history (1 row)"."""
    ordered = sorted(rows.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} ({count:,} row{'s' * (count != 1)})" for name, count in ordered)


def by_kind(rows: Sequence[DroppedRow], shown: int | None = None, total: int | None = None) -> list[str]:
    """A line for each of at most `shown` kinds of reason: its first row, and how many of `total`."""
    kinds: dict[tuple[str, str], list[DroppedRow]] = {}
    for row in rows:
        kind = _VALUES.sub("", row.reason.replace(row.file or "", ""))
        kinds.setdefault((row.source, kind), []).append(row)
    listed = list(kinds.values())[:shown]
    lines = []
    for alike in listed:
        count = f" ({'all ' if len(alike) == total else ''}{len(alike):,} rows)" if len(alike) > 1 else ""
        lines.append(f"  {alike[0]}{count}")
    more = len(rows) - sum(map(len, listed))
    return lines + ([f"  and {more:,} more"] if more else [])


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning in the main process, the first time."""
    if PartialState().is_main_process:
        logger.warning(message)
