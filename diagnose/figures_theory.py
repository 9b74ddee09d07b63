# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The figure of the theory's simulation (section 3, appendix B)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from .figures_style import COLORS, MUTED, Sketch, log_scale, new_figure, tidy
from .report import Drawing


ORANGE, BLUE, GREEN, VERMILLION, PURPLE = (
    COLORS[kind] for kind in ("visual", "text", "newline", "indicator", "special")
)
DIRECTIONS = {
    "independent": ("independent turns (the theorem)", "o", BLUE),
    "shared": ("one turn for both", "^", VERMILLION),
    "toward": ("turns toward the other", "D", ORANGE),
}
CASES = {
    "imbalanced": ("-", "o", ORANGE),
    "balanced": ("--", "s", BLUE),
    "aligned": (":", "^", GREEN),
}
LAG = "lag angle δ (degrees)"


def simulation_figure(simulation: Mapping[str, Any]) -> Sketch:
    """The checks of `simulate`, one panel for each claim."""
    figure = new_figure(10, "The theory in simulation: where its claims hold, and where not")
    panels = figure.subplots(3, 2)
    fill_retention(panels[0, 0], simulation["retention"])
    fill_lemma(panels[0, 1], simulation["lemma"])
    fill_lag(panels[1, 0], simulation["lag"])
    fill_trace(panels[1, 1], simulation["trace"])
    fill_signal(panels[2, 0], simulation["attention"])
    fill_entropy(panels[2, 1], simulation["attention"])
    for axes in panels.flat:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.05, -0.2))
    caption = (
        "Monte Carlo (marks) against closed forms (lines). Theorem 1 holds for turns in independent directions only "
        "(eqs. 15, 16). Lemma 1 compares rotations whose tangents have the same product; if instead the text token's "
        "rotation stays, as when visual norms are aligned to it, lambda rises with imbalance. The lag angle (eq. 17) "
        "has the sign that the paper gives it against the balanced pair. The trace bound falls by cos(delta) (eqs. "
        "18 to 20), unless all tokens lag by the same turn; the signal-to-noise ratio falls and attention spreads "
        "(eqs. 10, 21)."
    )
    return Sketch(figure, Drawing("simulation.png", "The theory in simulation", caption, "theory"))


def fill_retention(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Theorem 1: simulated mean cosines against predicted ones, which lie on the diagonal where it holds."""
    ends = [min(row["predicted"] for row in rows), max(row["predicted"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=0.9, linestyle=":")
    for name, (label, marker, color) in DIRECTIONS.items():
        of = [row for row in rows if row["directions"] == name]
        x, y = [row["predicted"] for row in of], [row["simulated"] for row in of]
        if of:
            axes.errorbar(x, y, [row["standard_error"] for row in of], fmt="none", ecolor=color, linewidth=1)
            axes.plot(x, y, marker, color=color, markersize=5, markerfacecolor="none", label=label)
    tidy(axes, "predicted mean cosine, λ cos θ", "simulated", "Theorem 1: decay of the cosine")


def fill_lemma(axes: Axes, lemma: Mapping[str, Any]) -> None:
    """Lemma 1: lambda against how unequal the rotations are."""
    axes.plot(lemma["ratio"], lemma["product_fixed"], color=BLUE, label="product of tangents fixed (lemma)")
    axes.plot(lemma["ratio"], lemma["text_fixed"], color=ORANGE, linestyle="--", label="text's rotation fixed")
    log_scale(axes, "x", lemma["ratio"])
    tidy(axes, "tan ω of text over tan ω of visual", "λ", "Lemma 1: equal rotations keep most")


def fill_lag(axes: Axes, lag: Mapping[str, Any]) -> None:
    """Angle of a pair over layers, for each case of starting norms."""
    for name, (line, marker, color) in CASES.items():
        visual, text = lag["norms"][name]
        axes.plot(
            lag["layer"],
            np.degrees(lag["angle"][name]),
            color=color,
            linestyle=line,
            label=f"{name}: norms {visual:.3g}, {text:.3g}",
        )
        axes.plot(lag["layer"], np.degrees(lag["simulated"][name]), marker, color=color, markersize=4)
    tidy(axes, "layer", "angle of the pair (degrees)", "Lag: a related pair drifts apart")


def fill_trace(axes: Axes, trace: Mapping[str, Any]) -> None:
    """Trace bound over what it is without lag."""
    x = np.degrees(trace["delta"])
    axes.plot(x, trace["predicted"], color="black", linewidth=1, label="cos δ (eq. 19)")
    axes.plot(x, trace["bound"], "o", color=BLUE, markerfacecolor="none", label="bound")
    axes.plot(x, trace["attained"], "+", color=BLUE, markersize=7, label="attained by the best projection")
    axes.plot(x, trace["same_turn"], "^", color=VERMILLION, markersize=5, label="bound, all lag by one turn")
    axes.plot(x, trace["random"], "s", color=MUTED, markersize=4, label="largest of random projections")
    tidy(axes, LAG, "over the bound without lag", "Trace bound")


def fill_signal(axes: Axes, attention: Mapping[str, Any]) -> None:
    """Signal to noise against the lag."""
    x = np.degrees(attention["delta"])
    axes.plot(x, attention["predicted_snr"], color="black", linewidth=1, label="√d cos δ")
    axes.plot(x, attention["snr"], "o", color=BLUE, markersize=5, markerfacecolor="none", label="signal over noise")
    axes.plot(x, attention["noise"], "s", color=MUTED, markersize=4, label="mean score of unrelated keys")
    keys, dimension = attention["keys"], attention["dimension"]
    tidy(axes, LAG, "score", f"Signal to noise (d = {dimension}, {keys} other keys)")


def fill_entropy(axes: Axes, attention: Mapping[str, Any]) -> None:
    """Spread of the attention against the lag."""
    x = np.degrees(attention["delta"])
    axes.plot(x, attention["entropy"], "-o", color=BLUE, markersize=4, label="entropy (1 is even)")
    axes.plot(x, attention["share"], "--s", color=ORANGE, markersize=4, label="share of the related key")
    axes.set_ylim(-0.05, 1.05)
    tidy(axes, LAG, "", "Attention spreads out")
