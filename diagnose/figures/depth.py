# SPDX-License-Identifier: Apache-2.0
"""Figures of what the layers do to visual and to text tokens (figures 1b to 5)."""

from collections.abc import Sequence
from math import degrees

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from ..report import Curve, Drawing, number
from .style import COLORS, Shown, Sketch, legend, log_scale, new_figure, ratio_title, tidy


MODALITIES = ("visual", "text")


def curves(model: Shown, quantity: str) -> dict[str, Curve]:
    """The field `quantity` of the model's `Depth`, for the modalities it was measured for."""
    measured: dict[str, Curve] = getattr(model.report.depth, quantity)
    return {kind: measured[kind] for kind in MODALITIES if kind in measured}


def norms(models: Sequence[Shown]) -> Sketch:
    """Norm of the states (figures 1b, 4a)."""
    entering = [[curve.mean[0] for curve in curves(model, "norm").values()] for model in models]
    ratios = [pair[0] / pair[1] if len(pair) == 2 else None for pair in entering]
    title = ratio_title(models, ratios, "Visual tokens start with {} the norm of text in the data")
    figure = new_figure(4.4, title or "Norm of the hidden states")
    axes = figure.subplots()
    for model in models:
        for kind, curve in curves(model, "norm").items():
            logarithm = curves(model, "log_norm")[kind]
            center, spread = np.asarray(logarithm.mean), np.asarray(logarithm.std)
            band = np.exp(center - spread), np.exp(center + spread)
            draw_curve(axes, model, kind, range(len(curve.mean)), np.asarray(curve.mean), band)
    log_scale(axes, "y")
    tidy(axes, "state (0 enters the first layer)", "mean L2 norm (logarithmic)")
    legend(figure, axes, len(models))
    caption = (
        "Mean L2 norm of the hidden states (figures 1b and 4a); state 0 enters the first layer, the last leaves the "
        "last layer. The bands are one standard deviation of the logarithm around the geometric mean; a mean above "
        "its band comes of a few tokens of huge norm."
    )
    return figure, Drawing("norms.png", "Norm in depth", caption, "depth")


def cosine(models: Sequence[Shown]) -> Sketch:
    """Cosine similarity of consecutive states (figures 2, 3, 4b)."""
    means = {kind: number(float(np.mean(curve.mean)), 3) for kind, curve in curves(models[-1], "cosine").items()}
    listed = ", ".join(f"{value} for {kind}" for kind, value in means.items())
    title = f"Cosine similarity between layers is {listed} tokens"
    figure = by_layer(models, "cosine", title, "cosine similarity\nof consecutive states")
    caption = (
        "Cosine similarity of a token's states before a layer and before the next (figures 2, 3 and 4b): mean and one "
        "standard deviation over tokens. The title has the mean over layers."
    )
    return figure, Drawing("cosine.png", "Cosine similarity between layers", caption, "depth")


def rotation(models: Sequence[Shown]) -> Sketch:
    """Effective rotation angle of each layer (eqs. 8, 13)."""
    ratios = [model.report.depth.asymmetry for model in models]
    title = ratio_title(models, ratios, "Visual tokens rotate {} as much as text in each layer")
    figure = by_layer(
        models, "rotation", title or "Rotation in each layer", "rotation by the layer (degrees)", degrees(1)
    )
    figure.axes[0].set_ylim(bottom=0)
    caption = (
        "Rotation angle ω of each layer's update (eqs. 8 and 13): mean and one standard deviation over tokens. The "
        "title has the ratio of the means over all layers but the last (eqs. 9 and 14)."
    )
    return figure, Drawing("rotation.png", "Rotation in depth", caption, "depth")


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
            tidy(axes, "layer", "cosine similarity", f"{kind}, {model.label}")
            axes.label_outer()
    figure.colorbar(scale, ax=grid, label="optimizer step", aspect=30, pad=0.02)
    caption = "Mean cosine similarity of a token's states before and after each layer, by recorded step (figure 5)."
    return figure, Drawing("dynamics.png", "Training dynamics", caption, "dynamics")


def by_layer(models: Sequence[Shown], quantity: str, title: str, label: str, factor: float = 1.0) -> Figure:
    """A figure of the field `quantity` of each model's `Depth`, times `factor`, over layers."""
    figure = new_figure(4.2, title)
    axes = figure.subplots()
    for model in models:
        for kind, curve in curves(model, quantity).items():
            mean, std = factor * np.asarray(curve.mean), factor * np.asarray(curve.std)
            draw_curve(axes, model, kind, range(1, len(mean) + 1), mean, (mean - std, mean + std))
    tidy(axes, "layer", label)
    legend(figure, axes, len(models))
    return figure


def draw_curve(
    axes: Axes, model: Shown, kind: str, x: Sequence[int], mean: np.ndarray, band: Sequence[np.ndarray]
) -> None:
    """Draws the mean and, except for a baseline, its band; twice as many bands would hide each other."""
    axes.plot(x, mean, label=f"{kind}, {model.label}", **model.line(kind))
    if not model.baseline:
        axes.fill_between(x, *band, color=COLORS[kind], alpha=0.15, linewidth=0)
