# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The figures of training dynamics (appendix F, figure 5) and of the norms that training logged."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from ..report import Drawing
from .depth import MODALITIES
from .style import Shown, Sketch, layer_axis, legend, new_figure, tidy


def dynamics(models: Sequence[Shown]) -> Sketch | None:
    """Cosine similarity between layers over training (figure 5); None if none was recorded."""
    recorded = [model for model in models if model.report.dynamics]
    if not recorded:
        return None
    figure = new_figure(0.9 + 2.5 * len(recorded), "Cosine similarity between layers during training")
    steps = [entry.step for model in recorded for entry in model.report.dynamics]
    # The brightest yellow of viridis cannot be seen on white.
    colors = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)))
    scale = ScalarMappable(Normalize(min(steps), max(max(steps), min(steps) + 1)), colors)
    grid = figure.subplots(len(recorded), 2, squeeze=False, sharex=True, sharey=True)
    for row, model in zip(grid, recorded, strict=True):
        for axes, kind in zip(row, MODALITIES, strict=True):
            for entry in model.report.dynamics:
                values: list[float] = getattr(entry, kind)
                axes.plot(range(1, len(values) + 1), values, color=scale.to_rgba(entry.step), linewidth=1.3)
            layer_axis(axes, max(len(getattr(entry, kind)) for entry in model.report.dynamics))
            tidy(axes, "layer", "cosine similarity", f"{kind}, {model.label}")
            axes.label_outer()
    bar = figure.colorbar(scale, ax=grid, label="optimizer step", aspect=30, pad=0.02)
    bar.locator = MaxNLocator(integer=True, nbins=8)
    bar.update_ticks()
    caption = (
        "Cosine similarity of a token's hidden state before and after each layer, one line for each recorded step of "
        "training, from dark to light (figure 5)."
    )
    return Sketch(figure, Drawing("dynamics.png", "Training dynamics", caption, "dynamics"))


def training(models: Sequence[Shown]) -> Sketch | None:
    """Norms of tokens that `normalign train` logged over steps; None if none were."""
    logged = [model for model in models if "norm/text" in model.report.training]
    if not logged:
        return None
    figure = new_figure(3.0, "Norms of tokens during training")
    axes = figure.subplots()
    for model in logged:
        for kind in MODALITIES:
            if points := model.report.training.get(f"norm/{kind}"):
                style = model.line(kind) | {"markersize": 3}
                axes.plot(*zip(*points, strict=True), label=f"{kind}, {model.label}", **style)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    tidy(axes, "optimizer step", "L2 norm")
    legend(figure, axes, len(logged))
    caption = "Means over the tokens of each logged step, as they enter the first decoder layer."
    return Sketch(figure, Drawing("training.png", "Norms during training", caption, "dynamics"))
