# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The tables of `report.html` on embedding matrices, gain, training dynamics and attention."""

from collections.abc import Sequence
from itertools import zip_longest

from ..findings import attention_mean, attention_spread
from ..paper import paper_tables
from ..report import Report
from ..verdict import number, with_error
from .tables import Table, mean, names


def embedding_tables(models: Sequence[Report]) -> list[Table]:
    """Norms of embedding rows (table 6) and the largest (tables 7, 8)."""
    tables = [model.embeddings for model in models if model.embeddings]
    rows = [[table.model, number(table.mean), number(table.std), f"{table.rows:,}"] for table in tables]
    paper = [
        [f"{name}, {label}", f"{row[f'{key}_mean']:.4f}", f"{row[f'{key}_std']:.4f}", "–"]
        for name, row in paper_tables()["table_6"].items()
        for key, label in (("base", "base"), ("vl", "vision-language"))
    ]
    tops = [[[_token(row.text), str(row.id), number(row.norm)] for row in table.top] for table in tables]
    ranked = [
        [str(rank), *(cell for row in places for cell in row)]
        for rank, places in enumerate(zip_longest(*tops, fillvalue=["–"] * 3), 1)
    ]
    return [
        Table("L2 norms of the rows of embedding matrices.", ["Model", "Mean", "Std", "Rows"], rows, paper),
        Table(
            "Tokens of largest L2 norm.",
            ["Rank", *(["Token", "Id", "Norm"] * len(tables))],
            ranked,
            groups=[("", 1), *((table.model, 3) for table in tables)],
        ),
    ]


def gain_tables(models: Sequence[Report]) -> list[Table]:
    """Gain and bias of the norm after the projector (table 5)."""
    rows = [
        [
            name,
            *map(number, (gain.l2, gain.mean_abs, gain.bias_mean_abs, gain.start, gain.distance, gain.bias_distance)),
        ]
        for name, model in zip(names(models), models, strict=True)
        if (gain := model.gain)
    ]
    labels = {"default_init": "gain from 1, after stage 1", "ours": "aligned gain, after stage 1"}
    paper = [
        [labels[key], *(f"{row[name]:.4f}" for name in ("gain_l2", "gain_mean_abs", "bias_mean_abs")), *["–"] * 3]
        for key, row in paper_tables()["table_5_after_stage_1"].items()
    ]
    columns = ["Model", "L2 norm", "Mean |gain|", "Mean |bias|", "Start", "Distance", "Bias's distance"]
    groups = [("", 1), ("Now", 3), ("From the start", 3)]
    return [Table("The norm after the projector.", columns, rows, paper, groups)]


def dynamics_tables(models: Sequence[Report]) -> list[Table]:
    """Inter-layer cosines by training step, averaged over layers (figure 5)."""
    return [
        Table(
            f"Cosine similarity of consecutive states of {name}, mean over layers.",
            ["Step", "Visual", "Text"],
            [[f"{each.step:,}", number(mean(each.visual)), number(mean(each.text))] for each in model.dynamics],
            folded=len(model.dynamics) > 12,
        )
        for name, model in zip(names(models), models, strict=True)
        if model.dynamics
    ]


def attention_tables(models: Sequence[Report]) -> list[Table]:
    """Where text looks (appendix G), averaged over layers."""
    rows = [
        [
            each.question,
            name,
            " × ".join(map(str, each.grid)) if each.grid else "by token order",
            *(number(attention_mean([curve])) for curve in (each.image_share, each.entropy, each.bottom_bias)),
        ]
        for name, model in zip(names(models), models, strict=True)
        for each in model.attention
    ]
    columns = ["Question", "Model", "Visual tokens", "Share of the image", "Entropy", "Bottom bias"]
    caption = "Attention from the text after an image to the image, mean over layers, by question."
    by_question = Table(caption, columns, rows, folded=len(rows) > 8)
    measures = ("image_share", "entropy", "bottom_bias")
    over_all = [
        [name, f"{len(model.attention):,}", *(_spread(attention_spread(model, measure)) for measure in measures)]
        for name, model in zip(names(models), models, strict=True)
        if model.attention
    ]
    columns = ["Model", "Questions", "Share of the image", "Entropy", "Bottom bias"]
    caption = "Attention from the text after an image to the image, mean over layers and questions ± standard error."
    return [Table(caption, columns, over_all), by_question]


def _spread(spread: tuple[float, float | None] | None) -> str:
    return "–" if spread is None else with_error(*spread, digits=3)


def _token(text: str | None) -> str:
    return "–" if text is None else repr(text)
