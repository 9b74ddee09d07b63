"""The verdict, and the paper's claims checked on reports made by hand."""

import json
import math
import re
from dataclasses import fields, replace

import pytest
from diagnosed import attention_of, diagnosed
from paths import ROOT

from normalign_llava.diagnose import criteria
from normalign_llava.diagnose.criteria import CRITERIA, Effect
from normalign_llava.diagnose.findings import findings, problem, verdict
from normalign_llava.diagnose.report import (
    SCHEMA_VERSION,
    Attention,
    Curve,
    Depth,
    Gain,
    Interface,
    Moments,
    Report,
    paper_tables,
)


CLAIMS = (
    criteria.RQ1,
    criteria.RQ2,
    criteria.RQ3,
    criteria.UPDATES,
    criteria.BOTTOM,
    criteria.NEARNESS,
    criteria.FOCUS,
)
CLAIM_NAMES = (
    "projector",
    "decoder",
    "rotation",
    "updates",
    "bottom",
    "nearness",
    "focus",
)
STORED = ROOT / "docs" / "quickstart" / "report.json"


def with_depth(report: Report, **changes) -> Report:
    return replace(report, depth=replace(report.depth, **changes))


def with_interface(report: Report, **changes) -> Report:
    return replace(report, interface=replace(report.interface, **changes))


def with_rotation(
    report: Report,
    asymmetry: float | None,
    error: float | None = 0.01,
    less_in: int | None = None,
) -> Report:
    """`report` with another ratio of rotations; visual tokens rotate less in `less_in` layers.

    By default these are all layers but the last, or none for a ratio of 1 and more.
    """
    layers = report.layers
    if less_in is None:
        less_in = layers - 1
        if asymmetry is None or asymmetry >= 1:
            less_in = 0
    text_curve = [0.5] * layers
    visual = [0.4] * less_in + [0.6] * (layers - less_in)
    rotation = {"visual": Curve(visual, text_curve), "text": Curve(text_curve, text_curve)}
    return with_depth(report, asymmetry=asymmetry, asymmetry_error=error, rotation=rotation)


def check_claims(report, baseline=None):
    """The findings by short names of their claims."""
    found = findings(report, baseline)
    assert tuple(finding.claim for finding in found) == CLAIMS
    return dict(zip(CLAIM_NAMES, found, strict=True))


def check_outcomes(report, baseline=None):
    checked = check_claims(report, baseline)
    return {claim: finding.outcome for claim, finding in checked.items()}


@pytest.mark.parametrize(
    ("ratio", "asymmetry", "error", "numbers", "agreed", "has_problem"),
    [
        pytest.param(
            37.0,
            0.4,
            0.01,
            ("37 ×", "0.40 ± 0.01 ×"),
            "5, and agrees with 5",
            "It has",
            id="it has the problem",
        ),
        pytest.param(
            1.03,
            0.97,
            0.01,
            ("1.0 ×", "0.97 ± 0.01 ×"),
            "4, and agrees with 3",
            "does not have",
            id="norms and rotations are alike",
        ),
        pytest.param(
            37.0,
            0.8,
            0.2,
            ("37 ×", "0.8 ± 0.2 ×"),
            "5, and agrees with 4",
            "is unclear",
            id="a large error",
        ),
        pytest.param(
            37.0,
            0.8,
            None,
            ("37 ×", "0.80 ×"),
            "5, and agrees with 4",
            "is unclear",
            id="no error",
        ),
        pytest.param(
            46.0,
            1.2,
            0.01,
            ("46 ×", "1.20 ± 0.01 ×"),
            "5, and agrees with 4",
            "does not have",
            id="visual tokens rotate more",
        ),
    ],
)
def test_the_verdict_on_one_model(ratio, asymmetry, error, numbers, agreed, has_problem):
    report = with_rotation(diagnosed(ratio), asymmetry, error)
    measured, judged, claims = verdict(report)
    for number in numbers:
        assert number in measured
    assert "layers 1 to 29" in measured
    assert has_problem in judged
    assert f"can check {agreed}." in claims


@pytest.mark.parametrize(
    ("ratio", "asymmetry", "is_not_larger", "is_not_slower"),
    [
        (1.03, 0.97, True, True),
        (1.03, 0.4, True, False),
        (46.0, 1.2, False, True),
        (0.2, 0.4, True, False),
    ],
)
def test_reasons_why_a_model_has_no_problem_are_given(
    ratio, asymmetry, is_not_larger, is_not_slower
):
    sentence = problem(with_rotation(diagnosed(ratio), asymmetry))
    assert ("not much larger" in sentence) == is_not_larger
    assert ("not rotate clearly less" in sentence) == is_not_slower


def test_a_problem_is_not_measured_without_visual_tokens():
    assert "was not measured" in problem(with_interface(diagnosed(), visual=None))


def test_a_problem_is_not_measured_without_text_tokens():
    report = with_rotation(diagnosed(), None)
    assert "was not measured" in problem(report)
    measured, judged, _ = verdict(report)
    assert "rotate – ×" in measured
    assert "was not measured" in judged


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [
        (1.2, "does not apply"),
        (1.25, "does not apply"),
        (1.26, "agrees"),
    ],
)
def test_rotation_is_asked_of_visual_tokens_that_are_larger(ratio, outcome):
    report = with_rotation(diagnosed(ratio), 0.4)
    assert check_outcomes(report)["rotation"] == outcome


def test_rotation_is_not_measured_without_a_ratio_of_norms():
    report = with_interface(diagnosed(), ratio=None, ratio_data=None)
    assert check_outcomes(report)["rotation"] == "not measured"


@pytest.mark.parametrize("quantity", ["log_update", "update_angle"])
def test_updates_are_not_measured_without_curves_of_both_kinds(quantity):
    report = diagnosed()
    visual_curves = {"visual": getattr(report.depth, quantity)["visual"]}
    for curves in ({}, visual_curves):
        incomplete = with_depth(report, **{quantity: curves})
        assert check_outcomes(incomplete)["updates"] == "not measured"


def test_updates_are_not_measured_if_all_layers_change_nothing():
    idle = Curve([-math.inf] * 30, [0.0] * 30)
    report = with_depth(diagnosed(), log_update={"visual": idle, "text": idle})
    assert check_outcomes(report)["updates"] == "not measured"


@pytest.mark.parametrize("changes", [{"asymmetry": None}, {"log_norm": {}}])
def test_what_is_missing_of_one_of_two_models_is_not_compared(changes):
    report = diagnosed(1.0, "layer_norm", "ours")
    baseline = diagnosed(model="base")
    assert check_outcomes(report, baseline)["nearness"] != "not measured"

    incomplete_report = with_depth(report, **changes)
    assert check_outcomes(incomplete_report, baseline)["nearness"] == "not measured"
    incomplete_baseline = with_depth(baseline, **changes)
    assert check_outcomes(report, incomplete_baseline)["nearness"] == "not measured"


def test_focus_is_not_measured_without_attention():
    report = diagnosed(1.0, "layer_norm", "ours", attention=[])
    baseline = diagnosed(model="base", attention=[])
    assert check_outcomes(report, baseline)["focus"] == "not measured"


ZERO = Moments(0.0, 0.0, 4)


def test_visual_norms_of_zero_decide_nothing():
    report = with_interface(paper_model(None, (8.0, 6.0), 2.0), visual=ZERO)
    assert check_outcomes(report)["decoder"] == "unclear"


def test_against_text_norms_of_zero_nothing_is_measured():
    report = with_interface(paper_model(None, (8.0, 6.0), 2.0), vocabulary=None, text=ZERO)
    assert check_outcomes(report)["decoder"] == "not measured"


@pytest.mark.parametrize(
    ("baseline_error", "error", "baseline_asymmetry"),
    [
        pytest.param(None, 0.01, 0.4, id="no error of the baseline"),
        pytest.param(0.01, None, 0.4, id="no error of the model"),
        pytest.param(0.01, 0.01, 0.0, id="no rotation of the baseline"),
    ],
)
def test_rotations_without_an_error_decide_nothing(baseline_error, error, baseline_asymmetry):
    baseline = at_distance(8.0, baseline_asymmetry, baseline_error)
    report = at_distance(1.1, 0.9, error, norm="layer_norm")
    assert check_outcomes(report, baseline)["nearness"] == "unclear"


def test_without_n_text_the_ratio_to_text_in_the_data_stands_in_the_verdict():
    report = with_interface(diagnosed(), ratio=None, ratio_data=31.0)
    assert "at 31 ×" in verdict(report)[0]


@pytest.fixture
def compared_reports():
    report = with_rotation(diagnosed(1.02, "layer_norm", "ours"), 0.9)
    baseline = with_rotation(diagnosed(model="base"), 0.4)
    return report, baseline


def test_the_verdict_compares_a_model_with_its_baseline(compared_reports):
    _, judged, compared = verdict(*compared_reports)
    assert "Compared with base," in compared
    for number in ("1.02 ×", "instead of 37.0 ×", "0.900 ×", "instead of 0.400 ×"):
        assert number in compared
    assert judged.startswith("base: It has the problem")
    assert "ours: It does not" in judged


@pytest.mark.parametrize(
    ("claim", "number"),
    [
        ("projector", "at 27 ×"),
        ("projector", "have 66 ×"),
        ("decoder", "at 37 ×"),
        ("rotation", "0.40 ± 0.01 × as much as text, and less in 29 of 29 layers"),
        ("updates", "factor of 1.0"),
        ("bottom", "1.61 ×"),
        ("nearness", "0.40 ± 0.01 × without it"),
    ],
)
def test_a_finding_has_the_numbers_of_its_claim(compared_reports, claim, number):
    checked = check_claims(*compared_reports)
    assert number in checked[claim].sentence


def test_outcomes_of_two_models_that_differ_by_the_norm(compared_reports):
    assert check_outcomes(*compared_reports) == {
        "projector": "agrees",
        "decoder": "agrees",
        "rotation": "agrees",
        "updates": "agrees",
        "bottom": "agrees",
        "nearness": "agrees",
        "focus": "too small",
    }


def test_claims_are_checked_on_the_model_without_the_norm(compared_reports):
    subjects = {}
    for claim, finding in check_claims(*compared_reports).items():
        subject, _, _ = finding.sentence.partition(":")
        subjects[claim] = subject
    assert subjects == {
        "projector": "base",
        "decoder": "base",
        "rotation": "base",
        "updates": "base",
        "bottom": "base",
        "nearness": "ours",
        "focus": "ours",
    }


@pytest.mark.parametrize(
    ("norm", "baseline_norm", "decoder_outcome", "compared_outcome"),
    [
        ("none", "none", "agrees", "does not apply"),
        ("none", "layer_norm", "agrees", "does not apply"),
        ("layer_norm", "rms_norm", "does not apply", "not measured"),
    ],
)
def test_claims_of_a_pair_that_does_not_differ_by_the_norm_are_the_model_s(
    norm, baseline_norm, decoder_outcome, compared_outcome
):
    report = diagnosed(norm=norm, model="ours")
    baseline = diagnosed(norm=baseline_norm, model="other")
    checked = check_claims(report, baseline)
    for finding in checked.values():
        assert finding.sentence.startswith("ours: ")
    assert checked["decoder"].outcome == decoder_outcome
    assert checked["nearness"].outcome == compared_outcome
    assert checked["focus"].outcome == compared_outcome


def test_claims_on_a_model_with_the_norm_do_not_apply():
    outcomes = check_outcomes(diagnosed(1.0, "layer_norm"))
    assert outcomes["decoder"] == "does not apply"
    assert outcomes["rotation"] == "does not apply"
    assert outcomes["nearness"] == "not measured"
    assert outcomes["focus"] == "not measured"
    assert outcomes["bottom"] == "does not apply"


def test_claims_without_rotation_and_attention_are_not_measured():
    outcomes = check_outcomes(with_rotation(diagnosed(attention=[]), None))
    assert outcomes["nearness"] == "does not apply"
    assert outcomes["rotation"] == "not measured"
    assert outcomes["bottom"] == "not measured"


def test_effects_of_two_models_with_the_same_norms_are_too_small():
    outcomes = check_outcomes(diagnosed(1.0, "layer_norm"), diagnosed(1.0, "none"))
    assert outcomes["nearness"] == "too small"
    assert outcomes["decoder"] == "too small"


@pytest.mark.parametrize(
    ("quantity", "distance", "number"),
    [
        ("log_update", math.log(3), "a factor of 3.0"),
        ("update_angle", 0.3, "17"),
    ],
)
def test_updates_that_differ_between_kinds_disagree(quantity, distance, number):
    report = diagnosed()
    curves = getattr(report.depth, quantity)
    curves["visual"].mean[:] = [value + distance for value in curves["text"].mean]
    finding = check_claims(report)["updates"]
    assert finding.outcome == "disagrees"
    assert number in finding.sentence

    # A layer that changes nothing has no angle.
    curves["visual"].mean[3] = math.nan
    assert check_outcomes(report)["updates"] == "disagrees"


def curves_of_updates(text, visual, last_visual):
    """Curves of five layers, of which only the last differs for visual tokens."""
    return {
        "text": Curve([text] * 5, [0.0] * 5),
        "visual": Curve([visual] * 4 + [last_visual], [0.0] * 5),
    }


@pytest.mark.parametrize(
    ("visual_size", "last_visual_size", "outcome"),
    [
        pytest.param(math.log(1.2), math.log(40), "agrees", id="the last layer differs"),
        pytest.param(math.log(1.3), 0.0, "disagrees", id="only the last layer is the same"),
    ],
)
def test_the_claim_on_updates_leaves_the_last_layer_out(visual_size, last_visual_size, outcome):
    """It prepares the prediction: sizes 40 times text's there, and another angle, do not count."""
    report = with_depth(
        diagnosed(layers=5),
        log_update=curves_of_updates(0.0, visual_size, last_visual_size),
        update_angle=curves_of_updates(1.5, 1.6, 3.0),
    )
    finding = check_claims(report)["updates"]
    assert finding.outcome == outcome
    if outcome == "agrees":
        assert "a factor of 1.20, angles by 5.73 degrees" in finding.sentence


@pytest.fixture
def same_updates():
    """A report of updates that are the same for both kinds in all layers."""
    return with_depth(
        diagnosed(layers=5),
        log_update=curves_of_updates(0.0, 0.0, 0.0),
        update_angle=curves_of_updates(0.0, 0.0, 0.0),
    )


def test_updates_of_a_single_sample_decide_nothing(same_updates):
    report = replace(same_updates, samples=1)
    assert check_outcomes(report)["updates"] == "unclear"


@pytest.mark.parametrize(
    ("quantity", "visual_deviation", "text_deviation", "outcome"),
    [
        # Up to 1 + 2 * 0.992 / 8, within 1.25.
        ("log_update", 0.6, 0.79, "agrees"),
        # Up to 1 + 2 * 1.008 / 8.
        ("log_update", 0.6, 0.81, "unclear"),
        # 2 * 39.5 / 8 degrees, within 10.
        ("update_angle", 0.0, 0.69, "agrees"),
        ("update_angle", 0.0, 0.71, "unclear"),
    ],
)
def test_the_error_of_a_distance_is_of_both_kinds_over_samples(
    same_updates, quantity, visual_deviation, text_deviation, outcome
):
    curves = getattr(same_updates.depth, quantity)
    curves["visual"].std[:] = [visual_deviation] * 5
    curves["text"].std[:] = [text_deviation] * 5
    assert check_outcomes(same_updates)["updates"] == outcome


def at_distance(factor: float, asymmetry: float, error: float | None = 0.01, **changes) -> Report:
    """Norms of all states but the last are a factor apart; rotations have this ratio."""
    report = with_rotation(diagnosed(layers=3, **changes), asymmetry, error)
    visual = [math.log(factor)] * 3 + [0.0]
    curves = {"visual": Curve(visual, [0.0] * 4), "text": Curve([0.0] * 4, [0.0] * 4)}
    return with_depth(report, log_norm=curves)


@pytest.mark.parametrize(
    ("baseline_factor", "factor", "baseline_rotation", "rotation", "outcome"),
    [
        pytest.param(8.0, 1.1, 0.4, 0.9, "agrees", id="both nearer"),
        pytest.param(8.0, 1.1, 1.6, 1.1, "agrees", id="both nearer from above"),
        pytest.param(1.1, 1.1, 0.4, 0.9, "too small", id="norms alike"),
        pytest.param(8.0, 1.1, 0.9, 0.9, "too small", id="rotations alike"),
        pytest.param(1.1, 8.0, 0.4, 0.9, "disagrees", id="norms farther"),
        pytest.param(8.0, 1.1, 0.9, 0.4, "disagrees", id="rotations farther"),
    ],
)
def test_both_norms_and_rotations_must_be_nearer(
    baseline_factor, factor, baseline_rotation, rotation, outcome
):
    baseline = at_distance(baseline_factor, baseline_rotation)
    report = at_distance(factor, rotation, norm="layer_norm")
    finding = check_claims(report, baseline)["nearness"]
    assert finding.outcome == outcome
    # The mean is over four states, and the last ones do not differ.
    norms = f"factor of {factor**0.75:.2f} on average, {baseline_factor**0.75:.2f} without it"
    assert norms in finding.sentence
    rotations = f"is {rotation:.2f} ± 0.01 × text's, {baseline_rotation:.2f} ± 0.01"
    assert rotations in finding.sentence


@pytest.mark.parametrize(
    ("baseline_error", "error", "outcome"),
    [
        (0.10, 0.0, "agrees"),
        (0.12, 0.0, "unclear"),
        (0.0, 0.27, "agrees"),
        (0.0, 0.29, "unclear"),
    ],
)
def test_the_errors_of_both_rotations_count_relative_to_them(baseline_error, error, outcome):
    """2.5 times nearer, less twice 2.5 * hypot(baseline_error / 0.4, error), is to be 1.11."""
    baseline = at_distance(8.0, 0.4, baseline_error)
    report = at_distance(1.1, 1.0, error, norm="layer_norm")
    assert check_outcomes(report, baseline)["nearness"] == outcome


def test_a_layer_that_rotates_both_alike_does_not_rotate_visual_tokens_less():
    report = with_rotation(diagnosed(layers=5), 0.9, less_in=2)
    rotation = report.depth.rotation
    rotation["visual"].mean[2:] = rotation["text"].mean[2:]
    assert "less in 2 of 4 layers" in check_claims(report)["rotation"].sentence


@pytest.mark.parametrize(
    ("asymmetry", "error", "less_in", "outcome"),
    [
        (0.4, 0.01, 29, "agrees"),
        # 20 of 29 by a fair coin: 3 %.
        (0.85, 0.01, 20, "agrees"),
        (0.85, 0.01, 19, "unclear"),
        # Significant, and does not matter.
        (0.963, 0.002, 13, "too small"),
        (0.963, 0.002, 29, "too small"),
        # Matters, in a few layers.
        (0.85, 0.01, 13, "unclear"),
        (0.85, 0.01, 2, "disagrees"),
        (0.85, 0.04, 29, "unclear"),
        (0.85, None, 29, "unclear"),
        (0.99, 0.1, 29, "unclear"),
        (1.2, 0.01, 0, "disagrees"),
    ],
)
def test_rotation_must_matter_be_significant_and_be_in_most_layers(
    asymmetry, error, less_in, outcome
):
    report = with_rotation(diagnosed(37.0), asymmetry, error, less_in)
    finding = check_claims(report)["rotation"]
    assert finding.outcome == outcome
    assert f"less in {less_in} of 29 layers" in finding.sentence


@pytest.mark.parametrize(
    ("biases", "outcome"),
    [
        ((1.6, 1.7, 1.8), "agrees"),
        ((0.9, 1.7, 1.6), "unclear"),
        ((1.27, 1.26, 1.20), "unclear"),
        ((1.1, 1.0, 1.05), "too small"),
        ((0.6, 0.5, 0.55), "disagrees"),
        # One question has no standard error.
        ((1.7,), "unclear"),
        # The standard error of four is 0.577 times the distance from their mean, 1.5.
        ((1.29, 1.29, 1.71, 1.71), "agrees"),
        ((1.27, 1.27, 1.73, 1.73), "unclear"),
    ],
)
def test_attention_at_the_bottom_is_judged_by_the_same_rule(biases, outcome):
    report = diagnosed()
    answer = report.attention[0]
    without_grid = replace(answer, bottom_bias=None)
    attention = [without_grid]
    for bias in biases:
        attention.append(replace(answer, bottom_bias=[bias - 0.5, bias + 0.5] * 15))
    finding = check_claims(replace(report, attention=attention))["bottom"]
    assert finding.outcome == outcome
    assert f"questions: {len(biases)}" in finding.sentence


def with_entropies(entropies: list[float]) -> list[Attention]:
    answer = attention_of("Where?", 4)
    return [replace(answer, entropy=[entropy] * 4) for entropy in entropies]


@pytest.mark.parametrize(
    ("entropies", "outcome"),
    [
        pytest.param([0.80, 0.82, 0.81], "agrees", id="lower"),
        pytest.param([0.88, 0.881, 0.882], "too small", id="lower by 0.02, significantly"),
        pytest.param([0.70, 0.90, 0.95], "unclear", id="spread"),
        pytest.param([0.99, 0.985, 0.99], "disagrees", id="higher"),
    ],
)
def test_focus_must_matter_and_be_significant(entropies, outcome):
    report = diagnosed(1.0, "layer_norm", "ours", attention=with_entropies(entropies))
    baseline = diagnosed(attention=with_entropies([0.90, 0.90, 0.90]))
    assert check_outcomes(report, baseline)["focus"] == outcome


def test_the_finding_on_focus_has_both_entropies_and_their_difference():
    report = diagnosed(1.0, "layer_norm", "ours", attention=with_entropies([0.80, 0.82, 0.81]))
    baseline = diagnosed(attention=with_entropies([0.90, 0.90, 0.90]))
    sentence = check_claims(report, baseline)["focus"].sentence
    assert "0.810, 0.900 without it" in sentence
    assert "lower by 0.090 ± 0.006" in sentence


def test_focus_is_not_compared_if_one_of_the_questions_is_another():
    report = diagnosed(1.0, "layer_norm", "ours", attention=with_entropies([0.80, 0.82, 0.81]))
    answers = with_entropies([0.90, 0.90, 0.90])
    answers[1] = replace(answers[1], question="Is it another?")
    baseline = diagnosed(attention=answers)
    assert check_outcomes(report, baseline)["focus"] == "not measured"


def paper_model(
    before: tuple[float, float] | None,
    after: tuple[float, float],
    text_norm: float,
) -> Report:
    """A report with norms of the paper: mean and deviation into the projector and the decoder."""
    projector_input = None
    if before is not None:
        projector_input = Moments(*before, 1024)
    visual = Moments(*after, 1024)
    return with_interface(
        diagnosed(),
        encoder_output=None,
        projector_input=projector_input,
        visual=visual,
        vocabulary=Moments(text_norm, 0.0, 49152),
        ratio=visual.mean / text_norm,
    )


@pytest.mark.parametrize(
    ("deviation", "samples", "outcome"),
    [
        (3.9, 64, "agrees"),
        (4.1, 64, "unclear"),
        (1.9, 16, "agrees"),
        (2.1, 16, "unclear"),
    ],
)
def test_each_sample_counts_once_in_the_error_of_a_norm(deviation, samples, outcome):
    """4 minus twice the error is 3 at a deviation of half the root of the samples."""
    report = paper_model(None, (8.0, 2 * deviation), 2.0)
    report = replace(report, samples=samples)
    assert check_outcomes(report)["decoder"] == outcome


@pytest.mark.parametrize(("deviation", "outcome"), [(0.1, "agrees"), (1.0, "unclear")])
def test_without_n_text_the_text_in_the_data_has_an_error_too(deviation, outcome):
    """4 minus twice 4 * hypot(3 / 4, deviation) / 8: 3.24 and 2.75."""
    text_moments = Moments(2.0, 2 * deviation, 713)
    report = with_interface(paper_model(None, (8.0, 6.0), 99.0), vocabulary=None, text=text_moments)
    finding = check_claims(report)["decoder"]
    assert finding.outcome == outcome
    assert "at 4.0 ×" in finding.sentence


def test_where_no_rows_enter_a_projector_the_rows_that_leave_the_encoder_count():
    report = with_interface(diagnosed(), projector_input=None)
    finding = check_claims(report)["projector"]
    assert finding.outcome == "agrees"
    assert re.findall(r"[\d.]+ ×", finding.sentence) == ["66 ×"]


def test_the_paper_has_four_models_in_table_2():
    assert len(paper_tables()["table_2"]) == 4


@pytest.mark.parametrize("model_row", paper_tables()["table_2"])
def test_the_models_of_table_2_have_the_paper_s_difference_of_norms(model_row):
    """With the 64 images that a diagnosis takes by default. The paper took 1000."""
    before = (model_row["before_mean"], model_row["before_std"])
    after_projector = (model_row["after_mean"], model_row["after_std"])
    outcomes = check_outcomes(paper_model(before, after_projector, model_row["text_mean"]))
    assert outcomes["projector"] == "agrees"
    assert outcomes["decoder"] == "agrees"


def test_the_model_of_table_3_has_the_paper_s_difference_of_norms():
    ovis_row = paper_tables()["table_3_ovis2_5"]
    after_projector = (ovis_row["visual_mean"], ovis_row["visual_std"])
    outcomes = check_outcomes(paper_model(None, after_projector, ovis_row["text_mean"]))
    assert outcomes["decoder"] == "agrees"
    assert outcomes["projector"] == "not measured"


def test_the_norm_that_the_projector_receives_decides_not_the_encoder_s_last_layer():
    report = paper_model((4.15, 0.32), (6.08, 1.44), 3.20)
    report = with_interface(report, encoder_output=Moments(44.4, 5.5, 1088))
    checked = check_claims(with_rotation(report, 0.963, 0.002, 13))
    assert checked["projector"].outcome == "too small"
    assert checked["decoder"].outcome == "too small"
    assert checked["rotation"].outcome == "too small"
    assert "1.3 ×" in checked["projector"].sentence
    assert "14 ×" in checked["projector"].sentence


def test_of_a_single_sample_nothing_is_known_of_other_images():
    report = paper_model((4.15, 0.32), (6.08, 1.44), 3.20)
    report = with_interface(report, encoder_output=Moments(44.4, 5.5, 1088))
    assert check_outcomes(replace(report, samples=1))["decoder"] == "unclear"


@pytest.mark.parametrize(
    ("criterion", "value", "error", "outcome"),
    [
        # At least 3.
        ("decoder", 5.0, 0.9, "agrees"),
        ("decoder", 5.0, 1.1, "unclear"),
        ("decoder", 2.0, 0.4, "too small"),
        ("decoder", 2.0, 0.6, "unclear"),
        ("decoder", 0.2, 0.05, "disagrees"),
        ("decoder", math.nan, 1.0, "unclear"),
        # At most 0.9.
        ("rotation", 0.8, 0.04, "agrees"),
        ("rotation", 0.8, 0.06, "unclear"),
        ("rotation", 0.99, 0.01, "too small"),
        ("rotation", 1.3, 0.05, "disagrees"),
        # Within 10.
        ("update angle", 8.0, 0.9, "agrees"),
        ("update angle", 8.0, 1.1, "unclear"),
        ("update angle", 14.0, 1.9, "disagrees"),
        # Ends of the interval that are at a threshold.
        ("decoder", 5.0, 1.0, "agrees"),
        ("decoder", 2.0, 0.5, "unclear"),
        ("update angle", 8.0, 1.0, "agrees"),
        ("update angle", 12.0, 1.0, "unclear"),
    ],
)
def test_every_outcome_of_the_rule_by_hand(criterion, value, error, outcome):
    rule = CRITERIA[criterion]
    assert rule.outcome(Effect(value, error)) == outcome
    assert rule.outcome(Effect(value, None)) == "unclear"


def test_docs_show_the_table_of_the_code():
    docs_text = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    _, _, after_heading = docs_text.partition("## When a claim holds")
    section, _, _ = after_heading.partition("\n## ")
    _, *table_rows = re.findall(r"^\| (.+) \|$", section, re.MULTILINE)
    assert len(table_rows) == len(CRITERIA)
    for table_row, criterion in zip(table_rows, CRITERIA.values(), strict=True):
        claim, effect, threshold, error_text, reason = table_row.split(" | ")
        expected_claim, _, _ = criterion.claim.partition(":")
        assert claim == expected_claim
        assert effect == criterion.effect
        assert threshold == f"{criterion.relation} {criterion.matters:.4g}"
        assert error_text == criterion.error
        assert reason == criterion.reason


def test_every_claim_has_a_criterion_and_a_name():
    claims = [criterion.claim for criterion in CRITERIA.values()]
    assert tuple(dict.fromkeys(claims)) == CLAIMS


def read_report(content: dict) -> Report:
    """The report that a stored one holds; null in a curve is NaN."""
    changes = {
        "interface": read_interface(content["interface"]),
        "depth": read_depth(content["depth"]),
        "attention": [Attention(**answer) for answer in content["attention"]],
    }
    if content["gain"]:
        changes["gain"] = Gain(**content["gain"])
    return Report(**{**content, **changes})


def read_interface(content: dict) -> Interface:
    norms = {}
    for field_name, field_value in content.items():
        norms[field_name] = field_value
        if isinstance(field_value, dict):
            norms[field_name] = Moments(**field_value)
    return Interface(**norms)


def read_depth(content: dict) -> Depth:
    depth = {}
    for field_name, field_value in content.items():
        if field_name == "final_norm":
            depth[field_name] = {kind: Moments(**of_kind) for kind, of_kind in field_value.items()}
        elif isinstance(field_value, dict):
            depth[field_name] = {kind: read_curve(of_kind) for kind, of_kind in field_value.items()}
        else:
            depth[field_name] = field_value
    return Depth(**depth)


def read_curve(content: dict) -> Curve:
    numbers = {}
    for field_name, values in content.items():
        numbers[field_name] = [math.nan if value is None else value for value in values]
    return Curve(**numbers)


@pytest.fixture
def stored_content():
    """The report that the docs show."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def test_the_stored_report_has_today_s_fields(stored_content):
    assert stored_content["schema_version"] == SCHEMA_VERSION
    for model in ("report", "against"):
        content = stored_content[model]
        assert list(content) == [field.name for field in fields(Report)]
        assert list(content["interface"]) == [field.name for field in fields(Interface)]


def test_the_stored_report_has_today_s_verdict_and_findings(stored_content):
    report = read_report(stored_content["report"])
    baseline = read_report(stored_content["against"])
    assert stored_content["verdict"] == verdict(report, baseline)
    assert stored_content["findings"] == [vars(finding) for finding in findings(report, baseline)]


def test_docs_and_diagnosis_say_the_same_of_the_quickstart_s_model(stored_content):
    """docs/quickstart.md: without the norm it does not have the paper's problem."""
    report = read_report(stored_content["report"])
    baseline = read_report(stored_content["against"])
    docs_text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert "does not have the paper's problem" in docs_text
    assert "does not have the problem" in problem(report)
    assert "does not have the problem" in problem(baseline)

    ratio_row = r"^\| norm, visual over text \| ([\d.]+) \| ([\d.]+) \|"
    ((baseline_ratio, ratio),) = re.findall(ratio_row, docs_text, re.MULTILINE)
    assert baseline_ratio == f"{baseline.interface.ratio:.2f}"
    assert ratio == f"{report.interface.ratio:.2f}"
    rotation_row = r"^\| rotation, visual over text \| ([\d.]+)"
    rotations = re.findall(rotation_row, docs_text, re.MULTILINE)
    assert rotations == [f"{baseline.depth.asymmetry:.3f}"]
