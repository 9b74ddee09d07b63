# SPDX-License-Identifier: Apache-2.0
"""`report.html`: all that a diagnosis found in one file, for a person."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from .figures import STAGES
from .findings import findings, verdict
from .report import KINDS, PAGE, Drawing, Report, number, paper_ratios, spread


SECTIONS = {
    "interface": ("At the interface", "Tokens between the vision encoder and the first decoder layer (RQ1, RQ2)."),
    "depth": ("In depth", "What the decoder's layers do to visual and to text tokens (RQ3, section 3)."),
    "embeddings": ("Embedding matrices", "L2 norms of text embeddings, as stored (appendix C)."),
    "gain": ("Gain", "The norm after the projector, and what training changed (section 5.3)."),
    "dynamics": ("Training dynamics", "Inter-layer cosines recorded during training (appendix F)."),
    "attention": ("Attention", "Where the text after an image looks in it (appendix G)."),
}
"""`Drawing.section`: the section's title and subject, in reading order."""


def write_page(
    report: Report, against: Report | None, drawings: Sequence[Drawing], folder: Path, *, provenance: Mapping[str, str]
) -> None:
    """Writes `report.html` into `folder`, with the figures inside, whose files are there."""
    models = [report] if against is None else [against, report]
    tables = tables_of(models)
    sections = []
    for id, (title, subject) in SECTIONS.items():
        shown = [drawing for drawing in drawings if drawing.section == id]
        images = [(drawing, b64encode((folder / drawing.file).read_bytes()).decode()) for drawing in shown]
        content = {"tables": tables.get(id, []), "images": images}
        if any(content.values()):
            sections.append({"id": id, "title": title, "subject": subject, **content})
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html.jinja").render(
        report=report,
        against=against,
        verdict=verdict(report, against),
        findings=findings(report, against),
        sections=sections,
        left_out=dict.fromkeys(sentence for model in reversed(models) for sentence in model.left_out),
        data=tables["data"][0],
        provenance=provenance,
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def table(caption: str, columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """A table as the template draws it; the first cell of a row is its header.

    Columns that hold numbers alone are aligned to the right.
    """
    numeric = [all(cell[:1] in "0123456789−–" for cell in column) for column in zip(*rows, strict=True)]
    return {"caption": caption, "columns": columns, "rows": rows, "numeric": numeric}


def tables_of(models: Sequence[Report]) -> dict[str, list[dict[str, Any]]]:
    """The tables of each section, and of the data; of two models, the first is the baseline."""
    names = [*(f"{model.model} (baseline)" for model in models[:-1]), models[-1].model]
    interface = [
        *([label, *(spread(getattr(m.interface, stage)) for m in models)] for stage, (_, label) in STAGES.items()),
        ["visual tokens / vocabulary", *(number(model.interface.ratio) for model in models)],
        ["visual tokens / text in the data", *(number(model.interface.ratio_data) for model in models)],
        ["text as received / text as stored", *(number(model.interface.scale) for model in models)],
    ]
    low, high = (number(limit(paper_ratios().values()), 2) for limit in (min, max))
    caption = (
        "L2 norms from the encoder to the first decoder layer, and ratios of their means: 1 is "
        f"aligned, and visual tokens of the paper's models have {low} to {high}."
    )
    embeddings = [
        table(
            f"{read.model}: {spread(read)}, and the tokens of largest norm.",
            ["Token", "Text", "Norm"],
            [[f"{row.id}", "–" if row.text is None else repr(row.text), number(row.norm)] for row in read.top],
        )
        for model in models
        if (read := model.embeddings)
    ]
    gains = [
        [name, *map(number, vars(model.gain).values())]
        for name, model in zip(names, models, strict=True)
        if model.gain
    ]
    heads = ["Model", "L2 norm", "Mean |gain|", "Mean |bias|", "Start", "Distance from start", "Bias, from 0"]
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
    data = [[label, *(str(getattr(model, field) or "–") for model in models)] for field, label in labels.items()]
    for kind in KINDS:
        if any(kind in model.tokens for model in models):
            data.append([f"{kind.capitalize()} tokens", *(f"{model.tokens.get(kind, 0):,}" for model in models)])
    return {
        "interface": [table(caption, ["Tokens", *names], [row for row in interface if {*row[1:]} != {"–"}])],
        "embeddings": embeddings,
        "gain": [table("The norm after the projector.", heads, gains)] if gains else [],
        "data": [table("What was measured.", ["", *names], data)],
    }
