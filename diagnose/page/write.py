# SPDX-License-Identifier: Apache-2.0
"""`report.html`: all that a diagnosis found in one file, for a person."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..figures.interface import STAGES
from ..findings import findings, verdict
from ..paper import paper_ratios
from ..report import KINDS, PAGE, Drawing, Report, number, spread


def write_page(
    report: Report,
    against: Report | None,
    drawings: Sequence[Drawing],
    folder: Path,
    *,
    provenance: Mapping[str, str],
) -> None:
    """Writes `report.html` into `folder`, with style and figures inside, whose files are in the folder."""
    models = [report] if against is None else [against, report]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(
        report=report,
        against=against,
        verdict=verdict(report, against),
        findings=findings(report, against),
        sections=_sections(models, drawings, folder),
        left_out=list(dict.fromkeys(sentence for model in reversed(models) for sentence in model.left_out)),
        data=model_table(models),
        provenance=provenance,
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def table(caption: str, columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """A table as the template draws it; the first cell of a row is its header, for which `columns` has a head too.

    Columns that hold numbers alone are aligned to the right.
    """
    numeric = [all(cell[:1] in "0123456789−–" for cell in column) for column in zip(*rows, strict=True)]
    return {"caption": caption, "columns": columns, "rows": rows, "numeric": numeric}


def names(models: Sequence[Report]) -> list[str]:
    """The models' names; of two, the first is the baseline."""
    return [*(f"{model.model} (baseline)" for model in models[:-1]), models[-1].model]


def interface_tables(models: Sequence[Report]) -> list[dict[str, Any]]:
    """Norms at every stage, and their ratios."""
    rows = [
        *([label, *(spread(getattr(m.interface, name)) for m in models)] for name, (_, label) in STAGES.items()),
        ["visual tokens / vocabulary", *(number(model.interface.ratio) for model in models)],
        ["visual tokens / text in the data", *(number(model.interface.ratio_data) for model in models)],
        ["text as received / text as stored", *(number(model.interface.scale) for model in models)],
    ]
    known = [row for row in rows if any(cell != "–" for cell in row[1:])]
    low, high = (number(limit(paper_ratios().values()), 2) for limit in (min, max))
    caption = (
        "L2 norms from the encoder to the first decoder layer, and ratios of their means: 1 is aligned, and visual "
        f"tokens of the paper's models have {low} to {high}."
    )
    return [table(caption, ["Tokens", *names(models)], known)]


def embedding_tables(models: Sequence[Report]) -> list[dict[str, Any]]:
    """Mean and deviation of an embedding matrix, and its rows of largest norm (tables 6 to 8)."""
    return [
        table(
            f"{read.model}: {spread(read)}, and the tokens of largest norm.",
            ["Token", "Text", "Norm"],
            [[f"{row.id}", "–" if row.text is None else repr(row.text), number(row.norm)] for row in read.top],
        )
        for model in models
        if (read := model.embeddings)
    ]


def gain_tables(models: Sequence[Report]) -> list[dict[str, Any]]:
    """Gain and bias of the norm after the projector (table 5)."""
    rows = []
    for name, model in zip(names(models), models, strict=True):
        if gain := model.gain:
            now = (gain.l2, gain.mean_abs, gain.bias_mean_abs)
            rows.append([name, *map(number, (*now, gain.start, gain.distance, gain.bias_distance))])
    columns = ["Model", "L2 norm", "Mean |gain|", "Mean |bias|", "Start", "Distance from start", "Bias, from 0"]
    return [table("The norm after the projector.", columns, rows)]


def model_table(models: Sequence[Report]) -> dict[str, Any]:
    """The table of models and data."""
    labels = {
        "model_type": "Family",
        "dtype": "Precision of the decoder",
        "hidden_size": "Hidden size d",
        "layers": "Layers L of the decoder",
        "projector": "Projector",
        "norm": "Norm after the projector",
        "data": "Data",
        "samples": "Samples",
    }
    rows = [[label, *(str(getattr(model, name) or "–") for model in models)] for name, label in labels.items()]
    for kind in KINDS:
        if any(kind in model.tokens for model in models):
            rows.append([f"{kind.capitalize()} tokens", *(f"{model.tokens.get(kind, 0):,}" for model in models)])
    return table("What was measured.", ["", *names(models)], rows)


SECTIONS = {
    "interface": (
        "At the interface",
        "Tokens between the vision encoder and the first decoder layer (RQ1, RQ2).",
        interface_tables,
    ),
    "depth": ("In depth", "What the decoder's layers do to visual and to text tokens (RQ3, section 3).", None),
    "embeddings": ("Embedding matrices", "L2 norms of text embeddings, as stored (appendix C).", embedding_tables),
    "gain": ("Gain", "The norm after the projector, and what training changed (section 5.3).", gain_tables),
    "dynamics": ("Training dynamics", "Inter-layer cosines recorded during training (appendix F).", None),
    "attention": ("Attention", "Where the text after an image looks in it (appendix G).", None),
}
"""`Drawing.section`: the section's title, subject and tables, in reading order."""


def _sections(models: list[Report], drawings: Sequence[Drawing], folder: Path) -> list[dict[str, Any]]:
    """The sections that have something to show."""
    sections = []
    for id, (title, subject, tables_of) in SECTIONS.items():
        tables = [drawn for drawn in tables_of(models) if drawn["rows"]] if tables_of else []
        images = [
            (drawing, b64encode((folder / drawing.file).read_bytes()).decode())
            for drawing in drawings
            if drawing.section == id
        ]
        if tables or images:
            sections.append({"id": id, "title": title, "subject": subject, "tables": tables, "images": images})
    return sections
