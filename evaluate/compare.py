# SPDX-License-Identifier: Apache-2.0
"""`normalign compare`: which model is better, by how much, and whether that is noise.

Models are compared over the same questions, so that what makes a question hard for all of them cancels. Two kinds of
noise are kept apart: other questions (a bootstrap over questions), and other training runs (a t interval over seeds).
"""

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table
from scipy import stats

from ..checkpoint.precision import quantization_name
from ..checkpoint.untrusted import json_object
from ..errors import Printed
from .results import FOLDER, read_evaluations
from .tasks.benchmarks import by_category, whole_questions


CONFIDENCE = 0.95
Interval = tuple[float, float]
Scores = dict[tuple[str, int, str], float]
"""The score of each question, by task, number, and a hash of the true answer with the task's version."""


@dataclass(frozen=True)
class Arm:
    """One model, or the same model trained with several seeds, each a run."""

    name: str
    runs: list[dict[str, Scores]]  # by task and metric, and how the model was quantized, if it was
    folders: Sequence[Path] = ()


@dataclass(frozen=True)
class Difference:
    """An arm against the first one on a task, over the questions that all models were asked."""

    task: str
    arm: str
    against: str
    questions: int
    score: float  # a mean over questions and runs, as is the reference
    reference: float
    over_questions: Interval  # of the difference, if other questions of the kind were asked
    over_seeds: Interval | None  # of the difference over training runs
    mcnemar: float | None  # p-value; None with several runs, or if scores are not right or wrong

    @property
    def value(self) -> float:
        """The difference of the scores."""
        return self.score - self.reference


@dataclass(frozen=True)
class Comparison(Printed):
    """Arms, and the differences of all but the first from it."""

    arms: Sequence[Arm]
    differences: list[Difference]

    def renderable(self) -> Table:
        against = self.arms[0].name
        columns = ("task", "model", "n", "score", against, "difference", "over questions", "over seeds", "p")
        caption = f"Differences from {against}, 95 % intervals, over the n questions that all models were asked."
        table = Table(*columns, box=SIMPLE, padding=0, show_edge=False, caption=caption)
        for column in table.columns[2:]:
            column.justify = "right"
        for row in self.differences:
            scores = (f"{row.questions:,}", f"{row.score:.3f}", f"{row.reference:.3f}", f"{row.value:+.3f}")
            ends = [f"{i[0]:+.3f} {i[1]:+.3f}" if i else "-" for i in (row.over_questions, row.over_seeds)]
            p = "-" if row.mcnemar is None else f"{row.mcnemar:.3f}"
            table.add_row(row.task, row.arm, *scores, *ends, p)
        return table

    def left_out(self) -> list[str]:
        """A sentence for each task that is not compared, with the arms that lack it."""
        sentences = []
        for task in sorted({task for arm in self.arms for run in arm.runs for task in run}):
            for reason, lacking in (("not evaluated on it", None), ("without a score for each question", {})):
                if names := [arm.name for arm in self.arms if any(run.get(task) == lacking for run in arm.runs)]:
                    sentences.append(f"Left out: {task} ({reason}: {', '.join(names)}).")
        return sentences


def read_arm(argument: str) -> Arm:
    """Reads `FOLDER`, or `NAME=FOLDER,FOLDER,...` for several runs. Raises ValueError if one has no evaluation."""
    name, _, folders = ("", "", "") if os.path.exists(argument) else argument.partition("=")
    paths = [Path(folder).resolve() for folder in (folders.split(",") if folders else [argument])]
    return Arm(name if folders else paths[0].name, [_run(path) for path in paths], paths)


def compare_arms(arms: Sequence[Arm], confidence: float = CONFIDENCE) -> Comparison:
    """Compares arms with the first, on the tasks that all runs have, over the questions that all were asked.

    Args:
        arms: Two or more.
        confidence: Coverage of both intervals.

    Raises:
        ValueError: A name or a folder is given twice, no task is common to all, or tasks asked other questions.
    """
    names, folders = [arm.name for arm in arms], [folder for arm in arms for folder in arm.folders]
    if len(arms) < 2 or len({*names}) < len(names) or len({*folders}) < len(folders):
        named = ", ".join([*names, *map(str, folders)])
        raise ValueError(f"Name two or more models, each name and each folder once, as NAME=FOLDER: {named}.")
    runs = [run for arm in arms for run in arm.runs]
    tasks = [task for task in runs[0] if all(run.get(task) for run in runs)]
    if not tasks:
        known = "; ".join(f"{arm.name}: {', '.join(arm.runs[0])}" for arm in arms)
        raise ValueError(f"No task is common to all ({known}). Evaluate each on the same tasks, quantized alike.")
    differences = []
    for task in tasks:
        shared = set.intersection(*(set(run[task]) for run in runs))
        # Of other versions of the data, some answers under the same number are the same by chance.
        numbers = set.intersection(*({key[:2] for key in run[task]} for run in runs))
        if not shared or len(shared) < len(numbers):
            raise ValueError(f"{task} asked the models other questions. Evaluate them again, with the same versions.")
        order = sorted(shared)
        reference, *others = (np.array([[run[task][key] for key in order] for run in arm.runs]) for arm in arms)
        for name, scores in zip(names[1:], others, strict=True):
            binary = len(scores) == len(reference) == 1 and set(np.unique([scores, reference])) <= {0.0, 1.0}
            questions = over_questions(scores.mean(0), reference.mean(0), confidence)
            seeds = over_seeds(scores.mean(1), reference.mean(1), confidence)
            means = float(scores.mean()), float(reference.mean())
            p = mcnemar(scores[0], reference[0]) if binary else None
            differences.append(Difference(task, name, names[0], len(order), *means, questions, seeds, p))
    return Comparison(arms, differences)


def over_questions(scores: np.ndarray, reference: np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """Percentile interval of the mean difference of scores `(questions,)`, by a paired bootstrap."""
    if len(scores) == 1:
        return (float(scores[0] - reference[0]),) * 2
    settings = {"n_resamples": 10_000, "batch": 500, "method": "percentile", "rng": 0}
    bootstrap = stats.bootstrap((scores - reference,), np.mean, confidence_level=confidence, **settings)
    return tuple(bootstrap.confidence_interval)


def mcnemar(scores: np.ndarray, reference: np.ndarray) -> float:
    """Two-sided exact p-value of McNemar's test on answers `(questions,)` that are right, 1, or wrong, 0."""
    alone, other = int((scores > reference).sum()), int((scores < reference).sum())
    return float(stats.binomtest(alone, alone + other, 0.5).pvalue) if alone + other else 1.0


def over_seeds(scores: np.ndarray, reference: np.ndarray, confidence: float = CONFIDENCE) -> Interval | None:
    """t interval of the difference of runs' mean scores, paired if there are as many, or Welch's; None for one run."""
    if min(len(scores), len(reference)) < 2:
        return None
    paired = len(scores) == len(reference)
    test = stats.ttest_rel(scores, reference) if paired else stats.ttest_ind(scores, reference, equal_var=False)
    low, high = test.confidence_interval(confidence)
    value = float(scores.mean() - reference.mean())
    return (value, value) if math.isnan(low) else (low, high)  # all runs differ alike


def _run(folder: Path) -> dict[str, Scores]:
    """The scores of the tasks in a folder, as in [`Arm`]; none of a task without one for each question."""
    scores = {}
    for result in read_evaluations(folder):
        names = [metric.name for metric in result.metrics]
        metric, values = _scores(folder / FOLDER / result.task, names, result.versions.get(result.task))
        quantization = result.settings.get("quantization")
        how = f" ({quantization_name(quantization, products=False)})" if quantization else ""
        scores[f"{result.task} {metric}{how}"] = values
    if not scores:
        raise ValueError(f"{folder} has no evaluation/. Run `normalign evaluate {folder}` first.")
    return scores


def _scores(folder: Path, metrics: Sequence[str], version: str | None) -> tuple[str, Scores]:
    """The first of some metrics that each question has, and the scores, whose mean is the benchmark's own; or none."""
    scores: dict[str, dict[tuple[str, int, str], Any]] = defaultdict(dict)  # a number, or a group and a number
    for file in sorted(folder.glob("samples_*.jsonl")):
        task = file.name.removeprefix("samples_").rpartition("_")[0]
        for line in file.read_text(encoding="utf-8").splitlines():
            sample: dict[str, Any] = json_object(line.encode(), str(file))
            key = task, sample["doc_id"], f"{sample['target_hash']} {version}"
            for metric in sample["metrics"]:
                name = metric if sample["filter"] == "none" else f"{metric}, {sample['filter']}"
                if isinstance(sample.get(metric), int | float | list):
                    scores[name][key] = sample[metric]
    asked = max(map(len, scores.values()), default=0)
    for name in metrics:
        values = scores[name]
        if not values or len(values) < asked:
            continue
        if name == "acc_circular":
            keys = {index: key for key, (index, _) in values.items()}
            return name, {keys[index]: right for index, right in whole_questions([*values.values()]).items()}
        if name == "acc_by_category":
            return name, dict(zip(values, by_category([*values.values()]), strict=True))
        if not any(isinstance(value, list) for value in values.values()):
            return name, {key: float(value) for key, value in values.items()}
    return next(iter(metrics), ""), {}
