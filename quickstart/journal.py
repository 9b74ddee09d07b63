# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The journal of a quickstart run, so that a stopped run resumes as it began."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checkpoint.files import write_json
from ..checkpoint.precision import half_precision_pays
from .display import peak_rss_gib
from .time_left import SECONDS, TimeLeft


JOURNAL = "journal.json"


class Journal:
    """Settings and finished steps of a run, kept in its folder's `JOURNAL`.

    Args:
        output: Folder of the run.
        settings: The run's settings, a dataclass.
        names: Names of the steps that the run takes.
        console: Where each step is announced, with the time that is left.

    Attributes:
        bf16: Whether this run multiplies in bfloat16; decided once, so that a resumed run does the same.
        steps: Seconds and peak memory of each finished step, without the seconds before an interruption.
        time_left: The time that is left.

    Raises:
        ValueError: The folder holds a run with other settings.
    """

    def __init__(
        self, output: Path, settings: Any, names: Sequence[str] = tuple(SECONDS), console: Console | None = None
    ):
        self.path = output / JOURNAL
        wanted = json.loads(json.dumps(asdict(settings)))  # as it will be read back
        if self.path.exists():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            changed = sorted(key for key, value in wanted.items() if content["settings"].get(key) != value)
            if changed:
                remedy = "name another output folder, or remove this one"
                raise ValueError(f"{output} holds a run with other settings ({', '.join(changed)}): {remedy}")
            self.bf16, self.steps = content["bf16"], content["steps"]
        else:
            self.bf16, self.steps = half_precision_pays(), {}
        self.settings = wanted
        self.console = console or Console(quiet=True)
        self.time_left = TimeLeft({name: SECONDS[name][0 if self.bf16 else 1] for name in names})
        for name in set(self.steps) & set(names):
            self.time_left.finish(name)
        self.write()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announces and times a step. One that an earlier run has finished keeps its time."""
        about = "finished before" if name in self.steps else self.time_left
        self.console.rule(f"[bold]{name}[/], {about}", align="left")
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.steps.setdefault(name, {"seconds": round(seconds, 1), "peak_rss_gib": round(peak_rss_gib(), 2)})
        self.time_left.finish(name)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        write_json(self.path, {"settings": self.settings, "bf16": self.bf16, "steps": self.steps})
