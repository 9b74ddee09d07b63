# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`report.html`: all that a diagnosis found in one file, for a person."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..findings import findings
from ..report import PAGE, Drawing, Report
from ..verdict import verdict
from .tables import embedding_tables, gain_tables, interface_tables, model_table


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
    "theory": ("Theory", "What the norms predict of the rotation (section 3.1).", None),
}
"""`Drawing.section`: the section's title, subject and tables, in reading order."""


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
    claims = findings(report, against)
    if all(claim.outcome == "does not apply" for claim in claims):  # a vision encoder or a language model alone
        claims = []
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
        findings=claims,
        sections=_sections(models, drawings, folder),
        left_out=list(dict.fromkeys(sentence for model in reversed(models) for sentence in model.left_out)),
        data=model_table(models),
        provenance=provenance,
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def _sections(models: list[Report], drawings: Sequence[Drawing], folder: Path) -> list[dict[str, Any]]:
    """The sections that have something to show."""
    sections = []
    for id, (title, subject, tables_of) in SECTIONS.items():
        tables = [table for table in tables_of(models) if table.rows] if tables_of else []
        drawn = [drawing for drawing in drawings if drawing.section == id]
        encoded = [b64encode((folder / drawing.file).read_bytes()).decode() for drawing in drawn]
        images = list(zip(drawn, encoded, strict=True))
        if tables or images:
            sections.append({"id": id, "title": title, "subject": subject, "tables": tables, "images": images})
    return sections
