# SPDX-License-Identifier: Apache-2.0
"""Filters: which rows of a data set are read, by the values of its own columns."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


_FILTER = re.compile(r"\s*(.+?)\s*(>=|<=|!=|==|=|>|<)\s*(.+?)\s*", re.S)
_ORDERS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
REMEDY = "Write filters as relevance_min>=4, language=en or split!=test."


@dataclass(frozen=True)
class Filter:
    """One condition, such as `relevance_min>=4`."""

    column: str  # as the data names it
    comparison: str  # one of `_ORDERS`, "=" or "!="
    value: str

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether a row meets the condition. A row without a value only meets `!=`.

        Raises ValueError if a value is compared by size, but is not a number.
        """
        value = row.get(self.column)
        if value is None or value != value:  # NaN
            return self.comparison == "!="
        number = _number(value)
        wanted = _number(self.value)
        if self.comparison in _ORDERS:
            if number is None:
                raise ValueError(f"{self.column} is {str(value)[:40]!r} in a row, not a number")
            assert wanted is not None  # by `parse_filters`
            return _ORDERS[self.comparison](number, wanted)
        is_equal = str(value).lower() == self.value.lower()
        if number is not None and wanted is not None:
            is_equal = number == wanted
        return is_equal == (self.comparison == "=")

    def __str__(self) -> str:
        return f"{self.column}{self.comparison}{self.value}"


def parse_filters(texts: str | list[str] | None) -> tuple[Filter, ...]:
    """Returns the conditions in a list of texts, or in a text where commas separate them.

    Raises ValueError if one is not valid.
    """
    if isinstance(texts, str):
        texts = texts.split(",")
    filters = []
    for text in texts or ():
        match = isinstance(text, str) and _FILTER.fullmatch(text)
        if not match:
            raise ValueError(f"filters has {text!r}, not a condition. {REMEDY}")
        column, comparison, value = match.groups()
        if comparison in _ORDERS and _number(value) is None:
            raise ValueError(f"filters compares {column} with {value!r}, not with a number.")
        filters.append(Filter(column, comparison.replace("==", "="), value))
    return tuple(filters)


def _number(value: Any) -> float | None:
    """Returns a number, or the number that a text holds, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
