# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Tables of the terminal as HTML, which a notebook shows of what a function returns."""

from html import escape

from rich.table import Table

from .errors import escaped


def html_table(table: Table) -> str:
    """A table of texts as HTML: its title above, its rows, its caption below. No text in it is read as HTML."""
    columns = table.columns
    rows = zip(*(column.cells for column in columns), strict=True)
    head = _row("th", columns, (column.header for column in columns)) if table.show_header else ""
    body = "".join(_row("td", columns, row) for row in rows)
    title = f"<caption>{html_text(table.title)}</caption>" if table.title else ""
    caption = html_paragraph(table.caption) if table.caption else ""
    return f"<table>{title}{head}{body}</table>{caption}"


def html_paragraph(text: object) -> str:
    """A text as a paragraph of HTML."""
    return f"<p>{html_text(text)}</p>"


def html_text(text: object) -> str:
    """A text as HTML shows it, with its line breaks; invisible characters as at the terminal."""
    return escape(escaped(str(text))).replace("\n", "<br>")


def _row(tag: str, columns, texts) -> str:
    # Notebooks' style sheets align to the right what has no style of its own.
    cells = (
        f'<{tag} style="text-align: {column.justify}">{html_text(text)}</{tag}>'
        for column, text in zip(columns, texts, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"
