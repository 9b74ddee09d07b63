# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How commands fail: one sentence on standard error and exit status 1."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console


@contextmanager
def errors_for_people(extra: str | None = None) -> Iterator[None]:
    """Turns an error that a person can do something about into a message, without a traceback.

    Args:
        extra: The extra of this package that a missing module belongs to.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        remedy = f". Install it with: pip install 'normalign-llava[{extra}]'"
        message = f"{error}{remedy if extra and isinstance(error, ModuleNotFoundError) else ''}"
        console = Console(stderr=True)
        console.print("[bold red]Error:[/]", end=" ")
        console.print(message, markup=False, highlight=False, soft_wrap=True)  # paths stay whole
        raise typer.Exit(1) from error
