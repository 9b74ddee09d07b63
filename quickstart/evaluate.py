# SPDX-License-Identifier: Apache-2.0
"""What the quickstart asks its models, two tasks of the offline suite, and what it measures of them."""

import json
from pathlib import Path
from typing import Any

import torch

from ..diagnose.report import PAGE, REPORT
from ..diagnose.run import FOLDER, diagnose
from ..evaluate.results import read_evaluations
from ..evaluate.run import evaluate
from ..fetched.easy_vqa import KINDS, OVERALL


EMOJI = "emoji"
EASY_VQA, NAMES = "offline_easy_vqa", "offline_emoji"
METRICS = {kind: (EASY_VQA, f"acc_{kind.replace('/', '_')}") for kind in KINDS} | {
    OVERALL: (EASY_VQA, "acc"),
    EMOJI: (NAMES, "acc"),
}
"""Task and metric of each kind of question."""
BATCH_SIZE = 128

OURS, BASELINE = "quickstart", "quickstart-no-norm"
"""Names of the models in the reports."""


def ask_held_out(checkpoint: Path, *, limit: int | None = None, bf16: bool = False) -> dict[str, Any]:
    """Asks a checkpoint the held-out questions, unless it was asked before, and keeps the results in its folder.
    With `limit`, it is asked the first so many questions about easy-VQA's images and about emoji.

    Returns:
        `"accuracy"`, `"blank"` (with a white image) and `"majority"` (of always giving the commonest answer), each by
        kind; and `"count"`, the number of questions.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        tasks = (EASY_VQA, NAMES)
        evaluated = evaluate(str(checkpoint), tasks=tasks, limit=limit, batch_size=BATCH_SIZE, dtype="float32")
    for task, reason in evaluated.failed.items():
        raise RuntimeError(f"{task} could not be run: {reason}")
    results = read_evaluations(checkpoint)
    by_name = {(result.task, metric.name): metric for result in results for metric in result.metrics}
    metrics = {kind: by_name[key] for kind, key in METRICS.items()}
    return {
        "accuracy": {kind: metric.value for kind, metric in metrics.items()},
        "blank": {kind: metric.references["blank image"] for kind, metric in metrics.items()},
        "majority": {kind: metric.references["commonest answer"] for kind, metric in metrics.items()},
        "count": {kind: metric.samples for kind, metric in metrics.items()},
    }


def diagnose_once(checkpoint: Path, name: str, baseline: Path | None, baseline_name: str, samples: int) -> Path:
    """Diagnoses a checkpoint, against a baseline if one is given, unless that is done already; returns the page."""
    folder = checkpoint / FOLDER
    if not (folder / REPORT).exists() or (baseline is not None and read_report(checkpoint)["against"] is None):
        against = None if baseline is None else str(baseline)
        diagnose(str(checkpoint), against=against, samples=samples, name=name, against_name=baseline_name)
    return folder / PAGE


def read_report(checkpoint: Path) -> dict[str, Any]:
    """The report of a checkpoint's diagnosis."""
    return json.loads((checkpoint / FOLDER / REPORT).read_text(encoding="utf-8"))
