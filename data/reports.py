# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What became of data sets: how many rows there were, and which were left out."""

from dataclasses import asdict, dataclass, field
from typing import Any

from .rows import DroppedRow


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
        images: Images in the rows kept.
        text_only: Rows kept that have no image.
        shortest, median, longest: Tokens in a kept row, image tokens included.
        dropped: Every row that was bad or too long.
        dataset: Of a data set of the Hub, which it is, and its licence: see [`hub_dataset`].
        forms: Rows kept of each form, by the column that tells it.
        unread: Rows kept without images in which a column or text looks like one: see [`unread_image`].
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
    forms: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)


@dataclass
class DataReport:
    """What became of all data sets, training data first."""

    sources: list[SourceReport]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every dropped row included."""
        return asdict(self)
