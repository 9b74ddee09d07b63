# SPDX-License-Identifier: Apache-2.0
"""The results of the quickstart: asks and diagnoses its models, draws and prints what they gave."""

import json
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ..checkpoint.files import atomic_write
from ..diagnose.report import PAGE, REPORT
from ..diagnose.run import DIAGNOSTICS, diagnose
from ..evaluation.answers import named
from ..evaluation.results import read_evaluations
from ..evaluation.run import evaluate
from ..fetched.easy_vqa import CHOICES, OVERALL, QUESTION_KINDS, Question, load_image


EASY_VQA_TASK = "offline_easy_vqa"
EMOJI_TASK = "offline_emoji"
METRICS = {kind: (EASY_VQA_TASK, f"acc_{kind.replace('/', '_')}") for kind in QUESTION_KINDS}
METRICS |= {OVERALL: (EASY_VQA_TASK, "acc"), "emoji": (EMOJI_TASK, "acc")}
"""Task of the offline suite and metric of each kind of question."""


def ask_held_out(checkpoint: Path, limit: int | None, bf16: bool) -> dict[str, Any]:
    """Asks a checkpoint the held-out questions.

    Results are kept in its folder. If they are there, nothing is asked again.

    Args:
        checkpoint: The checkpoint.
        limit: How many questions of each task to ask. None asks all.
        bf16: Whether matrices are multiplied in bfloat16.

    Returns:
        `"accuracy"`, `"blank"` (the accuracy with a white image), `"majority"` (the accuracy of
        always giving the commonest answer) and `"count"` (the number of questions). Each is a
        mapping by kind of question.

    Raises:
        RuntimeError: A task could not be run.
        ValueError: The checkpoint cannot be read, or a limit would replace whole results.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device_type, torch.bfloat16, enabled=bf16):
        suite_results = evaluate(
            str(checkpoint),
            tasks=(EASY_VQA_TASK, EMOJI_TASK),
            limit=limit,
            batch_size=128,
            dtype="float32",
        )
    for task_name, reason in suite_results.failed.items():
        raise RuntimeError(f"{task_name} could not be run: {reason}")
    metrics = {}
    for evaluation in read_evaluations(checkpoint):
        for metric in evaluation.metrics:
            metrics[evaluation.task, metric.name] = metric
    scores: dict[str, Any] = {"accuracy": {}, "blank": {}, "majority": {}, "count": {}}
    for kind, task_and_metric in METRICS.items():
        metric = metrics[task_and_metric]
        scores["accuracy"][kind] = metric.value
        scores["blank"][kind] = metric.references["blank image"]
        scores["majority"][kind] = metric.references["commonest answer"]
        scores["count"][kind] = metric.samples
    return scores


def diagnose_once(checkpoint: Path, baseline: Path | None, samples: int, suffix: str = "") -> Path:
    """Diagnoses a checkpoint, unless it has a report, with the baseline if there is one.

    Args:
        checkpoint: The checkpoint.
        baseline: A checkpoint to compare it with.
        samples: How many held-out images to measure on.
        suffix: The end of both names in the report.

    Returns:
        The page of the report.
    """
    diagnosis_folder = checkpoint / DIAGNOSTICS
    if not (diagnosis_folder / REPORT).exists() or (
        baseline and not read_report(checkpoint)["against"]
    ):
        diagnose(
            str(checkpoint),
            against=str(baseline) if baseline else None,
            samples=samples,
            name=f"quickstart{suffix}",
            against_name=f"quickstart-no-norm{suffix}",
        )
    return diagnosis_folder / PAGE


def read_report(checkpoint: Path) -> dict[str, Any]:
    """Reads the report of a checkpoint's diagnosis."""
    return json.loads((checkpoint / DIAGNOSTICS / REPORT).read_text(encoding="utf-8"))


def write_answers_image(answered: Sequence[tuple[Question, str]], output: Path) -> None:
    """Writes a PNG of held-out images: above each question and answer, below the truth if wrong."""
    column_count = 4
    row_count = ceil(len(answered) / column_count)
    figure = Figure(figsize=(2.4 * column_count, 2.7 * row_count), layout="constrained")
    grid = figure.subplots(row_count, column_count, squeeze=False)
    for image_axes in grid.flat:
        image_axes.set_axis_off()
    for image_axes, (question, answer) in zip(grid.flat, answered, strict=False):
        text_style = {"transform": image_axes.transAxes, "ha": "center", "fontsize": 9}
        answer_choices = CHOICES.get(question.kind, (question.answer,))
        is_right = named(answer, answer_choices) == question.answer
        image_axes.imshow(load_image(question.image))
        image_axes.set_title(f"{question.text}\n", fontsize=9, wrap=True)
        caption = shorten(answer, 40, placeholder=" ...")
        color = "green" if is_right else "crimson"
        image_axes.text(0.5, 1.02, caption, color=color, weight="bold", **text_style)
        if not is_right:
            image_axes.text(0.5, -0.08, f"truth: {question.answer}", **text_style)
    with atomic_write(output) as partial:
        figure.savefig(partial, format="png", dpi=120, bbox_inches="tight")


def print_results(console: Console, results: dict, output: Path, pages: Sequence[Path]) -> None:
    """Prints what a quickstart has shown.

    These are a table of accuracies with their controls, the time, whether the reloaded checkpoint
    gives the same logits, the verdicts of the reports, and the paths of files.

    Args:
        console: Where they are printed.
        results: The content of `results.json`.
        output: Folder of the run.
        pages: The pages of the diagnoses.
    """
    accuracy_columns = {
        "before": results["before"]["accuracy"],
        "after": results["after"]["accuracy"],
        "after, blank image": results["after"]["blank"],
    }
    if results["baseline"]:
        accuracy_columns["without the norm"] = results["baseline"]["accuracy"]
    accuracy_columns["majority answer"] = results["majority"]
    table = Table("kind", title="Held-out accuracy", title_justify="left")
    for column_title in ("questions", *accuracy_columns):
        table.add_column(column_title, justify="right")
    for question_kind in METRICS:
        accuracies = [f"{column[question_kind]:.2f}" for column in accuracy_columns.values()]
        table.add_row(question_kind, str(results["count"][question_kind]), *accuracies)
    console.print(table)
    total_seconds = sum(seconds for step, seconds in results["seconds"].items() if step != "fetch")
    console.print(f"All but fetching took {total_seconds:.0f} seconds.")
    logits = "the same logits" if results["reloaded_alike"] else "[red]other logits"
    console.print(f"Reloaded in a clean process from its own code: {logits}.")
    for checkpoint, sentences in results["verdicts"].items():
        verdict = " ".join(sentences)
        console.print(f"Report on {checkpoint}: {verdict}", highlight=False, markup=False)
    model_folder = output / "model"
    files = [
        ("Checkpoint:", model_folder),
        ("Model card:", model_folder / "README.md"),
        ("Images:", output / "images.png"),
        *[("Report:", page) for page in pages],
    ]
    for label, result_file in files:
        console.print(f"{label:11} {result_file}", markup=False, soft_wrap=True)
