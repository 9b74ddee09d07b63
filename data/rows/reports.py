# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Counts of the rows of each data set."""

from dataclasses import dataclass, field
from typing import Any

from .parse import DroppedRow


@dataclass
class SourceReport:
    """Counts of the rows of one data set.

    The numbers are None for a stream, whose dropped rows are in the file of dropped rows.

    Attributes:
        source: Name of the data set.
        split: `"train"` or `"eval"`.
        found: All rows.
        bad: Rows that cannot be trained on.
        too_long: Rows with more than `max_length` tokens.
        valid: The other rows.
        used: Selected rows: valid ones that are in the mixture and not held out of it.
        images: Images in the valid rows.
        text_only: Valid rows without an image.
        shortest, median, longest: Tokens in a valid row, image tokens included.
        dropped: Every row that was bad or too long.
        dataset: A Hub data set's id, commit and licence: see [`hub_dataset`].
        forms: Valid rows of each form, by the column that identifies it.
        unread: Valid rows without images in which a column or text looks like one: see [`unread_image`].
    """

    source: str
    split: str
    found: int | None = None
    bad: int | None = None
    too_long: int | None = None
    valid: int | None = None
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
    """Counts of all data sets, training data first."""

    sources: list[SourceReport]
