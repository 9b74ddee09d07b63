# SPDX-License-Identifier: Apache-2.0
"""Figures of where text looks in an image (appendix G)."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage
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
    image = None if asked.image is None else Image.open(images / asked.image, formats=("PNG",)).convert("RGB")
    rows, columns = asked.grid or (1, 3)
    shape = min(2.0, max(0.3, image.height / image.width if image else rows / columns))
    words = fill(printable(asked.question), 76, max_lines=3, placeholder=" …")
    maps = [np.mean(answer.maps, axis=0) for _, answer in answers]
    width = (WIDTH - 0.8) / (1 + len(maps))
    figure = new_figure(
        0.35 + shape * width + 0.25 * (words.count("\n") + 3), f"Where text looks when asked:\n{words}"
    )
    panels = figure.subplots(1, 1 + len(maps))
    for axes in panels:
        axes.set_axis_off()
    if image is not None:
        panels[0].imshow(image)
        panels[0].set_title("the image", fontsize=8.5)
    # Up to a high quantile: a few cells with nearly everything would leave all others black.
    every = np.concatenate([100 * np.ravel(shares) for shares in maps])
    scale = Normalize(0, max(float(np.quantile(every, 0.995)), 1e-9))
    for axes, (model, answer), shares in zip(panels[1:], answers, maps, strict=True):
        shades = draw_map(axes, shares, scale, image if answer.grid else None, shape)
        axes.set_title(fill(model.label, 26), fontsize=8.5)
    bar = figure.colorbar(shades, ax=list(panels), extend="max", aspect=40, extendfrac=0.02, pad=0.02)
    bar.set_label("share of the attention\nto the image (%)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    how = "on the image" if asked.grid else "visual tokens in order, since they form no single grid"
    caption = (
        f"Attention from the text after the image to the image's tokens: average over layers, {how} (appendix G). "
        f"A map sums to 100 %. Question: {elide(asked.question, 300)}"
    )
    return figure, Drawing(f"attention_{number}.png", f"Attention, question {number}", caption, "attention")


def draw_map(axes: Axes, shares: np.ndarray, scale: Normalize, image: Image.Image | None, shape: float) -> AxesImage:
    """Draws a map in percent, over a pale grey copy of the image if there is one."""
    extent = (0.0, 1.0, shape, 0.0)
    if image is not None:
        grey = 128 + np.asarray(image.convert("L")) / 2
        axes.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=extent, interpolation="antialiased")
    alpha = None if image is None else 0.65
    shades = axes.imshow(100 * shares, cmap="magma", norm=scale, alpha=alpha, extent=extent, interpolation="nearest")
    axes.set_aspect("equal")
    return shades
