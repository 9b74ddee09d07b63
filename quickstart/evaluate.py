# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's questions to its models: two tasks of the offline suite."""

from pathlib import Path
from typing import Any

import torch

from ..data.easy_vqa import KINDS, OVERALL
from ..evaluate.results import read_evaluations
from ..evaluate.run import evaluate


EMOJI = "emoji"
EASY_VQA, NAMES = "offline_easy_vqa", "offline_emoji"
METRICS = {kind: (EASY_VQA, f"acc_{kind.replace('/', '_')}") for kind in KINDS} | {
    OVERALL: (EASY_VQA, "acc"),
    EMOJI: (NAMES, "acc"),
}
"""Task and metric of each kind of question."""
BATCH_SIZE = 128


def ask(checkpoint: Path, *, limit: int | None = None, bf16: bool = False) -> dict[str, dict[str, float]]:
    """Asks a checkpoint the held-out questions, unless it was asked before, and keeps the results in its folder.

    Args:
        checkpoint: Folder of the model.
        limit: Ask the first so many questions about easy-VQA's images and about emoji.
        bf16: Whether to multiply in bfloat16.

    Returns:
        `"accuracy"`, `"blank"` (with a white image) and `"majority"` (of always giving the commonest answer), each by
        kind; and `"count"`, the number of questions.

    Raises:
        RuntimeError: A task could not be run.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        done = evaluate(str(checkpoint), tasks=(EASY_VQA, NAMES), limit=limit, batch_size=BATCH_SIZE, dtype="float32")
    for task, reason in done.failed.items():
        raise RuntimeError(f"{task} could not be run: {reason}")
    return read_scores(checkpoint)


def read_scores(checkpoint: Path) -> dict[str, Any]:
    """What [`ask`] returned for a checkpoint."""
    found = {(each.task, metric.name): metric for each in read_evaluations(checkpoint) for metric in each.metrics}
    metrics = {kind: found[key] for kind, key in METRICS.items()}
    return {
        "accuracy": {kind: metric.value for kind, metric in metrics.items()},
        "blank": {kind: metric.references["blank image"] for kind, metric in metrics.items()},
        "majority": {kind: metric.references["commonest answer"] for kind, metric in metrics.items()},
        "count": {kind: metric.samples for kind, metric in metrics.items()},
    }
