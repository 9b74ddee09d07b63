# SPDX-License-Identifier: Apache-2.0
"""The journal of a quickstart run, so that a stopped run resumes as it began."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checkpoint.files import write_json
from ..checkpoint.precision import half_precision_pays


JOURNAL = "journal.json"


class Journal:
    """Settings and finished steps of a run, kept in its folder's `JOURNAL`.

    Attributes:
        bf16: Whether this run multiplies in bfloat16; decided once, so that a resumed run does the same.
        seconds: Seconds of each finished step, without those before an interruption.
    """

    def __init__(self, output: Path, settings: Any, console: Console):
        self.path, self.console = output / JOURNAL, console
        self.settings = json.loads(json.dumps(asdict(settings)))  # as it will be read back
        if self.path.exists():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            changed = sorted(key for key, value in self.settings.items() if content["settings"].get(key) != value)
            if changed:
                remedy = "name another output folder, or remove this one"
                raise ValueError(f"{output} holds a run with other settings ({', '.join(changed)}): {remedy}")
            self.bf16, self.seconds = content["bf16"], content.get("seconds", {})
        else:
            self.bf16, self.seconds = half_precision_pays(), {}
        self.write()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announces and times a step. One that an earlier run has finished keeps its time."""
        self.console.rule(f"[bold]{name}[/]{', finished before' if name in self.seconds else ''}", align="left")
        start = time.perf_counter()
        yield
        self.seconds.setdefault(name, round(time.perf_counter() - start, 1))
        self.write()

    def write(self) -> None:
        write_json(self.path, {"settings": self.settings, "bf16": self.bf16, "seconds": self.seconds})
