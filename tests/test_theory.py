# SPDX-License-Identifier: Apache-2.0
"""The paper's theory against random vectors, and where its claims fail: docs/theory.md.

Angles, lags and entropies are those that `diagnose` measures, so that what holds of the theory's
quantities holds of the report's.
"""

import math

import pytest
import torch

from normalign_llava.diagnose.critical import rotation_angle
from normalign_llava.diagnose.measure.attention import relative_entropy
from normalign_llava.diagnose.measure.depth import QUANTITIES, quantities


DELTAS = [math.radians(degrees) for degrees in range(0, 90, 10)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def unit(rows):
    return rows / rows.norm(dim=-1, keepdim=True)


def orthogonal(*units):
    """Random unit rows, uniform in the space orthogonal to `units`, which are orthonormal."""
    rows = randn(*units[0].shape)
    for direction in units:
        rows = rows - (rows * direction).sum(-1, keepdim=True) * direction
    return unit(rows)


def quarter_turn(rows):
    """A rotation of the whole space, of even dimension, that turns all vectors by a right angle."""
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def turned(rows, directions, angle):
    return math.cos(angle) * rows + math.sin(angle) * directions


def rotations(before, after):
    """The angle by which each row is turned, as `diagnose` measures it."""
    values, defined = quantities(before, after)
    place = QUANTITIES.index("rotation")
    assert defined[place].all()
    return values[place]


def assert_turned_by(before, after, angle):
    assert rotations(before, after).tolist() == pytest.approx([angle] * len(before), abs=1e-7)


def kept(omega_visual, omega_text):
    """lambda, the share of a pair's expected cosine that one layer keeps (eq. 16)."""
    return math.cos(omega_visual) * math.cos(omega_text)


def cosines_of_pairs(dimension, theta, omegas, directions):
    """Cosines of 2,000 pairs at an angle theta once both tokens turned, and their expectation."""
    visual = unit(randn(2000, dimension))
    away = orthogonal(visual)  # the straight way from the visual to the text token
    text = turned(visual, away, theta)
    to_visual = orthogonal(visual)
    to_text = orthogonal(text)
    term = 0.0
    if directions == "shared":
        to_visual = quarter_turn(visual)
        to_text = quarter_turn(text)
        term = math.sin(omegas[0]) * math.sin(omegas[1]) * math.cos(theta)
    elif directions == "toward":
        to_visual = turned(away, orthogonal(visual, away), math.pi / 3)
        term = math.sin(omegas[0]) * math.cos(omegas[1]) * math.cos(math.pi / 3) * math.sin(theta)
    turned_visual = turned(visual, to_visual, omegas[0])
    turned_text = turned(text, to_text, omegas[1])
    assert_turned_by(visual, turned_visual, omegas[0])
    assert_turned_by(3.0 * text, 0.5 * turned_text, omegas[1])  # whatever the norms
    cosines = (turned_visual * turned_text).sum(-1)
    return cosines, kept(*omegas) * math.cos(theta) + term


@pytest.mark.parametrize("omegas", [(0.2, 0.9), (0.5, 0.5)])
@pytest.mark.parametrize("theta", [0.35, 1.05, 1.92])
def test_theorem_1_holds_in_every_dimension_for_independent_directions_alone(theta, omegas):
    cases = [(dimension, "independent") for dimension in (2, 8, 64, 512)]
    for dimension, directions in [*cases, (64, "shared"), (64, "toward")]:
        cosines, exact = cosines_of_pairs(dimension, theta, omegas, directions)
        error = cosines.std().item() / math.sqrt(len(cosines))
        assert abs(cosines.mean().item() - exact) < 4 * error + 1e-12
        theorem = kept(*omegas) * math.cos(theta)
        assert (abs(cosines.mean().item() - theorem) > 10 * error) == (directions != "independent")


def test_lemma_1_needs_a_fixed_product_of_tangents():
    ratios = [10 ** (step / 10) for step in range(21)]
    product_fixed = [kept(math.atan(0.3 / ratio), math.atan(0.3 * ratio)) for ratio in ratios]
    text_fixed = [kept(math.atan(0.3 / ratio), math.atan(0.3)) for ratio in ratios]  # as alignment
    assert product_fixed == sorted(product_fixed, reverse=True) and text_fixed == sorted(text_fixed)
    before = rotation_angle(37.0, 0.3, 1.5)
    after = rotation_angle(1.0, 0.3, 1.5)
    assert kept(after, after) < kept(before, after)


def test_lag_grows_layer_by_layer_and_is_largest_for_the_aligned_pair():
    lag = {}
    start = unit(randn(1000, 64))
    related = turned(start, orthogonal(start), math.pi / 6)
    cases = {"imbalanced": (30.0, 1.0), "balanced": (30**0.5, 30**0.5), "aligned": (1.0, 1.0)}
    for case, norms in cases.items():
        expected = [math.cos(math.pi / 6)]
        sizes = norms
        states = [norms[0] * start, norms[1] * related]
        for _ in range(24):
            angles = [rotation_angle(size, 0.3, math.pi / 2) for size in sizes]
            expected.append(expected[-1] * kept(*angles))
            sizes = [math.hypot(size, 0.3) for size in sizes]
            states = [state + 0.3 * orthogonal(unit(state)) for state in states]
            cosines = (unit(states[0]) * unit(states[1])).sum(-1)
            assert cosines.mean().item() == pytest.approx(expected[-1], abs=0.03)
        # With updates at right angles a cosine is a norm over the next: their product telescopes.
        telescoped = math.prod(norm / math.hypot(norm, 0.3 * math.sqrt(24)) for norm in norms)
        assert expected[-1] == pytest.approx(telescoped * math.cos(math.pi / 6))
        lag[case] = [math.acos(cosine) for cosine in expected]
    rows = list(zip(lag["balanced"], lag["imbalanced"], lag["aligned"], strict=True))[1:]
    assert all(balanced < imbalanced < aligned for balanced, imbalanced, aligned in rows)


def test_trace_bound_falls_with_the_cosine_of_the_lag_unless_all_lag_alike():
    text = unit(randn(20_000, 16))
    visual = unit(text @ randn(16, 16) + randn(20_000, 16))
    directions = orthogonal(visual)
    projections = torch.linalg.qr(randn(200, 16, 16)).Q
    whole = torch.linalg.svdvals(visual.T @ text).sum().item()
    for delta in DELTAS:
        lagging = turned(visual, directions, delta)
        assert_turned_by(visual, lagging, delta)
        covariance = lagging.T @ text
        left, values, right = torch.linalg.svd(covariance)
        bound = values.sum().item()  # of tr(M C) over M of spectral norm 1 (eq. 20, von Neumann)
        assert bound / whole == pytest.approx(math.cos(delta), abs=0.01)
        assert (right.T @ left.T @ covariance).trace().item() == pytest.approx(bound, rel=1e-9)
        assert torch.einsum("nij,ji->n", projections, covariance).max().item() < bound
        alike = turned(visual, quarter_turn(visual), delta).T @ text
        assert torch.linalg.svdvals(alike).sum().item() / whole == pytest.approx(1.0)


def entropy(scores):
    """Mean over rows of the entropy of the softmax, as `diagnose` measures it of a map."""
    shares = scores.softmax(-1).flatten(0, -2) if scores.dim() > 1 else scores.softmax(-1)[None]
    return sum(map(relative_entropy, shares)) / len(shares)


def test_attention_spreads_with_the_lag_unless_a_sink_scores_higher():
    query = unit(randn(200, 64))
    keys = unit(randn(200, 256, 64))
    away = orthogonal(query)
    noise = 8 * (keys @ query[..., None]).squeeze(-1)
    spread = []
    share = []
    for delta in DELTAS:
        key = turned(query, away, delta)
        assert_turned_by(query, key, delta)
        signal = 8 * (key * query).sum(-1, keepdim=True)
        ratio = (signal.mean() / noise.std()).item()  # eqs. 10, 21
        assert ratio == pytest.approx(8 * math.cos(delta), abs=0.03)
        scores = torch.cat([signal, noise], dim=-1)
        spread.append(entropy(scores))
        share.append(scores.softmax(-1)[:, 0].mean().item())
    assert spread == sorted(spread) and spread[-1] > 0.85 and share == sorted(share, reverse=True)
    assert relative_entropy(torch.full((4, 4), 1 / 16)) == pytest.approx(1)
    by_hand = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(3)
    assert relative_entropy(torch.tensor([[0.75, 0.25, 0.0]])) == pytest.approx(by_hand)
    with_sink = [entropy(torch.tensor([signal, 6.0, 0, 0, 0])) for signal in (9, 8, 7, 6, 4, 2)]
    above = with_sink[:3]
    below = with_sink[3:]
    assert above == sorted(above) and below == sorted(below, reverse=True)
