# SPDX-License-Identifier: Apache-2.0
"""`normalign compare`: which model is better, by how much, and whether that is noise.

Models are compared over the same questions, so that what makes a question hard cancels. Two kinds
of noise are kept apart: other questions (a bootstrap), and other training runs (a t interval).
"""

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
from .results import EVALUATION, Evaluation, read_evaluations
from .tasks.benchmarks import by_category, whole_questions


CONFIDENCE = 0.95
ROUNDING = 1e-10  # of the largest score: far above rounding, far below what seeds change
ALIKE = "alike"  # in place of an interval, where runs or questions all differ by the same
Array = np.ndarray
Interval = tuple[float, float]
Scores = dict[tuple[str, int, str], float]  # by task, number, hash of true answer and version


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
    over_questions: Interval | None  # of the difference, if other questions of the kind were asked
    over_seeds: Interval | None  # of the difference over training runs
    mcnemar: float | None  # p-value; None with several runs, or if scores are not right or wrong
    several_runs: bool = False  # of both

    @property
    def value(self) -> float:
        return self.score - self.reference


@dataclass(frozen=True)
class Comparison(Printed):
    """Arms, and the differences of all but the first from it."""

    arms: Sequence[Arm]
    differences: list[Difference]

    def renderable(self) -> Table:
        against = self.arms[0].name
        caption = f"Differences from {against}, 95 % intervals, over the n questions asked of all."
        table = Table("task", "model", box=SIMPLE, padding=0, show_edge=False, caption=caption)
        for name in ("n", "score", against, "difference", "over questions", "over seeds", "p"):
            table.add_column(name, justify="right")
        alike = False
        for row in self.differences:
            scores = (f"{row.score:.3f}", f"{row.reference:.3f}", f"{row.value:+.3f}")
            questions = _ends(row.over_questions, several=row.questions > 1)
            seeds = _ends(row.over_seeds, several=row.several_runs)
            alike = alike or ALIKE in (questions, seeds)
            p = "-" if row.mcnemar is None else f"{row.mcnemar:.3f}"
            table.add_row(row.task, row.arm, f"{row.questions:,}", *scores, questions, seeds, p)
        if alike:
            reason = f"{ALIKE!r}: all differ by the same, so no interval can be told."
            table.caption = f"{caption} {reason}"
        return table

    def left_out(self) -> list[str]:
        """A sentence for each task that is not compared, with the arms that lack it."""
        sentences = []
        runs = [(arm.name, run) for arm in self.arms for run in arm.runs]
        for task in sorted({task for _, run in runs for task in run}):
            for reason, scores in (("not evaluated on it", None), ("no score per question", {})):
                if names := dict.fromkeys(name for name, run in runs if run.get(task) == scores):
                    sentences.append(f"Left out: {task} ({reason}: {', '.join(names)}).")
        return sentences


def read_arm(argument: str) -> Arm:
    """Reads `FOLDER`, or `NAME=FOLDER,FOLDER,...` for several runs. All need an evaluation."""
    name, _, folders = ("", "", "") if os.path.exists(argument) else argument.partition("=")
    paths = [Path(folder).resolve() for folder in (folders.split(",") if folders else [argument])]
    return Arm(name if folders else paths[0].name, [_run(path) for path in paths], paths)


def compare_arms(arms: Sequence[Arm], confidence: float = CONFIDENCE) -> Comparison:
    """Compares two or more arms with the first, on the tasks and the questions that all have.

    `confidence` is the coverage of both intervals. Raises ValueError if a name or a folder comes
    twice, if no task is common to all, or if a task asked the models different questions.
    """
    names, folders = [arm.name for arm in arms], [folder for arm in arms for folder in arm.folders]
    if len(arms) < 2 or len({*names}) < len(names) or len({*folders}) < len(folders):
        named = ", ".join([*names, *map(str, folders)])
        raise ValueError(f"Name two or more models, as NAME=FOLDER, and none twice: {named}.")
    runs = [run for arm in arms for run in arm.runs]
    tasks = [task for task in runs[0] if all(run.get(task) for run in runs)]
    if not tasks:
        known = "; ".join(f"{arm.name}: {', '.join(arm.runs[0])}" for arm in arms)
        remedy = "Evaluate all of them on the same tasks, quantized alike"
        raise ValueError(f"No task is common to all ({known}). {remedy}.")
    rows = []
    for task in tasks:
        shared = set.intersection(*(set(run[task]) for run in runs))
        # Of other versions of the data, some answers under the same number are the same by chance.
        numbers = set.intersection(*({key[:2] for key in run[task]} for run in runs))
        if not shared or len(shared) < len(numbers):
            remedy = "Evaluate them again, with one version of the task and its data"
            raise ValueError(f"{task} asked the models different questions. {remedy}.")
        order = sorted(shared)
        of_arms = [[[run[task][key] for key in order] for run in arm.runs] for arm in arms]
        reference, *others = map(np.array, of_arms)
        for name, scores in zip(names[1:], others, strict=True):
            single = len(scores) == len(reference) == 1
            binary = single and np.isin([scores, reference], [0, 1]).all()
            several = min(len(scores), len(reference)) > 1
            questions = over_questions(scores.mean(0), reference.mean(0), confidence)
            seeds = over_seeds(scores.mean(1), reference.mean(1), confidence)
            means = float(scores.mean()), float(reference.mean())
            p = mcnemar(scores[0], reference[0]) if binary else None
            row = Difference(task, name, names[0], len(order), *means, questions, seeds, p, several)
            rows.append(row)
    return Comparison(arms, rows)


def over_questions(
    scores: Array, reference: Array, confidence: float = CONFIDENCE
) -> Interval | None:
    """Percentile interval of the mean difference of scores `(questions,)`: a paired bootstrap.

    None for one question, and if all differ by the same: nothing is known of others then.
    """
    if len(scores) < 2 or without_spread(scores - reference, scores, reference):
        return None
    settings = {"n_resamples": 10_000, "batch": 500, "method": "percentile", "rng": 0}
    drawn = stats.bootstrap((scores - reference,), np.mean, confidence_level=confidence, **settings)
    return tuple(drawn.confidence_interval)


def mcnemar(scores: Array, reference: Array) -> float:
    """Two-sided exact p-value of McNemar's test on answers `(questions,)`: right is 1, wrong 0."""
    alone, other = int((scores > reference).sum()), int((scores < reference).sum())
    return float(stats.binomtest(alone, alone + other, 0.5).pvalue) if alone + other else 1.0


def over_seeds(scores: Array, reference: Array, confidence: float = CONFIDENCE) -> Interval | None:
    """t interval of runs' mean difference: paired if as many, else Welch's.

    None for one run, and if the variance is 0 to rounding: such an interval would have no width,
    and would call any difference certain.
    """
    if min(len(scores), len(reference)) < 2:
        return None
    if len(scores) == len(reference):
        if without_spread(scores - reference, scores, reference):
            return None
        test = stats.ttest_rel(scores, reference)
    else:
        if without_spread(scores, scores) and without_spread(reference, reference):
            return None
        test = stats.ttest_ind(scores, reference, equal_var=False)
    low, high = test.confidence_interval(confidence)
    return float(low), float(high)


def without_spread(values: Array, *computed_from: Array) -> bool:
    """Whether values are equal but for the rounding of the numbers that they are computed from."""
    size = max(float(np.abs(numbers).max()) for numbers in computed_from)
    return float(np.ptp(values)) <= ROUNDING * size


def _ends(interval: Interval | None, *, several: bool) -> str:
    """An interval as the table shows it, or why there is none."""
    if interval is not None:
        return f"{interval[0]:+.3f} {interval[1]:+.3f}"
    return ALIKE if several else "-"


def _run(folder: Path) -> dict[str, Scores]:
    """The scores of a folder's tasks, as in [`Arm`]; empty for a task without one per question."""
    scores = {}
    for result in read_evaluations(folder):
        metric, values = _scores(folder / EVALUATION / result.task, result)
        quantization = result.settings.get("quantization")
        how = f" ({quantization_name(quantization, products=False)})" if quantization else ""
        scores[f"{result.task} {metric}{how}"] = values
    if not scores:
        raise ValueError(f"{folder} has no evaluation/. Run `normalign evaluate {folder}` first.")
    return scores


def _scores(folder: Path, result: Evaluation) -> tuple[str, Scores]:
    """The first metric that all questions have, and scores, whose mean is the benchmark's own."""
    version, names = result.versions.get(result.task), [metric.name for metric in result.metrics]
    scores: dict[str, dict[tuple[str, int, str], Any]] = defaultdict(dict)  # or (group, score)
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
    for name in names:
        rows = [*scores[name].values()]
        if not rows or len(rows) < asked:
            continue
        if name == "acc_circular":
            keys = {index: key for key, (index, _) in scores[name].items()}
            return name, {keys[index]: right for index, right in whole_questions(rows).items()}
        if name == "acc_by_category":
            return name, dict(zip(scores[name], by_category(rows), strict=True))
        if not any(isinstance(row, list) for row in rows):
            return name, {key: float(score) for key, score in scores[name].items()}
    return next(iter(names), ""), {}
