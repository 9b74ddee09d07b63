# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Makes the runs of an experiment: build, train both stages, evaluate, measure, and keep one small JSON of each.

Runs that are finished are skipped, and one that was stopped is resumed. Several processes may work on one experiment:
each takes runs that no other holds.
"""

import hashlib
import json
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from filelock import FileLock, Timeout
from rich.console import Console
from transformers import set_seed

from ..assembly.merge import merge_adapter
from ..checkpoint.files import finished_file, read_json
from ..checkpoint.names import STATE, TRAINING_RECORD
from ..data.fetch import cache_dir
from ..diagnose.critical import updates_of
from ..evaluate.results import read_evaluations
from ..evaluate.run import evaluate
from ..quickstart.convert import convert_language, convert_vision
from ..quickstart.run import Settings, write_data
from ..quickstart.train import bfloat16_pays, rows_of, train_stage
from .measure import measure_tokens, trained_change
from .plan import TUNING, Plan, Run
from .variants import build_variant, callbacks_of, scaled_checkpoint


START = "start.json"
"""What is found before the first run: whether all of them multiply in bfloat16, and the predicted critical norms."""


SCALED_TASK = "offline_easy_vqa"
BATCH_SIZE = 128
Rates = tuple[dict[str, Any], dict[str, Any]]
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
    bf16 = read_json(start)["bf16"]
    runs, began, made = plan.runs(quick), time.monotonic(), 0
    while waiting := [run for run in runs if not result_file(plan, run).exists()]:
        taken = False
        for run in waiting:
            rates = learning_rates(plan, run)
            with held(work / f"{run.key}.lock") as mine:
                if rates is None or not mine or result_file(plan, run).exists():
                    continue
                taken = True
                left = (
                    "" if not made else f", about {(time.monotonic() - began) / made * len(waiting) / 60:.0f} minutes"
                )
                console.rule(f"[bold]{run.key}[/], {len(waiting)} of {len(runs)} left{left}", align="left")
                write(result_file(plan, run), _guarded(plan, run, rates, language, vision, work, bf16))
                made += 1
                break
        if not taken:  # others work on what is left, or on what it waits for
            time.sleep(WAIT)
    return [run.key for run in runs if "failed" in read_json(result_file(plan, run))]


def result_file(plan: Plan, run: Run) -> Path:
    """Where the result of a run is kept."""
    return plan.results / f"{run.key}.json"


def learning_rates(plan: Plan, run: Run) -> Rates | None:
    """The learning rates that tuning found for a run's arm and both stages; none if it is not tuned.

    Returns:
        Options of both stages; None if tuning is not finished.

    Raises:
        ValueError: All tries failed.
    """
    if not run.tuned or plan.tuning is None:
        return {}, {}
    found: list[dict[str, Any]] = []
    for name in ("stage1", "stage2"):
        if run.group == TUNING and name == "stage2":
            return found[0], {}
        losses = {}
        for each in plan.runs():
            if each.group == TUNING and each.variant.arm == run.variant.arm and f"-{name}-" in each.key:
                result = read_json(result_file(plan, each))
                if result is None:
                    return None
                if "failed" not in result:
                    losses[getattr(each.variant, name)["learning_rate"]] = final_loss(result["curves"][name])
        if not losses:
            raise ValueError(
                f"All tries of {name} with arm {run.variant.arm} failed: remove their results, and run again."
            )
        found.append({"learning_rate": min(losses, key=lambda rate: losses[rate])})
    return found[0], found[1]


def final_loss(curve: dict[str, list]) -> float:
    """Mean loss of the last quarter of the logged steps, of rows that were not trained on before."""
    losses = curve["loss"]
    last = losses[-max(len(losses) // 4, 1) :]
    return sum(last) / len(last)


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


def _guarded(plan: Plan, run: Run, rates: Rates, language: str, vision: str, work: Path, bf16: bool) -> dict[str, Any]:
    """The result of a run, or why it failed: that is a result too."""
    try:
        return _make(plan, run, rates, language, vision, work, bf16)
    except (FloatingPointError, ValueError, RuntimeError, SystemExit) as error:  # the last from an option's value
        traceback.print_exc()
        return {**_description(run), "failed": f"{type(error).__name__}: {error}"}


def _make(plan: Plan, run: Run, rates: Rates, language: str, vision: str, work: Path, bf16: bool) -> dict[str, Any]:
    folder, began, spent = work / run.key, time.monotonic(), time.process_time()
    variant = run.variant
    stage1, stage2 = (
        {**rate, **options} for rate, options in zip(rates, (variant.stage1, variant.stage2), strict=True)
    )
    first, second = plan.options(type(variant)(**{**vars(variant), "stage1": stage1, "stage2": stage2}), run.seed)
    settings = Settings(
        stage1=first, stage2=second, emoji_count=plan.emoji_count, emoji_share=plan.emoji_share, seed=run.seed
    )
    data = work / f"data-{run.seed}-{rows_of(first)}-{rows_of(second)}"
    with FileLock(data.with_suffix(".lock")):
        write_data(data, settings, cache_dir())
    untrained, aligned, adapter, model = (folder / name for name in ("untrained", "stage1", "stage2", "model"))
    if not untrained.exists():
        set_seed(run.seed)  # of the projector's initial weights
        build_variant(vision, language, untrained, variant, plan.feature_layer)
    train_stage(first, untrained, data / "stage1", aligned, bf16=bf16, callbacks=callbacks_of(variant))
    result = {
        **_description(run),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "options": {"stage1": first, "stage2": second},
        "bf16": bf16,
        "threads": torch.get_num_threads(),
        "data": _hash(data),
        "curves": {"stage1": _curve(aligned)},
    }
    trained = aligned
    if not run.stage1_only:
        train_stage(second, aligned, data / "stage2", adapter, bf16=bf16, callbacks=callbacks_of(variant))
        result["curves"]["stage2"] = _curve(adapter)
        trained = adapter
    if run.group != TUNING:
        if not model.exists():
            merge_adapter(adapter, model, base=str(aligned))
        result["scores"] = _scores(model, plan.tasks, bf16)
        result["tokens"] = {"untrained": measure_tokens(untrained, plan.diagnosed)["norm"]}
        result["tokens"]["trained"] = measure_tokens(model, plan.diagnosed)
        result["change"] = trained_change(untrained, model)
        if variant.scaled:
            result["scaled"] = [_scaled(model, factor, plan, bf16, folder) for factor in variant.scaled]
    record = read_json(trained / TRAINING_RECORD)
    result |= {name: record[name] for name in ("hardware", "versions", "commit")}
    result["minutes"] = {
        "wall": (time.monotonic() - began) / 60,
        "processor": (time.process_time() - spent) / 60,
    }
    shutil.rmtree(folder)
    return result


def _description(run: Run) -> dict[str, Any]:
    return {"group": run.group, "variant": run.name, "seed": run.seed, "settings": vars(run.variant)}


def _hash(data: Path) -> str:
    """SHA-256 over messages and images of both stages."""
    digest = hashlib.sha256()
    for name in ("stage1", "stage2"):
        table = load_from_disk(str(data / name)).with_format("arrow")[:]
        digest.update(json.dumps(table["messages"].to_pylist(), sort_keys=True).encode())
        for images in table["images"].to_pylist():
            for image in images:
                digest.update(image["bytes"])
    return digest.hexdigest()


def _curve(folder: Path) -> dict[str, list]:
    """What training logged, by quantity: one value for each logged step, None where there was none."""
    log = [each for each in read_json(folder / STATE)["log_history"] if "loss" in each]
    names = ("step", "loss", "learning_rate", "grad_norm", "clip/share", "norm/visual", "norm/text", "gain/mean_abs")
    shown = [
        name for each in log for name in each if name in names or name.startswith(("grad_norm/", "update_ratio/"))
    ]
    return {name: [_rounded(each.get(name)) for each in log] for name in dict.fromkeys(shown)}


def _rounded(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.5g}")


def _scores(model: Path, tasks: list[str], bf16: bool) -> dict[str, float]:
    """The metrics of all tasks, by `"task metric"`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        done = evaluate(str(model), tasks=tasks, batch_size=BATCH_SIZE, dtype="float32")
    for task, reason in done.failed.items():
        raise RuntimeError(f"{task} could not be run: {reason}")
    found = read_evaluations(model)
    return {f"{each.task} {metric.name}": metric.value for each in found for metric in each.metrics}


def _scaled(model: Path, factor: float, plan: Plan, bf16: bool, folder: Path) -> dict[str, float]:
    """A trained model with its visual tokens times a factor: their norm on entry, rotation and accuracy."""
    output = folder / f"scaled-{factor:g}"
    if not (output / "processor_config.json").exists():
        scaled_checkpoint(model, factor, output)
    accuracy = _scores(output, [SCALED_TASK], bf16)[f"{SCALED_TASK} acc"]
    found = {"factor": factor, "accuracy": accuracy, **measure_tokens(output, plan.diagnosed)}
    shutil.rmtree(output)
    return found
