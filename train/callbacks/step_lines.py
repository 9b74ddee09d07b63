# SPDX-License-Identifier: Apache-2.0
"""Files of a run with lines of JSON, each about a step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...checkpoint.files import atomic_write


def write_step(file: Path, step: int, entries: Sequence[dict[str, Any]]) -> None:
    """Writes entries about a step, a line each, after the lines of earlier steps.

    Lines of this step or later ones are from before a run was resumed. They are dropped.
    """
    lines = read_lines_before(file, step)
    for step_entry in entries:
        lines.append(json.dumps({"step": step, **step_entry}, ensure_ascii=False))
    content = "\n".join(lines) + "\n"
    with atomic_write(file) as partial:
        partial.write_text(content, encoding="utf-8", errors="replace")


def read_lines_before(file: Path, step: int) -> list[str]:
    """Returns the lines of a file about earlier steps, or none if it does not exist."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if json.loads(line)["step"] < step]
