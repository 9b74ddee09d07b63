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
from .results import EVALUATION, Evaluation, read_evaluations, read_samples
from .tasks.benchmarks import by_category, whole_questions


CONFIDENCE = 0.95
ROUNDING = 1e-10  # of the largest score: far above rounding, far below what seeds change
ALIKE = "alike"  # in place of an interval, where runs or questions all differ by the same
Array = np.ndarray
Interval = tuple[float, float]
QuestionKey = tuple[str, int, str]  # task, number, hash of the true answer and version of the task
Scores = dict[QuestionKey, float]


@dataclass(frozen=True)
class ModelScores:
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
    """A model against the first one on a task, over the questions that all models were asked.

    Attributes:
        task: The task, its metric, and how the models were quantized, if they were.
        model: Name of the compared model.
        against: Name of the first model.
        questions: How many questions all models were asked.
        score: Mean of the model over questions and runs.
        reference: Mean of the first model over questions and runs.
        over_questions: Interval of the difference, had other questions of the kind been asked.
        over_seeds: Interval of the difference over training runs.
        mcnemar: P-value of [`mcnemar`]. None with several runs, or if scores are not 0 or 1.
        several_runs: Whether both models have several runs.
    """

    task: str
    model: str
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
    """The outcome of [`compare_models`].

    Attributes:
        models: The models that were compared.
        differences: For each common task, the differences of each later model from the first one.
        confidence: Coverage of the intervals.
    """

    models: Sequence[ModelScores]
    differences: list[Difference]
    confidence: float = CONFIDENCE

    def renderable(self) -> Table:
        """Returns a table with a row for each difference."""
        first_name = self.models[0].name
        caption = (
            f"Differences from {first_name}, {100 * self.confidence:g} % intervals, over the n "
            "questions asked of all."
        )
        table = Table("task", "model", box=SIMPLE, padding=0, show_edge=False, caption=caption)
        for header in ("n", "score", first_name, "difference", "over questions", "over seeds", "p"):
            table.add_column(header, justify="right")
        for difference in self.differences:
            over_questions = _ends(difference.over_questions, several=difference.questions > 1)
            over_seeds = _ends(difference.over_seeds, several=difference.several_runs)
            if ALIKE in (over_questions, over_seeds):
                table.caption = (
                    f"{caption} {ALIKE!r}: all differ by the same, so there is nothing to estimate "
                    "from."
                )
            p_value = "-"
            if difference.mcnemar is not None:
                p_value = f"{difference.mcnemar:.3f}"
            table.add_row(
                difference.task,
                difference.model,
                f"{difference.questions:,}",
                f"{difference.score:.3f}",
                f"{difference.reference:.3f}",
                f"{difference.value:+.3f}",
                over_questions,
                over_seeds,
                p_value,
            )
        return table

    def left_out(self) -> list[str]:
        """Returns a sentence for each task that is not compared, with the models that lack it."""
        sentences = []
        for task in sorted(set().union(*_runs(self.models))):
            for scores, reason in ((None, "not evaluated on it"), ({}, "no score per question")):
                names = []
                for model in self.models:
                    if any(run.get(task) == scores for run in model.runs):
                        names.append(model.name)
                if names:
                    sentences.append(f"Left out: {task} ({reason}: {', '.join(names)}).")
        return sentences


def read_scores(argument: str) -> ModelScores:
    """Reads the scores in `FOLDER`, or in `NAME=FOLDER,FOLDER,...` for several runs.

    A task without scores per question has empty ones.

    Raises ValueError if a folder has no evaluation, or one that is not valid.
    """
    name, _, listed_folders = argument.partition("=")
    if listed_folders and not os.path.exists(argument):
        paths = [Path(folder).resolve() for folder in listed_folders.split(",")]
    else:
        paths = [Path(argument).resolve()]
        name = paths[0].name
    runs = []
    for folder in paths:
        scores_by_task = {}
        for result in read_evaluations(folder):
            metric_name, scores = _read_task(folder / EVALUATION / result.task, result)
            label = f"{result.task} {metric_name}"
            quantization = result.settings.get("quantization")
            if quantization:
                label += f" ({quantization_name(quantization, products=False)})"
            scores_by_task[label] = scores
        if not scores_by_task:
            raise ValueError(
                f"{folder} has no evaluation/. Run `normalign evaluate {folder}` first."
            )
        runs.append(scores_by_task)
    return ModelScores(name, runs, paths)


def compare_models(models: Sequence[ModelScores], confidence: float = CONFIDENCE) -> Comparison:
    """Compares two or more models with the first, on the tasks and the questions that all have.

    Args:
        models: Models to compare, see [`read_scores`].
        confidence: Coverage of both intervals.

    Raises:
        ValueError: A name or a folder comes twice, no task is common to all, or a task asked the
            models different questions.
    """
    names = [model.name for model in models]
    folders = [folder for model in models for folder in model.folders]
    if len(models) < 2 or len(set(names)) < len(names) or len(set(folders)) < len(folders):
        listed = ", ".join([*names, *map(str, folders)])
        raise ValueError(f"Name two or more models, as NAME=FOLDER, and none twice: {listed}.")
    common_tasks = list(models[0].runs[0])
    for run in _runs(models):
        common_tasks = [task for task in common_tasks if run.get(task)]
    if not common_tasks:
        tasks_by_model = "; ".join(f"{model.name}: {', '.join(model.runs[0])}" for model in models)
        raise ValueError(
            f"No task is common to all ({tasks_by_model}). Evaluate all of them on the same tasks, "
            "quantized alike."
        )
    first, *others = models
    differences = []
    for task in common_tasks:
        reference, *scores_of_others = _require_shared_scores(task, models)
        for model, scores in zip(others, scores_of_others, strict=True):
            p_value = None
            is_one_run = len(scores) == len(reference) == 1
            if is_one_run and np.isin([scores, reference], [0, 1]).all():
                p_value = mcnemar(scores[0], reference[0])
            difference = Difference(
                task=task,
                model=model.name,
                against=first.name,
                questions=scores.shape[1],
                score=float(scores.mean()),
                reference=float(reference.mean()),
                over_questions=over_questions(scores.mean(0), reference.mean(0), confidence),
                over_seeds=over_seeds(scores.mean(1), reference.mean(1), confidence),
                mcnemar=p_value,
                several_runs=min(len(scores), len(reference)) > 1,
            )
            differences.append(difference)
    return Comparison(models, differences, confidence)


def _runs(models: Sequence[ModelScores]) -> list[dict[str, Scores]]:
    return [run for model in models for run in model.runs]


def _require_shared_scores(task: str, models: Sequence[ModelScores]) -> list[Array]:
    """Returns each model's scores `(runs, questions)` of the questions that all runs answered.

    Raises ValueError if the runs were asked different questions, as with different versions of the
    data. Some true answers are then the same by chance, so each shared number must have the same.
    """
    runs = _runs(models)
    shared_keys = set.intersection(*(set(run[task]) for run in runs))
    numbers_by_run = [{question[:2] for question in run[task]} for run in runs]
    if not shared_keys or len(shared_keys) < len(set.intersection(*numbers_by_run)):
        raise ValueError(
            f"{task} asked the models different questions. Evaluate them again, with one version "
            "of the task and its data."
        )
    questions = sorted(shared_keys)
    scores_by_model = []
    for model in models:
        scores_by_run = []
        for run in model.runs:
            scores_by_run.append([run[task][question] for question in questions])
        scores_by_model.append(np.array(scores_by_run))
    return scores_by_model


def over_questions(
    scores: Array, reference: Array, confidence: float = CONFIDENCE
) -> Interval | None:
    """Returns the percentile interval of the mean difference of scores, by a paired bootstrap.

    Returns None for one question, and if all differ by the same: nothing is then known of others.

    Args:
        scores: The model's scores, `(questions,)`.
        reference: The first model's scores of the same questions, `(questions,)`.
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
    only_model_right = int((scores > reference).sum())
    discordant = int((scores != reference).sum())
    if discordant == 0:
        return 1.0
    return float(stats.binomtest(only_model_right, discordant, 0.5).pvalue)


def over_seeds(scores: Array, reference: Array, confidence: float = CONFIDENCE) -> Interval | None:
    """Returns the t interval of runs' mean difference: paired if as many, else Welch's.

    Returns None for one run, and if the variance is 0 but for rounding. Such an interval would have
    no width, and would call any difference certain.

    Args:
        scores: The model's mean score in each run, `(runs,)`.
        reference: The first model's mean score in each run, `(runs,)`.
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


def _read_task(folder: Path, result: Evaluation) -> tuple[str, Scores]:
    """Reads the first metric that all questions have, and its score of each question.

    The mean of the scores is the benchmark's own result. There are none without such a metric.
    """
    version = result.versions.get(result.task)
    # For each metric and question what the harness stored: a number, or (group, score).
    stored_scores: dict[str, dict[QuestionKey, Any]] = defaultdict(dict)
    for task, sample in read_samples(folder):
        question = (task, sample["doc_id"], f"{sample['target_hash']} {version}")
        filter_name = sample["filter"]
        for metric in sample["metrics"]:
            metric_name = metric if filter_name == "none" else f"{metric}, {filter_name}"
            if isinstance(sample.get(metric), int | float | list):
                stored_scores[metric_name][question] = sample[metric]
    question_count = max(map(len, stored_scores.values()), default=0)
    for whole_metric in result.metrics:
        by_question = stored_scores.get(whole_metric.name)
        if by_question and len(by_question) == question_count:
            scores = _comparable_scores(whole_metric.name, by_question)
            if scores is not None:
                return whole_metric.name, scores
    return result.metrics[0].name if result.metrics else "", {}


def _comparable_scores(metric_name: str, by_question: dict[QuestionKey, Any]) -> Scores | None:
    """Returns a number for each question, or None if a metric has lists with another meaning."""
    stored_scores = list(by_question.values())
    if metric_name == "acc_circular":
        # Several rotations of a question count as one question, under the first one's key.
        keys = {index: question for question, (index, _) in by_question.items()}
        return {keys[index]: right for index, right in whole_questions(stored_scores).items()}
    if metric_name == "acc_by_category":
        return dict(zip(by_question, by_category(stored_scores), strict=True))
    if any(isinstance(score, list) for score in stored_scores):
        return None
    return {question: float(score) for question, score in by_question.items()}
