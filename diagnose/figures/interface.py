# SPDX-License-Identifier: Apache-2.0
"""The figure of norms where vision meets language (tables 1 to 3)."""

from collections.abc import Sequence
from math import isfinite

from ..report import Drawing, Interface, Moments, number
from .style import COLORS, MARKERS, MUTED, Shown, Sketch, legend, log_scale, new_figure, ratio_title, tidy


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


def interface(models: Sequence[Shown]) -> Sketch:
    """Norms on the way into the language model, a row for each stage."""
    rows = [
        name
        for name in STAGES
        if not name.endswith("_raw") and any(positive(model.report.interface, name) for model in models)
    ]
    ratios = [model.report.interface.ratio for model in models]
    title = ratio_title(models, ratios, "Visual tokens enter with {} the norm of text embeddings")
    figure = new_figure(1.3 + (0.25 + 0.17 * (len(models) - 1)) * len(rows), title or "L2 norms at the interface")
    axes = figure.subplots()
    drawn = [
        (row + 0.34 * (place - (len(models) - 1) / 2), STAGES[name][0], model, moments)
        for row, name in enumerate(rows)
        for place, model in enumerate(models)
        if (moments := positive(model.report.interface, name))
    ]
    low = min(max(moments.mean - moments.std, moments.mean / 2) for *_, moments in drawn) / 1.15
    high = max(moments.mean + moments.std for *_, moments in drawn)
    axes.set_xlim(low, high * (high / low) ** 0.1)
    for y, kind, model, moments in drawn:
        face = "white" if model.baseline else COLORS[kind]
        marker = {"fmt": MARKERS[kind], "markersize": 6.5, "markerfacecolor": face, "markeredgewidth": 1.4}
        axes.errorbar(moments.mean, y, xerr=moments.std, color=COLORS[kind], elinewidth=1.4, **marker)
        end = moments.mean + moments.std, y
        label = number(moments.mean, 3)
        axes.annotate(label, end, (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    log_scale(axes, "x")
    for model in models:
        axes.plot([], [], "o", color=MUTED, markerfacecolor="white" if model.baseline else MUTED, label=model.label)
    if target := positive(models[-1].report.interface, "vocabulary"):
        axes.axvline(target.mean, color=COLORS["text"], linewidth=1, linestyle=":", zorder=1)
    axes.set_yticks(range(len(rows)), [STAGES[name][1] for name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    tidy(axes, "L2 norm (logarithmic)", "")
    axes.grid(False, axis="y")
    legend(figure, axes, 2)
    caption = (
        "L2 norm of tokens from the vision encoder to the first decoder layer (tables 1 to 3): mean, and one standard "
        "deviation to each side, cut off where it would reach zero. The dotted line is N_text (eq. 11)."
    )
    return figure, Drawing("interface.png", "Norms at the interface", caption, "interface")


def positive(values: Interface, name: str) -> Moments | None:
    """The moments of stage `name`; None if there are none or a logarithmic axis cannot show them."""
    moments: Moments | None = getattr(values, name)
    return moments if moments is not None and isfinite(moments.mean + moments.std) and moments.mean > 0 else None
