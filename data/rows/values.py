# SPDX-License-Identifier: Apache-2.0
"""Values as rows hold them: numbers for text, nothing in many forms, lists as text, lists by column."""

import ast
import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any


_MAX_LITERAL = 2**16  # characters of a list that is written as Python writes it
_BETWEEN_TEXTS = re.compile(r"(['\"])\s+(['\"])")


def as_text(value: Any) -> Any:
    """A number as text, 3.0 as 3, since tables write it so; NaN as None, and others unchanged."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value) if value == value else None
    return value


def is_empty(value: Any) -> bool:
    """Whether a column holds nothing: None, NaN, an empty text, or a list or a mapping of nothing else."""
    if isinstance(value, str):  # first, since most are
        return not value
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_empty, value))
    return value is None or value == b"" or (isinstance(value, float) and math.isnan(value))


def parsed(value: Any) -> Any:
    """The list or mapping that a text holds in JSON, or as Python prints it, as tables have it; else the value."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:  # numpy prints no commas, and Python reads texts without them as one
        text = _BETWEEN_TEXTS.sub(r"\1, \2", value.strip())
        return ast.literal_eval(text) if len(value) <= _MAX_LITERAL else value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def transposed(value: Any) -> Any:
    """A mapping of lists of one length as a list of mappings, as older `datasets` store it; else the value."""
    columns = list(value.values()) if isinstance(value, Mapping) else []
    are_lists = all(isinstance(column, (list, tuple)) for column in columns)
    if not columns or not are_lists or len({*map(len, columns)}) > 1:
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def leave_out(left_out: list[str], values: Mapping, read: Collection[Any], place: str = "") -> None:
    """Adds to `left_out` the keys of `values` that hold something and are not among those `read`."""
    keys = (key for key in values if key not in read and not is_empty(values[key]))
    names = (printable(f"{place}{key}"[:80]) or "(no name)" for key in keys)
    left_out += [name for name in names if name not in left_out]


def printable(text: str) -> str:
    """The text with question marks for half surrogate pairs, which JSON may have and UTF-8 may not."""
    return text.encode(errors="replace").decode()
