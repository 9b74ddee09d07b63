# SPDX-License-Identifier: Apache-2.0
"""Evaluated models in the columns of the paper's table 4, above the paper's own rows."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from ..diagnose.paper import paper_tables
from .results import Evaluation


PAPER_COLUMNS = {
    "MMBench-EN": ("mmbench_en_dev", "acc_circular", 100),
    "MMStar": ("mmstar", "acc_by_category", 100),
    "POPE": ("pope", "acc", 100),
    "SEED-Bench-2-Plus": ("seedbench_2_plus", "acc", 100),
    "OCRBench": ("ocrbench", "total", 0.1),
    "ScienceQA": ("scienceqa", "acc", 100),
    "AI2D": ("ai2d", "acc", 100),
    "HellaSwag": ("hellaswag", "acc", 100),
    "MMLU": ("mmlu", "acc", 100),
}
"""Task, metric and factor of each column. The paper does not say which metric its HellaSwag is."""


def paper_scores(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """A model's scores as the paper gives them, by column, of the tasks that were evaluated whole."""
    values = {
        (result.task, metric.name): metric.value
        for result in evaluations
        if not result.partial
        for metric in result.metrics
        if metric.subset is None
    }
    scores = {
        name: factor * values[task, metric]
        for name, (task, metric, factor) in PAPER_COLUMNS.items()
        if (task, metric) in values
    }
    return scores | ({"average": sum(scores.values()) / len(scores)} if len(scores) == len(PAPER_COLUMNS) else {})


def paper_table(models: Mapping[str, Sequence[Mapping[str, float]]]) -> Table | None:
    """The table of the [`paper_scores`] of each model's runs; None if there is no column that all have."""
    paper = paper_tables()["table_4"]
    runs = [run for of_model in models.values() for run in of_model]
    shown = [name for name in paper["columns"] if all(name in run for run in runs)]
    if not shown:
        return None
    table = Table(caption="Rows of the paper are of its own models and training (its table 4).")
    for name in ("model", *shown):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, of_model in models.items():
        means = [sum(run[column] for run in of_model) / len(of_model) for column in shown]
        table.add_row(name, *(f"{mean:.2f}" for mean in means))
    table.add_section()
    for row in paper["rows"]:
        scores = dict(zip(paper["columns"], row["scores"], strict=True))
        table.add_row(f"paper: {row['model']}, {row['arm']}", *(f"{scores[column]:.2f}" for column in shown))
    return table
