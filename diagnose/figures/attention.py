# SPDX-License-Identifier: Apache-2.0
"""Figures of where text looks in an image (appendix G)."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.colors import Normalize
from PIL import Image

from ..report import Attention, Drawing
from .style import WIDTH, Shown, Sketch, elide, new_figure, printable


def attention_figures(models: Sequence[Shown], images: Path) -> list[Sketch]:
    """A figure for each question that has maps of the last of `models`."""
    sketches = []
    for index in range(sum(bool(answer.maps) for answer in models[-1].report.attention)):
        asked = [(model, model.report.attention[index]) for model in models if len(model.report.attention) > index]
        sketches.append(draw_question(asked, index + 1, images))
    return sketches


def draw_question(answers: Sequence[tuple[Shown, Attention]], number: int, images: Path) -> Sketch:
    """The image, and where each model looks in it when asked question `number`, averaged over layers.

    Where visual tokens form no single grid, a map is a row of them.
    """
    asked = answers[-1][1]
    image = Image.open(images / str(asked.image), formats=("PNG",)).convert("RGB")
    words = fill(printable(asked.question), 76, max_lines=3, placeholder=" …")
    maps = [100 * np.mean(answer.maps, axis=0) for _, answer in answers]
    width = (WIDTH - 0.8) / (1 + len(maps))
    shape = min(2.0, max(0.3, image.height / image.width))
    figure = new_figure(
        0.35 + shape * width + 0.25 * (words.count("\n") + 3), f"Where text looks when asked:\n{words}"
    )
    panels = figure.subplots(1, 1 + len(maps))
    for axes in panels:
        axes.set_axis_off()
    panels[0].imshow(image)
    panels[0].set_title("the image", fontsize=8.5)
    # Up to a high quantile: a few cells with nearly everything would leave all others black.
    scale = Normalize(0, max(np.quantile(np.concatenate([np.ravel(shares) for shares in maps]), 0.995), 1e-9))
    for axes, (model, answer), shares in zip(panels[1:], answers, maps, strict=True):
        shades = axes.imshow(shares, cmap="magma", norm=scale, aspect="equal" if answer.grid else "auto")
        axes.set_title(fill(model.label, 26), fontsize=8.5)
    bar = figure.colorbar(shades, ax=list(panels), extend="max", aspect=40, extendfrac=0.02, pad=0.02)
    bar.set_label("share of the attention\nto the image (%)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    order = "" if asked.grid else ", visual tokens in order, since they form no single grid"
    caption = (
        f"Attention from the text after the image to the image's tokens: average over layers{order} (appendix G). "
        f"A map sums to 100 %. Question: {elide(asked.question, 300)}"
    )
    return figure, Drawing(f"attention_{number}.png", f"Attention, question {number}", caption, "attention")
