# SPDX-License-Identifier: Apache-2.0
"""`report.html`: all that a diagnosis found in one file, for a person."""

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from .figures import STAGES
from .findings import findings, verdict
from .report import KINDS, PAGE, Drawing, Report, number, paper_ratios, spread


def write_page(
    report: Report, against: Report | None, drawings: list[Drawing], folder: Path, provenance: dict
) -> None:
    """Writes `report.html` into `folder`, with the figures inside, whose files are there."""
    models = [report] if against is None else [against, report]
    images: dict[str, list[tuple[Drawing, str]]] = {}
    for drawing in drawings:
        encoded = b64encode((folder / drawing.file).read_bytes()).decode()
        images.setdefault(drawing.section, []).append((drawing, encoded))
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html.jinja").render(
        report=report,
        against=against,
        verdict=verdict(report, against),
        findings=findings(report, against),
        tables=tables_of(models),
        images=images,
        left_out=dict.fromkeys(reason for model in reversed(models) for reason in model.left_out),
        provenance=provenance,
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def table(caption: str, columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """A table as the template draws it, with columns of numbers alone aligned to the right."""
    cells = zip(*rows, strict=True)
    numeric = [all(cell[:1] in "0123456789−–" for cell in column) for column in cells]
    return {"caption": caption, "columns": columns, "rows": rows, "numeric": numeric}


def tables_of(models: Sequence[Report]) -> dict[str, list[dict[str, Any]]]:
    """The tables of each section, and of the data; of two models, the first is the baseline."""
    names = [*(f"{model.model} (baseline)" for model in models[:-1]), models[-1].model]
    norms = [model.interface for model in models]
    interface = [
        [label, *(spread(getattr(norm, stage)) for norm in norms)]
        for stage, (_, label) in STAGES.items()
    ]
    interface += [
        ["visual tokens / vocabulary", *(number(norm.ratio) for norm in norms)],
        ["visual tokens / text in the data", *(number(norm.ratio_data) for norm in norms)],
        ["text as received / text as stored", *(number(norm.scale) for norm in norms)],
    ]
    interface = [row for row in interface if {*row[1:]} != {"–"}]
    low, high = (number(limit(paper_ratios().values()), 2) for limit in (min, max))
    caption = f"L2 norms, and ratios of their means: aligned is 1, the paper's are {low} to {high}."
    embeddings = []
    for read in filter(None, (model.embeddings for model in models)):
        rows = [
            [f"{row.id}", "–" if row.text is None else repr(row.text), number(row.norm)]
            for row in read.top
        ]
        largest = f"{read.model}: {spread(read)}, and the tokens of largest norm."
        embeddings.append(table(largest, ["Token", "Text", "Norm"], rows))
    gains = [
        [name, *map(number, vars(model.gain).values())]
        for name, model in zip(names, models, strict=True)
        if model.gain
    ]
    heads = ["Model", "L2 norm", "Mean |gain|", "Mean |bias|", "Start"]
    heads += ["Distance from start", "Bias, from 0"]
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
    data = []
    for field, label in labels.items():
        data.append([label, *(str(getattr(model, field) or "–") for model in models)])
    for kind in KINDS:
        counts = [model.tokens.get(kind, 0) for model in models]
        if any(counts):
            data.append([f"{kind.capitalize()} tokens", *(f"{count:,}" for count in counts)])
    return {
        "interface": [table(caption, ["Tokens", *names], interface)],
        "embeddings": embeddings,
        "gain": [table("The norm after the projector.", heads, gains)] if gains else [],
        "data": [table("What was measured.", ["", *names], data)],
    }
