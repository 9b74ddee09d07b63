# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The tables of `report.html`: what was measured, with the paper's rows beneath if it has them.

Models come as `Models`: one, or the baseline and then the model in question.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ..figures.interface import STAGES
from ..findings import attention_spread
from ..measure.theory import predicted_rotation
from ..paper import paper_ratios, paper_tables
from ..report import KINDS, Moments, Report
from ..verdict import asymmetry, layers, number, with_error


Row = list[str]
Models = Sequence[Report]

NORMS: dict[str | None, str] = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "none": "none"}


@dataclass(frozen=True)
class Table:
    """A table as the template draws it; the first cell of a row is its header.

    Attributes:
        caption: What it shows.
        columns: Heads of the columns, the row headers' included.
        rows: What was measured here.
        paper: What the paper published, in the same columns.
    """

    caption: str
    columns: Row
    rows: list[Row]
    paper: list[Row] = field(default_factory=list)

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether it holds numbers only; these are aligned to the right."""
        return [all(cell[:1] in "0123456789−–" for cell in column) for column in zip(*self.rows, strict=True)]


def names(models: Models) -> list[str]:
    """The models' names; of two, the first is the baseline."""
    if len(models) == 1:
        return [models[0].model]
    return [f"{models[0].model} (baseline)", models[1].model]


def interface_tables(models: Models) -> list[Table]:
    """Norms at every stage, their ratios, and the paper's tables 1 to 3."""
    stages = [
        [label, *(_spread(getattr(model.interface, name)) for model in models)] for name, (_, label) in STAGES.items()
    ]
    ratios = [
        ["visual tokens / vocabulary", *(number(model.interface.ratio) for model in models)],
        ["visual tokens / text in the data", *(number(model.interface.ratio_data) for model in models)],
        ["text as received / text as stored", *(number(model.interface.scale) for model in models)],
    ]
    tables = [
        Table("L2 norms from the encoder to the first decoder layer.", ["Tokens", *names(models)], _known(stages)),
        Table("Ratios of mean norms; 1 is aligned.", ["Ratio", *names(models)], _known(ratios)),
    ]
    return [*tables, _as_in_the_paper(models)] if tables[0].rows else []


def depth_tables(models: Models) -> list[Table]:
    """What the layers do to the tokens of each kind, averaged over layers."""
    rows = []
    for kind in KINDS:
        for name, model in zip(names(models), models, strict=True):
            if (depth := model.depth) is None or kind not in depth.rotation:
                continue
            norm, final = depth.norm[kind].mean, depth.final_norm.get(kind)
            curves = (depth.cosine, depth.rotation, depth.update_norm, depth.update_angle)
            cosine, rotation, size, angle = (_mean(curve[kind].mean[:-1]) for curve in curves)
            norms = [number(value) for value in (norm[0], norm[-1], final.mean if final else None)]
            label = f"{kind}, {name}" if len(models) > 1 else kind
            rows.append([label, *norms, number(cosine), _degrees(rotation), number(size), _degrees(angle)])
    columns = ["Tokens", "First norm", "Last norm", "After final norm"]
    columns += ["Cosine", "Rotation", "Update norm", "Update angle"]
    return [Table("Norms of the states, and means over layers 1 to L − 1.", columns, rows)]


def embedding_tables(models: Models) -> list[Table]:
    """Norms of embedding rows (table 6)."""
    tables = [model.embeddings for model in models if model.embeddings]
    rows = [[table.model, number(table.mean), number(table.std), f"{table.rows:,}"] for table in tables]
    paper = [
        [f"{name}, {label}", f"{row[f'{key}_mean']:.4f}", f"{row[f'{key}_std']:.4f}", "–"]
        for name, row in paper_tables()["table_6"].items()
        for key, label in (("base", "base"), ("vl", "vision-language"))
    ]
    return [Table("L2 norms of the rows of embedding matrices.", ["Model", "Mean", "Std", "Rows"], rows, paper)]


def gain_tables(models: Models) -> list[Table]:
    """Gain and bias of the norm after the projector (table 5)."""
    rows = []
    for name, model in zip(names(models), models, strict=True):
        if gain := model.gain:
            now = (gain.l2, gain.mean_abs, gain.bias_mean_abs)
            rows.append([name, *map(number, (*now, gain.start, gain.distance, gain.bias_distance))])
    labels = {"default_init": "gain from 1, after stage 1", "ours": "aligned gain, after stage 1"}
    paper = [
        [labels[key], *(f"{row[name]:.4f}" for name in ("gain_l2", "gain_mean_abs", "bias_mean_abs")), *["–"] * 3]
        for key, row in paper_tables()["table_5_after_stage_1"].items()
    ]
    columns = ["Model", "L2 norm", "Mean |gain|", "Mean |bias|", "Start", "Distance from start", "Bias, from 0"]
    return [Table("The norm after the projector.", columns, rows, paper)]


def attention_tables(models: Models) -> list[Table]:
    """Where text looks (appendix G), averaged over layers and questions."""
    rows = []
    for name, model in zip(names(models), models, strict=True):
        spreads = (attention_spread(model, field) for field in ("image_share", "entropy", "bottom_bias"))
        cells = ["–" if spread is None else with_error(*spread, digits=3) for spread in spreads]
        if model.attention:
            rows.append([name, f"{len(model.attention):,}", *cells])
    columns = ["Model", "Questions", "Share of the image", "Entropy", "Bottom bias"]
    caption = "Attention from the text after an image to the image, mean over layers and questions ± standard error."
    return [Table(caption, columns, rows)]


def theory_tables(models: Models) -> list[Table]:
    """The ratio of rotations that section 3.1 predicts from the norms, beside the measured one."""
    rows = []
    for name, model in zip(names(models), models, strict=True):
        if model.depth is not None and (measured := asymmetry(model)) is not None:
            rotation = predicted_rotation(model.depth)
            predicted = fmean(rotation["visual"][:-1]) / fmean(rotation["text"][:-1])
            rows.append([name, number(predicted), number(measured)])
    caption = "Ratio of rotations if updates had the same size and angle for visual and text tokens, and as measured."
    return [Table(caption, ["Model", "Predicted from the norms", "Measured"], rows)]


def model_table(models: Models) -> Table:
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
    ]
    for kind in KINDS:
        if any(kind in model.tokens for model in models):
            rows.append([f"{kind.capitalize()} tokens", *(f"{model.tokens.get(kind, 0):,}" for model in models)])
    return Table("What was measured.", ["", *names(models)], rows)


def _as_in_the_paper(models: Models) -> Table:
    """The norms of the paper's tables 1 to 3, in the same columns as its rows."""
    rows = []
    for name, model in zip(names(models), models, strict=True):
        found = model.interface
        after = found.visual_table or found.projector_output
        stages = (found.encoder_output, found.projector_input, after, found.vocabulary_raw)
        rows.append([name, *map(_spread, stages), number(found.ratio)])
    paper, ratios = paper_tables(), paper_ratios()
    ovis = paper["table_3_ovis2_5"]
    published = [
        *([row["model"], _published(row, "norm"), *["–"] * 4] for row in paper["table_1_vision"]),
        *([row["model"], *["–"] * 3, _published(row, "norm"), "–"] for row in paper["table_1_text"]),
    ]
    for row in paper["table_2"]:
        norms = [_published(row, name) for name in ("before", "after", "text")]
        published.append([row["model"], "–", *norms, number(ratios[row["model"]], 3)])
    norms = [_published(ovis, name) for name in ("visual", "text")]
    published.append(["Ovis2.5", "–", "–", *norms, number(ratios["Ovis2.5"], 3)])
    columns = ["Model", "Encoder output", "Before the projector", "After it, or visual vocabulary", "Text", "Ratio"]
    return Table("Norms as in tables 1 to 3; of text, as stored.", columns, rows, published)


def _known(rows: list[Row]) -> list[Row]:
    return [row for row in rows if any(cell != "–" for cell in row[1:])]


def _spread(moments: Moments | None) -> str:
    return f"{number(moments.mean)} ± {number(moments.std)}" if moments else "–"


def _published(row: dict[str, float], name: str) -> str:
    """Mean and, if it is given, standard deviation with the decimals of the paper's tables 1 to 3."""
    return " ± ".join(f"{row[key]:,.2f}" for key in (f"{name}_mean", f"{name}_std") if key in row)


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _degrees(angle: float | None) -> str:
    return "–" if angle is None else f"{number(math.degrees(angle), 3)}°"
