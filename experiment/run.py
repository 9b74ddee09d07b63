# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Makes the runs of an experiment, and keeps one small JSON of each.

Runs that are finished are skipped, and one that was stopped is resumed. Several processes may work on one experiment:
each takes runs that no other holds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from ..checkpoint.files import read_json
from ..diagnose.critical import updates_of
from ..quickstart.convert import convert_language, convert_vision
from ..quickstart.train import bfloat16_pays
from .make import Parts, check_options, make_run
from .plan import Plan
from .results import read_result, waits, write


START = "start.json"
"""What is found before the first run: whether all of them multiply in bfloat16, and the predicted critical norms."""

LOCKS = ".locks"
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

    Raises:
        ValueError: An option has a value that it cannot have, or a stored result is of other settings.
    """
    console = console or Console()
    language = plan.language or str(convert_language())
    vision = plan.vision or str(convert_vision(plan.image_size))
    locks, runs = plan.results / LOCKS, plan.runs(quick)
    locks.mkdir(parents=True, exist_ok=True)
    check_options(plan, runs)
    for run in runs:
        read_result(plan, run)
    start = plan.results / START
    with FileLock(locks / f"{START}.lock"):
        if not start.exists():
            updates = updates_of(language)
            write(start, {"bf16": bfloat16_pays(), "n_text": updates.n_text, **updates.to_dict()})
    parts = Parts(vision, language, work, bf16=read_json(start)["bf16"])
    began, made = time.monotonic(), 0
    while waiting := [run for run in runs if not plan.result_file(run).exists()]:
        taken = False
        for run in waiting:
            with held(locks / f"{run.key}.lock") as mine:
                if not mine or plan.result_file(run).exists() or waits(plan, run):
                    continue
                taken = True
                pace = (time.monotonic() - began) / 60 / made if made else None
                left = f", about {pace * len(waiting):.0f} minutes" if pace else ""
                console.rule(f"[bold]{run.key}[/], {len(waiting)} of {len(runs)} left{left}", align="left")
                write(plan.result_file(run), make_run(plan, run, parts))
                made += 1
                break
        if not taken:  # others work on what is left, or on what it waits for
            time.sleep(WAIT)
    return [run.key for run in runs if "failed" in (read_result(plan, run) or {})]


@contextmanager
def held(file: Path) -> Iterator[bool]:
    """Holds a lock; yields whether no other process has it."""
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
