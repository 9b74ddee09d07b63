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
from ..console import Printed
from .results import EVALUATION, Evaluation, read_evaluations, stored_samples
from .tasks.benchmarks import by_category, whole_questions


CONFIDENCE = 0.95
ROUNDING = 1e-10  # of the largest score: far above rounding, far below what seeds change
ALIKE = "alike"  # in place of an interval, where runs or questions all differ by the same
Array = np.ndarray
Interval = tuple[float, float]
QuestionKey = tuple[str, int, str]  # task, number, hash of the true answer and version of the task
Scores = dict[QuestionKey, float]


@dataclass(frozen=True)
class Arm:
    """One model, or the same model trained with several seeds.

    Attributes:
        name: What tables call it.
        runs: For each run its scores, by task, metric and quantization.
        folders: The folders of the runs.
    """

    name: str
    runs: list[dict[str, Scores]]
    folders: Sequence[Path] = ()


@dataclass(frozen=True)
class Difference:
    """An arm against the first one on a task, over the questions that all models were asked.

    Attributes:
        task: The task, its metric, and how the models were quantized, if they were.
        arm: Name of the compared arm.
        against: Name of the first arm.
        questions: How many questions all models were asked.
        score: Mean of the arm over questions and runs.
        reference: Mean of the first arm over questions and runs.
        over_questions: Interval of the difference, had other questions of the kind been asked.
        over_seeds: Interval of the difference over training runs.
        mcnemar: P-value of [`mcnemar`]; None with several runs, or if scores are not 0 or 1.
        several_runs: Whether both arms have several runs.
    """

    task: str
    arm: str
    against: str
    questions: int
    score: float
    reference: float
    over_questions: Interval | None
    over_seeds: Interval | None
    mcnemar: float | None
    several_runs: bool = False

    @property
    def value(self) -> float:
        return self.score - self.reference


@dataclass(frozen=True)
class Comparison(Printed):
    """Arms, and the differences between each later arm and the first one."""

    arms: Sequence[Arm]
    differences: list[Difference]

    def renderable(self) -> Table:
        """Returns a table with a row for each difference."""
        first_name = self.arms[0].name
        caption = (
            f"Differences from {first_name}, 95 % intervals, over the n questions asked of all."
        )
        table = Table("task", "model", box=SIMPLE, padding=0, show_edge=False, caption=caption)
        for header in ("n", "score", first_name, "difference", "over questions", "over seeds", "p"):
            table.add_column(header, justify="right")
        any_alike = False
        for difference in self.differences:
            over_questions = _ends(difference.over_questions, several=difference.questions > 1)
            over_seeds = _ends(difference.over_seeds, several=difference.several_runs)
            if ALIKE in (over_questions, over_seeds):
                any_alike = True
            p_value = "-"
            if difference.mcnemar is not None:
                p_value = f"{difference.mcnemar:.3f}"
            table.add_row(
                difference.task,
                difference.arm,
                f"{difference.questions:,}",
                f"{difference.score:.3f}",
                f"{difference.reference:.3f}",
                f"{difference.value:+.3f}",
                over_questions,
                over_seeds,
                p_value,
            )
        if any_alike:
            reason = f"{ALIKE!r}: all differ by the same, so no interval can be told."
            table.caption = f"{caption} {reason}"
        return table

    def left_out(self) -> list[str]:
        """Returns a sentence for each task that is not compared, with the arms that lack it."""
        all_tasks: set[str] = set()
        for run in _runs(self.arms):
            all_tasks.update(run)
        sentences = []
        for task in sorted(all_tasks):
            not_evaluated = self._arms_with(task, None)
            if not_evaluated:
                sentences.append(f"Left out: {task} (not evaluated on it: {not_evaluated}).")
            without_scores = self._arms_with(task, {})
            if without_scores:
                sentences.append(f"Left out: {task} (no score per question: {without_scores}).")
        return sentences

    def _arms_with(self, task: str, scores: Scores | None) -> str:
        """Returns the names of arms that have a run with exactly these scores on a task."""
        arm_names = []
        for arm in self.arms:
            if any(run.get(task) == scores for run in arm.runs):
                arm_names.append(arm.name)
        return ", ".join(arm_names)


def read_arm(argument: str) -> Arm:
    """Reads `FOLDER`, or `NAME=FOLDER,FOLDER,...` for several runs. All need an evaluation."""
    name, _, folders = argument.partition("=")
    if folders and not os.path.exists(argument):
        paths = [Path(folder).resolve() for folder in folders.split(",")]
    else:
        paths = [Path(argument).resolve()]
        name = paths[0].name
    return Arm(name, [_scores_by_task(path) for path in paths], paths)


def compare_arms(arms: Sequence[Arm], confidence: float = CONFIDENCE) -> Comparison:
    """Compares two or more arms with the first, on the tasks and the questions that all have.

    Args:
        arms: Models to compare, see [`read_arm`].
        confidence: Coverage of both intervals.

    Raises:
        ValueError: A name or a folder comes twice, no task is common to all, or a task asked the
            models different questions.
    """
    _check_distinct(arms)
    first, *others = arms
    differences = []
    for task in _common_tasks(arms):
        questions = _shared_questions(task, arms)
        reference = _score_array(first, task, questions)
        for arm in others:
            scores = _score_array(arm, task, questions)
            difference = Difference(
                task=task,
                arm=arm.name,
                against=first.name,
                questions=len(questions),
                score=float(scores.mean()),
                reference=float(reference.mean()),
                over_questions=over_questions(scores.mean(0), reference.mean(0), confidence),
                over_seeds=over_seeds(scores.mean(1), reference.mean(1), confidence),
                mcnemar=_mcnemar_of_runs(scores, reference),
                several_runs=min(len(scores), len(reference)) > 1,
            )
            differences.append(difference)
    return Comparison(arms, differences)


def _runs(arms: Sequence[Arm]) -> list[dict[str, Scores]]:
    return [run for arm in arms for run in arm.runs]


def _check_distinct(arms: Sequence[Arm]) -> None:
    """Raises ValueError if there is only one arm, or a name or a folder comes twice."""
    arm_names = [arm.name for arm in arms]
    folders = [folder for arm in arms for folder in arm.folders]
    if len(arms) < 2 or len(set(arm_names)) < len(arm_names) or len(set(folders)) < len(folders):
        listed = ", ".join([*arm_names, *map(str, folders)])
        raise ValueError(f"Name two or more models, as NAME=FOLDER, and none twice: {listed}.")


def _common_tasks(arms: Sequence[Arm]) -> list[str]:
    """Returns the tasks that all runs have scores of, in the first run's order."""
    common_tasks = list(arms[0].runs[0])
    for run in _runs(arms):
        common_tasks = [task for task in common_tasks if run.get(task)]
    if not common_tasks:
        tasks_by_arm = "; ".join(f"{arm.name}: {', '.join(arm.runs[0])}" for arm in arms)
        raise ValueError(
            f"No task is common to all ({tasks_by_arm}). Evaluate all of them on the same tasks, "
            "quantized alike."
        )
    return common_tasks


def _shared_questions(task: str, arms: Sequence[Arm]) -> list[QuestionKey]:
    """Returns the questions of a task that all runs answered, in order.

    Raises ValueError if the runs were asked different questions, as with different versions of the
    data. Some true answers are then the same by chance, so each shared number must have the same.
    """
    key_sets = []
    number_sets = []
    for run in _runs(arms):
        key_sets.append(set(run[task]))
        number_sets.append({question[:2] for question in run[task]})
    shared_keys = set.intersection(*key_sets)
    shared_numbers = set.intersection(*number_sets)
    if not shared_keys or len(shared_keys) < len(shared_numbers):
        raise ValueError(
            f"{task} asked the models different questions. Evaluate them again, with one version "
            "of the task and its data."
        )
    return sorted(shared_keys)


def _score_array(arm: Arm, task: str, questions: Sequence[QuestionKey]) -> Array:
    """Returns an arm's scores, `(runs, questions)`."""
    scores_by_run = []
    for run in arm.runs:
        scores_by_run.append([run[task][question] for question in questions])
    return np.array(scores_by_run)


def _mcnemar_of_runs(scores: Array, reference: Array) -> float | None:
    """Returns [`mcnemar`] of two single runs `(1, questions)` whose answers are right or wrong."""
    if len(scores) > 1 or len(reference) > 1:
        return None
    if not np.isin([scores, reference], [0, 1]).all():
        return None
    return mcnemar(scores[0], reference[0])


def over_questions(
    scores: Array, reference: Array, confidence: float = CONFIDENCE
) -> Interval | None:
    """Returns the percentile interval of the mean difference of scores: a paired bootstrap.

    None for one question, and if all differ by the same: nothing is known of others then.

    Args:
        scores: The arm's scores, `(questions,)`.
        reference: The first arm's scores of the same questions, `(questions,)`.
        confidence: Coverage of the interval.
    """
    differences = scores - reference
    if len(scores) < 2 or without_spread(differences, scores, reference):
        return None
    bootstrap = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=10_000,
        batch=500,
        method="percentile",
        confidence_level=confidence,
        rng=0,
    )
    return tuple(bootstrap.confidence_interval)


def mcnemar(scores: Array, reference: Array) -> float:
    """Returns the two-sided exact p-value of McNemar's test.

    Both arguments are answers to the same questions, `(questions,)`: 1 is right, 0 is wrong.
    """
    only_arm_right = int((scores > reference).sum())
    only_reference_right = int((scores < reference).sum())
    discordant = only_arm_right + only_reference_right
    if discordant == 0:
        return 1.0
    return float(stats.binomtest(only_arm_right, discordant, 0.5).pvalue)


def over_seeds(scores: Array, reference: Array, confidence: float = CONFIDENCE) -> Interval | None:
    """Returns the t interval of runs' mean difference: paired if as many, else Welch's.

    None for one run, and if the variance is 0 to rounding: such an interval would have no width,
    and would call any difference certain.

    Args:
        scores: The arm's mean score in each run, `(runs,)`.
        reference: The first arm's mean score in each run, `(runs,)`.
        confidence: Coverage of the interval.
    """
    if min(len(scores), len(reference)) < 2:
        return None
    if len(scores) == len(reference):
        if without_spread(scores - reference, scores, reference):
            return None
        t_test = stats.ttest_rel(scores, reference)
    else:
        if without_spread(scores, scores) and without_spread(reference, reference):
            return None
        t_test = stats.ttest_ind(scores, reference, equal_var=False)
    low, high = t_test.confidence_interval(confidence)
    return float(low), float(high)


def without_spread(values: Array, *computed_from: Array) -> bool:
    """Returns whether values are equal, except for the rounding of what they are computed from."""
    largest = max(float(np.abs(numbers).max()) for numbers in computed_from)
    return float(np.ptp(values)) <= ROUNDING * largest


def _ends(interval: Interval | None, *, several: bool) -> str:
    """Returns an interval as the table shows it, or why there is none."""
    if interval is not None:
        return f"{interval[0]:+.3f} {interval[1]:+.3f}"
    return ALIKE if several else "-"


def _scores_by_task(folder: Path) -> dict[str, Scores]:
    """Returns the scores of a folder's tasks, by task, metric and quantization.

    They are empty for a task without scores per question.
    """
    scores_by_task = {}
    for result in read_evaluations(folder):
        metric_name, scores = _scores(folder / EVALUATION / result.task, result)
        label = f"{result.task} {metric_name}"
        quantization = result.settings.get("quantization")
        if quantization:
            label += f" ({quantization_name(quantization, products=False)})"
        scores_by_task[label] = scores
    if not scores_by_task:
        raise ValueError(f"{folder} has no evaluation/. Run `normalign evaluate {folder}` first.")
    return scores_by_task


def _scores(folder: Path, result: Evaluation) -> tuple[str, Scores]:
    """Returns the first metric that all questions have, and its score of each question.

    The mean of the scores is the benchmark's own result. There are none without such a metric.
    """
    stored_scores = _stored_scores(folder, result.versions.get(result.task))
    question_count = max(map(len, stored_scores.values()), default=0)
    metric_names = [metric.name for metric in result.metrics]
    for metric_name in metric_names:
        by_question = stored_scores.get(metric_name)
        if by_question and len(by_question) == question_count:
            scores = _comparable_scores(metric_name, by_question)
            if scores is not None:
                return metric_name, scores
    return next(iter(metric_names), ""), {}


def _stored_scores(folder: Path, version: str | None) -> dict[str, dict[QuestionKey, Any]]:
    """Returns what the harness stored for each metric and question: a number, or (group, score)."""
    scores_by_metric: dict[str, dict[QuestionKey, Any]] = defaultdict(dict)
    for task, sample in stored_samples(folder):
        question = (task, sample["doc_id"], f"{sample['target_hash']} {version}")
        filter_name = sample["filter"]
        for metric in sample["metrics"]:
            metric_name = metric if filter_name == "none" else f"{metric}, {filter_name}"
            if isinstance(sample.get(metric), int | float | list):
                scores_by_metric[metric_name][question] = sample[metric]
    return scores_by_metric


def _comparable_scores(metric_name: str, by_question: dict[QuestionKey, Any]) -> Scores | None:
    """Returns a number for each question; None if a metric has lists with another meaning."""
    stored_scores = list(by_question.values())
    if metric_name == "acc_circular":
        # Several rotations of a question count as one question, under the first one's key.
        first_rotations = {index: question for question, (index, _) in by_question.items()}
        return {
            first_rotations[index]: right for index, right in whole_questions(stored_scores).items()
        }
    if metric_name == "acc_by_category":
        return dict(zip(by_question, by_category(stored_scores), strict=True))
    if any(isinstance(score, list) for score in stored_scores):
        return None
    return {question: float(score) for question, score in by_question.items()}
