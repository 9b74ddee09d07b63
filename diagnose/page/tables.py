# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The tables of `report.html`: what was measured, with the paper's rows beneath where it has them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ..figures.interface import STAGES
from ..measure.theory import predicted_rotation
from ..paper import paper_tables
from ..report import KINDS, Curve, Depth, Moments, Report
from ..verdict import asymmetry, layers, number


Row = list[str]

NORMS: dict[str | None, str] = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "none": "none"}


@dataclass(frozen=True)
class Table:
    """A table as the template draws it; the first cell of a row is its header.

    Attributes:
        caption: What it shows.
        columns: Heads of the columns, the row headers' included.
        rows: What was measured here.
        paper: What the paper published, in the same columns.
        groups: Heads above the columns, each with how many columns it spans; empty without.
        folded: Whether it is shown on demand: it is long.
    """

    caption: str
    columns: Row
    rows: list[Row]
    paper: list[Row] = field(default_factory=list)
    groups: list[tuple[str, int]] = field(default_factory=list)
    folded: bool = False

    @property
    def numeric(self) -> list[bool]:
        """Whether a column holds nothing but numbers, which are set flush right."""
        return [all(cell[:1] in "0123456789−–" for cell in column) for column in zip(*self.rows, strict=True)]


def interface_tables(models: Sequence[Report]) -> list[Table]:
    """Norms at every stage, their ratios, and the paper's tables 1 and 2."""
    stages = [
        [label, *(cell for model in models for cell in _moments(getattr(model.interface, name)))]
        for name, (_, label) in STAGES.items()
        if any(getattr(model.interface, name) for model in models)
    ]
    if not stages:
        return []
    ratios = [
        ["visual tokens over the vocabulary", *(number(model.interface.ratio) for model in models)],
        ["visual tokens over text in the data", *(number(model.interface.ratio_data) for model in models)],
        ["text as received over text as stored", *(number(model.interface.scale) for model in models)],
    ]
    tables = [
        Table(
            "L2 norms from the encoder to the first decoder layer.",
            ["Tokens", *(["Mean", "Std", "Count"] * len(models))],
            stages,
            groups=[("", 1), *((name, 3) for name in names(models))],
        ),
        Table("Ratios of mean norms; 1 is aligned.", ["Ratio", *names(models)], _filled(ratios)),
    ]
    return [table for table in (*tables, _table_1(models), _table_2(models)) if table.rows]


def vocabulary_tables(models: Sequence[Report]) -> list[Table]:
    """Norms of a visual embedding table (table 3)."""
    rows = [
        [
            name,
            _spread(model.interface.visual_table),
            _spread(model.interface.indicator_table),
            _spread(model.interface.vocabulary_raw),
        ]
        for name, model in zip(names(models), models, strict=True)
        if model.interface.visual_table
    ]
    paper = paper_tables()["table_3_ovis2_5"]
    visual, text = (_published(paper[f"{kind}_mean"], paper[f"{kind}_std"]) for kind in ("visual", "text"))
    columns = ["Model", "Visual vocabulary", "Indicators", "Text vocabulary"]
    caption = "L2 norms of the rows of visual and text vocabularies, as stored."
    return [Table(caption, columns, rows, [["Ovis 2.5", visual, "–", text]])]


def depth_tables(models: Sequence[Report]) -> list[Table]:
    """Means over depth by kind of token, and every layer's values of visual and text tokens."""
    measured = [(name, model.depth) for name, model in zip(names(models), models, strict=True) if model.depth]
    rows = [
        [f"{kind}, {name}" if len(models) > 1 else kind, *_over_depth(depth, kind)]
        for kind in KINDS
        for name, depth in measured
        if kind in depth.rotation
    ]
    columns = ["Tokens", "First state", "Last state", "Final norm"]
    columns += ["Cosine", "Rotation", "Update norm", "Update angle"]
    groups = [("", 1), ("L2 norm", 3), ("Mean over layers 1 to L − 1", 4)]
    by_layer = [_by_layer(name, depth) for name, depth in measured]
    return [Table("What the decoder does to tokens of each kind.", columns, rows, groups=groups), *by_layer]


def model_table(models: Sequence[Report]) -> Table:
    """What was measured, and on what."""
    rows = [
        ["Family", *(model.model_type for model in models)],
        ["Precision of the decoder", *(model.dtype for model in models)],
        ["Hidden size d", *(str(model.hidden_size) for model in models)],
        ["Layers L of the decoder", *(str(layers(model) or "–") for model in models)],
        ["Projector", *(model.projector or "–" for model in models)],
        ["Norm after the projector", *(NORMS.get(model.norm, "–") for model in models)],
        ["Data", *(model.data or "–" for model in models)],
        ["Samples", *(f"{model.samples:,}" for model in models)],
        *(
            [f"{kind.capitalize()} tokens", *(f"{model.tokens.get(kind, 0):,}" for model in models)]
            for kind in KINDS
            if any(kind in model.tokens for model in models)
        ),
    ]
    return Table("What was measured.", ["", *names(models)], rows)


def names(models: Sequence[Report]) -> list[str]:
    """The models' names; where two are compared, the first is the baseline."""
    if len(models) == 1:
        return [models[0].model]
    return [f"{models[0].model} (baseline)", models[1].model]


def degrees(angle: float | None) -> str:
    """An angle in radians, written in degrees."""
    return "–" if angle is None else f"{number(math.degrees(angle), 3)}°"


def mean(values: list[float]) -> float | None:
    """Their mean; None of none."""
    return fmean(values) if values else None


def _table_1(models: Sequence[Report]) -> Table:
    paper, labelled = paper_tables(), list(zip(names(models), models, strict=True))
    rows = [
        [f"{name}, {label}", _spread(moments)]
        for label, field_name in (("encoder output", "encoder_output"), ("text embeddings", "vocabulary_raw"))
        for name, model in labelled
        if (moments := getattr(model.interface, field_name))
    ]
    published = [[row["model"], _published(row["norm_mean"], row["norm_std"])] for row in paper["table_1_vision"]]
    published += [[row["model"], _published(row["norm_mean"])] for row in paper["table_1_text"]]
    return Table("Both sides of the interface, as in table 1.", ["Model", "L2 norm"], rows, published)


def _table_2(models: Sequence[Report]) -> Table:
    rows = [
        [
            name,
            _spread(model.interface.projector_input),
            _spread(model.interface.projector_output),
            number(model.interface.vocabulary_raw.mean) if model.interface.vocabulary_raw else "–",
            number(model.interface.ratio),
        ]
        for name, model in zip(names(models), models, strict=True)
        if model.interface.projector_output
    ]
    published = [
        [
            row["model"],
            _published(row["before_mean"], row["before_std"]),
            _published(row["after_mean"], row["after_std"]),
            _published(row["text_mean"]),
            number(row["after_mean"] / row["text_mean"], 3),
        ]
        for row in paper_tables()["table_2"]
    ]
    columns = ["Model", "Before the projector", "After it", "Text", "Ratio"]
    return Table("Visual tokens around the projector against text, as in table 2.", columns, rows, published)


def _over_depth(depth: Depth, kind: str) -> Row:
    norm, final = depth.norm[kind].mean, depth.final_norm.get(kind)
    norms = [number(value) for value in (norm[0], norm[-1], final.mean if final else None)]
    cosine, rotation, size, angle = (
        mean(curves[kind].mean[:-1])
        for curves in (depth.cosine, depth.rotation, depth.update_norm, depth.update_angle)
    )
    return [*norms, number(cosine), degrees(rotation), number(size), degrees(angle)]


def _by_layer(name: str, depth: Depth) -> Table:
    quantities: list[tuple[str, dict[str, Curve], Callable[[float], str]]] = [
        ("Norm of the input", depth.norm, number),
        ("Geometric mean", depth.log_norm, _exponential),
        ("Cosine", depth.cosine, number),
        ("Rotation", depth.rotation, degrees),
        ("Update norm", depth.update_norm, number),
        ("Geometric mean", depth.log_update, _exponential),
        ("Update angle", depth.update_angle, degrees),
    ]
    kinds = [kind for kind in ("visual", "text") if kind in depth.rotation]
    rows = [
        [str(layer), *(show(curves[kind].mean[layer - 1]) for _, curves, show in quantities for kind in kinds)]
        for layer in range(1, 1 + max((len(depth.rotation[kind].mean) for kind in kinds), default=0))
    ]
    if rows:
        last = [show(curves[kind].mean[-1]) for _, curves, show in quantities[:2] for kind in kinds]
        rows.append(["output", *last, *["–"] * 5 * len(kinds)])
    groups = [("", 1), *((title, len(kinds)) for title, *_ in quantities)]
    return Table(f"{name}, layer by layer.", ["Layer", *kinds * len(quantities)], rows, groups=groups, folded=True)


def _exponential(logarithm: float) -> str:
    return number(math.exp(logarithm))


def _filled(rows: list[Row]) -> list[Row]:
    return [row for row in rows if any(cell != "–" for cell in row[1:])]


def _moments(moments: Moments | None) -> Row:
    return [number(moments.mean), number(moments.std), f"{moments.count:,}"] if moments else ["–"] * 3


def _spread(moments: Moments | None) -> str:
    return f"{number(moments.mean)} ± {number(moments.std)}" if moments else "–"


def _published(*values: float) -> str:
    """Mean and standard deviation with the decimals that the paper's tables 1 to 3 give."""
    return " ± ".join(f"{value:,.2f}" for value in values)


def theory_tables(models: Sequence[Report]) -> list[Table]:
    """The asymmetry that section 3.1 predicts from the norms, beside the measured one."""
    rows = [
        [name, number(_predicted(model)), number(measured)]
        for name, model in zip(names(models), models, strict=True)
        if (measured := asymmetry(model)) is not None
    ]
    title = "Ratio of rotations if updates had the same size and angle for visual and text tokens, and as measured."
    return [Table(title, ["Model", "Predicted from the norms", "Measured"], rows)]


def _predicted(report: Report) -> float | None:
    if report.depth is None or asymmetry(report) is None:
        return None
    rotation = predicted_rotation(report.depth)
    visual, text = (fmean(rotation[kind][:-1]) for kind in ("visual", "text"))
    return visual / text
