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
from plan import Plan, Run
from scores import paper_average

from normalign_llava.checkpoint.files import TRAINING_RECORD, json_or_none, write_json
from normalign_llava.diagnose.report import REPORT
from normalign_llava.diagnose.run import DIAGNOSTICS
from normalign_llava.evaluation.compare import read_scores
from normalign_llava.evaluation.results import read_evaluations
from normalign_llava.quickstart.results import read_report
from normalign_llava.quickstart.train import rows_of, words, write_stage_data


TIMES = "times.json"


class Step(NamedTuple):
    """A command of a run: the words after `normalign`, and whether what it writes is there."""

    words: list[str]
    done: bool


def own_data(plan: Plan, run: Run, work: Path) -> Path | None:
    """The folder of the quickstart's data for a run; None if its stages name data sets."""
    first, second = plan.options(run)
    if "dataset_name" in first:
        return None
    return work / f"data-{run.seed}-{rows_of(first)}-{rows_of(second)}"


def write_own_data(plan: Plan, run: Run, work: Path) -> None:
    """Writes the folder of [`own_data`], with the run's seed, unless it is there."""
    data = own_data(plan, run, work)
    if data is None:
        return
    first, second = plan.options(run)
    with FileLock(f"{data}.lock"):
        write_stage_data(data, rows_of(first), rows_of(second), run.seed)


def steps(
    plan: Plan, run: Run, vision: str, language: str, work: Path, gpus: int
) -> dict[str, Step]:
    """The commands of a run by name, in their order; they read the data of [`write_own_data`]."""
    names = ("untrained", "stage1", "stage2", "model")
    untrained, stage1, stage2, model = (work / run.key / name for name in names)
    first, second = plan.options(run)
    data = own_data(plan, run, work)
    if data is not None:
        first = {**first, "dataset_name": data / "stage1"}
        second = {**second, "dataset_name": data / "stage2"}
    parts = {"vision": vision, "language": language, "arm": run.variant.arm, "seed": run.seed}
    parts |= {"feature-layer": plan.feature_layer, "output": untrained}
    commands = {"build": Step(["build", *words(parts)], untrained.exists())}
    for name, options, start, output in (
        ("stage1", first, untrained, stage1),
        ("stage2", second, stage1, stage2),
    ):
        options = {**options, "model_name_or_path": start, "output_dir": output}
        options["resume_from_checkpoint"] = "last"
        if plan.bf16 is not None:
            options["bf16"] = plan.bf16
        if gpus > 1:
            options["accelerate_config"] = plan.accelerate.get(name, "ddp")
            options["num_processes"] = gpus
        commands[name] = Step(["train", *words(options)], (output / TRAINING_RECORD).exists())
    if second.get("use_peft"):
        merged = ["merge", str(stage2), *words({"output": model, "base": stage1})]
        commands["merge"] = Step(merged, model.exists())
    else:
        model = stage2
    tasks = {result.task for result in read_evaluations(model)}
    asked = ["evaluate", str(model), *words({"tasks": ",".join(plan.tasks), **plan.evaluate})]
    commands["evaluate"] = Step(asked, set(plan.tasks) <= tasks)
    diagnosed = words({"samples": plan.diagnosed, **plan.diagnose})
    for name, checkpoint in (("diagnose stage 1", stage1), ("diagnose", model)):
        measured = ["diagnose", str(checkpoint), *diagnosed]
        commands[name] = Step(measured, (checkpoint / DIAGNOSTICS / REPORT).exists())
    return commands


def run_commands(
    plan: Plan, run: Run, vision: str, language: str, work: Path, gpus: int
) -> dict[str, Any]:
    """Runs the commands that are not done, and returns the result of the run.

    Raises:
        ValueError: A command failed; those before it stay done.
    """
    write_own_data(plan, run, work)
    folder = work / run.key
    commands = steps(plan, run, vision, language, work, gpus)
    times = json_or_none(folder / TIMES) or {}
    for name, step in commands.items():
        if not step.done:
            started = time.monotonic()
            before = _cpu_seconds()
            command = [sys.executable, "-m", "normalign_llava", *step.words]
            if status := subprocess.run(command).returncode:
                said = f"normalign {shlex.join(step.words)}"
                raise ValueError(f"it ended with status {status}: {said}")
            seconds = time.monotonic() - started
            cpu = _cpu_seconds() - before
            times[name] = {"seconds": round(seconds, 1), "cpu": round(cpu, 1)}
            write_json(folder / TIMES, times)
    for checkpoint in folder.glob("stage[12]/checkpoint-*"):  # what resuming needed
        shutil.rmtree(checkpoint)
    stage1 = folder / "stage1"
    model = folder / ("model" if "merge" in commands else "stage2")
    records = {name: json_or_none(folder / name / TRAINING_RECORD) for name in ("stage1", "stage2")}
    training = {
        name: {key: record[key] for key in ("seconds", "processes")}
        for name, record in records.items()
    }
    arm = read_scores(str(model))
    evaluations = read_evaluations(model)
    report1, report2 = (read_report(checkpoint)["report"] for checkpoint in (stage1, model))
    options = dict(zip(("stage1", "stage2"), plan.options(run), strict=True))
    return {
        **{"group": run.group, "variant": run.name, "seed": run.seed},
        **{"settings": vars(run.variant), "options": options, "bf16": plan.bf16},
        "date": datetime.now(UTC).date().isoformat(),
        "scores": {
            f"{evaluation.task} {metric.name}": metric.value
            for evaluation in evaluations
            for metric in evaluation.metrics
        },
        "columns": paper_average(evaluations),
        "answers": {name: _stored(scores) for name, scores in arm.runs[0].items()},
        "diagnosis": {"stage1": _diagnosis(report1), "stage2": _diagnosis(report2)},
        "dynamics": report1["dynamics"],
        **{name: records["stage2"][name] for name in ("hardware", "versions", "commit")},
        "training": training,
        "times": times,
        "minutes": round(sum(step["seconds"] for step in times.values()) / 60, 1),
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _stored(scores: dict[tuple[str, int, str], float]) -> dict[str, Any]:
    """The score of each question in their order, and a hash of what was asked."""
    asked = hashlib.sha256(json.dumps(sorted(scores)).encode()).hexdigest()
    return {"asked": asked, "scores": [round(scores[key], 6) for key in sorted(scores)]}


def _diagnosis(report: dict[str, Any]) -> dict[str, Any]:
    """Of a report: norm and rotation of visual tokens over text's, all rotations, and the gain."""
    depth = report["depth"]
    gain = report["gain"]
    return {
        "entry": report["interface"]["ratio"],
        "rotation": depth["asymmetry"],
        "rotations": {kind: depth["rotation"][kind]["mean"] for kind in ("visual", "text")},
        "gain": gain and {"mean_abs": gain["mean_abs"], "start": gain["start"]},
    }
