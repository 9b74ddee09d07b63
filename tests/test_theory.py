# SPDX-License-Identifier: Apache-2.0
"""The paper's theory against random vectors, and where its claims fail: docs/theory.md.

Angles, lags and entropies are measured as `diagnose` measures them, so that what holds of the
theory's quantities holds of the report's.
"""

import math

import pytest
import torch

from normalign_llava.diagnose.critical import rotation_angle
from normalign_llava.diagnose.measure.attention import relative_entropy
from normalign_llava.diagnose.measure.depth import QUANTITIES, quantities


LAGS = [math.radians(degrees) for degrees in range(0, 90, 10)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def unit(rows):
    return rows / rows.norm(dim=-1, keepdim=True)


def dot(first_rows, second_rows):
    return (first_rows * second_rows).sum(-1)


def orthogonal(*units):
    """Random unit rows, uniform in the space orthogonal to `units`, which are orthonormal."""
    rows = randn(*units[0].shape)
    for direction in units:
        rows = rows - dot(rows, direction)[..., None] * direction
    return unit(rows)


def quarter_turn(rows):
    """A rotation of the whole space, of even dimension, that turns all vectors by a right angle."""
    first_half, second_half = rows.chunk(2, dim=-1)
    return torch.cat([-second_half, first_half], dim=-1)


def turned(rows, directions, angle):
    return math.cos(angle) * rows + math.sin(angle) * directions


def rotations(before, after):
    """The angle by which each row is turned, as `diagnose` measures it."""
    measured, defined = quantities(before, after)
    index = QUANTITIES.index("rotation")
    assert defined[index].all()
    return measured[index]


def assert_turned_by(before, after, angle):
    expected = [angle] * len(before)
    assert rotations(before, after).tolist() == pytest.approx(expected, abs=1e-7)


def kept_share(visual_angle, text_angle):
    """lambda, the share of a pair's expected cosine that one layer keeps (eq. 16)."""
    return math.cos(visual_angle) * math.cos(text_angle)


class Pairs:
    """2,000 pairs of a visual and a text token, and directions in which a layer turns them.

    `extra_term` is what the directions add to the pairs' expected cosine.
    """

    def __init__(self, dimension, pair_angle, visual_angle, text_angle):
        self.pair_angle = pair_angle
        self.visual_angle = visual_angle
        self.text_angle = text_angle
        self.visual = unit(randn(2000, dimension))
        # The straight way from the visual to the text token.
        self.away = orthogonal(self.visual)
        self.text = turned(self.visual, self.away, pair_angle)
        self.visual_direction = orthogonal(self.visual)
        self.text_direction = orthogonal(self.text)
        self.extra_term = 0.0

    def share_directions(self):
        self.visual_direction = quarter_turn(self.visual)
        self.text_direction = quarter_turn(self.text)
        both_turn = math.sin(self.visual_angle) * math.sin(self.text_angle)
        self.extra_term = both_turn * math.cos(self.pair_angle)

    def direct_toward_text(self):
        sideways = orthogonal(self.visual, self.away)
        self.visual_direction = turned(self.away, sideways, math.pi / 3)
        only_visual_turns = math.sin(self.visual_angle) * math.cos(self.text_angle)
        toward = math.cos(math.pi / 3) * math.sin(self.pair_angle)
        self.extra_term = only_visual_turns * toward

    def theorem(self):
        return kept_share(self.visual_angle, self.text_angle) * math.cos(self.pair_angle)

    def cosines(self):
        """The pairs' cosines after both tokens have turned."""
        turned_visual = turned(self.visual, self.visual_direction, self.visual_angle)
        turned_text = turned(self.text, self.text_direction, self.text_angle)
        assert_turned_by(self.visual, turned_visual, self.visual_angle)
        # The norms do not matter.
        assert_turned_by(3.0 * self.text, 0.5 * turned_text, self.text_angle)
        return dot(turned_visual, turned_text)


pair_angles = pytest.mark.parametrize("pair_angle", [0.35, 1.05, 1.92])
turn_angles = pytest.mark.parametrize(
    ("visual_angle", "text_angle"),
    [
        (0.2, 0.9),
        (0.5, 0.5),
    ],
)


def standard_error(samples) -> float:
    return samples.std().item() / math.sqrt(len(samples))


@turn_angles
@pair_angles
@pytest.mark.parametrize("dimension", [2, 8, 64, 512])
def test_theorem_1_holds_in_every_dimension_for_independent_directions(
    pair_angle, visual_angle, text_angle, dimension
):
    pairs = Pairs(dimension, pair_angle, visual_angle, text_angle)
    cosines = pairs.cosines()
    difference = abs(cosines.mean().item() - pairs.theorem())
    assert difference < 4 * standard_error(cosines) + 1e-12
    assert difference <= 10 * standard_error(cosines)


@turn_angles
@pair_angles
@pytest.mark.parametrize("change_directions", [Pairs.share_directions, Pairs.direct_toward_text])
def test_theorem_1_lacks_a_term_for_other_directions(
    pair_angle, visual_angle, text_angle, change_directions
):
    pairs = Pairs(64, pair_angle, visual_angle, text_angle)
    change_directions(pairs)
    cosines = pairs.cosines()
    mean_cosine = cosines.mean().item()
    exact = pairs.theorem() + pairs.extra_term
    assert abs(mean_cosine - exact) < 4 * standard_error(cosines) + 1e-12
    assert abs(mean_cosine - pairs.theorem()) > 10 * standard_error(cosines)


NORM_RATIOS = [10 ** (step / 10) for step in range(21)]


def test_lemma_1_holds_for_a_fixed_product_of_tangents():
    shares = []
    for ratio in NORM_RATIOS:
        shares.append(kept_share(math.atan(0.3 / ratio), math.atan(0.3 * ratio)))
    assert shares == sorted(shares, reverse=True)


def test_lemma_1_fails_for_a_fixed_angle_of_text():
    """Alignment leaves the text's angle as it is."""
    shares = []
    for ratio in NORM_RATIOS:
        shares.append(kept_share(math.atan(0.3 / ratio), math.atan(0.3)))
    assert shares == sorted(shares)


def test_alignment_lowers_the_kept_share():
    before = rotation_angle(37.0, 0.3, 1.5)
    after = rotation_angle(1.0, 0.3, 1.5)
    assert kept_share(after, after) < kept_share(before, after)


LAYER_COUNT = 24
UPDATE_NORM = 0.3
FIRST_COSINE = math.cos(math.pi / 6)


def expected_cosines(visual_norm, text_norm) -> list[float]:
    """A pair's expected cosines before and after each layer."""
    cosines = [FIRST_COSINE]
    for _ in range(LAYER_COUNT):
        visual_angle = rotation_angle(visual_norm, UPDATE_NORM, math.pi / 2)
        text_angle = rotation_angle(text_norm, UPDATE_NORM, math.pi / 2)
        cosines.append(cosines[-1] * kept_share(visual_angle, text_angle))
        visual_norm = math.hypot(visual_norm, UPDATE_NORM)
        text_norm = math.hypot(text_norm, UPDATE_NORM)
    return cosines


def add_update(states):
    return states + UPDATE_NORM * orthogonal(unit(states))


NORM_PAIRS = {
    "imbalanced": (30.0, 1.0),
    "balanced": (30**0.5, 30**0.5),
    "aligned": (1.0, 1.0),
}
"""Norms of the visual and the text token."""

every_norm_pair = pytest.mark.parametrize(
    ("visual_norm", "text_norm"),
    NORM_PAIRS.values(),
    ids=NORM_PAIRS,
)


@every_norm_pair
def test_mean_cosines_fall_layer_by_layer_as_expected(visual_norm, text_norm):
    start = unit(randn(1000, 64))
    visual_states = visual_norm * start
    text_states = text_norm * turned(start, orthogonal(start), math.pi / 6)
    for expected in expected_cosines(visual_norm, text_norm)[1:]:
        visual_states = add_update(visual_states)
        text_states = add_update(text_states)
        cosines = dot(unit(visual_states), unit(text_states))
        assert cosines.mean().item() == pytest.approx(expected, abs=0.03)


@every_norm_pair
def test_the_last_cosine_depends_on_the_first_and_last_norms(visual_norm, text_norm):
    """With updates at right angles a cosine is a norm over the next: their product telescopes."""
    growth = UPDATE_NORM * math.sqrt(LAYER_COUNT)
    visual_factor = visual_norm / math.hypot(visual_norm, growth)
    text_factor = text_norm / math.hypot(text_norm, growth)
    last_cosine = expected_cosines(visual_norm, text_norm)[-1]
    assert last_cosine == pytest.approx(visual_factor * text_factor * FIRST_COSINE)


def test_the_lag_is_largest_for_the_aligned_pair_in_every_layer():
    lags = {}
    for pair_name, norms in NORM_PAIRS.items():
        lags[pair_name] = [math.acos(cosine) for cosine in expected_cosines(*norms)]
    for layer in range(1, LAYER_COUNT + 1):
        assert lags["balanced"][layer] < lags["imbalanced"][layer]
        assert lags["imbalanced"][layer] < lags["aligned"][layer]


def nuclear_norm(matrix) -> float:
    return torch.linalg.svdvals(matrix).sum().item()


@pytest.fixture
def related_tokens():
    """Text tokens, and visual ones that depend on them."""
    text = unit(randn(20_000, 16))
    visual = unit(text @ randn(16, 16) + randn(20_000, 16))
    return visual, text


def test_trace_bound_falls_with_the_cosine_of_the_lag(related_tokens):
    visual, text = related_tokens
    directions = orthogonal(visual)
    projections = torch.linalg.qr(randn(200, 16, 16)).Q
    bound_without_lag = nuclear_norm(visual.T @ text)
    for lag in LAGS:
        lagging = turned(visual, directions, lag)
        assert_turned_by(visual, lagging, lag)
        covariance = lagging.T @ text
        # The bound of tr(M C) over M of spectral norm 1 (eq. 20, von Neumann).
        left, singular_values, right = torch.linalg.svd(covariance)
        bound = singular_values.sum().item()
        assert bound / bound_without_lag == pytest.approx(math.cos(lag), abs=0.01)

        best_projection = right.T @ left.T
        assert (best_projection @ covariance).trace().item() == pytest.approx(bound, rel=1e-9)
        traces = torch.einsum("nij,ji->n", projections, covariance)
        assert traces.max().item() < bound


@pytest.mark.parametrize("lag", LAGS)
def test_trace_bound_stays_if_all_lag_alike(related_tokens, lag):
    visual, text = related_tokens
    lagging_alike = turned(visual, quarter_turn(visual), lag)
    bound_without_lag = nuclear_norm(visual.T @ text)
    assert nuclear_norm(lagging_alike.T @ text) / bound_without_lag == pytest.approx(1.0)


def mean_entropy(scores):
    """Mean over rows of the entropy of the softmax, as `diagnose` measures it of a map."""
    entropies = [relative_entropy(shares) for shares in scores.softmax(-1)]
    return sum(entropies) / len(entropies)


def test_attention_spreads_with_the_lag():
    query = unit(randn(200, 64))
    other_keys = unit(randn(200, 256, 64))
    away = orthogonal(query)
    noise_scores = 8 * (other_keys @ query[..., None]).squeeze(-1)
    entropies = []
    signal_shares = []
    for lag in LAGS:
        key = turned(query, away, lag)
        assert_turned_by(query, key, lag)
        signal_score = 8 * dot(key, query)[:, None]
        signal_to_noise = (signal_score.mean() / noise_scores.std()).item()  # eqs. 10, 21
        assert signal_to_noise == pytest.approx(8 * math.cos(lag), abs=0.03)

        scores = torch.cat([signal_score, noise_scores], dim=-1)
        entropies.append(mean_entropy(scores))
        signal_shares.append(scores.softmax(-1)[:, 0].mean().item())
    assert entropies == sorted(entropies)
    assert entropies[-1] > 0.85
    assert signal_shares == sorted(signal_shares, reverse=True)


def test_the_entropy_of_equal_shares_is_1():
    assert relative_entropy(torch.full((4, 4), 1 / 16)) == pytest.approx(1)


def test_the_entropy_is_relative_to_the_largest():
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    shares = torch.tensor([[0.75, 0.25, 0.0]])
    assert relative_entropy(shares) == pytest.approx(entropy / math.log(3))


def entropy_beside_a_sink(signal_score):
    """The entropy of a row in which another token, a sink, has the score 6."""
    scores = torch.tensor([signal_score, 6.0, 0.0, 0.0, 0.0])
    return relative_entropy(scores.softmax(-1))


def test_attention_spreads_while_the_signal_scores_higher_than_a_sink():
    entropies = [entropy_beside_a_sink(signal_score) for signal_score in (9.0, 8.0, 7.0)]
    assert entropies == sorted(entropies)


def test_attention_concentrates_when_a_sink_scores_higher():
    entropies = [entropy_beside_a_sink(signal_score) for signal_score in (6.0, 4.0, 2.0)]
    assert entropies == sorted(entropies, reverse=True)
