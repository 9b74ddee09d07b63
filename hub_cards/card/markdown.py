# SPDX-License-Identifier: Apache-2.0
"""Markdown of a card: text of other people, escaped, and links and tables made of it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from .facts import Part


DASH = "–"
_MARKUP = re.compile(r"([\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_]))")  # not "_" within a word
_HEADING_OR_LIST = re.compile(r"^(\d*)(?=[#=]|[+-](?:[\s-]|$)|(?<=\d)[.)](?:\s|$))")


def escape(value: Any) -> Markup:
    """Returns `value` on one line, with all characters escaped that Markdown or HTML would read."""
    if isinstance(value, Markup):
        return value
    line = " ".join(str(value).split())
    line = "".join(filter(str.isprintable, line))
    line = _MARKUP.sub(r"\\\1", line)
    return Markup(_HEADING_OR_LIST.sub(r"\1\\", line))


def link(name: str, address: str) -> Markup:
    """Returns a link whose text and address are escaped."""
    quoted_address = quote(address, safe="/:@#?&=%+")
    return Markup(f"[{escape(name)}]({quoted_address})")


def part_link(part: Part) -> Markup:
    """Returns a part's name, with a link if the Hub has it, and its commit if that is known."""
    if part.hub_id is None:
        return escape(part.name)
    address = f"https://huggingface.co/{part.hub_id}"
    if part.role == "data":
        address = f"https://huggingface.co/datasets/{part.hub_id}"
    text = link(part.name, address)
    if part.revision:
        commit = link(part.revision[:7], f"{address}/tree/{part.revision}")
        text += Markup(f" ({commit})")
    return text


def table(titles: Iterable[Any], table_rows: Iterable[Sequence[Any]]) -> Markup:
    """Returns a table of the rows that have a known cell after the first. Empty without such rows.

    A cell that is None or "" is not known, and a dash stands for it. Numbers are aligned right.
    """
    known_rows = []
    for row in table_rows:
        row_cells = [_cell(value) for value in row]
        if any(cell != DASH for cell in row_cells[1:]):
            known_rows.append(row_cells)
    if not known_rows:
        return Markup()
    alignment = []
    for column in zip(*known_rows, strict=True):
        is_numeric = all(re.match(r"[\d–−-]", cell) for cell in column)
        alignment.append("---:" if is_numeric else "---")
    table_text = ""
    lines: list[Iterable[str]] = [map(escape, titles), alignment, *known_rows]
    for table_line in lines:
        table_text += f"| {' | '.join(table_line)} |\n"
    return Markup(table_text)


def _cell(value: Any) -> Markup:
    if value is None or value == "":
        return Markup(DASH)
    return escape(value).replace(" ± ", "\xa0±\xa0")


def table_of_columns(columns: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Returns a table of columns.

    Args:
        columns: Cells by title of the column, and then by name of the row. All columns must have
            the same rows.
    """
    rows: dict[str, list[Any]] = {}
    for column_cells in columns.values():
        for row_name, cell_value in column_cells.items():
            rows.setdefault(row_name, [row_name]).append(cell_value)
    return table(["", *columns], rows.values())
