# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Figures of norms where vision meets language (tables 1 to 3) and of embedding matrices (tables 6 to 8)."""

from collections.abc import Sequence
from math import isclose, isfinite

from matplotlib.axes import Axes

from ..paper import paper_ratios, paper_tables
from ..report import Drawing, EmbeddingTable, Interface, Moments
from .style import (
    COLORS,
    MARKERS,
    MUTED,
    Shown,
    Sketch,
    compare,
    elide,
    log_scale,
    new_figure,
    number,
    printable,
    tidy,
)


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
"""The kind and the words of each measured place, in the order in which tokens pass it."""


def interface(models: Sequence[Shown]) -> Sketch | None:
    """Norms on the way into the language model; None if nothing of it was measured."""
    rows = measured(models)
    if not rows:
        return None
    title = entering(models) or "L2 norms at the interface"
    figure = new_figure(1.3 + (0.25 + 0.17 * (len(models) - 1)) * len(rows), title)
    fill_interface(axes := figure.subplots(), models, rows)
    if len(models) > 1:
        for model in models:
            axes.plot(
                [], [], "o", color=MUTED, markerfacecolor="white" if model.baseline else MUTED, label=model.label
            )
        figure.legend(loc="outside lower left", ncols=2, fontsize=9, frameon=False)
    caption = (
        "L2 norm of tokens from the vision encoder to the first decoder layer (tables 1 to 3): mean, and a whisker "
        "of one standard deviation to each side, which ends at the left edge where it would reach zero. Circles are "
        "visual tokens, squares text. The dotted line is the mean of the vocabulary as received, N_text (eq. 11)."
    )
    return Sketch(figure, Drawing("interface.png", "Norms at the interface", caption, "interface"))


def entering(models: Sequence[Shown]) -> str | None:
    """What tables 1 to 3 come down to, in a sentence."""
    ratios = [model.report.interface.ratio for model in models]
    return compare(models, ratios, "Visual tokens enter with {} the norm of text embeddings", " ×")


def measured(models: Sequence[Shown]) -> list[str]:
    """The stages that a logarithmic axis can show; rows as stored only where they are scaled on the way."""
    scaled = any(not isclose(model.report.interface.scale or 1.0, 1.0, rel_tol=1e-3) for model in models)
    return [
        name
        for name in STAGES
        if (scaled or not name.endswith("_raw")) and any(positive(model.report.interface, name) for model in models)
    ]


def positive(values: Interface, name: str) -> Moments | None:
    """The moments of stage `name`, None without any or if no logarithm could show them."""
    moments: Moments | None = getattr(values, name)
    return moments if moments is not None and isfinite(moments.mean + moments.std) and moments.mean > 0 else None


def fill_interface(axes: Axes, models: Sequence[Shown], rows: Sequence[str]) -> None:
    """Draws a row for each stage, from top to bottom, and in it a dot and whiskers for each model."""
    drawn = [
        (row + 0.34 * (place - (len(models) - 1) / 2), STAGES[name][0], model, moments)
        for row, name in enumerate(rows)
        for place, model in enumerate(models)
        if (moments := positive(model.report.interface, name))
    ]
    low = min(max(moments.mean - moments.std, moments.mean / 2) for *_, moments in drawn) / 1.15
    high = max(moments.mean + moments.std for *_, moments in drawn)
    log_scale(axes, "x", (low, high))
    axes.set_xlim(low, high * (high / low) ** 0.1)
    for y, kind, model, moments in drawn:
        ends = [max(moments.mean - moments.std, low), moments.mean + moments.std]
        axes.plot(ends, [y, y], color=COLORS[kind], linewidth=1.4)
        axes.plot(
            moments.mean,
            y,
            MARKERS[kind],
            color=COLORS[kind],
            markersize=6.5,
            markerfacecolor="white" if model.baseline else COLORS[kind],
            markeredgewidth=1.4,
        )
        axes.annotate(
            number(moments.mean),
            (moments.mean + moments.std, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    if target := positive(models[-1].report.interface, "vocabulary"):
        axes.axvline(target.mean, color=COLORS["text"], linewidth=1, linestyle=":", zorder=1)
    axes.set_yticks(range(len(rows)), [STAGES[name][1] for name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    tidy(axes, "L2 norm (logarithmic)", "")
    axes.grid(False, axis="y")


def paper_interface(models: Sequence[Shown]) -> Sketch | None:
    """The models among the paper's; None if there is nothing to set beside them."""
    tables = paper_tables()
    panels: list[tuple[str, str, list[tuple[str, Moments | float]], list[Moments | float | None]]] = [
        (
            "Vision encoders: L2 norm of the output (table 1)",
            "visual",
            [(row["model"], Moments(row["norm_mean"], row["norm_std"], 0)) for row in tables["table_1_vision"]],
            [positive(model.report.interface, "encoder_output") for model in models],
        ),
        (
            "Language models: mean L2 norm of the text embeddings (table 1)",
            "text",
            [(row["model"], row["norm_mean"]) for row in tables["table_1_text"]],
            [text.mean if (text := positive(m.report.interface, "vocabulary")) else None for m in models],
        ),
        (
            "Together: visual tokens over text embeddings (tables 2, 3); 1 is aligned",
            "visual",
            list(paper_ratios().items()),
            [model.report.interface.ratio for model in models],
        ),
    ]
    panels = [panel for panel in panels if any(panel[3])]
    if not panels:
        return None
    heights = [len(paper) + sum(own is not None for own in ours) + 2.6 for _, _, paper, ours in panels]
    title = "Beside what the paper found in other models"
    if seen := entering(models):
        low, high = (number(extreme(paper_ratios().values())) for extreme in (min, max))
        title = f"{seen};\nin the paper's models with {low} to {high} ×"
    figure = new_figure(0.23 * sum(heights) + 0.6 + 0.2 * title.count("\n"), title)
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (title, kind, paper, own) in zip(grid.flat, panels, strict=True):
        ours = [(model, value) for model, value in zip(models, own, strict=True) if value is not None]
        fill_paper(axes, kind, paper, ours)
        tidy(axes, "ratio (logarithmic)" if title.startswith("Together") else "L2 norm (logarithmic)", "", title)
        axes.grid(False, axis="y")
    caption = (
        "In colour what was measured here, in grey what the paper published: norms of encoder outputs and of text "
        "embeddings (table 1), and the norm of visual tokens that enter the language model over that of text "
        "embeddings (tables 2 and 3). The paper measured other images."
    )
    return Sketch(figure, Drawing("paper_interface.png", "Beside the paper's models", caption, "interface"))


def fill_paper(
    axes: Axes, kind: str, paper: Sequence[tuple[str, Moments | float]], ours: Sequence[tuple[Shown, Moments | float]]
) -> None:
    """Draws a row for each of the paper's models, then for each of ours."""
    rows = [(name, value, MUTED, MUTED) for name, value in paper]
    color = COLORS[kind]
    rows += [(model.label, value, color, "white" if model.baseline else color) for model, value in ours]
    moments = [value if isinstance(value, Moments) else Moments(value, 0.0, 0) for _, value, _, _ in rows]
    low, high = min(m.mean for m in moments) / 1.6, max(m.mean + m.std for m in moments)
    log_scale(axes, "x", (low, high))
    axes.set_xlim(low, high * (high / low) ** 0.1)
    for y, (m, (_, _, edge, face)) in enumerate(zip(moments, rows, strict=True)):
        axes.plot([max(m.mean - m.std, low), m.mean + m.std], [y, y], color=edge, linewidth=1.4)
        axes.plot(m.mean, y, MARKERS[kind], color=edge, markerfacecolor=face, markersize=6.5, markeredgewidth=1.4)
        at = (m.mean + m.std, y)
        axes.annotate(number(m.mean), at, xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    for label in axes.get_yticklabels()[len(paper) :]:
        label.set_fontweight("bold")
    axes.set_ylim(len(rows) - 0.4, -0.6)


def embeddings(models: Sequence[Shown]) -> Sketch | None:
    """Norms of embedding rows and the largest of them; None if no embedding matrix was measured."""
    tables = [(model, table) for model in models if (table := model.report.embeddings)]
    if not tables:
        return None
    means = [table.mean for _, table in tables]
    title = compare([model for model, _ in tables], means, "Text embeddings have a mean norm of {}")
    longest = max(len(table.top) for _, table in tables)
    figure = new_figure(1.4 + 0.24 * longest, title or "Text embeddings")
    grid = figure.subplots(1, len(tables), squeeze=False, sharex=True)
    for axes, (model, table) in zip(grid.flat, tables, strict=True):
        fill_embeddings(axes, model, table)
    right = max(max([row.norm for row in table.top] + [table.mean + table.std]) for _, table in tables)
    grid[0, 0].set_xlim(0, 1.16 * right)
    caption = (
        "Rows of largest L2 norm in the embedding matrix, as stored. The line is the mean over all rows that are not "
        "zero, the band one standard deviation to each side (tables 6 to 8)."
    )
    return Sketch(figure, Drawing("embeddings.png", "Embedding matrices", caption, "embeddings"))


def fill_embeddings(axes: Axes, model: Shown, table: EmbeddingTable) -> None:
    """Draws a bar for each of the largest rows, over mean and standard deviation of all."""
    face = "white" if model.baseline else COLORS["text"]
    axes.axvspan(table.mean - table.std, table.mean + table.std, color="#DDDDDD", linewidth=0)
    axes.axvline(table.mean, color="black", linewidth=1, linestyle="--")
    axes.barh(range(len(table.top)), [row.norm for row in table.top], 0.62, color=face, edgecolor=COLORS["text"])
    for y, row in enumerate(table.top):
        axes.annotate(number(row.norm), (row.norm, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    names = [f"#{row.id}" if row.text is None else elide(printable(repr(row.text)), 20) for row in table.top]
    axes.set_yticks(range(len(table.top)), names)
    axes.set_ylim(max(len(table.top), 1) - 0.4, -0.6)
    spread = f"mean {number(table.mean)} ± {number(table.std)}" + (" (baseline)" if model.baseline else "")
    tidy(axes, "L2 norm, as stored", "", f"{elide(printable(table.model), 24)}\n{spread}")
    axes.grid(False, axis="y")
