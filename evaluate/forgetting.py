# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What training made a model forget: the offline suite's two texts, before and after."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.names import TRAINING_RECORD
from ..checkpoint.provenance import read_beside
from .results import Evaluation, read_evaluations


TEXTS = ("offline_perplexity", "offline_definitions")
BEFORE = "before training"
"""Name of the reference among results: what the checkpoint that was trained had."""

RISE = 0.1
"""Share by which bits per byte rise at least where text is called forgotten."""


def with_before(result: Evaluation, checkpoint: Path) -> Evaluation:
    """The result of one of `TEXTS`, with that before training as a reference of its metrics, if it is known.

    `training.json` names the checkpoints that the stages started from, without the folders above them. Those beside
    `checkpoint` are looked at, the first stage's first: whether they were evaluated on the same text, and whether
    their own `training.json` is the one recorded.
    """
    stages: list[tuple[str, Any]] = []
    record = read_beside(str(checkpoint), TRAINING_RECORD)
    while record:
        stages.insert(0, (str((record.get("options") or {}).get("model_name_or_path")), record.get("before")))
        record = record.get("before")
    for name, recorded in stages:
        folder = checkpoint.resolve().parent / Path(name).name
        if folder == checkpoint.resolve() or read_beside(str(folder), TRAINING_RECORD) != recorded:
            continue
        for each in _evaluations(folder):
            if (each.task, each.samples) == (result.task, result.samples):
                values = {metric.name: metric.value for metric in each.metrics}
                metrics = [
                    replace(metric, references={**metric.references, BEFORE: values[metric.name]})
                    for metric in result.metrics
                    if metric.name in values
                ]
                return replace(result, metrics=metrics)
    return result


def forgotten(evaluations: Iterable[Evaluation]) -> str | None:
    """A sentence if bits per byte rose by more than `RISE` in training; None if not, or if that is not known."""
    for metric in (metric for each in evaluations if each.task == TEXTS[0] for metric in each.metrics):
        before = metric.references.get(BEFORE)
        if metric.name == "bits_per_byte" and before and metric.value > (1 + RISE) * before:
            return (
                f"It forgot text in training: bits per byte of a speech rose from {before:.2f} to {metric.value:.2f}, "
                f"by {metric.value / before - 1:.0%}."
            )
    return None


def unknown_before(evaluations: Iterable[Evaluation], checkpoint: Path) -> str | None:
    """How to find out what was forgotten, if texts were evaluated after training and not before it."""
    record = read_beside(str(checkpoint), TRAINING_RECORD)
    asked = [each for each in evaluations if each.task == TEXTS[0]]
    if not record or not asked or any(BEFORE in metric.references for metric in asked[0].metrics):
        return None
    while record.get("before"):
        record = record["before"]
    name = (record.get("options") or {}).get("model_name_or_path")
    return (
        f"Whether it forgot text in training is not known. Evaluate {name}, from which it was trained, on {TEXTS[0]}, "
        f"with its folder beside {checkpoint.resolve().name}; then run this again."
    )


def _evaluations(folder: Path) -> list[Evaluation]:
    with suppress(ValueError):
        return read_evaluations(folder)
    return []
