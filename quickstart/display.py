# SPDX-License-Identifier: Apache-2.0
"""What a quickstart run prints and draws: its images and results."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.table import Table

from ..checkpoint.files import atomic_write
from ..evaluate.answers import named
from ..fetched.easy_vqa import CHOICES, KINDS, OVERALL, Question, load_image
from .evaluate import EMOJI


IMAGES_PER_ROW = 4
"""Images side by side."""


def draw_images(answered: Sequence[tuple[Question, str]], output: Path) -> None:
    """Draws held-out images with question, answer and truth into one PNG."""
    from matplotlib.figure import Figure

    rows = ceil(len(answered) / IMAGES_PER_ROW)
    figure = Figure(figsize=(2.4 * IMAGES_PER_ROW, 2.7 * rows), layout="constrained")
    for axes in (grid := figure.subplots(rows, IMAGES_PER_ROW, squeeze=False)).flat:
        axes.set_axis_off()
    for axes, (question, said) in zip(grid.flat, answered, strict=False):
        right = named(said, CHOICES.get(question.kind, (question.answer,))) == question.answer
        axes.imshow(load_image(question.image))
        axes.set_title(f"{question.text}\n", fontsize=9, wrap=True)
        style = {"transform": axes.transAxes, "ha": "center", "fontsize": 9}
        answer, color = shorten(said, 40, placeholder=" ..."), "green" if right else "crimson"
        axes.text(0.5, 1.02, answer, color=color, weight="bold", **style)
        if not right:
            axes.text(0.5, -0.08, f"truth: {question.answer}", **style)
    with atomic_write(output) as partial:
        figure.savefig(partial, format="png", dpi=120, bbox_inches="tight")


def print_results(console: Console, results: dict[str, Any], output: Path, pages: Sequence[Path]) -> None:
    """Prints accuracy by kind with its controls, the time taken, and the verdicts."""
    table = Table(title="Held-out accuracy", title_justify="left")
    table.add_column("kind")
    before, after, baseline = results["before"], results["after"], results["baseline"]
    columns = {
        "before": before["accuracy"],
        "after": after["accuracy"],
        "after, blank image": after["blank"],
        **({"without the norm": baseline["accuracy"]} if baseline else {}),
        "majority answer": results["majority"],
    }
    for column in ("questions", *columns):
        table.add_column(column, justify="right")
    for kind in (*KINDS, OVERALL, EMOJI):
        cells = columns.values()
        table.add_row(kind, str(results["count"][kind]), *(f"{cell[kind]:.2f}" for cell in cells))
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
