# SPDX-License-Identifier: Apache-2.0
"""`report.html`: the results of a diagnosis in one file, for a person."""

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ..assembly.gain import EmbeddingStatistics
from .figures import STAGES
from .findings import findings, verdict
from .report import KINDS, PAGE, Drawing, Gain, Report, number, paper_ratios, spread


RATIOS = {
    "ratio": "visual tokens / vocabulary",
    "ratio_data": "visual tokens / text in the data",
    "scale": "text as received / text as stored",
}
"""Labels of the ratios in `Interface`."""

GAIN = ["L2 norm", "Mean |gain|", "Mean |bias|", "Start", "Distance from start", "Bias, from 0"]
"""Labels of the fields of `Gain`."""

PROPERTIES = {
    "model_type": "Family",
    "dtype": "Precision of the decoder",
    "hidden_size": "Hidden size d",
    "layers": "Layers L of the decoder",
    "projector": "Projector",
    "norm": "Norm after the projector",
    "data": "Data",
    "samples": "Samples",
}
"""Labels of the attributes of `Report` that say what was measured."""

Table = dict[str, Any]


def write_page(
    report: Report, against: Report | None, drawings: list[Drawing], folder: Path, provenance: dict
) -> None:
    """Writes `report.html` into `folder`. It includes the figures, whose files are there."""
    models = [report] if against is None else [against, report]
    images: dict[str, list[tuple[Drawing, str]]] = {}
    for drawing in drawings:
        content = (folder / drawing.file).read_bytes()
        images.setdefault(drawing.section, []).append((drawing, b64encode(content).decode()))
    left_out = list(report.left_out)
    if against is not None:
        left_out += [reason for reason in against.left_out if reason not in left_out]
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html.jinja").render(
        report=report,
        against=against,
        verdict=verdict(report, against),
        findings=findings(report, against),
        tables=tables_of(models),
        images=images,
        left_out=left_out,
        provenance=provenance,
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def tables_of(models: Sequence[Report]) -> dict[str, list[Table]]:
    """Returns the tables of each section, and of the data.

    If there are two models, the first is the baseline.
    """
    names = [model.model for model in models]
    for place in range(len(models) - 1):
        names[place] += " (baseline)"
    gains = {name: model.gain for name, model in zip(names, models, strict=True) if model.gain}
    return {
        "interface": [_interface_table(models, names)],
        "embeddings": [_embedding_table(model.embeddings) for model in models if model.embeddings],
        "gain": [_gain_table(gains)] if gains else [],
        "data": [_data_table(models, names)],
    }


def _table(caption: str, columns: list[str], rows: list[list[str]]) -> Table:
    """Returns a table as the template draws it. Columns with only numbers are aligned right."""
    numeric = []
    for column in zip(*rows, strict=True):
        numeric.append(all(cell[:1] in "0123456789−–" for cell in column))
    return {"caption": caption, "columns": columns, "rows": rows, "numeric": numeric}


def _interface_table(models: Sequence[Report], names: list[str]) -> Table:
    """Norms and ratios at the interface, without those that no model has."""
    rows = []
    for stage, (_, label) in STAGES.items():
        rows.append([label, *(spread(getattr(model.interface, stage)) for model in models)])
    for ratio, label in RATIOS.items():
        rows.append([label, *(number(getattr(model.interface, ratio)) for model in models)])
    rows = [row for row in rows if set(row[1:]) != {"–"}]
    ratios = paper_ratios().values()
    lowest = number(min(ratios), 2)
    highest = number(max(ratios), 2)
    caption = (
        f"L2 norms, and ratios of their means: aligned is 1, the paper's are {lowest} to {highest}."
    )
    return _table(caption, ["Tokens", *names], rows)


def _embedding_table(embeddings: EmbeddingStatistics) -> Table:
    """The tokens of largest norm in an embedding matrix."""
    rows = []
    for token in embeddings.top:
        text = "–" if token.text is None else repr(token.text)
        rows.append([str(token.id), text, number(token.norm)])
    caption = f"{embeddings.model}: {spread(embeddings)}, and the tokens of largest norm."
    return _table(caption, ["Token", "Text", "Norm"], rows)


def _gain_table(gains: dict[str, Gain]) -> Table:
    """Gain and bias by the model's name."""
    rows = [[name, *map(number, vars(gain).values())] for name, gain in gains.items()]
    return _table("The norm after the projector.", ["Model", *GAIN], rows)


def _data_table(models: Sequence[Report], names: list[str]) -> Table:
    """What the models are, and the number of their tokens by kind."""
    rows = []
    for name, label in PROPERTIES.items():
        rows.append([label, *(str(getattr(model, name) or "–") for model in models)])
    for kind in KINDS:
        counts = [model.tokens.get(kind, 0) for model in models]
        if any(counts):
            rows.append([f"{kind.capitalize()} tokens", *(f"{count:,}" for count in counts)])
    return _table("What was measured.", ["", *names], rows)
