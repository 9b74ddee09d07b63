# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Makes one run of an experiment: builds, trains both stages, evaluates and measures."""

import hashlib
import json
import shutil
import time
import traceback
from collections.abc import Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import datetime, timezone
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from filelock import FileLock
from transformers import set_seed

from ..assembly.merge import merge_adapter
from ..checkpoint.files import check_new, read_json
from ..checkpoint.names import STATE, TRAINING_RECORD
from ..data.fetch import cache_dir
from ..evaluate.results import read_evaluations
from ..evaluate.run import evaluate
from ..quickstart.run import Settings, write_data
from ..quickstart.train import rows_of, train_stage, words
from ..train.options import parse
from .measure import measure_tokens, trained_change
from .plan import TUNING, Plan, Run
from .results import Result, options_of, write
from .variants import build_variant, callbacks_of, scaled_checkpoint


SCALED_TASK = "offline_easy_vqa"
BATCH_SIZE = 128


@dataclass(frozen=True)
class Parts:
    """What all runs have in common.

    Attributes:
        vision, language: Folder or Hub id of each part.
        work: Folder of checkpoints and data while they are needed.
        bf16: Whether they multiply in bfloat16.
    """

    vision: str
    language: str
    work: Path
    bf16: bool


def check_options(plan: Plan, runs: Iterable[Run]) -> None:
    """Raises ValueError if an option of a run has a value that it cannot have."""
    given = {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "output"}
    checked: list[dict[str, Any]] = []
    for run in runs:
        for options in plan.options(run.variant, 0):
            if options in checked:
                continue
            checked.append(options)
            said = StringIO()
            try:
                with redirect_stderr(said):
                    parse(words({**options, **given}))
            except (ValueError, SystemExit) as error:  # argparse says why, and exits
                reason = said.getvalue().strip().rpartition("error: ")[2] or error
                raise ValueError(f"{plan.name}, {run.group}.{run.name}: {reason}") from error


def make_run(plan: Plan, run: Run, parts: Parts) -> Result:
    """The result of a run, or that it diverged: that is a result too. Other errors leave its folder to be resumed."""
    try:
        return _make(plan, run, parts)
    except FloatingPointError as error:
        traceback.print_exc()
        shutil.rmtree(parts.work / run.key, ignore_errors=True)
        return {**_description(run), "failed": str(error)}


class Minutes:
    """Wall and processor time of a run, counted on from where a stopped process last kept it.

    Args:
        file: Where it is kept.
    """

    def __init__(self, file: Path):
        self._file = file
        self._before = read_json(file) or {"wall": 0.0, "processor": 0.0}
        self._began = {"wall": time.monotonic(), "processor": time.process_time()}

    def keep(self) -> dict[str, float]:
        """What was spent so far, by all processes."""
        now = {"wall": time.monotonic(), "processor": time.process_time()}
        spent = {name: self._before[name] + (now[name] - self._began[name]) / 60 for name in now}
        self._file.write_text(json.dumps(spent), encoding="utf-8")
        return spent


def _make(plan: Plan, run: Run, parts: Parts) -> Result:
    folder, variant, bf16 = parts.work / run.key, run.variant, parts.bf16
    first, second = options_of(plan, run)
    _own_folder(folder, {**_description(run), "options": [first, second], "parts": [parts.vision, parts.language]})
    minutes = Minutes(folder / "minutes.json")
    settings = Settings(
        stage1=first, stage2=second, emoji_count=plan.emoji_count, emoji_share=plan.emoji_share, seed=run.seed
    )
    rows = f"{rows_of(first)}-{rows_of(second)}-{plan.emoji_count}-{plan.emoji_share:g}"
    data = parts.work / f"data-{run.seed}-{rows}"
    with FileLock(f"{data}.lock"):
        write_data(data, settings, cache_dir())
    untrained, aligned, adapter, model = (folder / name for name in ("untrained", "stage1", "stage2", "model"))
    if not untrained.exists():
        set_seed(run.seed)  # of the projector's initial weights
        build_variant(parts.vision, parts.language, untrained, variant, plan.feature_layer)
    minutes.keep()
    train_stage(first, untrained, data / "stage1", aligned, bf16=bf16, callbacks=callbacks_of(variant))
    minutes.keep()
    result = {
        **_description(run),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "options": {"stage1": first, "stage2": second},
        "bf16": bf16,
        "threads": torch.get_num_threads(),
        "data": _hash(data),
        "curves": {"stage1": _curve(aligned)},
    }
    train_stage(second, aligned, data / "stage2", adapter, bf16=bf16, callbacks=callbacks_of(variant))
    minutes.keep()
    result["curves"]["stage2"] = _curve(adapter)
    if run.group != TUNING:
        if not model.exists():
            merge_adapter(adapter, model, base=str(aligned))
        result["scores"], result["references"] = _scores(model, plan.tasks, bf16)
        minutes.keep()
        result["tokens"] = {"untrained": measure_tokens(untrained, plan.diagnosed)["norm"]}
        result["tokens"]["trained"] = measure_tokens(model, plan.diagnosed)
        result["change"] = trained_change(untrained, model)
        if variant.scaled:
            result["scaled"] = [_scaled(model, factor, plan, bf16, folder) for factor in variant.scaled]
    record = read_json(adapter / TRAINING_RECORD)
    result |= {name: record[name] for name in ("hardware", "versions", "commit")}
    result["minutes"] = minutes.keep()
    shutil.rmtree(folder)
    return result


def _description(run: Run) -> dict[str, Any]:
    return {"group": run.group, "variant": run.name, "seed": run.seed, "settings": vars(run.variant)}


def _own_folder(folder: Path, made_of: dict[str, Any]) -> None:
    """A run's folder; what a run of other settings left in it is removed."""
    file = folder / "run.json"
    if (found := read_json(file)) != made_of:
        if found is not None:
            shutil.rmtree(folder)
        check_new(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write(file, made_of)


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


def _scores(model: Path, tasks: list[str], bf16: bool) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The metrics of all tasks, and what a blank image and the commonest answer give, by `"task metric"`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        done = evaluate(str(model), tasks=tasks, batch_size=BATCH_SIZE, dtype="float32")
    for task, reason in done.failed.items():
        raise ValueError(f"{task} could not be run: {reason} Start again to resume.")
    found = {f"{each.task} {metric.name}": metric for each in read_evaluations(model) for metric in each.metrics}
    scores = {name: metric.value for name, metric in found.items()}
    return scores, {name: metric.references for name, metric in found.items() if metric.references}


def _scaled(model: Path, factor: float, plan: Plan, bf16: bool, folder: Path) -> dict[str, float]:
    """A trained model with its visual tokens times a factor: their norm on entry, rotation and accuracy."""
    output = folder / f"scaled-{factor:g}"
    if not (output / "processor_config.json").exists():
        scaled_checkpoint(model, factor, output)
    scores, _ = _scores(output, [SCALED_TASK], bf16)
    found = {"factor": factor, "accuracy": scores[f"{SCALED_TASK} acc"], **measure_tokens(output, plan.diagnosed)}
    shutil.rmtree(output)
    return found
