# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, as PNG."""

from pathlib import Path

from ..report import Drawing, Report
from .attention import attention_figures
from .depth import cosine, dynamics, norms, rotation
from .interface import interface
from .style import DPI, Sketch, shown


def draw(report: Report, against: Report | None, output: Path) -> list[Drawing]:
    """Draws everything that the reports hold into the folder `output`, a baseline on the same axes.

    The images that attention is drawn on are read from that folder. The figures are in reading order.
    """
    models = shown(report, against)
    sketches: list[Sketch | None] = [
        interface(models),
        norms(models),
        cosine(models),
        rotation(models),
        dynamics(models),
        *attention_figures(models, output),
    ]
    drawn = [sketch for sketch in sketches if sketch is not None]
    for figure, drawing in drawn:
        figure.savefig(output / drawing.file, format="png", dpi=DPI)
    return [drawing for _, drawing in drawn]
