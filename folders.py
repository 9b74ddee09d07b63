# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Folders that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def finished_folder(target: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` when the block ends without an error, and vanishes otherwise.

    Where another process has filled `target` in the meantime, that one stays.
    """
    target = Path(target).resolve()
    ancestor = next(parent for parent in target.parents if parent.exists())
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=ancestor) as temporary:
        staging = Path(temporary) / target.name
        staging.mkdir()
        yield staging
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or not any(target.iterdir()):
            os.replace(staging, target)


@contextmanager
def new_folder(output: str | os.PathLike) -> Iterator[Path]:
    """[`finished_folder`] for a folder that must not be there yet, or be empty.

    Raises:
        ValueError: it is a file, or has something in it.
    """
    output = Path(output).resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"The output {output} exists and is not an empty folder. Choose another, or remove it first.")
    with finished_folder(output) as folder:
        yield folder
