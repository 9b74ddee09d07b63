# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The paper's theory in simulation (section 3, appendix B): `python benchmarks/theory.py` draws docs/theory.png.

States and directions are drawn at random, and the outcome is compared with the equation. Where a claim needs an
assumption, a case without it is drawn too; docs/theory.md discusses both. Angles are in radians, numbers in float64.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from normalign_llava.diagnose.figures.style import COLORS, DPI, MUTED, log_scale, new_figure, tidy
from normalign_llava.diagnose.measure.theory import rotation_angle


FIGURE = Path(__file__).resolve().parents[1] / "docs" / "theory.png"

TOWARD = 0.5
"""Cosine between the direction in which a "toward" token turns and the straight way to the other token."""

VISUAL, TEXT, ALIGNED, SHARED = (COLORS[kind] for kind in ("visual", "text", "newline", "indicator"))


def retention_factor(omega_visual: float, omega_text: float) -> float:
    """lambda = cos(omega_v) cos(omega_t) (eq. 16): the share of a pair's expected cosine that one layer keeps."""
    return math.cos(omega_visual) * math.cos(omega_text)


def expected_cosine(
    cosine: float, omega_visual: float, omega_text: float, *, toward_text: float = 0.0, shared: float = 0.0
) -> float:
    """Expected cosine of a pair after both tokens have turned; with the defaults this is Theorem 1 (eq. 15).

    With unit states v, t and unit directions a (orthogonal to v) and b (orthogonal to t), the new states are
    cos(omega_v) v + sin(omega_v) a and cos(omega_t) t + sin(omega_t) b. Their product has a term in v.b too, which is
    zero on average in every case simulated here.

    Args:
        cosine: cos(theta) before.
        omega_visual, omega_text: How far each token turns.
        toward_text: E[a.t].
        shared: E[a.b].
    """
    return (
        retention_factor(omega_visual, omega_text) * cosine
        + math.sin(omega_visual) * math.cos(omega_text) * toward_text
        + math.sin(omega_visual) * math.sin(omega_text) * shared
    )


def lagging_states(states: Tensor, directions: Tensor, delta: float) -> Tensor:
    """States `(n, d)` that lag by delta in unit directions orthogonal to them (eq. 18); their norms stay."""
    return math.cos(delta) * states + math.sin(delta) * states.norm(dim=-1, keepdim=True) * directions


def trace_bound(covariance: Tensor) -> float:
    """Maximum of tr(M C) over M of spectral norm 1: the sum of C's singular values (eq. 20, von Neumann)."""
    return torch.linalg.svdvals(covariance).sum().item()


def best_projection(covariance: Tensor) -> Tensor:
    """The M of spectral norm 1 that attains `trace_bound`: V U^T for C = U S V^T."""
    left, _, right = torch.linalg.svd(covariance)
    return right.T @ left.T


def attention_entropy(scores: Tensor) -> Tensor:
    """Entropy of the softmax over the last dimension, relative to an even one: 1 is even, 0 is one key."""
    logs = scores.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1) / math.log(scores.shape[-1])


def simulate(seed: int = 0) -> dict[str, Any]:
    """What each claim predicts and what came out, by panel of the figure."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [(math.radians(theta), omegas) for theta in (20, 60, 110) for omegas in ((0.2, 0.9), (0.5, 0.5))]
    cases = [(dimension, "independent") for dimension in (2, 8, 64, 512)] + [(64, "shared"), (64, "toward")]
    return {
        "cosine": [
            simulate_cosine(dimension, theta, *omegas, directions, generator)
            for dimension, directions in cases
            for theta, omegas in pairs
        ],
        "lemma": compute_lemma(),
        "lag": simulate_lag(generator),
        "trace": simulate_trace(generator),
        "attention": simulate_attention(generator),
    }


def simulate_cosine(dimension, theta, omega_visual, omega_text, directions, generator, samples=2000) -> dict[str, Any]:
    """Theorem 1: the mean cosine of pairs whose tokens turn in independent, shared, or approaching directions."""
    visual = unit(randn(samples, dimension, generator=generator))
    away = orthogonal(visual, generator=generator)  # the straight way from the visual to the text token
    text = math.cos(theta) * visual + math.sin(theta) * away
    to_visual, to_text, terms = orthogonal(visual, generator=generator), orthogonal(text, generator=generator), {}
    if directions == "shared":
        # The pair's orientation is random, so one fixed turn serves as well as a random one.
        to_visual, to_text, terms = quarter_turn(visual), quarter_turn(text), {"shared": math.cos(theta)}
    elif directions == "toward":
        to_visual = TOWARD * away + math.sqrt(1 - TOWARD**2) * orthogonal(visual, away, generator=generator)
        terms = {"toward_text": TOWARD * math.sin(theta)}
    turned_visual = math.cos(omega_visual) * visual + math.sin(omega_visual) * to_visual
    turned_text = math.cos(omega_text) * text + math.sin(omega_text) * to_text
    cosines = (turned_visual * turned_text).sum(-1)
    return dict(
        dimension=dimension,
        directions=directions,
        predicted=expected_cosine(math.cos(theta), omega_visual, omega_text),
        exact=expected_cosine(math.cos(theta), omega_visual, omega_text, **terms),
        simulated=cosines.mean().item(),
        standard_error=cosines.std().item() / math.sqrt(samples),
    )


def compute_lemma(tangent: float = 0.3) -> dict[str, list[float]]:
    """Lemma 1: lambda for unequal rotations of the same product of tangents, and for a fixed rotation of text."""
    ratios = [10 ** (step / 10) for step in range(21)]
    unequal = [(math.atan(tangent / math.sqrt(r)), math.atan(tangent * math.sqrt(r))) for r in ratios]
    return dict(
        ratio=ratios,
        product_fixed=[retention_factor(*omegas) for omegas in unequal],
        text_fixed=[retention_factor(math.atan(tangent / r), math.atan(tangent)) for r in ratios],
    )


def simulate_lag(generator, layers=24, theta=math.pi / 6, update=0.3, dimension=64, samples=1000) -> dict[str, Any]:
    """Eq. 17: the angle of a related pair, layer by layer, by the recursion of Theorem 1 and by real updates.

    Updates are at a right angle to the state: then a pair at the geometric mean of two norms has the same product of
    tangents, which Lemma 1 holds fixed.
    """
    mean = math.sqrt(30.0)
    norms = {"imbalanced": (30.0, 1.0), "balanced": (mean, mean), "aligned": (1.0, 1.0)}
    angle, simulated = {}, {}
    for case, sizes in norms.items():
        cosines = [math.cos(theta)]
        start = unit(randn(samples, dimension, generator=generator))
        other = math.cos(theta) * start + math.sin(theta) * orthogonal(start, generator=generator)
        states, seen = [sizes[0] * start, sizes[1] * other], [theta]
        for _ in range(layers):
            cosines.append(
                expected_cosine(cosines[-1], *(rotation_angle(size, update, math.pi / 2) for size in sizes))
            )
            sizes = [math.hypot(size, update) for size in sizes]
            states = [state + update * orthogonal(unit(state), generator=generator) for state in states]
            seen.append(math.acos((unit(states[0]) * unit(states[1])).sum(-1).mean().item()))
        angle[case], simulated[case] = [math.acos(cosine) for cosine in cosines], seen
    return dict(layer=list(range(layers + 1)), norms=norms, angle=angle, simulated=simulated)


def simulate_trace(generator, dimension=16, samples=20000, trials=200) -> dict[str, list[float]]:
    """Eqs. 18 to 20: the trace bound of lagging states, relative to the bound without lag."""
    text = unit(randn(samples, dimension, generator=generator))
    mixing, noise = (randn(size, dimension, generator=generator) for size in (dimension, samples))
    visual = unit(text @ mixing + noise)
    directions = orthogonal(visual, generator=generator)
    projections = torch.linalg.qr(randn(trials, dimension, dimension, generator=generator)).Q
    whole = trace_bound(visual.T @ text / samples)
    deltas = [math.radians(degrees) for degrees in range(0, 90, 10)]
    covariances = [lagging_states(visual, directions, delta).T @ text / samples for delta in deltas]
    turned = [lagging_states(visual, quarter_turn(visual), delta).T @ text / samples for delta in deltas]
    return dict(
        delta=deltas,
        bound=[trace_bound(c) / whole for c in covariances],
        attained=[(best_projection(c) @ c).trace().item() / whole for c in covariances],
        random=[torch.einsum("nij,ji->n", projections, c).max().item() / whole for c in covariances],
        same_turn=[trace_bound(c) / whole for c in turned],
    )


def simulate_attention(generator, dimension=64, keys=256, queries=200) -> dict[str, Any]:
    """Eqs. 10, 21: scores of one related key that lags, among unrelated keys, all of unit norm times sqrt(d)."""
    query = unit(randn(queries, dimension, generator=generator))
    away = orthogonal(query, generator=generator)
    unrelated = unit(randn(queries, keys, dimension, generator=generator))
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
        noise=noise.mean().item(),
        predicted_snr=[math.sqrt(dimension) * math.cos(delta) for delta in deltas],
        snr=[(signal.mean() / noise.std()).item() for signal in signals],
        entropy=[attention_entropy(score).mean().item() for score in scores],
        share=[score.softmax(-1)[:, 0].mean().item() for score in scores],
    )


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unit(rows: Tensor) -> Tensor:
    """Rows divided by their norms."""
    return rows / rows.norm(dim=-1, keepdim=True)


def orthogonal(states: Tensor, *others: Tensor, generator: torch.Generator) -> Tensor:
    """Unit rows, uniform over the space orthogonal to the unit rows `states` (and `others`, orthogonal to those)."""
    rows = randn(*states.shape, generator=generator)
    for units in (states, *others):
        rows = rows - (rows * units).sum(-1, keepdim=True) * units
    return unit(rows)


def quarter_turn(rows: Tensor) -> Tensor:
    """One rotation of the whole space, of even dimension, that takes each vector to one orthogonal to it."""
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def draw(simulation: dict[str, Any], path: Path) -> None:
    """Writes the figure: one panel for each claim."""
    figure = new_figure(10, "The theory in simulation: where its claims hold, and where they do not")
    ((cosine, lemma), (lag, trace), (signal, spread)) = panels = figure.subplots(3, 2)
    draw_cosine(cosine, simulation["cosine"])

    found = simulation["lemma"]
    lemma.plot(found["ratio"], found["product_fixed"], color=TEXT, label="product of tangents fixed (lemma)")
    lemma.plot(found["ratio"], found["text_fixed"], color=VISUAL, linestyle="--", label="rotation of text fixed")
    log_scale(lemma, "x")
    tidy(lemma, "tan ω of text / tan ω of visual", "λ", "Lemma 1: equal rotations keep most")

    found = simulation["lag"]
    for case, line, marker, color in (
        ("imbalanced", "-", "o", VISUAL),
        ("balanced", "--", "s", TEXT),
        ("aligned", ":", "^", ALIGNED),
    ):
        label = "{}: norms {:.3g}, {:.3g}".format(case, *found["norms"][case])
        lag.plot(found["layer"], np.degrees(found["angle"][case]), line, color=color, label=label)
        lag.plot(found["layer"], np.degrees(found["simulated"][case]), marker, color=color, markersize=4)
    tidy(lag, "layer", "angle of the pair (degrees)", "Lag: a related pair drifts apart")

    found = simulation["trace"]
    x = np.degrees(found["delta"])
    trace.plot(x, np.cos(found["delta"]), color="black", linewidth=1, label="cos δ (eq. 19)")
    trace.plot(x, found["bound"], "o", color=TEXT, markerfacecolor="none", label="bound")
    trace.plot(x, found["attained"], "+", color=TEXT, markersize=7, label="attained by the best projection")
    trace.plot(x, found["same_turn"], "^", color=SHARED, markersize=5, label="bound, all lag by one turn")
    trace.plot(x, found["random"], "s", color=MUTED, markersize=4, label="largest of random projections")
    tidy(trace, "lag angle δ (degrees)", "relative to no lag", "Trace bound")

    found = simulation["attention"]
    x = np.degrees(found["delta"])
    signal.plot(x, found["predicted_snr"], color="black", linewidth=1, label="√d cos δ")
    signal.plot(x, found["snr"], "o", color=TEXT, markersize=5, markerfacecolor="none", label="signal / noise")
    signal.plot(x, [found["noise"]] * len(x), "s", color=MUTED, markersize=4, label="mean score of unrelated keys")
    title = f"Signal to noise (d = {found['dimension']}, {found['keys']} other keys)"
    tidy(signal, "lag angle δ (degrees)", "score", title)
    spread.plot(x, found["entropy"], "-o", color=TEXT, markersize=4, label="entropy (1 is even)")
    spread.plot(x, found["share"], "--s", color=VISUAL, markersize=4, label="share of the related key")
    spread.set_ylim(-0.05, 1.05)
    tidy(spread, "lag angle δ (degrees)", "", "Attention spreads out")

    for axes in panels.flat:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.05, -0.2))
    figure.savefig(path, format="png", dpi=DPI)


def draw_cosine(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Theorem 1: simulated against predicted mean cosines, which lie on the diagonal where it holds."""
    ends = [min(row["predicted"] for row in rows), max(row["predicted"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=0.9, linestyle=":")
    for directions, label, marker, color in (
        ("independent", "independent turns (the theorem)", "o", TEXT),
        ("shared", "one turn for both", "^", SHARED),
        ("toward", "turns toward the other", "D", VISUAL),
    ):
        points = [row for row in rows if row["directions"] == directions]
        x, y = ([row[key] for row in points] for key in ("predicted", "simulated"))
        axes.errorbar(x, y, [row["standard_error"] for row in points], fmt="none", ecolor=color, linewidth=1)
        axes.plot(x, y, marker, color=color, markersize=5, markerfacecolor="none", label=label)
    tidy(axes, "predicted mean cosine, λ cos θ", "simulated", "Theorem 1: decay of the cosine")


if __name__ == "__main__":
    draw(simulate(), FIGURE)
