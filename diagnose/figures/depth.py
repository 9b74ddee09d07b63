# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Figures of what the layers do to visual and to text tokens (figures 1b to 4; section 3.1)."""

from collections.abc import Sequence
from math import degrees

import numpy as np
from matplotlib.axes import Axes

from ..measure.theory import predicted_rotation
from ..report import Curve, Depth, Drawing
from .style import (
    COLORS,
    MARKERS,
    Shown,
    Sketch,
    compare,
    layer_axis,
    legend,
    new_figure,
    number,
    scale_y,
    tidy,
)


MODALITIES = ("visual", "text")
LAYER = "layer"
TYPICAL = (
    "The bands hold the model's typical tokens, one standard deviation of the logarithm to each side of the geometric "
    "mean: a mean above its band comes of a few tokens of huge norm."
)

Band = tuple[np.ndarray, np.ndarray]


def depth_figures(models: Sequence[Shown]) -> list[Sketch]:
    """Every figure of measured states and updates, in reading order; none if no model has a decoder."""
    if not (deep := with_depth(models)):
        return []
    return [norms(deep), cosine(deep), rotation(deep), updates(deep)]


def with_depth(models: Sequence[Shown]) -> list[Shown]:
    """The models that have a decoder."""
    return [model for model in models if model.report.depth is not None]


def curves(model: Shown, quantity: str) -> dict[str, Curve]:
    """The model's curves of `quantity`, a field of `Depth`, for the modalities it was measured for."""
    depth = model.report.depth
    found: dict[str, Curve] = {} if depth is None else getattr(depth, quantity)
    return {kind: found[kind] for kind in MODALITIES if kind in found}


def norms(models: Sequence[Shown]) -> Sketch:
    """Norm of the states (figures 1b, 4a)."""
    entering = [{kind: curve.mean[0] for kind, curve in curves(model, "norm").items()} for model in models]
    ratios = [start["visual"] / start["text"] if {*start} == {*MODALITIES} else None for start in entering]
    title = compare(models, ratios, "Visual tokens start with {} the norm of text in the data", " ×")
    figure = new_figure(4.4, title or "Norm of the hidden states")
    fill_norms(axes := figure.subplots(), models)
    legend(figure, axes, len(models))
    caption = (
        "Mean L2 norm of the hidden states (figures 1b and 4a); state 0 enters the first layer, the last leaves the "
        f"last layer. Apart, at the right: the last state after the final norm. {TYPICAL}"
    )
    return Sketch(figure, Drawing("norms.png", "Norm in depth", caption, "depth"))


def fill_norms(axes: Axes, models: Sequence[Shown]) -> None:
    """Draws a curve for each model and modality, and a mark for the state after the final norm."""
    means = [value for model in models for curve in curves(model, "norm").values() for value in curve.mean]
    finals = [
        (model, kind, depth.final_norm[kind].mean)
        for model in models
        if (depth := model.report.depth)
        for kind in MODALITIES
        if kind in depth.final_norm
    ]
    floor = scale_y(axes, [*means, *typical_floor(models, "log_norm"), *(value for *_, value in finals)])
    last = max(len(curve.mean) for model in models for curve in curves(model, "norm").values()) - 1
    for model in models:
        for kind, curve in curves(model, "norm").items():
            band = typical(curves(model, "log_norm")[kind])
            draw_curve(axes, model, kind, range(len(curve.mean)), np.asarray(curve.mean), band)
    at = last + max(0.5, 0.07 * last)
    for model, kind, value in finals:
        axes.plot(at, value, **model.line(kind) | {"linestyle": "none", "markersize": 7})
    axes.axvline((last + at) / 2, color="#BBBBBB", linewidth=0.8)
    step = max(1, round(last / 10))
    ticks = [*range(0, last - step + 1, step), last]
    axes.set_xticks([*ticks, at], [*map(str, ticks), "after\nfinal norm"])
    axes.set_ylim(bottom=floor)
    tidy(axes, "state (0 enters the first layer)", "mean L2 norm")


def draw_curve(axes: Axes, model: Shown, kind: str, x: Sequence[int], mean: np.ndarray, band: Band) -> None:
    """Draws the mean and, but for a baseline, its band; twice as many bands would hide each other."""
    axes.plot(x, mean, label=f"{kind}, {model.label}", **model.line(kind))
    if not model.baseline:
        axes.fill_between(x, *band, color=COLORS[kind], alpha=0.15, linewidth=0)


def typical(logarithm: Curve) -> Band:
    """One standard deviation of the logarithm to each side of the geometric mean."""
    mean, std = np.asarray(logarithm.mean), np.asarray(logarithm.std)
    return np.exp(mean - std), np.exp(mean + std)


def typical_floor(models: Sequence[Shown], quantity: str) -> list[float]:
    """Lower ends of the bands that are drawn of `quantity`, a logarithm."""
    drawn = [model for model in models if not model.baseline]
    return [end for model in drawn for curve in curves(model, quantity).values() for end in typical(curve)[0].tolist()]


def fill_layers(axes: Axes, models: Sequence[Shown], quantity: str, factor: float = 1.0) -> None:
    """Draws the field `quantity` of each model's `Depth`, times `factor`, over layers."""
    for model in models:
        for kind, curve in curves(model, quantity).items():
            mean, std = factor * np.asarray(curve.mean), factor * np.asarray(curve.std)
            band = mean - std, mean + std
            if quantity == "update_norm":
                band = typical(curves(model, "log_update")[kind])
            draw_curve(axes, model, kind, range(1, len(mean) + 1), mean, band)
    layer_axis(axes, max(len(curve.mean) for model in models for curve in curves(model, quantity).values()))


def cosine(models: Sequence[Shown]) -> Sketch:
    """Cosine similarity of consecutive states (figures 2, 3, 4b)."""
    means = {kind: number(float(np.mean(curve.mean))) for kind, curve in curves(models[-1], "cosine").items()}
    seen = ", ".join(f"{value} for {kind}" for kind, value in means.items())
    figure = new_figure(4.2, f"Cosine similarity from layer to layer is {seen} tokens")
    fill_layers(axes := figure.subplots(), models, "cosine")
    tidy(axes, LAYER, "cosine similarity\nof consecutive states")
    legend(figure, axes, len(models))
    caption = (
        "Cosine similarity of a token's states before a layer and before the next, averaged over tokens (figures 2, 3 "
        "and 4b): 1 is no change of direction. The bands are one standard deviation over the model's tokens; the "
        "title has the mean over layers."
    )
    return Sketch(figure, Drawing("cosine.png", "Cosine similarity between layers", caption, "depth"))


def rotation(models: Sequence[Shown]) -> Sketch:
    """Effective rotation angle of each layer (eqs. 8, 13)."""
    rates = [model.report.depth.asymmetry if model.report.depth else None for model in models]
    title = compare(models, rates, "Visual tokens turn at {} the rate of text", " ×")
    figure = new_figure(4.2, title or "Rotation in each layer")
    fill_layers(axes := figure.subplots(), models, "rotation", degrees(1))
    tidy(axes, LAYER, "rotation by the layer (degrees)")
    axes.set_ylim(bottom=0)
    legend(figure, axes, len(models))
    caption = (
        "Effective rotation angle omega of each layer's update (eqs. 8 and 13), mean and one standard deviation over "
        "tokens. The rate in the title is the mean over all layers but the last, visual over text: the paper holds "
        "that it falls below 1 where visual tokens are the longer ones (eqs. 9 and 14)."
    )
    return Sketch(figure, Drawing("rotation.png", "Rotation in depth", caption, "depth"))


def updates(models: Sequence[Shown]) -> Sketch:
    """Size and angle of the updates, which section 3.1 assumes to be alike."""
    figure = new_figure(4.2, "Are updates alike, as the theory assumes? Their size, and their angle")
    size, angle = figure.subplots(1, 2)
    values = [value for model in models for curve in curves(model, "update_norm").values() for value in curve.mean]
    floor = scale_y(size, [*values, *typical_floor(models, "log_update")])
    fill_layers(size, models, "update_norm")
    size.set_ylim(bottom=floor)
    tidy(size, LAYER, "L2 norm of the update, c")
    fill_layers(angle, models, "update_angle", degrees(1))
    angle.axhline(90, color="black", linewidth=0.8, linestyle=":")
    tidy(angle, LAYER, "angle to the state, φ (degrees)")
    legend(figure, size, len(models))
    caption = (
        "What each layer adds to a state: its mean L2 norm c, and its mean angle phi to the state; 90 degrees is "
        "dotted. Section 3.1 assumes that within a layer both are the same for visual and text tokens: then the two "
        f"curves of a model would lie on each other. {TYPICAL} For angles they are one standard deviation to each "
        "side of the mean."
    )
    return Sketch(figure, Drawing("updates.png", "Assumptions about updates", caption, "depth"))


def predicted(models: Sequence[Shown]) -> Sketch | None:
    """Rotation that the theory predicts, beside the measured one; None if no model has a decoder."""
    if not (models := with_depth(models)):
        return None
    figure = new_figure(3.9, "Rotation that the theory predicts, and what was measured")
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axes, model in zip(panels, models, strict=True):
        fill_predicted(axes, model)
        tidy(axes, LAYER, "rotation (degrees)" if axes is panels[0] else "", model.label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=9, frameon=False)
    caption = (
        "Rotation per layer by equation 13, from the geometric mean of the states' norms and the size and angle of "
        "updates that the theory takes to be the same for both modalities, beside the mean of the measured rotations."
    )
    return Sketch(figure, Drawing("predicted.png", "Predicted and measured rotation", caption, "theory"))


def fill_predicted(axes: Axes, model: Shown) -> None:
    """Draws measured curves with markers, predicted ones dotted without."""
    depth: Depth | None = model.report.depth
    if depth is None:
        return
    expected = predicted_rotation(depth)
    for kind, curve in curves(model, "rotation").items():
        layers, measured = range(1, len(curve.mean) + 1), np.degrees(curve.mean)
        style = {"color": COLORS[kind], "marker": MARKERS[kind], "markersize": 4}
        axes.plot(layers, measured, label=f"{kind}, measured", linewidth=1.2, **style)
        axes.plot(
            layers, np.degrees(expected[kind]), ":", color=COLORS[kind], label=f"{kind}, predicted", linewidth=2.2
        )
    layer_axis(axes, max(map(len, expected.values())))
