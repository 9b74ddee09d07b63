# SPDX-License-Identifier: Apache-2.0
"""`normalign compare`: which model is better, by how much, and whether that is noise.

Models are compared over the same questions, so that what makes a question hard for all of them cancels. Two kinds of
noise are kept apart: other questions (a bootstrap over questions), and other training runs (a t interval over seeds).
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table
from scipy import stats

from ..checkpoint.files import write_json
from ..checkpoint.precision import quantization_name
from ..errors import Printed
from .results import FOLDER, Evaluation, read_evaluations
from .tasks.choices import by_category, whole_questions


CONFIDENCE = 0.95

Interval = tuple[float, float]
Scores = dict[tuple[str, int, str], float]
"""The score of each question, by task, number, and a hash of the true answer with the task's version."""


@dataclass(frozen=True)
class Arm:
    """One model, or the same model trained with several seeds, each a run."""

    name: str
    runs: list[dict[str, Scores]]  # by task and metric, and how the model was quantized, if it was


@dataclass(frozen=True)
class Difference:
    """An arm against the first one on a task. Scores are means over questions and runs.

    Attributes:
        questions: How many: those that all models were asked.
        over_questions: Interval of the difference if other questions of the kind were asked.
        over_seeds: Interval of the difference over training runs.
        mcnemar: p-value of whether as many questions are right in one model alone as in the other alone. None with
            several runs, or if scores are not right or wrong.
    """

    task: str
    arm: str
    against: str
    questions: int
    score: float
    reference: float
    over_questions: Interval
    over_seeds: Interval | None
    mcnemar: float | None

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
        """A row for each difference."""
        against = self.arms[0].name
        caption = f"Differences from {against}, 95 % intervals, over the n questions that all models were asked."
        table = Table(box=SIMPLE, padding=0, show_edge=False, caption=caption)
        for column in ("task", "model"):
            table.add_column(column, overflow="fold")
        for column in ("n", "score", against, "difference", "over questions", "over seeds", "p"):
            table.add_column(column, justify="right")
        for row in self.differences:
            scores = (f"{row.questions:,}", f"{row.score:.3f}", f"{row.reference:.3f}", f"{row.value:+.3f}")
            intervals = [
                f"{ends[0]:+.3f} {ends[1]:+.3f}" if ends else "-" for ends in (row.over_questions, row.over_seeds)
            ]
            p = "-" if row.mcnemar is None else f"{row.mcnemar:.3f}"
            table.add_row(row.task, row.arm, *scores, *intervals, p)
        return table

    def left_out(self) -> list[str]:
        """A sentence for each task that is not compared, with the arms that lack a score for each question."""
        sentences = []
        for task in sorted({task for arm in self.arms for run in arm.runs for task in run}):
            lacking = ", ".join(arm.name for arm in self.arms if not all(run.get(task) for run in arm.runs))
            if lacking:
                sentences.append(f"Left out: {task}, without a score for each question in {lacking}.")
        return sentences

    def write(self, output: Path) -> None:
        """Writes `comparison.json` into a folder."""
        write_json(output / "comparison.json", [asdict(difference) for difference in self.differences])


def read_arm(argument: str) -> Arm:
    """Reads `FOLDER`, or `NAME=FOLDER,FOLDER,...` for several runs.

    Raises:
        ValueError: A folder has no evaluation, or one that cannot be read.
    """
    name, equals, folders = ("", "", "") if os.path.exists(argument) else argument.partition("=")
    paths = [Path(folder) for folder in (folders.split(",") if equals else [argument]) if folder]
    if not paths:
        raise ValueError(f"{argument} names no folder. Write NAME=FOLDER,FOLDER,...")
    evaluations = [read_evaluations(path) for path in paths]
    return Arm(name or paths[0].resolve().name, list(map(_run, paths, evaluations)))


def compare_arms(arms: Sequence[Arm], confidence: float = CONFIDENCE) -> Comparison:
    """Compares arms with the first, on the tasks that all runs have, over the questions that all were asked.

    Args:
        arms: Two or more.
        confidence: Coverage of both intervals.

    Raises:
        ValueError: There are fewer than two arms, two of the same name, no common task, or other questions
            under the same name of a task.
    """
    if len(arms) < 2:
        raise ValueError("Name two or more models to compare.")
    if len({arm.name for arm in arms}) < len(arms):
        raise ValueError(f"Models have the same name: {', '.join(arm.name for arm in arms)}. Write NAME=FOLDER.")
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
        for arm, scores in zip(arms[1:], others, strict=True):
            binary = len(scores) == len(reference) == 1 and set(np.unique([scores, reference])) <= {0.0, 1.0}
            differences.append(
                Difference(
                    task,
                    arm.name,
                    arms[0].name,
                    questions=len(order),
                    score=float(scores.mean()),
                    reference=float(reference.mean()),
                    over_questions=over_questions(scores.mean(0), reference.mean(0), confidence),
                    over_seeds=over_seeds(scores.mean(1), reference.mean(1), confidence),
                    mcnemar=mcnemar(scores[0], reference[0]) if binary else None,
                )
            )
    return Comparison(arms, differences)


def over_questions(scores: np.ndarray, reference: np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """Percentile interval, by default 95 %, of the mean difference of scores `(questions,)`, by a paired bootstrap."""
    if len(scores) == 1:
        return (float(scores[0] - reference[0]),) * 2
    settings = {"n_resamples": 10_000, "batch": 500, "method": "percentile", "rng": 0}
    bootstrap = stats.bootstrap((scores - reference,), np.mean, confidence_level=confidence, **settings)
    low, high = bootstrap.confidence_interval
    return float(low), float(high)


def mcnemar(scores: np.ndarray, reference: np.ndarray) -> float:
    """Two-sided exact p-value of McNemar's test on answers `(questions,)` that are right, 1, or wrong, 0."""
    alone, other = int((scores > reference).sum()), int((scores < reference).sum())
    return float(stats.binomtest(alone, alone + other, 0.5).pvalue) if alone + other else 1.0


def over_seeds(scores: np.ndarray, reference: np.ndarray, confidence: float = CONFIDENCE) -> Interval | None:
    """t interval, by default 95 %, of the difference of mean scores of runs, `(runs,)` each: paired if there are as
    many runs, otherwise Welch's. None with fewer than two runs on either side."""
    if min(len(scores), len(reference)) < 2:
        return None
    paired = len(scores) == len(reference)
    test = stats.ttest_rel(scores, reference) if paired else stats.ttest_ind(scores, reference, equal_var=False)
    low, high = test.confidence_interval(confidence)
    value = float(scores.mean() - reference.mean())
    return (value, value) if math.isnan(low) else (float(low), float(high))  # all runs differ alike


def _run(folder: Path, evaluations: Sequence[Evaluation]) -> dict[str, Scores]:
    """The scores of the tasks in a folder, as in [`Arm`]; none of a task without one for each question."""
    if not evaluations:
        raise ValueError(f"{folder} has no evaluation/. Run `normalign evaluate {folder}` first.")
    scores = {}
    for result in evaluations:
        names = [metric.name for metric in result.metrics]
        metric, values = _scores(folder / FOLDER / result.task, names, result.versions.get(result.task))
        quantization = result.settings.get("quantization")
        how = f" ({quantization_name(quantization, products=False)})" if quantization else ""
        scores[f"{result.task} {metric}{how}"] = values
    return scores


def _scores(folder: Path, metrics: Sequence[str], version: str | None) -> tuple[str, Scores]:
    """The first of some metrics that each question has, and the scores; none if there is no such metric.

    Of MMBench and MMStar, the score is one whose mean is the benchmark's own: of a question in all its rotations, and
    weighted by category.
    """
    scores: dict[str, Scores] = defaultdict(dict)
    grouped: dict[str, dict[tuple[str, int, str], Any]] = defaultdict(dict)  # values with the group of their row
    for file in sorted(folder.glob("samples_*.jsonl")):
        task = file.name.removeprefix("samples_").rpartition("_")[0]
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                sample: dict[str, Any] = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file} is damaged ({error}). Remove its folder and evaluate again.") from error
            for metric in sample["metrics"]:
                key = task, sample["doc_id"], f"{sample['target_hash']} {version}"
                if isinstance(sample.get(metric), int | float):
                    name = metric if sample["filter"] == "none" else f"{metric}, {sample['filter']}"
                    scores[name][key] = float(sample[metric])
                elif isinstance(sample.get(metric), list):
                    grouped[metric][key] = sample[metric]
    asked = max(map(len, scores.values()), default=0)
    for name in metrics:
        rows = grouped.get(name, {})
        if name == "acc_circular" and len(rows) == asked:
            keys = {index: key for key, (index, _) in rows.items()}
            return name, {keys[index]: right for index, right in whole_questions([*rows.values()]).items()}
        if name == "acc_by_category" and len(rows) == asked:
            return name, dict(zip(rows, by_category([*rows.values()]), strict=True))
        if len(scores.get(name, ())) == asked:
            return name, scores[name]
    return next(iter(metrics), ""), {}
