# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The predicted rotation; the theory's simulation in benchmarks/theory.py, with a case where each claim fails."""

import math
import runpy

import pytest
import torch
from paths import ROOT

from normalign_llava.diagnose.measure.theory import predicted_rotation, rotation_angle
from normalign_llava.diagnose.report import Curve, Depth


def randn(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


def orthogonal(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Random unit rows, each orthogonal to its row."""
    other = randn(*rows.shape, seed=seed)
    return unit(other - (other * rows).sum(-1, keepdim=True) / (rows * rows).sum(-1, keepdim=True) * rows)


SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "theory.py"))


@pytest.fixture(scope="module")
def simulation() -> dict:
    return SCRIPT["simulate"]()


def depth_of(norms, updates, angle) -> Depth:
    """A `Depth` of one layer, measured on 30 random states of each kind."""
    states, changes, measured = {}, {}, {}
    for seed, (kind, norm) in enumerate(norms.items()):
        directions = unit(randn(30, 16, seed=seed))
        states[kind] = norm * directions
        turn = math.cos(angle) * directions + math.sin(angle) * orthogonal(directions, 10 + seed)
        changes[kind] = updates[kind] * turn
        measured[kind] = torch.acos((directions * unit(states[kind] + changes[kind])).sum(-1))

    def curve(values):
        return Curve([values.mean().item()], [0.0])

    log_norm = {kind: Curve([rows.norm(dim=-1).log().mean().item(), math.nan], []) for kind, rows in states.items()}
    return Depth(
        norm={}, final_norm={}, cosine={}, update_norm={}, asymmetry=None, asymmetry_error=None, log_norm=log_norm,
        rotation={kind: curve(values) for kind, values in measured.items()},
        update_angle={kind: Curve([angle], [0.0]) for kind in states},
        log_update={kind: curve(rows.norm(dim=-1).log()) for kind, rows in changes.items()},
    )  # fmt: skip


@pytest.mark.parametrize("norms", [{"visual": 37.0, "text": 1.0, "special": 5.0}, {"text": 1.0}])
def test_predicted_rotation_is_the_measured_one_under_its_assumptions(norms):
    depth = depth_of(norms, dict.fromkeys(norms, 2.0), 1.9)
    predicted = predicted_rotation(depth)
    assert list(predicted) == [kind for kind in norms if kind != "special"]
    for kind in predicted:
        assert predicted[kind] == pytest.approx(depth.rotation[kind].mean, abs=1e-6)


def test_predicted_rotation_differs_where_updates_differ_by_modality():
    depth = depth_of({"visual": 10.0, "text": 1.0}, {"visual": 10.0, "text": 1.0}, math.pi / 2)
    assert depth.rotation["visual"].mean == pytest.approx(depth.rotation["text"].mean)  # no inertia at all
    predicted = predicted_rotation(depth)
    assert predicted["visual"] == [pytest.approx(math.atan(math.sqrt(10) / 10))]
    assert predicted["text"] == [pytest.approx(math.atan(math.sqrt(10) / 1))]


# The simulation


def test_theorem_1_holds_in_every_dimension_for_independent_directions_alone(simulation):
    rows = [row for row in simulation["cosine"] if row["directions"] == "independent"]
    assert {row["dimension"] for row in rows} == {2, 8, 64, 512} and len(rows) == 24
    deviations = [(row["simulated"] - row["predicted"]) / row["standard_error"] for row in rows]
    assert all(abs(deviation) < 4 for deviation in deviations)
    assert sum(deviation**2 for deviation in deviations) / len(deviations) < 2  # the standard errors are honest
    others = [row for row in simulation["cosine"] if row["directions"] in ("shared", "toward")]
    assert len(others) == 12
    for row in others:
        assert abs(row["simulated"] - row["predicted"]) > 10 * row["standard_error"]
        assert abs(row["simulated"] - row["exact"]) < 4 * row["standard_error"] + 1e-12


def test_lemma_1_needs_a_fixed_product_of_tangents(simulation):
    lemma = simulation["lemma"]
    assert lemma["product_fixed"] == sorted(lemma["product_fixed"], reverse=True)
    assert lemma["text_fixed"] == sorted(lemma["text_fixed"])  # as when visual norms are aligned to text's
    assert lemma["product_fixed"][0] == pytest.approx(lemma["text_fixed"][0]) == pytest.approx(1 / 1.09)
    before, after = rotation_angle(37.0, 0.3, 1.5), rotation_angle(1.0, 0.3, 1.5)
    assert SCRIPT["retention_factor"](after, after) < SCRIPT["retention_factor"](before, after)


def test_lag_grows_layer_by_layer_and_is_largest_for_the_aligned_pair(simulation):
    lag = simulation["lag"]
    angles = [lag["angle"][case] for case in ("balanced", "imbalanced", "aligned")]
    for balanced, imbalanced, aligned in list(zip(*angles, strict=True))[1:]:
        assert balanced < imbalanced < aligned
    for case, norms in lag["norms"].items():
        assert lag["simulated"][case] == pytest.approx(lag["angle"][case], abs=0.03)
        # Updates at right angles: each cosine is a norm over the next, so their product over the layers telescopes.
        kept = math.prod(norm / math.hypot(norm, 0.3 * math.sqrt(24)) for norm in norms)
        assert lag["angle"][case][-1] == pytest.approx(math.acos(kept * math.cos(math.pi / 6)))


def test_trace_bound_falls_with_the_cosine_of_the_lag(simulation):
    trace = simulation["trace"]
    assert trace["bound"] == pytest.approx([math.cos(delta) for delta in trace["delta"]], abs=0.01)
    assert trace["attained"] == pytest.approx(trace["bound"], rel=1e-9)
    assert all(r < bound for r, bound in zip(trace["random"], trace["bound"], strict=True))
    assert trace["same_turn"] == pytest.approx([1.0] * 9)
    covariance = randn(6, 6)
    best = SCRIPT["best_projection"](covariance)
    assert torch.linalg.matrix_norm(best, 2).item() == pytest.approx(1.0)
    assert (best @ covariance).trace().item() == pytest.approx(SCRIPT["trace_bound"](covariance), rel=1e-12)


def test_attention_spreads_with_the_lag_unless_a_sink_scores_higher(simulation):
    attention = simulation["attention"]
    assert attention["predicted_snr"][0] == 8.0 and abs(attention["noise"]) < 0.01
    assert attention["snr"] == pytest.approx(attention["predicted_snr"], abs=0.03)
    # At the very end unrelated keys, by chance, score as high as the related one.
    assert attention["entropy"][:9] == sorted(attention["entropy"][:9]) and attention["entropy"][-1] > 0.9
    assert attention["share"] == sorted(attention["share"], reverse=True)

    entropy = SCRIPT["attention_entropy"]
    scores = randn(3, 5)
    shares = scores.exp() / scores.exp().sum(-1, keepdim=True)
    assert torch.allclose(entropy(scores), -(shares * shares.log()).sum(-1) / math.log(5))
    with_sink = [
        entropy(torch.tensor([signal, 6.0, 0.0, 0.0, 0.0])).item() for signal in (9.0, 8.0, 7.0, 6.0, 4.0, 2.0)
    ]
    assert with_sink[:3] == sorted(with_sink[:3]) and with_sink[3:] == sorted(with_sink[3:], reverse=True)


def test_the_figure_is_drawn(simulation, tmp_path):
    SCRIPT["draw"](simulation, tmp_path / "theory.png")
    assert (tmp_path / "theory.png").stat().st_size > 10**5
