# SPDX-License-Identifier: Apache-2.0
"""Values of tables: what is empty, numbers as text, lists and mappings that are stored in texts."""

import ast
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...console import printable


_LONGEST_LITERAL = 2**16  # characters of a text in Python's form. It is slow to read.
_LONGEST_NAME = 80  # characters of a key in a report
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
# A list of texts as numpy prints it, without commas.
_NUMPY_TEXTS = re.compile(rf"\[\s*(?:{_QUOTED})(?:\s+(?:{_QUOTED}))*\s*\]", re.S)


def plain(text: str) -> str:
    """Returns a text in lower case, with single spaces and without punctuation at its ends."""
    return " ".join(text.lower().split()).strip(" \"'*_.,:;!?()[]")


def as_text(value: Any) -> Any:
    """Returns a number as text, NaN as None, and any other value unchanged.

    3.0 becomes "3", because a table stores whole numbers as floats if one of them is missing.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if value.is_integer():
            return str(int(value))
    return str(value)


def is_empty(value: Any) -> bool:
    """Whether a column holds nothing: None, NaN, an empty text, or a list or mapping of such."""
    if isinstance(value, str):  # first, since most are
        return not value
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_empty, value))
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value == b""


def as_list(value: Any) -> Sequence[Any]:
    """Returns a list or tuple unchanged, and any other value in a list."""
    return value if isinstance(value, (list, tuple)) else [value]


def parsed(value: Any) -> Any:
    """Returns the list or mapping that a text holds, as JSON or Python prints it.

    Any other value is returned unchanged.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    if len(value) > _LONGEST_LITERAL:
        return value
    try:
        # Python would read texts without commas as a single text.
        if _NUMPY_TEXTS.fullmatch(value.strip()):
            return list(map(ast.literal_eval, re.findall(_QUOTED, value, re.S)))
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def transposed(value: Any) -> Any:
    """Returns a mapping of lists of one length as a list of mappings.

    Any other value is returned unchanged. Older versions of `datasets` store a list of mappings in
    that way.
    """
    if not isinstance(value, Mapping):
        return value
    columns = list(value.values())
    are_lists = all(isinstance(column, (list, tuple)) for column in columns)
    if not are_lists or len(set(map(len, columns))) != 1:
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def unread_keys(values: Mapping, read: Collection[Any], place: str = "") -> list[str]:
    """Returns the names of keys that hold something and are not read.

    Args:
        values: A row, or a mapping in it.
        read: The keys that are read.
        place: Where the mapping is in the row, such as `messages.`. The names begin with it.
    """
    return [
        printable(f"{place}{key}"[:_LONGEST_NAME]) or "(no name)"
        for key, value in values.items()
        if key not in read and not is_empty(value)
    ]
