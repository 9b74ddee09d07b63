# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The figures of training dynamics (appendix F, figure 5) and of what training logged."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from ..report import Drawing
from .depth import MODALITIES
from .style import COLORS, Shown, Sketch, layer_axis, legend, new_figure, tidy


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
            x, y = "layer" if model is recorded[-1] else "", "cosine similarity" if kind == "visual" else ""
            tidy(axes, x, y, f"{kind}, {model.label}")
    bar = figure.colorbar(scale, ax=grid, label="optimizer step", aspect=30, pad=0.02)
    bar.locator = MaxNLocator(integer=True, nbins=8)
    bar.update_ticks()
    caption = (
        "Cosine similarity of a token's hidden state before and after each layer, one line for each recorded step of "
        "training, from dark to light (figure 5)."
    )
    return Sketch(figure, Drawing("dynamics.png", "Training dynamics", caption, "dynamics"))


LOGGED = (
    ("L2 norm, entering the decoder", {"norm/visual": "visual", "norm/text": "text"}),
    ("mean |gain|", {"gain/mean_abs": "visual"}),
    ("mean |bias|", {"bias/mean_abs": "visual"}),
)
"""The panels of `training`: title, and the logged curves in it with the kind of token whose style they have."""


def training(models: Sequence[Shown]) -> Sketch | None:
    """What `normalign train` logged of norms, gain and bias, over steps; None if nothing was."""
    panels = [
        (label, curves)
        for label, curves in LOGGED
        if any(name in m.report.training for m in models for name in curves)
    ]
    if not panels:
        return None
    figure = new_figure(3.0, "Norms of tokens, gain and bias during training")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (label, curves) in zip(row, panels, strict=True):
        for model in models:
            for name, kind in curves.items():
                if points := model.report.training.get(name):
                    what = f"{kind if len(curves) > 1 else 'gain and bias'}, {model.label}"
                    style = model.line(kind) | {"markersize": 3, "color": COLORS[kind]}
                    axes.plot([step for step, _ in points], [value for _, value in points], label=what, **style)
        axes.set_ylim(0, 1.1 * max(axes.dataLim.y1, 1e-9))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        tidy(axes, "optimizer step", "", label)
    legend(figure, row[0], len(models))
    caption = (
        "Means over the tokens of each logged step as they enter the first decoder layer, and means over the elements "
        "of the norm's gain and bias after it."
    )
    return Sketch(figure, Drawing("training.png", "Norms and gain during training", caption, "dynamics"))
