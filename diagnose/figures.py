# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, as PNG."""

from math import degrees, isfinite
from pathlib import Path
from statistics import fmean
from textwrap import fill

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from PIL import Image

from . import style
from .report import Drawing, Moments, Report, number
from .style import COLORS, MARKERS, MUTED, Shown, Sketch


MODALITIES = ("visual", "text")
STAGES = {
    "encoder_output": ("visual", "encoder output"),
    "projector_input": ("visual", "projector input"),
    "visual_table": ("visual", "visual embedding table"),
    "norm_input": ("visual", "input of the norm"),
    "projector_output": ("visual", "projector output"),
    "visual": ("visual", "visual tokens, as received"),
    "newline": ("newline", "newline rows, as received"),
    "indicator_table": ("indicator", "indicator table"),
    "indicator": ("indicator", "indicators, as received"),
    "text": ("text", "text in the data, as received"),
    "vocabulary": ("text", "vocabulary, as received"),
    "text_raw": ("text", "text in the data, as stored"),
    "vocabulary_raw": ("text", "vocabulary, as stored"),
    "special": ("special", "special tokens, as received"),
}
"""Field of `Interface`: the kind of its tokens and its label, in the order in which tokens pass."""


def draw(report: Report, against: Report | None, output: Path) -> list[Drawing]:
    """Draws the reports, in reading order; `output` has the images that attention is drawn on."""
    models = style.shown(report, against)
    sketches = [interface(models), norms(models), cosine(models), rotation(models)]
    if any(model.report.dynamics for model in models):
        sketches.append(dynamics(models))
    for figure, drawing in (sketches := sketches + attention(models, output)):
        figure.savefig(output / drawing.file, format="png", dpi=style.DPI)
    return [drawing for _, drawing in sketches]


def interface(models: list[Shown]) -> Sketch:
    """Norms on the way into the language model, a row for each stage (tables 1 to 3)."""

    def positive(model: Shown, stage: str) -> Moments | None:
        """The moments of a stage; None if there are none or a logarithmic axis cannot show them."""
        moments: Moments | None = getattr(model.report.interface, stage)
        drawn = moments and isfinite(moments.mean + moments.std) and moments.mean > 0
        return moments if drawn else None

    stages = [stage for stage in STAGES if not stage.endswith("_raw")]
    rows = [stage for stage in stages if any(positive(model, stage) for model in models)]
    ratios = [model.report.interface.ratio for model in models]
    sentence = "Visual tokens enter with {} the norm of text embeddings"
    title = style.ratio_title(ratios, sentence, "L2 norms at the interface")
    figure = style.new_figure(1.3 + (0.25 + 0.17 * (len(models) - 1)) * len(rows), title)
    axes = figure.subplots()
    low, high = np.inf, 0.0
    for place, model in enumerate(models):
        axes.plot([], "o", color=MUTED, markerfacecolor=model.face(MUTED), label=model.label)
        for row, stage in enumerate(rows):
            if moments := positive(model, stage):
                color, marker = COLORS[STAGES[stage][0]], MARKERS[STAGES[stage][0]]
                y, end = row + 0.34 * (place - (len(models) - 1) / 2), moments.mean + moments.std
                axes.errorbar(
                    moments.mean, y, xerr=moments.std, color=color, elinewidth=1.4, fmt=marker,
                    markersize=6.5, markerfacecolor=model.face(color), markeredgewidth=1.4,
                )  # fmt: skip
                axes.text(end, y, f"  {number(moments.mean, 3)}", va="center", fontsize=8.5)
                low = min(low, max(moments.mean - moments.std, moments.mean / 2))
                high = max(high, end)
    axes.set_xlim(low / 1.15, high * (1.15 * high / low) ** 0.1)
    style.log_scale(axes, "x")
    if target := positive(models[-1], "vocabulary"):
        axes.axvline(target.mean, color=COLORS["text"], linewidth=1, linestyle=":", zorder=1)
    axes.set_yticks(range(len(rows)), [STAGES[stage][1] for stage in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    style.tidy(axes, "L2 norm (logarithmic)", "")
    axes.grid(False, axis="y")
    style.legend(figure, axes, 2)
    caption = "Mean and standard deviation of norms (tables 1 to 3). The dotted line is N_text."
    return figure, Drawing("interface.png", "Norms at the interface", caption, "interface")


def norms(models: list[Shown]) -> Sketch:
    """Norm of the states (figures 1b, 4a)."""
    ratios = [model.report.interface.ratio_data for model in models]
    sentence = "Visual tokens start with {} the norm of text in the data"
    title = style.ratio_title(ratios, sentence, "Norm of the hidden states")
    figure = in_depth(models, "norm", title, "mean L2 norm (logarithmic)")
    caption = (
        "Mean L2 norm of the hidden states (figures 1b, 4a). Bands: one standard deviation of its "
        "logarithm; a mean above its band comes of a few tokens of huge norm."
    )
    return figure, Drawing("norms.png", "Norm in depth", caption, "depth")


def cosine(models: list[Shown]) -> Sketch:
    """Cosine similarity of consecutive states (figures 2, 3, 4b)."""
    curves = models[-1].report.depth.cosine
    means = (f"{number(fmean(curves[kind].mean), 3)} for {kind}" for kind in kinds_of(models[-1]))
    title = f"Cosine similarity between layers is {', '.join(means)} tokens"
    figure = in_depth(models, "cosine", title, "cosine similarity\nof consecutive states")
    caption = "Cosine of a token's states around a layer (figures 2, 3, 4b): mean and deviation."
    return figure, Drawing("cosine.png", "Cosine similarity between layers", caption, "depth")


def rotation(models: list[Shown]) -> Sketch:
    """Effective rotation angle of each layer (eqs. 8, 13)."""
    ratios = [model.report.depth.asymmetry for model in models]
    sentence = "Visual tokens rotate {} as much as text in each layer"
    title = style.ratio_title(ratios, sentence, "Rotation in each layer")
    figure = in_depth(models, "rotation", title, "rotation by the layer (degrees)", degrees(1))
    figure.axes[0].set_ylim(bottom=0)
    caption = "Angle ω by which a layer rotates a token (eqs. 8, 13): mean and standard deviation."
    return figure, Drawing("rotation.png", "Rotation in depth", caption, "depth")


def dynamics(models: list[Shown]) -> Sketch:
    """Cosine similarity between layers over training (figure 5)."""
    recorded = [model for model in models if model.report.dynamics]
    figure = style.new_figure(0.9 + 2.5 * len(recorded), "Cosine between layers during training")
    steps = [entry.step for model in recorded for entry in model.report.dynamics]
    # The brightest yellow of viridis cannot be seen on white.
    colors = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)))
    scale = ScalarMappable(Normalize(min(steps), max(max(steps), min(steps) + 1)), colors)
    grid = figure.subplots(len(recorded), 2, squeeze=False, sharex=True, sharey=True)
    for row, model in zip(grid, recorded, strict=True):
        for axes, kind in zip(row, MODALITIES, strict=True):
            for entry in model.report.dynamics:
                values: list[float] = getattr(entry, kind)
                layers, color = range(1, len(values) + 1), scale.to_rgba(entry.step)
                axes.plot(layers, values, color=color, linewidth=1.3)
            style.tidy(axes, "layer", "cosine similarity", f"{kind}, {model.label}")
            axes.label_outer()
    figure.colorbar(scale, ax=grid, label="optimizer step", aspect=30, pad=0.02)
    caption = "Mean cosine of a token's states before and after each layer, by step (figure 5)."
    return figure, Drawing("dynamics.png", "Training dynamics", caption, "dynamics")


def attention(models: list[Shown], images: Path) -> list[Sketch]:
    """The image of every question with maps, and where models look in it, averaged over layers."""
    sketches = []
    for place, asked in enumerate(models[-1].report.attention, 1):
        if not asked.maps:
            continue
        answers = [(m, answer) for m in models for answer in m.report.attention[place - 1 : place]]
        image = Image.open(images / str(asked.image), formats=("PNG",)).convert("RGB")
        words = fill(style.drawable(asked.question), 76, max_lines=3, placeholder=" …")
        maps = [100 * np.mean(answer.maps, axis=0) for _, answer in answers]
        width = (style.WIDTH - 0.8) / (1 + len(maps))
        shape = min(2.0, max(0.3, image.height / image.width))
        height = 0.35 + shape * width + 0.25 * (words.count("\n") + 3)
        figure = style.new_figure(height, f"Where text looks when asked:\n{words}")
        panels = figure.subplots(1, 1 + len(maps))
        for axes in panels:
            axes.set_axis_off()
        panels[0].imshow(image)
        panels[0].set_title("the image", fontsize=8.5)
        # Up to a high quantile: a few cells with nearly everything would leave all others black.
        brightest = np.quantile(np.concatenate([np.ravel(shares) for shares in maps]), 0.995)
        scale = Normalize(0, max(brightest, 1e-9))
        for axes, (model, answer), shares in zip(panels[1:], answers, maps, strict=True):
            aspect = "equal" if answer.grid else "auto"
            shades = axes.imshow(shares, cmap="magma", norm=scale, aspect=aspect)
            axes.set_title(fill(model.label, 26), fontsize=8.5)
        bar = figure.colorbar(shades, ax=panels, extend="max", aspect=40, extendfrac=0.02, pad=0.02)
        bar.set_label("share of the attention\nto the image (%)", fontsize=8)
        bar.ax.tick_params(labelsize=8)
        order = "" if asked.grid else ", visual tokens in order, since they form no single grid"
        caption = (
            f"Attention from the text after the image to its tokens: average over layers{order} "
            f"(appendix G). A map sums to 100 %. Question: {style.elide(asked.question, 300)}"
        )
        file, title = f"attention_{place}.png", f"Attention, question {place}"
        sketches.append((figure, Drawing(file, title, caption, "attention")))
    return sketches


def kinds_of(model: Shown) -> list[str]:
    """The modalities that were measured."""
    return [kind for kind in MODALITIES if kind in model.report.depth.norm]


def in_depth(models: list[Shown], field: str, title: str, label: str, factor: float = 1) -> Figure:
    """A figure of a field of each model's `Depth`, times `factor`, over layers or states."""
    figure, first = style.new_figure(4.3, title), 0 if field == "norm" else 1
    axes = figure.subplots()
    for model in models:
        for kind in kinds_of(model):
            curve = getattr(model.report.depth, field)[kind]
            mean, std = factor * np.asarray(curve.mean), factor * np.asarray(curve.std)
            low, high = mean - std, mean + std
            if field == "norm":
                logarithm = model.report.depth.log_norm[kind]
                center, spread = np.asarray(logarithm.mean), np.asarray(logarithm.std)
                low, high = np.exp(center - spread), np.exp(center + spread)
            # Wide under narrow, so that curves that coincide can all be seen.
            width, size = (2.4, 5.5) if kind == "visual" else (1.5, 4.0)
            x, color = range(first, first + len(mean)), COLORS[kind]
            axes.plot(
                x, mean, label=f"{kind}, {model.label}", color=color, marker=MARKERS[kind],
                markerfacecolor=model.face(color), linestyle="--" if model.baseline else "-",
                linewidth=1.2 if model.baseline else width, zorder=4 if model.baseline else 3,
                markersize=size,
            )  # fmt: skip
            if not model.baseline:  # twice as many bands would hide each other
                axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    if field == "norm":
        style.log_scale(axes, "y")
    style.tidy(axes, "layer" if first else "state (0 enters the first layer)", label)
    style.legend(figure, axes, len(models))
    return figure
