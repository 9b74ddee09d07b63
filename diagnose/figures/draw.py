# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""PNG figures of reports: `draw(report, against, output)`."""

from pathlib import Path

from ..report import Drawing, Report
from .attention import attention_figures
from .depth import depth_figures, predicted
from .dynamics import dynamics, training
from .interface import embeddings, interface
from .style import Sketch, save, shown


def draw(report: Report, against: Report | None, output: Path) -> list[Drawing]:
    """Draws everything that the reports hold.

    Args:
        report: Of the model in question.
        against: Of the baseline, drawn on the same axes.
        output: Folder for the PNG files; the images that attention is drawn on are read from it.

    Returns:
        The figures in reading order.

    Raises:
        OSError: `output` cannot be written, or an image cannot be read.
    """
    models = shown(report, against)
    sketches: list[Sketch | None] = [
        interface(models),
        *depth_figures(models),
        embeddings(models),
        dynamics(models),
        training(models),
        *attention_figures(models, output),
        predicted(models),
    ]
    return [save(sketch, output) for sketch in sketches if sketch is not None]
