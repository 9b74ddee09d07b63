# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`report.html`: all that a diagnosis found in one file, for a person."""

import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...checkpoint.files import finished_file
from ..findings import findings
from ..paper import paper_ratios
from ..report import PAGE, Drawing, Report
from ..verdict import asymmetry, entry_ratio, number, verdict
from .appendix import attention_tables, dynamics_tables, embedding_tables, gain_tables
from .tables import Table, depth_tables, interface_tables, model_table, theory_tables, vocabulary_tables


SECTIONS = {
    "interface": (
        "At the interface",
        "Tokens between the vision encoder and the first decoder layer (RQ1, RQ2).",
    ),
    "vocabulary": ("Visual vocabulary", "A visual embedding table takes the place of a projector (RQ4)."),
    "depth": ("In depth", "What the decoder's layers do to visual and to text tokens (RQ3, section 3)."),
    "embeddings": ("Embedding matrices", "The language models' text embeddings, as stored (appendix C)."),
    "gain": ("Gain", "The norm after the projector, and how far training has taken it (section 5.3)."),
    "dynamics": ("Training dynamics", "Inter-layer cosines recorded during training (appendix F)."),
    "attention": ("Attention", "Where the text after an image looks in it (appendix G)."),
    "theory": ("Theory", "What the norms predict of the rotation (section 3.1)."),
}
"""Title and subject of each section by its id, in reading order; all but "vocabulary" are `Drawing.section`."""


@dataclass(frozen=True)
class Measure:
    """A number in large type: the model's, the baseline's, and what the paper has of it."""

    title: str
    value: str
    baseline: str | None
    paper: str | None


@dataclass(frozen=True)
class Image:
    """A drawing as the page holds it."""

    title: str
    caption: str
    source: str
    width: int
    height: int


@dataclass(frozen=True)
class Section:
    """A part of the page that has something to show."""

    id: str
    title: str
    subject: str
    tables: list[Table]
    images: list[Image]


def write_page(
    report: Report,
    against: Report | None,
    drawings: Sequence[Drawing],
    folder: Path,
    *,
    provenance: Mapping[str, str],
) -> Path:
    """Writes `report.html` into `folder`: one file that needs no other and asks for nothing.

    Args:
        report: Of the model in question.
        against: Of the baseline.
        drawings: The figures, whose files lie in `folder`.
        folder: Where `report.html` appears, whole or not at all.
        provenance: Where the numbers come from: names and versions, in reading order.

    Raises:
        OSError: A figure cannot be read, or the page cannot be written.
        ValueError: A drawing belongs to no section, or its file is no PNG.
    """
    if unknown := [drawing for drawing in drawings if drawing.section not in SECTIONS]:
        raise ValueError(
            f"{unknown[0].file} is of section {unknown[0].section!r}. Choose one of {', '.join(SECTIONS)}."
        )
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
        measures=_measures(report, against),
        findings=claims,
        sections=_sections(models, drawings, folder),
        left_out=list(dict.fromkeys(sentence for model in reversed(models) for sentence in model.left_out)),
        data=model_table(models),
        provenance=provenance,
    )
    with finished_file(path := folder / PAGE) as partial:
        partial.write_text(page, encoding="utf-8")
    return path


def _sections(models: Sequence[Report], drawings: Sequence[Drawing], folder: Path) -> list[Section]:
    tables = {
        "interface": interface_tables(models),
        "vocabulary": vocabulary_tables(models),
        "depth": depth_tables(models),
        "embeddings": embedding_tables(models),
        "gain": gain_tables(models),
        "dynamics": dynamics_tables(models),
        "attention": attention_tables(models),
        "theory": theory_tables(models),
    }
    sections = [
        Section(
            id,
            title,
            subject,
            [table for table in tables[id] if table.rows],
            [_image(drawing, folder) for drawing in drawings if drawing.section == id],
        )
        for id, (title, subject) in SECTIONS.items()
    ]
    return [section for section in sections if section.tables or section.images]


def _image(drawing: Drawing, folder: Path) -> Image:
    data = (folder / drawing.file).read_bytes()
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"{drawing.file} is no PNG file. Draw it again.")
    width, height = struct.unpack(">II", data[16:24])
    source = f"data:image/png;base64,{b64encode(data).decode()}"
    return Image(drawing.title, drawing.caption, source, width, height)


def _measures(report: Report, against: Report | None) -> list[Measure]:
    low, high = (number(limit(paper_ratios().values()), 2) for limit in (min, max))
    ratios = [
        (
            "Norm of visual tokens over that of text",
            entry_ratio,
            f"the paper's models {low} to {high}",
        ),
        ("Rate of visual tokens over that of text", asymmetry, None),
    ]
    return [
        Measure(title, number(value, 3), number(ratio(against), 3) if against else None, paper)
        for title, ratio, paper in ratios
        if (value := ratio(report)) is not None
    ]
