# SPDX-License-Identifier: Apache-2.0
"""A run that is made by the commands of the package, each a process of its own, and its result."""

import hashlib
import json
import resource
import shlex
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from files import TRAINING_RECORD, read_json, write_text
from plan import STAGES, Plan, Run, row_count
from scores import paper_average

from normalign_llava import (
    Evaluation,
    option_words,
    read_evaluations,
    read_scores,
    write_stage_data,
)


TIMES = "times.json"
REPORT = "diagnostics/report.json"


class Step(NamedTuple):
    """A command of a run: the words after `normalign`, and whether what it writes is there."""

    words: list[str]
    done: bool


def own_data(plan: Plan, run: Run, work: Path) -> Path | None:
    """Returns the folder of the quickstart's data for a run. None if its stages name data sets."""
    align_options, tune_options = plan.options(run)
    if "dataset_name" in align_options:
        return None
    return work / f"data-{run.seed}-{row_count(align_options)}-{row_count(tune_options)}"


def write_own_data(plan: Plan, run: Run, work: Path) -> None:
    """Writes the folder of [`own_data`], with the run's seed, unless it is there."""
    data = own_data(plan, run, work)
    if data is None:
        return
    align_options, tune_options = plan.options(run)
    with FileLock(f"{data}.lock"):
        write_stage_data(data, row_count(align_options), row_count(tune_options), run.seed)


def steps(
    plan: Plan, run: Run, vision: str, language: str, work: Path, gpus: int
) -> dict[str, Step]:
    """Returns the commands of a run by name, in their order.

    They read the data of [`write_own_data`].

    Args:
        plan: The plan.
        run: The run.
        vision: Folder or Hub id of the vision encoder.
        language: Folder or Hub id of the language model.
        work: The folder of checkpoints and data.
        gpus: The number of GPUs.
    """
    folder = work / run.key
    untrained = folder / "untrained"
    stage1 = folder / "stage1"
    stage2 = folder / "stage2"
    build_options = {
        "vision": vision,
        "language": language,
        "arm": run.variant.arm,
        "seed": run.seed,
        "feature-layer": plan.feature_layer,
        "output": untrained,
    }
    commands = {"build": Step(["build", *option_words(build_options)], untrained.exists())}
    start = untrained
    for stage, stage_options in zip(STAGES, plan.options(run), strict=True):
        output = folder / stage
        train_options = dict(stage_options)
        data = own_data(plan, run, work)
        if data is not None:
            train_options["dataset_name"] = data / stage
        train_options["model_name_or_path"] = start
        train_options["output_dir"] = output
        train_options |= _options_here(plan, stage, gpus)
        is_trained = (output / TRAINING_RECORD).exists()
        commands[stage] = Step(["train", *option_words(train_options)], is_trained)
        start = output
    model = stage2
    if stage_options.get("use_peft"):
        model = folder / "model"
        merge_options = option_words({"output": model, "base": stage1})
        commands["merge"] = Step(["merge", str(stage2), *merge_options], model.exists())
    evaluate_options = option_words({"tasks": ",".join(plan.tasks), **plan.evaluate})
    evaluated_tasks = {evaluation.task for evaluation in read_evaluations(model)}
    commands["evaluate"] = Step(
        ["evaluate", str(model), *evaluate_options], evaluated_tasks.issuperset(plan.tasks)
    )
    diagnose_options = option_words({"samples": plan.diagnosed, **plan.diagnose})
    for name, checkpoint in (("diagnose stage 1", stage1), ("diagnose", model)):
        command_words = ["diagnose", str(checkpoint), *diagnose_options]
        commands[name] = Step(command_words, (checkpoint / REPORT).exists())
    return commands


def _options_here(plan: Plan, stage: str, gpus: int) -> dict[str, Any]:
    """Returns the options of `normalign train` that depend on the machine, and not on the run."""
    options: dict[str, Any] = {"resume_from_checkpoint": "last"}
    if plan.bf16 is not None:
        options["bf16"] = plan.bf16
    if gpus > 1:
        options["accelerate_config"] = plan.accelerate.get(stage, "ddp")
        options["num_processes"] = gpus
    return options


def run_commands(
    plan: Plan, run: Run, vision: str, language: str, work: Path, gpus: int
) -> dict[str, Any]:
    """Runs the commands that are not done, and returns the result of the run.

    Args:
        plan: The plan.
        run: The run.
        vision: Folder or Hub id of the vision encoder.
        language: Folder or Hub id of the language model.
        work: The folder of checkpoints and data.
        gpus: The number of GPUs.

    Raises:
        ValueError: A command failed. Those before it stay done.
    """
    write_own_data(plan, run, work)
    folder = work / run.key
    commands = steps(plan, run, vision, language, work, gpus)
    times = read_json(folder / TIMES) or {}
    for name, step in commands.items():
        if not step.done:
            times[name] = _run_step(step)
            write_text(folder / TIMES, json.dumps(times, indent=2) + "\n")
    for checkpoint in folder.glob("stage[12]/checkpoint-*"):  # what resuming needed
        shutil.rmtree(checkpoint)
    last_folder = "model" if "merge" in commands else "stage2"
    result = {
        "group": run.group,
        "variant": run.name,
        "seed": run.seed,
        "settings": vars(run.variant),
        "options": dict(zip(STAGES, plan.options(run), strict=True)),
        "bf16": plan.bf16,
        "date": datetime.now(UTC).date().isoformat(),
    }
    result |= _read_measurements(folder, folder / last_folder)
    result["times"] = times
    seconds = sum(step_times["seconds"] for step_times in times.values())
    result["minutes"] = round(seconds / 60, 1)
    return result


def _run_step(step: Step) -> dict[str, float]:
    """Runs a command, and returns its seconds and its CPU seconds.

    Raises ValueError if it fails.
    """
    start_time = time.monotonic()
    cpu_before = _cpu_seconds()
    status = subprocess.run([sys.executable, "-m", "normalign_llava", *step.words]).returncode
    if status:
        command_line = shlex.join(["normalign", *step.words])
        raise ValueError(f"it ended with status {status}: {command_line}")
    seconds = time.monotonic() - start_time
    cpu_seconds = _cpu_seconds() - cpu_before
    return {"seconds": round(seconds, 1), "cpu": round(cpu_seconds, 1)}


def _read_measurements(folder: Path, model: Path) -> dict[str, Any]:
    """Reads what the commands of a run left in its folder.

    Args:
        folder: The folder of the run.
        model: The folder of the trained model.
    """
    evaluations = read_evaluations(model)
    answers = {}
    for benchmark, scores in read_scores(str(model)).runs[0].items():
        answers[benchmark] = _stored(scores)
    align_report = read_json(folder / "stage1" / REPORT)["report"]
    tune_report = read_json(model / REPORT)["report"]
    training = {}
    for stage in STAGES:
        record = read_json(folder / stage / TRAINING_RECORD)
        training[stage] = {"seconds": record["seconds"], "processes": record["processes"]}
    return {
        "scores": scores_by_metric(evaluations),
        "columns": paper_average(evaluations),
        "answers": answers,
        "diagnosis": {"stage1": _diagnosis(align_report), "stage2": _diagnosis(tune_report)},
        "dynamics": align_report["dynamics"],
        "hardware": record["hardware"],
        "versions": record["versions"],
        "commit": record["commit"],
        "training": training,
    }


def scores_by_metric(evaluations: list[Evaluation]) -> dict[str, float]:
    """Returns the metrics of all tasks, by `"task metric"`."""
    scores = {}
    for evaluation in evaluations:
        for metric in evaluation.metrics:
            scores[f"{evaluation.task} {metric.name}"] = metric.value
    return scores


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _stored(scores: dict[tuple[str, int, str], float]) -> dict[str, Any]:
    """Returns the score of each question in their order, and a hash of what was asked."""
    question_keys = sorted(scores)
    digest = hashlib.sha256(json.dumps(question_keys).encode()).hexdigest()
    return {"asked": digest, "scores": [round(scores[key], 6) for key in question_keys]}


def _diagnosis(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what is kept of a report.

    It is norm and rotation of visual tokens over text's, the rotations of all layers, and the gain.
    """
    depth = report["depth"]
    rotations = {kind: depth["rotation"][kind]["mean"] for kind in ("visual", "text")}
    gain = None
    if report["gain"]:
        gain = {"mean_abs": report["gain"]["mean_abs"], "start": report["gain"]["start"]}
    return {
        "entry": report["interface"]["ratio"],
        "rotation": depth["asymmetry"],
        "rotations": rotations,
        "gain": gain,
    }
