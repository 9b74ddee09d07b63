# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The theory's equations against vectors, enumeration and simulation; for each claim a case where it fails."""

import math
import runpy

import pytest
import torch
from paths import DOCS, ROOT

from normalign_llava.diagnose.measure.theory import (
    attention_entropy,
    best_projection,
    cross_covariance,
    expected_cosine,
    lag_angle,
    lagging_states,
    next_norm,
    predicted_rotation,
    retention_factor,
    rotation_angle,
    signal_to_noise,
    trace_bound,
)
from normalign_llava.diagnose.report import Curve, Depth


def draw(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


def orthogonal(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Random unit rows, each orthogonal to its row."""
    other = draw(*rows.shape, seed=seed)
    return unit(other - (other * rows).sum(-1, keepdim=True) / (rows * rows).sum(-1, keepdim=True) * rows)


SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "theory.py"))


@pytest.fixture(scope="module")
def simulation() -> dict:
    return SCRIPT["simulate"]()


@pytest.mark.parametrize("angle", [0.0, 0.4, math.pi / 2, 2.0, 3.0])
@pytest.mark.parametrize("norm", [0.5, 2.0, 40.0])
def test_rotation_is_the_angle_between_a_state_and_its_successor(norm, angle):
    update = 3.0  # larger than two of the norms: at obtuse angles the tangent's denominator is negative
    state = norm * unit(draw(7))
    change = update * (math.cos(angle) * unit(state) + math.sin(angle) * orthogonal(state[None], 1)[0])
    after = state + change
    # Kahan's formula, which keeps its precision near 0 and pi where arccos loses it
    first, second = unit(state), unit(after)
    angle_between = 2 * math.atan2((first - second).norm(), (first + second).norm())
    assert rotation_angle(norm, update, angle) == pytest.approx(angle_between, abs=1e-12)
    assert next_norm(norm, update, angle) == pytest.approx(after.norm().item(), rel=1e-12)


@pytest.mark.parametrize("angle", [0.05, 1.0, math.pi / 2, 2.5, 3.1])
def test_the_larger_state_turns_more_slowly_at_any_angle_of_the_update(angle):
    rotations = [rotation_angle(norm, 2.0, angle) for norm in (0.5, 1.0, 1.5, 3.0, 37.0)]
    assert rotations == sorted(rotations, reverse=True) and len(set(rotations)) == 5


def test_asymmetry_fails_where_updates_are_not_of_one_size_or_angle():
    text = rotation_angle(1.0, 0.5, 1.0)
    assert rotation_angle(2.0, 1.5, 1.0) > text  # twice the norm, three times the update
    assert rotation_angle(2.0, 0.5, 1.8) > rotation_angle(1.0, 0.5, 0.2)  # the same size, another angle
    # The tangent by itself misses what atan2 sees: the text token's is negative, its rotation larger.
    assert 2.0 * math.sin(2.5) / (1.0 + 2.0 * math.cos(2.5)) < 0
    assert rotation_angle(10.0, 2.0, 2.5) < rotation_angle(1.0, 2.0, 2.5)


# Theorem 1 (eqs. 15, 16)


@pytest.mark.parametrize("theta", [0.0, 0.3, 1.2, math.pi / 2, 2.6])
@pytest.mark.parametrize("omegas", [(0.1, 0.9), (0.5, 0.5), (2.0, 0.3)])
def test_theorem_1_is_exact_when_every_pair_of_directions_is_counted(theta, omegas):
    # In three dimensions the directions lie on two circles; even points on them give such means to the last digit.
    visual, third = torch.eye(3, dtype=torch.float64)[[0, 2]]
    text = torch.tensor([math.cos(theta), math.sin(theta), 0], dtype=torch.float64)
    points = torch.arange(8, dtype=torch.float64) * math.pi / 4

    def turned(state, omega):
        across = torch.linalg.cross(third, state)
        directions = torch.cos(points)[:, None] * across + torch.sin(points)[:, None] * third
        return math.cos(omega) * state + math.sin(omega) * directions

    mean = (turned(visual, omegas[0]) @ turned(text, omegas[1]).T).mean().item()
    assert mean == pytest.approx(expected_cosine(math.cos(theta), *omegas), abs=1e-12)
    assert mean == pytest.approx(math.cos(omegas[0]) * math.cos(omegas[1]) * math.cos(theta), abs=1e-12)


def test_theorem_1_holds_in_simulation_in_every_dimension(simulation):
    rows = [row for row in simulation["retention"] if row["directions"] == "independent"]
    assert {row["dimension"] for row in rows} == {2, 8, 64, 512} and len(rows) == 24
    deviations = [(row["simulated"] - row["predicted"]) / row["standard_error"] for row in rows]
    assert all(abs(deviation) < 4 for deviation in deviations)
    assert sum(deviation**2 for deviation in deviations) / len(deviations) < 2  # the standard errors are honest
    assert all(row["standard_error"] < 0.001 for row in rows if row["dimension"] == 512)


@pytest.mark.parametrize("directions", ["shared", "toward"])
def test_theorem_1_fails_where_directions_are_not_independent_and_symmetric(simulation, directions):
    rows = [row for row in simulation["retention"] if row["directions"] == directions]
    assert len(rows) == 6
    for row in rows:
        assert abs(row["simulated"] - row["predicted"]) > 10 * row["standard_error"]
        assert abs(row["simulated"] - row["exact"]) < 4 * row["standard_error"] + 1e-12


def test_one_turn_for_both_tokens_keeps_their_angle_though_each_direction_is_symmetric():
    # In the plane a token can turn left or right; both turn left, or both right, each half of the time.
    theta, omega = 0.7, 0.4
    cosines = [math.cos((theta + way * omega) - way * omega) for way in (1, -1)]
    assert sum(cosines) / 2 == pytest.approx(math.cos(theta))
    assert retention_factor(omega, omega) * math.cos(theta) < 0.9 * math.cos(theta)
    assert expected_cosine(math.cos(theta), omega, omega, shared=math.cos(theta)) == pytest.approx(math.cos(theta))
    kept = expected_cosine(1.0, omega, 0.9, shared=1.0)  # over cos(theta); what the simulation's rows are held to
    assert kept == pytest.approx(math.cos(omega - 0.9))


def test_turning_toward_the_other_token_can_bring_them_nearer():
    theta, omega = 1.0, 0.3
    straight = expected_cosine(math.cos(theta), omega, 0.0, toward_text=math.sin(theta))
    assert straight == pytest.approx(math.cos(theta - omega))
    assert expected_cosine(math.cos(theta), 0.0, omega, toward_visual=math.sin(theta)) == pytest.approx(straight)
    assert straight > math.cos(theta)


def test_the_recursion_is_of_mean_cosines_not_of_mean_angles():
    theta, first, second = 1.2, 0.4, 0.6
    angles = [theta + a * first + b * second for a in (1, -1) for b in (1, -1)]  # all there is in two dimensions
    mean_cosine = sum(math.cos(angle) for angle in angles) / 4
    assert mean_cosine == pytest.approx(expected_cosine(math.cos(theta), first, second))
    assert sum(angles) / 4 == pytest.approx(theta)  # where the theorem's angle has grown
    assert math.acos(mean_cosine) > theta + 0.09


# Lemma 1 and the lag angle (eq. 17)


def tangents(product, ratio):
    return math.atan(math.sqrt(product / ratio)), math.atan(math.sqrt(product * ratio))


@pytest.mark.parametrize("product", [0.001, 0.3, 1.0, 25.0])
def test_lemma_1_equal_rotations_keep_most_at_a_fixed_product_of_tangents(product):
    factors = [retention_factor(*tangents(product, ratio)) for ratio in (1, 1.1, 2, 10, 1000)]
    assert factors == sorted(factors, reverse=True) and len(set(factors)) == 5
    assert factors[0] == pytest.approx(1 / (1 + product), rel=1e-9)


def test_lemma_1_holds_at_a_fixed_product_or_sum_of_angles_too():
    ratios = [1 + step / 50 for step in range(1, 200)]
    for omega in (0.2, 0.8, 1.3):
        kept = retention_factor(omega, omega)
        assert all(retention_factor(omega / r, omega * r) < kept for r in ratios if omega * r < math.pi)
        assert all(retention_factor(omega - x, omega + x) < kept for x in (omega * s / 100 for s in range(1, 100)))


def test_lemma_1_fails_at_a_fixed_sum_of_large_tangents():
    def kept(mean, difference):
        return retention_factor(math.atan(mean - difference), math.atan(mean + difference))

    steps = [step / 100 for step in range(1, 100)]
    assert all(kept(1.0, step) < kept(1.0, 0.0) for step in steps)  # holds up to a mean of 1
    assert kept(2.0, math.sqrt(3)) == max(kept(2.0, math.sqrt(3) + x) for x in (-0.1, 0.0, 0.1)) > kept(2.0, 0.0)


def test_lemma_1_turns_round_when_one_rotation_exceeds_a_right_angle():
    factors = []
    for ratio in (1, 4, 100):
        omega_visual, omega_text = tangents(0.5, ratio)
        factors.append(retention_factor(omega_visual, math.pi - omega_text))
    assert factors[0] < factors[1] < factors[2] < 0


def test_lemma_1_does_not_compare_a_model_before_and_after_alignment(simulation):
    # Aligning the visual norm to text's leaves the text rotation as it is and raises the visual one.
    before, after = rotation_angle(37.0, 0.3, 1.5), rotation_angle(1.0, 0.3, 1.5)
    equal = 1 / (1 + math.tan(before) * math.tan(after))  # of the same product of tangents
    assert retention_factor(after, after) < retention_factor(before, after) < equal
    lemma = simulation["lemma"]
    assert lemma["product_fixed"] == sorted(lemma["product_fixed"], reverse=True)
    assert lemma["text_fixed"] == sorted(lemma["text_fixed"])
    assert lemma["product_fixed"][0] == pytest.approx(lemma["text_fixed"][0]) == pytest.approx(1 / 1.09)


def test_lag_grows_layer_by_layer_and_is_negative_against_the_aligned_pair(simulation):
    lag = simulation["lag"]
    assert lag["layer"] == list(range(25))
    assert lag["delta"][0] == lag["delta_aligned"][0] == 0
    assert all(later > earlier for earlier, later in zip(lag["delta"], lag["delta"][1:], strict=False))
    assert all(value < 0 for value in lag["delta_aligned"][1:])
    for case, norms in lag["norms"].items():
        assert lag["simulated"][case] == pytest.approx(lag["angle"][case], abs=0.03)
        # Updates at right angles: each cosine is a norm over the next, so their product over the layers telescopes.
        kept = math.prod(norm / math.hypot(norm, 0.3 * math.sqrt(24)) for norm in norms)
        assert lag["angle"][case][-1] == pytest.approx(math.acos(kept * math.cos(math.pi / 6)))
    assert lag["delta"][-1] == pytest.approx(lag["angle"]["imbalanced"][-1] - lag["angle"]["balanced"][-1])


@pytest.mark.parametrize(("cosine", "sign"), [(0.9, 1), (0.0, 0), (-0.9, -1)])
def test_lag_is_positive_only_for_pairs_that_start_nearer_than_a_right_angle(cosine, sign):
    imbalanced, balanced = expected_cosine(cosine, 0.1, 0.9), expected_cosine(cosine, 0.3, 0.3)
    delta = lag_angle(imbalanced, balanced)
    assert (delta > 0) - (delta < 0) == sign


# Signal and trace bound (eqs. 18 to 20)


def related_pairs(samples=40000, dimension=8):
    text = unit(draw(samples, dimension))
    return unit(text @ draw(dimension, dimension, seed=1) + draw(samples, dimension, seed=2)), text


def test_lagging_states_keep_their_norm_and_turn_by_delta():
    states = 5 * draw(6, 9)
    lagging = lagging_states(states, orthogonal(states, 3), 0.8)
    assert torch.allclose(lagging.norm(dim=-1), states.norm(dim=-1))
    assert torch.allclose((unit(lagging) * unit(states)).sum(-1), torch.full((6,), math.cos(0.8)).double())


def test_lag_in_directions_of_no_consequence_damps_every_singular_value():
    visual, text = related_pairs()
    covariance = cross_covariance(visual, text)
    reference = sum(torch.outer(v, t) for v, t in zip(visual[:50], text[:50], strict=True)) / 50
    assert torch.allclose(cross_covariance(visual[:50], text[:50]), reference)
    lagging = cross_covariance(lagging_states(visual, orthogonal(visual, 4), 1.0), text)
    damped = math.cos(1.0) * torch.linalg.svdvals(covariance)
    # Chance leaves an entry's mean a standard error of 1 / (d sqrt(n)) = 0.0006, and a singular value a few of those.
    assert torch.allclose(torch.linalg.svdvals(lagging), damped, atol=0.003)


def test_damping_fails_where_the_lag_is_one_turn_or_the_norm_grows(simulation):
    visual, text = related_pairs(500)
    covariance = cross_covariance(visual, text)
    turn = torch.linalg.qr(draw(8, 8, seed=5)).Q
    turned = cross_covariance(visual @ turn.T, text)
    assert torch.allclose(torch.linalg.svdvals(turned), torch.linalg.svdvals(covariance))
    projection = best_projection(covariance)
    recovered = (projection @ turn.T @ turned).trace().item()  # a projection of the same norm gets all of it back
    assert recovered == pytest.approx(trace_bound(covariance))
    assert simulation["trace"]["same_turn"] == pytest.approx([1.0] * 9)
    larger = cross_covariance(37 * lagging_states(visual, orthogonal(visual, 4), 1.0), text)
    assert trace_bound(larger) > trace_bound(covariance)


def test_trace_bound_is_never_exceeded_and_is_attained():
    covariance, radius = draw(6, 6), 2.5
    bound = trace_bound(covariance, radius)
    for seed in range(200):
        projection = draw(6, 6, seed=seed)
        projection *= radius / torch.linalg.matrix_norm(projection, 2)
        assert (projection @ covariance).trace().item() < bound
    best = best_projection(covariance, radius)
    assert torch.linalg.matrix_norm(best, 2).item() == pytest.approx(radius)
    assert (best @ covariance).trace().item() == pytest.approx(bound, rel=1e-12)


def test_trace_bound_depends_on_the_norm_that_is_bounded():
    covariance = draw(6, 6)
    best = covariance.T / covariance.norm()  # of Frobenius norm 1
    assert (best @ covariance).trace().item() == pytest.approx(covariance.norm().item())
    assert covariance.norm().item() < 0.8 * trace_bound(covariance)  # not attained
    ones = torch.ones(4, 4, dtype=torch.float64)  # each weight at most 1: over the bound
    assert (ones @ ones).trace().item() == 16 and trace_bound(ones) == pytest.approx(4)


def test_simulated_bound_falls_with_the_cosine_of_the_lag(simulation):
    trace = simulation["trace"]
    assert trace["predicted"] == [math.cos(delta) for delta in trace["delta"]]
    assert trace["bound"] == pytest.approx(trace["predicted"], abs=0.01)
    assert trace["attained"] == pytest.approx(trace["bound"], rel=1e-9)
    assert all(r < bound for r, bound in zip(trace["random"], trace["bound"], strict=True))


# Signal to noise (eqs. 10, 21)


def test_noise_stays_at_zero_and_entropy_rises_with_the_lag(simulation):
    attention = simulation["attention"]
    assert attention["predicted_snr"] == [signal_to_noise(delta, 64) for delta in attention["delta"]]
    assert attention["predicted_snr"][0] == 8
    assert attention["snr"] == pytest.approx(attention["predicted_snr"], rel=0.02, abs=1e-9)
    assert attention["noise"] == pytest.approx([0] * 10, abs=4 / math.sqrt(200 * 256))
    assert attention["share"] == sorted(attention["share"], reverse=True)
    # As long as the related key is the likely first of all 257, the largest of which scores about 3 without it.
    first = [entropy for entropy, signal in zip(attention["entropy"], attention["signal"], strict=True) if signal > 3]
    assert len(first) > 5 and first == sorted(first)
    assert first[0] < 0.2 and attention["entropy"][-1] > 0.9


def test_entropy_is_that_of_the_softmax():
    scores = draw(3, 5)
    shares = scores.exp() / scores.exp().sum(-1, keepdim=True)
    assert torch.allclose(attention_entropy(scores), -(shares * shares.log()).sum(-1) / math.log(5))
    assert attention_entropy(torch.zeros(4)).item() == pytest.approx(1)
    assert attention_entropy(torch.tensor([0.0, 1e4])).item() == 0


def test_entropy_falls_with_the_signal_where_a_sink_scores_higher():
    sink = torch.tensor([6.0, 0.0, 0.0, 0.0], dtype=torch.float64)

    def entropy(signal):
        return attention_entropy(torch.cat([torch.tensor([signal], dtype=torch.float64), sink])).item()

    assert entropy(6.0) > entropy(4.0) > entropy(2.0)
    assert entropy(9.0) < entropy(8.0) < entropy(7.0)  # while the related key scores most, the claim holds


def test_noise_is_not_zero_where_states_lie_in_a_cone():
    cone = unit(draw(1, 64))
    query, keys = unit(cone + 0.1 * draw(1, 64, seed=1)), unit(cone + 0.1 * draw(4000, 64, seed=2))
    assert (8 * keys @ query.T).mean().item() > 4


def measured(states, updates) -> Depth:
    """A `Depth` of one layer from vectors, `{kind: (n, d)}` each."""

    def curve(values):
        return Curve([values.mean().item()], [values.std(correction=0).item()])

    after = {kind: states[kind] + updates[kind] for kind in states}
    angle = {k: torch.acos((unit(states[k]) * unit(updates[k])).sum(-1)) for k in states}
    cosine = {k: (unit(states[k]) * unit(after[k])).sum(-1) for k in states}
    norm = {k: Curve([each[k].norm(dim=-1).mean().item() for each in (states, after)], [0.0, 0.0]) for k in states}
    return Depth(
        norm=norm,
        final_norm={},
        cosine={kind: curve(cosine[kind]) for kind in states},
        rotation={kind: curve(torch.acos(cosine[kind])) for kind in states},
        update_norm={kind: curve(updates[kind].norm(dim=-1)) for kind in states},
        update_angle={kind: curve(angle[kind]) for kind in states},
        log_norm={k: Curve([states[k].norm(dim=-1).log().mean().item(), math.nan], [0.0, math.nan]) for k in states},
        log_update={kind: curve(updates[kind].norm(dim=-1).log()) for kind in states},
        asymmetry=None,
        asymmetry_error=None,
    )


def tokens(norms, update, angle):
    states, updates = {}, {}
    for seed, (kind, norm) in enumerate(norms.items()):
        directions = unit(draw(30, 16, seed=seed))
        states[kind] = norm * directions
        updates[kind] = update[kind] * (
            math.cos(angle) * directions + math.sin(angle) * orthogonal(directions, 10 + seed)
        )
    return measured(states, updates)


def test_predicted_rotation_is_the_measured_one_under_its_assumptions():
    depth = tokens(
        {"visual": 37.0, "text": 1.0, "special": 5.0}, dict.fromkeys(("visual", "text", "special"), 2.0), 1.9
    )
    predicted = predicted_rotation(depth)
    assert list(predicted) == ["visual", "text"]
    for kind in predicted:
        assert predicted[kind] == pytest.approx(depth.rotation[kind].mean, abs=1e-6)


def test_predicted_rotation_departs_where_updates_differ_by_modality():
    depth = tokens({"visual": 10.0, "text": 1.0}, {"visual": 10.0, "text": 1.0}, math.pi / 2)
    assert depth.rotation["visual"].mean == pytest.approx(depth.rotation["text"].mean)  # no inertia at all
    predicted = predicted_rotation(depth)
    assert predicted["visual"] == [pytest.approx(math.atan(math.sqrt(10) / 10))]
    assert predicted["text"] == [pytest.approx(math.atan(math.sqrt(10) / 1))]


def test_predicted_rotation_of_text_alone():
    depth = tokens({"text": 1.0}, {"text": 0.5}, 1.0)
    assert predicted_rotation(depth) == {"text": pytest.approx(depth.rotation["text"].mean, abs=1e-6)}


def test_the_page_is_what_the_script_writes(simulation, tmp_path):
    before = torch.get_rng_state()
    SCRIPT["write_page"](SCRIPT["simulate"](), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert (tmp_path / "theory.md").read_text() == (DOCS / "theory.md").read_text()
    assert (tmp_path / "theory.png").stat().st_size > 10**5
    assert SCRIPT["simulate"](seed=1)["retention"][0]["simulated"] != simulation["retention"][0]["simulated"]
