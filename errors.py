# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Output of commands: foreign text cannot control the terminal; an error is one sentence and exit status 1."""

import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import rich.console
import typer
from rich.segment import Segment


class Console(rich.console.Console):
    """Rich's console without markup, and with control characters escaped."""

    def __init__(self, **options):
        super().__init__(markup=False, highlight=False, **options)

    def render_str(self, text: str, **options):
        return super().render_str(escaped(text), **options)  # before its width is measured

    def render(self, renderable, options=None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


def escaped(text: str) -> str:
    """`text` with control and invisible characters written as in Python, `\\x1b`, except line breaks and tabs."""
    return "".join(each if each in "\n\t" or _is_shown(each) else ascii(each)[1:-1] for each in text)


def _is_shown(character: str) -> bool:
    # Not control (C0, C1), format (bidirectional, of no width), half of a surrogate pair, line or paragraph separator.
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


@contextmanager
def errors_for_people(extra: str | None = None) -> Iterator[None]:
    """Prints errors that a user can fix as a message without a traceback, and exits with status 1.

    Args:
        extra: The extra of this package that a missing module belongs to.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        remedy = f". {install(extra)}" if extra and isinstance(error, ModuleNotFoundError) else ""
        message = f"{error}{remedy}"
        console = Console(stderr=True)
        console.print("Error:", style="bold red", end=" ")
        console.print(message, soft_wrap=True)  # paths stay whole
        raise typer.Exit(1) from error


def install(extra: str) -> str:
    """How to install an extra of this package, which is not on PyPI: from its checkout."""
    return f"Install it in the checkout of this package: pip install '.[{extra}]'"
