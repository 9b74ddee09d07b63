# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The journal of a quickstart run, so that a stopped run resumes as it began."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .display import peak_rss_gib
from .evaluate import write_json
from .train import bfloat16_pays


class Journal:
    """Settings and finished steps of a run, kept in its folder's `journal.json`.

    Attributes:
        bf16: Whether this run multiplies in bfloat16; decided once, so that a resumed run does the same.
        steps: Seconds and peak memory of each finished step, without the seconds before an interruption.

    Raises:
        ValueError: The folder holds a run with other settings.
    """

    def __init__(self, output: Path, settings: Any):
        self.path = output / "journal.json"
        wanted = json.loads(json.dumps(asdict(settings)))  # as it will be read back
        if self.path.exists():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            changed = sorted(key for key, value in wanted.items() if content["settings"].get(key) != value)
            if changed:
                remedy = "name another output folder, or remove this one"
                raise ValueError(f"{output} holds a run with other settings ({', '.join(changed)}): {remedy}")
            self.bf16, self.steps = content["bf16"], content["steps"]
        else:
            self.bf16, self.steps = bfloat16_pays(), {}
        self.settings = wanted
        self.write()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Times a step. One that an earlier run has finished keeps its time."""
        start = time.perf_counter()
        yield
        self.steps.setdefault(
            name, {"seconds": round(time.perf_counter() - start, 1), "peak_rss_gib": round(peak_rss_gib(), 2)}
        )
        self.write()

    def write(self) -> None:
        """Writes the file."""
        write_json(self.path, {"settings": self.settings, "bf16": self.bf16, "steps": self.steps})
