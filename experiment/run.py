# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Makes the runs of an experiment, and keeps one small JSON of each.

Runs that are finished are skipped, and one that was stopped is resumed. Several processes may work on one experiment:
each takes runs that no other holds.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from ..checkpoint.files import finished_file, read_json
from ..diagnose.critical import updates_of
from ..quickstart.convert import convert_language, convert_vision
from ..quickstart.train import bfloat16_pays
from .make import Parts, make_run
from .plan import Plan
from .tuning import learning_rates


START = "start.json"
"""What is found before the first run: whether all of them multiply in bfloat16, and the predicted critical norms."""

WAIT = 10  # seconds between looks for a run that can be made


def run_experiment(plan: Plan, work: Path, *, quick: bool = False, console: Console | None = None) -> list[str]:
    """Makes all runs that are not finished.

    Args:
        plan: The plan.
        work: Folder of checkpoints and data while they are needed; some gigabytes.
        quick: The reduced grid alone.
        console: Where progress is told.

    Returns:
        The keys of runs that failed, now or before.
    """
    console = console or Console()
    language = plan.language or str(convert_language())
    vision = plan.vision or str(convert_vision(plan.image_size))
    plan.results.mkdir(parents=True, exist_ok=True)
    if not (start := plan.results / START).exists():
        updates = updates_of(language)
        write(start, {"bf16": bfloat16_pays(), "n_text": updates.n_text, **updates.to_dict()})
    parts = Parts(vision, language, work, bf16=read_json(start)["bf16"])
    runs, began, made = plan.runs(quick), time.monotonic(), 0
    while waiting := [run for run in runs if not plan.result_file(run).exists()]:
        taken = False
        for run in waiting:
            rates = learning_rates(plan, run)
            with held(work / f"{run.key}.lock") as mine:
                if rates is None or not mine or plan.result_file(run).exists():
                    continue
                taken = True
                left = (
                    "" if not made else f", about {(time.monotonic() - began) / made * len(waiting) / 60:.0f} minutes"
                )
                console.rule(f"[bold]{run.key}[/], {len(waiting)} of {len(runs)} left{left}", align="left")
                write(plan.result_file(run), make_run(plan, run, rates, parts))
                made += 1
                break
        if not taken:  # others work on what is left, or on what it waits for
            time.sleep(WAIT)
    return [run.key for run in runs if "failed" in read_json(plan.result_file(run))]


def write(file: Path, content: dict[str, Any]) -> None:
    """Writes JSON, atomically, with one line for each key."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    with finished_file(file) as partial:
        partial.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


@contextmanager
def held(file: Path) -> Iterator[bool]:
    """Holds a lock; yields whether no other process has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
