# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Figures of where text looks in an image (appendix G)."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure, FigureBase
from PIL import Image

from ..report import Attention, Drawing
from .style import WIDTH, Shown, Sketch, compare, elide, layer_axis, new_figure, printable, tidy


COLUMNS = 6
MAPS = 12
COLORMAP = "magma"
SHARE = "share of the attention\nto the image (%)"
MEASURES = {
    "image_share": ("share of all attention (%)", 100.0, None),
    "entropy": ("entropy of the map (1 is even)", 1.0, 1.0),
    "bottom_bias": ("bottom third (1 is no bias)", 1.0, 1.0),
}
"""Field of `Attention`: its words, what it is multiplied with, and the value to compare it with."""


def attention_figures(models: Sequence[Shown], images: Path) -> list[Sketch]:
    """A figure for each question asked of the last of `models`, and one of the measures over depth."""
    asked = [each for each in models[-1].report.attention if each.maps]
    sketches = []
    for index, own in enumerate(asked):
        same = [
            (model, model.report.attention[index])
            for model in models
            if index < len(model.report.attention)
            and model.report.attention[index].question == own.question
            and model.report.attention[index].maps
        ]
        sketches.append(question(same, index + 1, images))
    deep = [model for model in models if model.report.attention]
    return [*sketches, attention_depth(deep)] if asked else []


def question(answers: Sequence[tuple[Shown, Attention]], place: int, images: Path) -> Sketch:
    """Where each model looks when asked question `place`: averaged over layers on the image, and layer by layer."""
    asked = answers[-1][1]
    image = None if asked.image is None else Image.open(images / asked.image).convert("RGB")
    gridded = all(answer.grid is not None for _, answer in answers)
    draw = question_maps if gridded else question_shares
    words = fill(printable(asked.question), 76, max_lines=3, placeholder=" …")
    figure = draw(answers, image, f"Where text looks when asked:\n{words}")
    several = " The baseline is above, and both have the same scale." if len(answers) > 1 else ""
    how = (
        "averaged over layers on the image, then layer by layer"
        if gridded
        else "by the order of visual tokens, since tiles form no single grid, averaged over layers and layer by layer"
    )
    caption = (
        f"Attention from the text after the image to the image's tokens, {how} (appendix G). Each layer's map "
        f"sums to 100 %.{several} Question: {elide(asked.question, 300)}"
    )
    title = f"Attention, question {place}"
    return Sketch(figure, Drawing(f"attention_{place}.png", title, caption, "attention"))


def question_maps(answers: Sequence[tuple[Shown, Attention]], image: Image.Image | None, title: str) -> Figure:
    """The image, the averages on it, and below them each model's layers."""
    rows, columns = answers[-1][1].grid or (1, 1)
    shape = min(2.0, max(0.3, image.height / image.width if image else rows / columns))
    chosen = [chosen_layers(len(answer.maps)) for _, answer in answers]
    lines = [ceil(len(layers) / COLUMNS) for layers in chosen]
    top = 0.45 + shape * (WIDTH - 1) / 3
    heights = [top, *(0.35 + count * (0.2 + shape * (WIDTH - 1.1) / COLUMNS) for count in lines)]
    figure = new_figure(sum(heights) + 0.25 * (title.count("\n") + 2), title)
    above, *below = figure.subfigures(1 + len(answers), 1, height_ratios=heights)

    averages = [np.mean(answer.maps, axis=0) for _, answer in answers]
    scale = Normalize(0, 100 * max(float(average.max()) for average in averages))
    panels = above.subplots(1, 3, squeeze=False)[0]
    for axes in panels:
        axes.set_axis_off()
    if image is not None:
        panels[0].imshow(image)
        panels[0].set_title("the image", fontsize=9)
    for axes, (model, _), average in zip(panels[1:], answers, averages, strict=False):
        fill_map(axes, average, scale, image, shape)
        axes.set_title(fill(model.label, 30), fontsize=9)
    color_bar(above, panels[1 : 1 + len(answers)], panels[1].images[-1])

    # A few cells that take nearly everything would leave all others black.
    every = np.concatenate([100 * np.ravel(answer.maps) for _, answer in answers])
    scale = Normalize(0, max(float(np.quantile(every, 0.995)), 1e-9))
    for part, (model, answer), layers, count in zip(below, answers, chosen, lines, strict=True):
        part.suptitle(f"{model.label}, by layer", fontsize=9.5, x=0.01, ha="left")
        grid = part.subplots(count, COLUMNS, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for axes, layer in zip(grid.flat, layers, strict=False):
            fill_map(axes, np.asarray(answer.maps[layer]), scale, None, shape)
            axes.set_title(f"layer {answer.layers[layer]}", fontsize=8.5, pad=3)
        color_bar(part, list(grid.flat), grid[0, 0].images[-1])
    return figure


def chosen_layers(count: int) -> list[int]:
    """Indices of at most `MAPS` of `count` layers, evenly spaced, with the first and the last."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, MAPS))})


def fill_map(axes: Axes, shares: np.ndarray, scale: Normalize, image: Image.Image | None, shape: float) -> None:
    """Draws a map in percent, over a pale grey copy of the image if there is one."""
    extent = (0.0, 1.0, shape, 0.0)
    if image is not None:
        grey = 128 + np.asarray(image.convert("L")) / 2
        axes.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=extent, interpolation="antialiased")
    alpha = None if image is None else 0.65
    axes.imshow(100 * shares, cmap=COLORMAP, norm=scale, alpha=alpha, extent=extent, interpolation="nearest")
    axes.set_aspect("equal")


def color_bar(figure: FigureBase, axes: Sequence[Axes], image) -> None:
    """A colour bar beside `axes`, with an arrow where the scale ends below the largest value."""
    over = "max" if float(np.max(image.get_array())) > image.norm.vmax else "neither"
    bar = figure.colorbar(image, ax=axes, extend=over, aspect=14, shrink=0.9, pad=0.02)
    bar.set_label(SHARE, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def question_shares(answers: Sequence[tuple[Shown, Attention]], image: Image.Image | None, title: str) -> Figure:
    """For tiles: shares by token order, averaged over layers as curves, and layer by layer as images."""
    figure = new_figure(2.9 + 1.9 * len(answers), title)
    above, *below = figure.subfigures(1 + len(answers), 1, height_ratios=[2.4, *[1.9] * len(answers)])
    panels = above.subplots(1, 2, width_ratios=[1, 2.2]) if image else [None, above.subplots()]
    if image is not None:
        panels[0].imshow(image)
        panels[0].set_axis_off()
    for model, answer in answers:
        mean = 100 * np.mean(answer.maps, axis=0).ravel()
        style = {**model.line("visual"), "marker": None}
        panels[1].plot(range(1, len(mean) + 1), mean, label=model.label, **style)
    tidy(panels[1], "visual token, in order", SHARE, "averaged over layers")
    panels[1].set_ylim(bottom=0)
    if len(answers) > 1:
        panels[1].legend(fontsize=8, frameon=False)
    every = np.concatenate([100 * np.ravel(answer.maps) for _, answer in answers])
    scale = Normalize(0, max(float(np.quantile(every, 0.995)), 1e-9))
    for part, (model, answer) in zip(below, answers, strict=True):
        axes = part.subplots()
        shares = 100 * np.asarray(answer.maps).reshape(len(answer.maps), -1)
        extent = (0.5, shares.shape[1] + 0.5, len(shares) + 0.5, 0.5)
        drawn = axes.imshow(shares, cmap=COLORMAP, norm=scale, extent=extent, aspect="auto", interpolation="nearest")
        tidy(axes, "visual token, in order", "layer", model.label)
        axes.grid(False)
        ticks = sorted({round(place) for place in np.linspace(0, len(shares) - 1, min(len(shares), 6))})
        axes.set_yticks([place + 1 for place in ticks], [str(answer.layers[place]) for place in ticks])
        color_bar(part, [axes], drawn)
    return figure


def attention_depth(models: Sequence[Shown]) -> Sketch:
    """Share, entropy and bottom bias by layer, averaged over questions."""
    held = [name for name in MEASURES if any(measure(model, name) is not None for model in models)]
    biases = [None if (bias := measure(m, "bottom_bias")) is None else float(np.mean(bias)) for m in models]
    title = compare(models, biases, "The image's bottom third gets {} its even share", " ×")
    figure = new_figure(3.5, title or "Attention from text to the image, by layer")
    for axes, name in zip(figure.subplots(1, len(held), squeeze=False)[0], held, strict=True):
        fill_measure(axes, models, name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=9, frameon=False)
    caption = (
        "By layer, averaged over the questions: the share of all attention of the text after the image that falls "
        "on the image; the entropy of its map, over that of an even one; and attention on the bottom third of the "
        "image over what an even map has there (section 5.3 and appendix G describe a bias to the bottom)."
    )
    return Sketch(figure, Drawing("attention_depth.png", "Attention in depth", caption, "attention"))


def measure(model: Shown, name: str) -> np.ndarray | None:
    """The field `name` of the model's answers, averaged over questions; None if no question has it.

    Layers with a sliding window see the image in short prompts only. The questions count that most layers answered.
    """
    values = [found for answer in model.report.attention if (found := getattr(answer, name)) is not None]
    longest = max(map(len, values), default=0)
    return np.mean([each for each in values if len(each) == longest], axis=0) if values else None


def fill_measure(axes: Axes, models: Sequence[Shown], name: str) -> None:
    """Draws a curve for each model, and a dotted line at the value to compare with."""
    words, factor, neutral = MEASURES[name]
    last = 0
    for model in models:
        if (values := measure(model, name)) is not None:
            layers = max((answer.layers for answer in model.report.attention), key=len)
            axes.plot(layers, factor * values, label=model.label, **model.line("visual"))
            last = max(last, layers[-1])
    if neutral is not None:
        axes.axhline(neutral, color="black", linewidth=0.8, linestyle=":")
    layer_axis(axes, last)
    tidy(axes, "layer", "", words)
