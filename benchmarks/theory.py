# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The paper's theory against simulation: `python benchmarks/theory.py` writes docs/theory.md and its figure.

Directions and states are drawn at random, or moved by real updates, and what comes out is set beside the equation
(section 3, appendix B). Where a claim needs an assumption, a case without it stands beside.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from normalign_llava.diagnose.figures.style import COLORS, DPI, MUTED, log_scale, new_figure, tidy
from normalign_llava.diagnose.measure.theory import (
    attention_entropy,
    best_projection,
    cross_covariance,
    expected_cosine,
    lag_angle,
    lagging_states,
    next_norm,
    retention_factor,
    rotation_angle,
    signal_to_noise,
    trace_bound,
)
from normalign_llava.diagnose.verdict import number


DOCS = Path(__file__).resolve().parents[1] / "docs"

TOWARD = 0.5
"""Cosine between the direction in which a "toward" token turns and the straight way to the other token."""


def simulate(seed: int = 0) -> dict[str, Any]:
    """Each claim's prediction and what came out, by name; angles are in radians. In float64, in about a second."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [(math.radians(theta), omegas) for theta in (20, 60, 110) for omegas in ((0.2, 0.9), (0.5, 0.5))]
    cases = [(dimension, "independent") for dimension in (2, 8, 64, 512)] + [(64, "shared"), (64, "toward")]
    retention = [
        _retention(dimension, theta, *omegas, directions, generator)
        for dimension, directions in cases
        for theta, omegas in pairs
    ]
    return {
        "retention": retention,
        "lemma": _lemma(),
        "lag": _lag(generator),
        "trace": _trace_bound(generator),
        "attention": _signal_to_noise(generator),
    }


def _retention(dimension, theta, omega_visual, omega_text, directions, generator, samples=2000) -> dict[str, Any]:
    visual = _unit(torch.randn(samples, dimension, generator=generator, dtype=torch.float64))
    away = _directions(visual, generator=generator)  # the straight way from the visual to the text token
    text = math.cos(theta) * visual + math.sin(theta) * away
    to_visual, to_text, common = _directions(visual, generator=generator), _directions(text, generator=generator), {}
    if directions == "shared":
        # The pair has a random orientation, so one fixed turn serves as well as a random one.
        to_visual, to_text, common = _quarter_turn(visual), _quarter_turn(text), {"shared": math.cos(theta)}
    elif directions == "toward":
        to_visual = TOWARD * away + math.sqrt(1 - TOWARD**2) * _directions(visual, away, generator=generator)
        common = {"toward_text": TOWARD * math.sin(theta)}
    turned_visual = math.cos(omega_visual) * visual + math.sin(omega_visual) * to_visual
    turned_text = math.cos(omega_text) * text + math.sin(omega_text) * to_text
    cosines = (turned_visual * turned_text).sum(-1)
    return dict(
        dimension=dimension,
        theta=theta,
        omega_visual=omega_visual,
        omega_text=omega_text,
        directions=directions,
        predicted=expected_cosine(math.cos(theta), omega_visual, omega_text),
        exact=expected_cosine(math.cos(theta), omega_visual, omega_text, **common),
        simulated=cosines.mean().item(),
        standard_error=cosines.std().item() / math.sqrt(samples),
    )


def _lemma(tangent: float = 0.3) -> dict[str, Any]:
    ratios = [10 ** (step / 10) for step in range(21)]
    unequal = [(math.atan(tangent / math.sqrt(r)), math.atan(tangent * math.sqrt(r))) for r in ratios]
    return dict(
        ratio=ratios,
        product_fixed=[retention_factor(*omegas) for omegas in unequal],
        text_fixed=[retention_factor(math.atan(tangent / r), math.atan(tangent)) for r in ratios],
    )


def _lag(
    generator, layers=24, theta=math.pi / 6, update=0.3, angle=math.pi / 2, dimension=64, samples=1000
) -> dict[str, Any]:
    # Updates at a right angle to the state: there a pair at the geometric mean of two norms has the same product of
    # tangents, which is what Lemma 1 holds fixed.
    visual, text = 30.0, 1.0
    mean = math.sqrt(visual * text)
    norms = {"imbalanced": [visual, text], "balanced": [mean, mean], "aligned": [text, text]}
    expected = {case: _recursion(pair, layers, theta, update, angle) for case, pair in norms.items()}
    simulated = {}
    for case, (norm_visual, norm_text) in norms.items():
        start = _unit(torch.randn(samples, dimension, generator=generator, dtype=torch.float64))
        other = math.cos(theta) * start + math.sin(theta) * _directions(start, generator=generator)
        states, angles = [norm_visual * start, norm_text * other], [theta]
        for _ in range(layers):
            states = [_updated(state, update, angle, generator) for state in states]
            angles.append(math.acos((_unit(states[0]) * _unit(states[1])).sum(-1).mean().item()))
        simulated[case] = angles
    lags = {
        case: [lag_angle(*cosines) for cosines in zip(expected["imbalanced"], expected[case], strict=True)]
        for case in ("balanced", "aligned")
    }
    return dict(
        layer=list(range(layers + 1)),
        norms=norms,
        angle={case: [math.acos(cosine) for cosine in cosines] for case, cosines in expected.items()},
        simulated=simulated,
        delta=lags["balanced"],
        delta_aligned=lags["aligned"],
    )


def _recursion(norms, layers, theta, update, angle) -> list[float]:
    cosines = [math.cos(theta)]
    for _ in range(layers):
        cosines.append(expected_cosine(cosines[-1], *(rotation_angle(norm, update, angle) for norm in norms)))
        norms = [next_norm(norm, update, angle) for norm in norms]
    return cosines


def _trace_bound(generator, dimension=16, samples=20000, trials=200) -> dict[str, Any]:
    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    text = _unit(noise(samples, dimension))
    visual = _unit(text @ noise(dimension, dimension) + noise(samples, dimension))
    directions = _directions(visual, generator=generator)
    projections = torch.linalg.qr(noise(trials, dimension, dimension)).Q  # of spectral norm 1, as R is
    whole = trace_bound(cross_covariance(visual, text))
    deltas = [math.radians(degrees) for degrees in range(0, 90, 10)]
    covariances = [cross_covariance(lagging_states(visual, directions, delta), text) for delta in deltas]
    turned = [math.cos(delta) * visual + math.sin(delta) * _quarter_turn(visual) for delta in deltas]
    return dict(
        delta=deltas,
        predicted=[math.cos(delta) for delta in deltas],
        bound=[trace_bound(c) / whole for c in covariances],
        attained=[(best_projection(c) @ c).trace().item() / whole for c in covariances],
        random=[torch.einsum("nij,ji->n", projections, c).max().item() / whole for c in covariances],
        same_turn=[trace_bound(cross_covariance(states, text)) / whole for states in turned],
    )


def _signal_to_noise(generator, dimension=64, keys=256, queries=200) -> dict[str, Any]:
    query = _unit(torch.randn(queries, dimension, generator=generator, dtype=torch.float64))
    away = _directions(query, generator=generator)
    unrelated = _unit(torch.randn(queries, keys, dimension, generator=generator, dtype=torch.float64))
    noise = math.sqrt(dimension) * (unrelated @ query[..., None]).squeeze(-1)
    deltas = [math.radians(degrees) for degrees in range(0, 91, 10)]
    signals = [
        math.sqrt(dimension) * (lagging_states(query, away, delta) * query).sum(-1, keepdim=True) for delta in deltas
    ]
    scores = [torch.cat([signal, noise], dim=-1) for signal in signals]
    return dict(
        dimension=dimension,
        keys=keys,
        delta=deltas,
        signal=[signal.mean().item() for signal in signals],
        noise=[noise.mean().item() for _ in deltas],
        snr=[(signal.mean() / noise.std()).item() for signal in signals],
        predicted_snr=[signal_to_noise(delta, dimension) for delta in deltas],
        entropy=[attention_entropy(score).mean().item() for score in scores],
        share=[score.softmax(-1)[:, 0].mean().item() for score in scores],
    )


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


def _directions(states: Tensor, *others: Tensor, generator: torch.Generator | None) -> Tensor:
    """Unit rows, uniform over the space orthogonal to the unit rows `states` (and `others`, orthogonal to those)."""
    rows = torch.randn(states.shape, generator=generator, dtype=states.dtype)
    for units in (states, *others):
        rows = rows - (rows * units).sum(-1, keepdim=True) * units
    return _unit(rows)


def _quarter_turn(rows: Tensor) -> Tensor:
    """One rotation of the whole space, of even dimension, that takes each vector to one orthogonal to it."""
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _updated(states: Tensor, update: float, angle: float, generator: torch.Generator) -> Tensor:
    units = _unit(states)
    turn = _directions(units, generator=generator)
    return states + update * (math.cos(angle) * units + math.sin(angle) * turn)


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


def simulation_figure(simulation: Mapping[str, Any]) -> Figure:
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
    return figure


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


def write_page(simulation: Mapping[str, Any], folder: Path) -> None:
    """Writes `theory.md` and `theory.png`."""
    lemma, lag, trace, attention = (simulation[name] for name in ("lemma", "lag", "trace", "attention"))
    turns = [
        [
            str(row["dimension"]),
            *(degrees(row[angle]) for angle in ("theta", "omega_visual", "omega_text")),
            DIRECTIONS[row["directions"]][0],
            number(row["predicted"]),
            number(row["exact"]),
            f"{number(row['simulated'])} ± {number(row['standard_error'], 1)}",
        ]
        for row in simulation["retention"]
    ]
    layers = [
        [str(layer), *(degrees(lag[of][case][layer]) for case in CASES for of in ("angle", "simulated"))]
        for layer in lag["layer"][::4]
    ]
    heads = ["d", "θ", "ω visual", "ω text", "directions of turning", "predicted", "exact", "simulated"]
    pages = {
        "RETENTION": table(heads, turns),
        "LEMMA": table(
            ["tan ω text / tan ω visual", "λ, product of tangents fixed", "λ, rotation of text fixed"],
            columns([lemma[name][::4] for name in ("ratio", "product_fixed", "text_fixed")]),
        ),
        "LAG": table(["layer", *(f"{case}, {of}" for case in CASES for of in ("recursion", "simulated"))], layers),
        "TRACE": table(
            ["δ", "cos δ", "bound", "attained", "best of random", "one turn for all"],
            columns(
                [trace[name] for name in ("delta", "predicted", "bound", "attained", "random", "same_turn")],
                angle=True,
            ),
        ),
        "ATTENTION": table(
            ["δ", "signal", "noise", "signal / noise", "predicted", "entropy", "share"],
            columns(
                [attention[name] for name in ("delta", "signal", "noise", "snr", "predicted_snr", "entropy", "share")],
                angle=True,
            ),
        ),
    }
    text = PAGE
    for name, content in pages.items():
        text = text.replace(f"@{name}", content)
    (folder / "theory.md").write_text(text, encoding="utf-8")
    simulation_figure(simulation).savefig(folder / "theory.png", format="png", dpi=DPI)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def columns(values: Sequence[Sequence[float]], angle: bool = False) -> list[list[str]]:
    """Rows of numbers from columns of numbers; with `angle` the first is in radians."""
    return [
        [degrees(first) if angle else number(first), *map(number, rest)] for first, *rest in zip(*values, strict=True)
    ]


def degrees(radians: float) -> str:
    """An angle as the page shows it."""
    return f"{math.degrees(radians):.1f}°"


PAGE = """# The theory in simulation

What section 3 and appendix B of the paper claim, checked by drawing vectors: `python benchmarks/theory.py`
writes this page. The functions are in [theory.py](../diagnose/measure/theory.py). A report of `normalign
diagnose` has the rotation that section 3.1 predicts from a model's norms, beside the measured one.

![Each claim: closed form and simulation](theory.png)

## Theorem 1 (eqs. 15, 16): the cosine of a pair after both have turned

It holds where tokens turn in independent directions, evenly spread. It does not where both turn together, or
one toward the other; the exact mean then has further terms.

@RETENTION

## Lemma 1: equal rotations keep most

The lemma compares rotations whose tangents have the same product. If the rotation of text stays as it is
instead, as when visual norms are aligned to those of text, λ rises with the imbalance: the lemma says nothing
of a model before and after alignment.

@LEMMA

## Lag angle (eq. 17): a related pair drifts apart, layer by layer

"Imbalanced" starts at norms 30 and 1, "balanced" at their geometric mean, "aligned" at 1 and 1. The angle of the
imbalanced pair exceeds that of the balanced one, as the paper says, and stays below that of the aligned one.

@LAG

## Trace bound (eqs. 18 to 20), over the bound without lag

It falls by cos δ where tokens lag in directions of no consequence, and not at all where all lag by one and the
same turn.

@TRACE

## Attention over one related and many unrelated keys (eqs. 10, 21)

The signal-to-noise ratio falls with the lag, and attention spreads.

@ATTENTION
"""


if __name__ == "__main__":
    write_page(simulate(), DOCS)
