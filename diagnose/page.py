# SPDX-License-Identifier: Apache-2.0
"""`report.html`: the results of a diagnosis in one file, for a person."""

from base64 import b64encode
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from .figures import STAGES
from .findings import findings, verdict
from .report import KINDS, PAGE, Drawing, Report, number, paper_ratios, spread


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
    """Writes `report.html`, with the figures in it, into the folder that has their files."""
    models = [report] if against is None else [against, report]
    images = defaultdict(list)
    for drawing in drawings:
        encoded = b64encode((folder / drawing.file).read_bytes()).decode()
        images[drawing.section].append((drawing, encoded))
    left_out = dict.fromkeys(report.left_out)
    if against is not None:
        left_out |= dict.fromkeys(against.left_out)
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
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
    (folder / PAGE).write_text(page, "utf-8")


def tables_of(models: Sequence[Report]) -> dict[str, list[Table]]:
    """Returns the tables of each section, and of the data.

    If there are two models, the first is the baseline.
    """
    names = [model.model for model in models]
    if len(models) == 2:
        names[0] += " (baseline)"
    gain_rows = []
    embedding_tables = []
    for name, model in zip(names, models, strict=True):
        if model.gain is not None:
            gain_rows.append([name, *map(number, vars(model.gain).values())])
        embeddings = model.embeddings
        if embeddings is not None:
            token_rows = []
            for token in embeddings.top:
                token_text = "–" if token.text is None else repr(token.text)
                token_rows.append([str(token.id), token_text, number(token.norm)])
            caption = f"{embeddings.model}: {spread(embeddings)}, and the tokens of largest norm."
            embedding_tables.append(_table(caption, ["Token", "Text", "Norm"], token_rows))
    gain_table = _table("The norm after the projector.", ["Model", *GAIN], gain_rows)
    return {
        "interface": [_interface_table(models, names)],
        "embeddings": embedding_tables,
        "gain": [gain_table] if gain_rows else [],
        "data": [_data_table(models, names)],
    }


def _table(caption: str, columns: list[str], rows: list[list[str]]) -> Table:
    """Returns a table as the template draws it. Columns with only numbers are aligned right."""
    numeric = []
    for column in zip(*rows, strict=True):
        numeric.append(all(cell[:1] in "0123456789−–" for cell in column))
    return {"caption": caption, "columns": columns, "rows": rows, "numeric": numeric}


def _interface_table(models: Sequence[Report], names: list[str]) -> Table:
    """Returns norms and ratios at the interface, without rows that no model has."""
    table_rows = []
    for stage, (_, row_label) in STAGES.items():
        norms = [spread(getattr(model.interface, stage)) for model in models]
        table_rows.append([row_label, *norms])
    for ratio_name, row_label in RATIOS.items():
        ratios = [number(getattr(model.interface, ratio_name)) for model in models]
        table_rows.append([row_label, *ratios])
    table_rows = [table_row for table_row in table_rows if set(table_row[1:]) != {"–"}]
    published = paper_ratios().values()
    caption = (
        "L2 norms, and ratios of their means: aligned is 1, the paper's are "
        f"{number(min(published), 2)} to {number(max(published), 2)}."
    )
    return _table(caption, ["Tokens", *names], table_rows)


def _data_table(models: Sequence[Report], names: list[str]) -> Table:
    """Returns what the models are, and the number of their tokens by kind."""
    table_rows = []
    for property_name, row_label in PROPERTIES.items():
        properties = [getattr(model, property_name) or "–" for model in models]
        table_rows.append([row_label, *map(str, properties)])
    for token_kind in KINDS:
        counts = [model.tokens.get(token_kind, 0) for model in models]
        if any(counts):
            row_label = f"{token_kind.capitalize()} tokens"
            table_rows.append([row_label, *(f"{count:,}" for count in counts)])
    return _table("What was measured.", ["", *names], table_rows)
