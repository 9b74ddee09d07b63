# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, as PNG.

Colours are Okabe and Ito's: colour-blind readers can tell them apart. In grey print, kinds of
token differ by marker and lightness, and a baseline by dashes and hollow markers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import degrees, isfinite
from pathlib import Path
from statistics import fmean
from textwrap import fill

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from .report import Attention, Drawing, Moments, Report, number


WIDTH = 7.5  # of a figure, in inches
DPI = 150
COLORS = {
    "visual": "#E69F00",
    "text": "#0072B2",
    "special": "#CC79A7",
    "newline": "#009E73",
    "indicator": "#D55E00",
}
MARKERS = {
    "visual": "o",
    "text": "s",
    "special": "D",
    "newline": "^",
    "indicator": "v",
}
MUTED = "#808080"

Sketch = tuple[Figure, Drawing]  # not yet written, with file name, title and caption

MODALITIES = ("visual", "text")
# Wide under narrow, so that curves that coincide can all be seen.
LINE_WIDTHS = {"visual": 2.4, "text": 1.5}
MARKER_SIZES = {"visual": 5.5, "text": 4.0}
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
"""For each field of `Interface`, the kind of its tokens and its label, in the tokens' order."""


@dataclass(frozen=True)
class Shown:
    """A model in the figures: its report, its label in legends, and whether it is the baseline."""

    report: Report
    label: str
    baseline: bool = False

    def face(self, color: str) -> str:
        """Returns the colour of a marker's face."""
        return "white" if self.baseline else color


def shown(report: Report, against: Report | None) -> list[Shown]:
    """Returns the models, the baseline first as in the paper, with names that can be drawn."""
    model = Shown(report, elide(drawable(report.model), 30))
    if against is None:
        return [model]
    label = f"{elide(drawable(against.model), 30)} (baseline)"
    return [Shown(against, label, baseline=True), model]


def draw(report: Report, against: Report | None, output: Path) -> list[Drawing]:
    """Writes the figures of the reports into the folder `output`.

    The folder has the images that attention is drawn on.

    Returns:
        The drawings in reading order.
    """
    models = shown(report, against)
    sketches = [interface(models), norms(models), cosine(models), rotation(models)]
    if any(model.report.dynamics for model in models):
        sketches.append(dynamics(models))
    sketches += attention(models, output)
    for figure, drawing in sketches:
        figure.savefig(output / drawing.file, dpi=DPI)
    return [drawing for _, drawing in sketches]


def interface(models: list[Shown]) -> Sketch:
    """Draws norms on the way into the language model, a row for each stage (tables 1 to 3)."""
    stages = []
    for stage in STAGES:
        is_received = not stage.endswith("_raw")
        if is_received and any(_positive_moments(model, stage) for model in models):
            stages.append(stage)
    ratios = [model.report.interface.ratio for model in models]
    sentence = "Visual tokens enter with {} the norm of text embeddings"
    title = ratio_title(ratios, sentence, "L2 norms at the interface")
    row_height = 0.25 + 0.17 * (len(models) - 1)
    figure = new_figure(1.3 + row_height * len(stages), title)
    axes = figure.subplots()
    for model in models:  # the legend has a grey marker for each
        axes.plot([], "o", color=MUTED, markerfacecolor=model.face(MUTED), label=model.label)
    _draw_stages(axes, models, stages)
    log_scale(axes, "x")
    text_norm = _positive_moments(models[-1], "vocabulary")
    if text_norm is not None:
        axes.axvline(text_norm.mean, color=COLORS["text"], linewidth=1, linestyle=":", zorder=1)
    axes.set_yticks(range(len(stages)), [STAGES[stage][1] for stage in stages])
    axes.set_ylim(len(stages) - 0.5, -0.5)
    tidy(axes, "L2 norm (logarithmic)", "")
    axes.grid(False, axis="y")
    legend(figure, 2)
    caption = "Mean and standard deviation of norms (tables 1 to 3). The dotted line is N_text."
    return figure, Drawing("interface.png", "Norms at the interface", caption, "interface")


def _positive_moments(model: Shown, stage: str) -> Moments | None:
    """Returns a stage's moments, or None if a logarithmic axis cannot show them."""
    moments = getattr(model.report.interface, stage)
    if moments is None or moments.mean <= 0 or not isfinite(moments.mean + moments.std):
        return None
    return moments


def _draw_stages(axes: Axes, models: list[Shown], stages: list[str]) -> None:
    """Draws a row for each stage, with each model at another height, and sets the axis' limits.

    A model's mean norm has its deviation as a bar, and its number beside it.
    """
    lower_ends = []
    upper_ends = []
    middle = (len(models) - 1) / 2
    for stage_index, stage in enumerate(stages):
        for model_index, model in enumerate(models):
            moments = _positive_moments(model, stage)
            if moments is not None:
                lower_ends.append(max(moments.mean - moments.std, moments.mean / 2))
                upper_ends.append(moments.mean + moments.std)
                height = stage_index + 0.34 * (model_index - middle)
                kind, _ = STAGES[stage]
                axes.errorbar(
                    moments.mean,
                    height,
                    xerr=moments.std,
                    color=COLORS[kind],
                    elinewidth=1.4,
                    fmt=MARKERS[kind],
                    markersize=6.5,
                    markerfacecolor=model.face(COLORS[kind]),
                    markeredgewidth=1.4,
                )
                label = f"  {number(moments.mean, 3)}"
                axes.text(upper_ends[-1], height, label, va="center", fontsize=8.5)
    lowest = min(lower_ends)
    highest = max(upper_ends)
    room_for_numbers = (1.15 * highest / lowest) ** 0.1
    axes.set_xlim(lowest / 1.15, highest * room_for_numbers)


def norms(models: list[Shown]) -> Sketch:
    """Draws the norm of the states (figures 1b, 4a)."""
    ratios = [model.report.interface.ratio_data for model in models]
    sentence = "Visual tokens start with {} the norm of text in the data"
    title = ratio_title(ratios, sentence, "Norm of the hidden states")
    figure = in_depth(models, "norm", title, "mean L2 norm (logarithmic)")
    caption = (
        "Mean L2 norm of the hidden states (figures 1b, 4a). Bands: one standard deviation of its "
        "logarithm. A few tokens of huge norm can lift the mean above its band."
    )
    return figure, Drawing("norms.png", "Norm in depth", caption, "depth")


def cosine(models: list[Shown]) -> Sketch:
    """Draws the cosine similarity of consecutive states (figures 2, 3, 4b)."""
    curves = models[-1].report.depth.cosine
    means = [f"{number(fmean(curves[kind].mean), 3)} for {kind}" for kind in kinds_of(models[-1])]
    title = f"Cosine similarity between layers is {', '.join(means)} tokens"
    figure = in_depth(models, "cosine", title, "cosine similarity\nof consecutive states")
    caption = "Cosine of a token's states around a layer (figures 2, 3, 4b): mean and deviation."
    return figure, Drawing("cosine.png", "Cosine similarity between layers", caption, "depth")


def rotation(models: list[Shown]) -> Sketch:
    """Draws a token's rotation in each layer (eqs. 8, 13)."""
    ratios = [model.report.depth.asymmetry for model in models]
    sentence = "Visual tokens rotate {} as much as text in each layer"
    title = ratio_title(ratios, sentence, "Rotation in each layer")
    figure = in_depth(models, "rotation", title, "rotation by the layer (degrees)", degrees(1))
    figure.axes[0].set_ylim(bottom=0)
    caption = "The angle ω of a token's rotation in a layer (eqs. 8, 13): mean and deviation."
    return figure, Drawing("rotation.png", "Rotation in depth", caption, "depth")


def dynamics(models: list[Shown]) -> Sketch:
    """Draws the cosine similarity between layers at each recorded step of training (figure 5)."""
    recording_models = [model for model in models if model.report.dynamics]
    height = 0.9 + 2.5 * len(recording_models)
    figure = new_figure(height, "Cosine between layers during training")
    steps = [entry.step for model in recording_models for entry in model.report.dynamics]
    first_step = min(steps)
    last_step = max(*steps, first_step + 1)
    # The brightest yellow of viridis cannot be seen on white.
    shades = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)))
    step_colors = ScalarMappable(Normalize(first_step, last_step), shades)
    panels = figure.subplots(
        len(recording_models),
        len(MODALITIES),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    contents = product(recording_models, MODALITIES)
    for axes, (model, modality) in zip(panels.flat, contents, strict=True):
        for recorded in model.report.dynamics:
            cosines = getattr(recorded, modality)
            color = step_colors.to_rgba(recorded.step)
            axes.plot(range(1, len(cosines) + 1), cosines, color=color, linewidth=1.3)
        tidy(axes, "layer", "cosine similarity", f"{modality}, {model.label}")
        axes.label_outer()
    figure.colorbar(
        step_colors,
        ax=panels,
        label="optimizer step",
        aspect=30,
        pad=0.02,
    )
    caption = "Mean cosine of a token's states before and after each layer, by step (figure 5)."
    return figure, Drawing("dynamics.png", "Training dynamics", caption, "dynamics")


def attention(models: list[Shown], images: Path) -> list[Sketch]:
    """Draws the image of every question with maps, and where the models look in it.

    Raises ValueError or OSError if an image in the folder `images` cannot be read.
    """
    sketches = []
    for question_index, main_answer in enumerate(models[-1].report.attention):
        if not main_answer.maps:
            continue
        answers = [
            (model, model.report.attention[question_index])
            for model in models
            if question_index < len(model.report.attention)
        ]
        opened = Image.open(images / str(main_answer.image), formats=("PNG",))
        figure = _draw_attention(opened.convert("RGB"), main_answer.question, answers)
        order = ""
        if not main_answer.grid:
            order = ", visual tokens in order, since they form no single grid"
        caption = (
            f"Attention from the text after the image to its tokens: average over layers{order} "
            "(appendix G). A map sums to 100 %. "
            f"Question: {elide(main_answer.question, 300)}"
        )
        file_name = f"attention_{question_index + 1}.png"
        title = f"Attention, question {question_index + 1}"
        sketches.append((figure, Drawing(file_name, title, caption, "attention")))
    return sketches


def _draw_attention(
    image: Image.Image, question: str, answers: list[tuple[Shown, Attention]]
) -> Figure:
    """Draws an image, and beside it the mean map of each model on one scale."""
    words = fill(drawable(question), 76, max_lines=3, placeholder=" …")
    panel_width = (WIDTH - 0.8) / (1 + len(answers))
    aspect_ratio = min(2.0, max(0.3, image.height / image.width))
    lines_of_text = words.count("\n") + 3
    height = 0.35 + aspect_ratio * panel_width + 0.25 * lines_of_text
    figure = new_figure(height, f"Where text looks when asked:\n{words}")
    panels = figure.subplots(1, 1 + len(answers))
    for axes in panels:
        axes.set_axis_off()
    panels[0].imshow(image)
    panels[0].set_title("the image", fontsize=8.5)
    maps = [100 * np.mean(answer.maps, axis=0) for _, answer in answers]
    # Up to a high quantile: a few cells with nearly everything would leave all others black.
    brightest = np.quantile(np.concatenate(maps, axis=None), 0.995)
    color_scale = Normalize(0, max(brightest, 1e-9))
    for axes, (model, answer), shares in zip(panels[1:], answers, maps, strict=True):
        shaded_map = axes.imshow(
            shares,
            cmap="magma",
            norm=color_scale,
            aspect="equal" if answer.grid else "auto",
        )
        axes.set_title(fill(model.label, 26), fontsize=8.5)
    color_bar = figure.colorbar(
        shaded_map,
        ax=panels,
        extend="max",
        aspect=40,
        extendfrac=0.02,
        pad=0.02,
    )
    color_bar.set_label("share of the attention\nto the image (%)", fontsize=8)
    color_bar.ax.tick_params(labelsize=8)
    return figure


def kinds_of(model: Shown) -> list[str]:
    """Returns the modalities that were measured."""
    return [kind for kind in MODALITIES if kind in model.report.depth.norm]


def in_depth(
    models: list[Shown], quantity: str, title: str, label: str, factor: float = 1
) -> Figure:
    """Draws a quantity of each model's `Depth`, times `factor`, over layers or states.

    Each kind of token has a curve and, unless the model is the baseline, a band of one standard
    deviation.
    """
    figure = new_figure(4.3, title)
    axes = figure.subplots()
    axis_label = "layer"
    first_position = 1
    band_quantity = quantity
    if quantity == "norm":
        axis_label = "state (0 enters the first layer)"
        first_position = 0
        band_quantity = "log_norm"
    for model in models:
        depth = model.report.depth
        for kind in kinds_of(model):
            means = factor * np.asarray(getattr(depth, quantity)[kind].mean)
            positions = first_position + np.arange(len(means))
            line_style = {"linestyle": "-", "linewidth": LINE_WIDTHS[kind], "zorder": 3}
            if model.baseline:
                line_style = {"linestyle": "--", "linewidth": 1.2, "zorder": 4}
            axes.plot(
                positions,
                means,
                label=f"{kind}, {model.label}",
                color=COLORS[kind],
                marker=MARKERS[kind],
                markerfacecolor=model.face(COLORS[kind]),
                markersize=MARKER_SIZES[kind],
                **line_style,
            )
            if not model.baseline:  # twice as many bands would hide each other
                curve = getattr(depth, band_quantity)[kind]
                band = np.asarray(curve.mean) + np.outer([-1, 1], curve.std)
                if quantity == "norm":  # norms deviate by a factor
                    band = np.exp(band)
                ends = factor * band
                axes.fill_between(positions, *ends, color=COLORS[kind], alpha=0.15, linewidth=0)
    if quantity == "norm":
        log_scale(axes, "y")
    tidy(axes, axis_label, label)
    legend(figure, len(models))
    return figure


def drawable(text: str) -> str:
    """Escapes what matplotlib's font lacks, and dollar signs, since they begin formulas."""
    font = get_font(findfont(FontProperties()))
    escaped_text = ""
    for character in text:
        if character == "$":
            escaped_text += r"\$"
        elif character.isprintable() and font.get_char_index(ord(character)):
            escaped_text += character
        else:
            escaped_text += ascii(character)[1:-1]
    return escaped_text


def elide(text: str, length: int) -> str:
    """Shortens `text` to `length` characters by leaving out its middle."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}…{text[1 - half :]}"


def new_figure(height: float, title: str) -> Figure:
    """Returns an empty figure, `height` inches high, under a title that wraps."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    wrapped_lines = [fill(line, 80) for line in title.split("\n")]
    figure.suptitle(
        "\n".join(wrapped_lines),
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    return figure


def tidy(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Labels `axes`, removes two spines and lightens the grid."""
    if axes.get_xscale() == "linear":  # it counts layers
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def ratio_title(ratios: Sequence[float | None], sentence: str, otherwise: str) -> str:
    """Returns `sentence` with the model's ratio, the last one, for {}, and the baseline's after it.

    Returns `otherwise` if the model has no ratio.
    """
    *baseline_ratios, ratio = ratios
    if ratio is None:
        return otherwise
    title = sentence.format(f"{number(ratio, 3)} ×")
    for baseline_ratio in baseline_ratios:
        if baseline_ratio is not None:
            title += f" (baseline {number(baseline_ratio, 3)} ×)"
    return title


def log_scale(axes: Axes, which: str) -> None:
    """Makes axis `which` ("x" or "y") logarithmic, with plain numbers at its ticks."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    multiples = [1.0]
    if max(axis.get_data_interval()) < 1000 * axis.get_minpos():
        multiples = [1.0, 2.0, 5.0]
    axis.set_major_locator(LogLocator(subs=multiples, numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, columns: int) -> None:
    """Adds a legend below the figure."""
    figure.legend(ncols=columns, loc="outside lower left", fontsize=9, frameon=False)
