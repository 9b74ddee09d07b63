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
    lines = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            if json.loads(line)["step"] < step:
                lines.append(line)
    for step_entry in entries:
        lines.append(json.dumps({"step": step, **step_entry}, ensure_ascii=False))
    with atomic_write(file) as partial:
        partial.write_text("\n".join([*lines, ""]), encoding="utf-8", errors="replace")
