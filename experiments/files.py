# SPDX-License-Identifier: Apache-2.0
"""Files and folders of experiments: they appear when they are complete, or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any


TRAINING_RECORD = "training.json"  # what `normalign train` writes beside a model
TRAINER_STATE = "trainer_state.json"


@contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """Yields a path for a file or folder that becomes `target` if the block ends without error.

    The path is in a temporary folder beside `target`. A file may replace an earlier one.

    Raises:
        OSError: `target` is a folder that is not empty.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield temporary_folder / target.name
        os.replace(temporary_folder / target.name, target)
    finally:
        shutil.rmtree(temporary_folder)


def read_json(file: Path) -> Any:
    """Reads a JSON file. Returns None if it does not exist or is not valid."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_text(file: Path, text: str) -> None:
    """Writes a text file."""
    with new_path(file) as partial_file:
        partial_file.write_text(text, encoding="utf-8")
