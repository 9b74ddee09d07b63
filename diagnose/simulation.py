# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The theory's equations against simulation, for the report and its figure: `simulate() -> dict`.

Directions and states are drawn at random, or moved by real updates, and what comes out is set beside the equation.
"""

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .simulation_results import Lag, Lemma, Retention, SignalToNoise, Simulation, TraceBound
from .theory import (
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


TOWARD = 0.5
"""Cosine between the direction in which a "toward" token turns and the straight way to the other token."""


def simulate(seed: int = 0) -> dict[str, Any]:
    """Checks each claim by simulation, in float64 on the CPU, in about a second.

    Args:
        seed: Of all random draws; the global random state is left alone.

    Returns:
        `Simulation` as plain dicts, lists, numbers and strings.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = [(math.radians(theta), omegas) for theta in (20, 60, 110) for omegas in ((0.2, 0.9), (0.5, 0.5))]
    cases = [(dimension, "independent") for dimension in (2, 8, 64, 512)] + [(64, "shared"), (64, "toward")]
    retention = [
        _retention(dimension, theta, *omegas, directions, generator)
        for dimension, directions in cases
        for theta, omegas in pairs
    ]
    return asdict(
        Simulation(retention, _lemma(), _lag(generator), _trace_bound(generator), _signal_to_noise(generator))
    )


def _retention(dimension, theta, omega_visual, omega_text, directions, generator, samples=2000) -> Retention:
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
    return Retention(
        dimension,
        theta,
        omega_visual,
        omega_text,
        directions,
        predicted=expected_cosine(math.cos(theta), omega_visual, omega_text),
        exact=expected_cosine(math.cos(theta), omega_visual, omega_text, **common),
        simulated=cosines.mean().item(),
        standard_error=cosines.std().item() / math.sqrt(samples),
    )


def _lemma(tangent: float = 0.3) -> Lemma:
    ratios = [10 ** (step / 10) for step in range(21)]
    unequal = [(math.atan(tangent / math.sqrt(r)), math.atan(tangent * math.sqrt(r))) for r in ratios]
    return Lemma(
        ratio=ratios,
        product_fixed=[retention_factor(*omegas) for omegas in unequal],
        text_fixed=[retention_factor(math.atan(tangent / r), math.atan(tangent)) for r in ratios],
    )


def _lag(generator, layers=24, theta=math.pi / 6, update=0.3, angle=math.pi / 2, dimension=64, samples=1000) -> Lag:
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
    return Lag(
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


def _trace_bound(generator, dimension=16, samples=20000, trials=200) -> TraceBound:
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
    return TraceBound(
        delta=deltas,
        predicted=[math.cos(delta) for delta in deltas],
        bound=[trace_bound(c) / whole for c in covariances],
        attained=[(best_projection(c) @ c).trace().item() / whole for c in covariances],
        random=[torch.einsum("nij,ji->n", projections, c).max().item() / whole for c in covariances],
        same_turn=[trace_bound(cross_covariance(states, text)) / whole for states in turned],
    )


def _signal_to_noise(generator, dimension=64, keys=256, queries=200) -> SignalToNoise:
    query = _unit(torch.randn(queries, dimension, generator=generator, dtype=torch.float64))
    away = _directions(query, generator=generator)
    unrelated = _unit(torch.randn(queries, keys, dimension, generator=generator, dtype=torch.float64))
    noise = math.sqrt(dimension) * (unrelated @ query[..., None]).squeeze(-1)
    deltas = [math.radians(degrees) for degrees in range(0, 91, 10)]
    signals = [
        math.sqrt(dimension) * (lagging_states(query, away, delta) * query).sum(-1, keepdim=True) for delta in deltas
    ]
    scores = [torch.cat([signal, noise], dim=-1) for signal in signals]
    return SignalToNoise(
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
