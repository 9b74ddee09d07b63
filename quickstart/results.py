# SPDX-License-Identifier: Apache-2.0
"""What the quickstart asks and measures of its models, and what it prints and draws of that."""

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


EASY_VQA_TASK, EMOJI_TASK = "offline_easy_vqa", "offline_emoji"
METRICS = {kind: (EASY_VQA_TASK, f"acc_{kind.replace('/', '_')}") for kind in QUESTION_KINDS}
METRICS |= {OVERALL: (EASY_VQA_TASK, "acc"), "emoji": (EMOJI_TASK, "acc")}
"""Task of the offline suite and metric of each kind of question."""


def ask_held_out(checkpoint: Path, limit: int | None, bf16: bool) -> dict[str, Any]:
    """Asks a checkpoint the held-out questions, with `limit` the first so many of each task.

    Results are kept in its folder, and those there are used. Returns `"accuracy"`, `"blank"` (with
    a white image), `"majority"` (of always the commonest answer) and `"count"`, each by kind.
    """
    tasks, device = (EASY_VQA_TASK, EMOJI_TASK), "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        suite = evaluate(str(checkpoint), tasks=tasks, limit=limit, batch_size=128, dtype="float32")
    for task, reason in suite.failed.items():
        raise RuntimeError(f"{task} could not be run: {reason}")
    results = read_evaluations(checkpoint)
    scores = {(result.task, metric.name): metric for result in results for metric in result.metrics}
    metrics = [(kind, scores[key]) for kind, key in METRICS.items()]
    return {
        "accuracy": {kind: metric.value for kind, metric in metrics},
        "blank": {kind: metric.references["blank image"] for kind, metric in metrics},
        "majority": {kind: metric.references["commonest answer"] for kind, metric in metrics},
        "count": {kind: metric.samples for kind, metric in metrics},
    }


def diagnose_once(checkpoint: Path, baseline: Path | None, samples: int, suffix: str = "") -> Path:
    """Diagnoses a checkpoint (and a baseline), unless its report has that; returns the page."""
    folder = checkpoint / DIAGNOSTICS
    if not (folder / REPORT).exists() or (baseline and not read_report(checkpoint)["against"]):
        against = str(baseline) if baseline else None
        name, plain = f"quickstart{suffix}", f"quickstart-no-norm{suffix}"
        diagnose(str(checkpoint), against=against, samples=samples, name=name, against_name=plain)
    return folder / PAGE


def read_report(checkpoint: Path) -> dict[str, Any]:
    """The report of a checkpoint's diagnosis."""
    return json.loads((checkpoint / DIAGNOSTICS / REPORT).read_text(encoding="utf-8"))


def draw_images(answered: Sequence[tuple[Question, str]], output: Path) -> None:
    """Draws held-out images with question, answer and truth into one PNG."""
    columns, rows = 4, ceil(len(answered) / 4)
    figure = Figure(figsize=(2.4 * columns, 2.7 * rows), layout="constrained")
    for axes in (grid := figure.subplots(rows, columns, squeeze=False)).flat:
        axes.set_axis_off()
    for axes, (question, answer) in zip(grid.flat, answered, strict=False):
        right = named(answer, CHOICES.get(question.kind, (question.answer,))) == question.answer
        axes.imshow(load_image(question.image))
        axes.set_title(f"{question.text}\n", fontsize=9, wrap=True)
        style = {"transform": axes.transAxes, "ha": "center", "fontsize": 9}
        caption, color = shorten(answer, 40, placeholder=" ..."), "green" if right else "crimson"
        axes.text(0.5, 1.02, caption, color=color, weight="bold", **style)
        if not right:
            axes.text(0.5, -0.08, f"truth: {question.answer}", **style)
    with atomic_write(output) as partial:
        figure.savefig(partial, format="png", dpi=120, bbox_inches="tight")


def print_results(console: Console, results: dict, output: Path, pages: Sequence[Path]) -> None:
    """Prints accuracy by kind with its controls, the time taken, and the verdicts."""
    before, after, baseline = results["before"], results["after"], results["baseline"]
    columns = {
        "before": before["accuracy"],
        "after": after["accuracy"],
        "after, blank image": after["blank"],
        **({"without the norm": baseline["accuracy"]} if baseline else {}),
        "majority answer": results["majority"],
    }
    table = Table("kind", title="Held-out accuracy", title_justify="left")
    for column in ("questions", *columns):
        table.add_column(column, justify="right")
    for kind in METRICS:
        shares = [f"{cells[kind]:.2f}" for cells in columns.values()]
        table.add_row(kind, str(results["count"][kind]), *shares)
    console.print(table)
    total = sum(seconds for name, seconds in results["seconds"].items() if name != "fetch")
    console.print(f"All but fetching took {total:.0f} seconds.")
    same = "the same logits" if results["reloaded_alike"] else "[red]other logits"
    console.print(f"Reloaded in a clean process from its own code: {same}.")
    for name, sentences in results["verdicts"].items():
        console.print(f"Report on {name}: {' '.join(sentences)}", highlight=False, markup=False)
    model, images = output / "model", output / "images.png"
    files = {"Checkpoint": model, "Model card": model / "README.md", "Images": images}
    for name, file in [*files.items(), *(("Report", page) for page in pages)]:
        console.print(f"{name + ':':11} {file}", markup=False, soft_wrap=True)
