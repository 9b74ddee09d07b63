"""The verdict, and the paper's claims checked on reports made by hand."""

import json
import math
import re
from dataclasses import fields, replace

import pytest
from diagnosed import attention_of, diagnosed
from paths import ROOT

from normalign_llava.diagnose import criteria
from normalign_llava.diagnose.criteria import CLAIMS, CRITERIA, Effect
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


NAMES = ("projector", "decoder", "rotation", "updates", "bottom", "nearness", "focus")
STORED = ROOT / "docs" / "quickstart" / "report.json"


def with_rotation(
    report: Report, asymmetry: float | None, error: float | None = 0.01, less: int | None = None
) -> Report:
    """`report` with another ratio of rotations, and visual tokens rotating less in `less` layers.

    By default that is all layers but the last, or none for a ratio of 1 and more.
    """
    layers = report.layers
    if less is None:
        less = 0 if asymmetry is None or asymmetry >= 1 else layers - 1
    text = [0.5] * layers
    visual = [0.4] * less + [0.6] * (layers - less)
    rotation = {"visual": Curve(visual, text), "text": Curve(text, text)}
    changes = dict(asymmetry=asymmetry, asymmetry_error=error, rotation=rotation)
    return replace(report, depth=replace(report.depth, **changes))


def by_claim(report, against=None):
    found = findings(report, against)
    assert tuple(finding.claim for finding in found) == CLAIMS
    checked = ((finding.outcome, finding.sentence) for finding in found)
    return dict(zip(NAMES, checked, strict=True))


@pytest.mark.parametrize(
    "ratio, asymmetry, error, numbers, agreed, has",
    [
        (37.0, 0.4, 0.01, ("37 ×", "0.40 ± 0.01 ×"), "5, and agrees with 5", "It has"),
        (1.03, 0.97, 0.01, ("1.0 ×", "0.97 ± 0.01 ×"), "4, and agrees with 3", "does not have"),
        (37.0, 0.8, 0.2, ("37 ×", "0.8 ± 0.2 ×"), "5, and agrees with 4", "is unclear"),
        (37.0, 0.8, None, ("37 ×", "0.80 ×"), "5, and agrees with 4", "is unclear"),
        (46.0, 1.2, 0.01, ("46 ×", "1.20 ± 0.01 ×"), "5, and agrees with 4", "does not have"),
    ],
)
def test_the_verdict_on_one_model(ratio, asymmetry, error, numbers, agreed, has):
    first, second, third = verdict(with_rotation(diagnosed(ratio), asymmetry, error))
    assert all(number in first for number in numbers) and f"can check {agreed}." in third
    assert has in second and "layers 1 to 29" in first


@pytest.mark.parametrize(
    ("ratio", "asymmetry", "reasons"),
    [
        (1.03, 0.97, ("not much larger", "not rotate clearly less")),
        (1.03, 0.4, ("not much larger",)),
        (46.0, 1.2, ("not rotate clearly less",)),
        (0.2, 0.4, ("not much larger",)),
    ],
)
def test_reasons_why_a_model_has_no_problem_are_those_that_hold(ratio, asymmetry, reasons):
    sentence = problem(with_rotation(diagnosed(ratio), asymmetry))
    for reason in ("not much larger", "not rotate clearly less"):
        assert (reason in sentence) == (reason in reasons)


def test_a_problem_is_not_measured_without_visual_or_text_tokens():
    report = diagnosed()
    without_visual = replace(report, interface=replace(report.interface, visual=None))
    for unmeasured in (with_rotation(report, None), without_visual):
        assert "was not measured" in problem(unmeasured)
    first, second, _ = verdict(with_rotation(report, None))
    assert "rotate – ×" in first and "was not measured" in second


@pytest.mark.parametrize(("ratio", "applies"), [(1.2, False), (1.25, False), (1.26, True)])
def test_rotation_is_asked_of_visual_tokens_that_are_larger(ratio, applies):
    outcome, _ = by_claim(with_rotation(diagnosed(ratio), 0.4))["rotation"]
    assert outcome == ("agrees" if applies else "does not apply")


def without(report, **changes):
    """`report` with other fields of its depth."""
    return replace(report, depth=replace(report.depth, **changes))


def test_claims_whose_numbers_are_missing_are_not_measured():
    report = diagnosed()
    norms = replace(report.interface, ratio=None, ratio_data=None)
    assert by_claim(replace(report, interface=norms))["rotation"][0] == "not measured"
    for quantity in ("log_update", "update_angle"):
        visual = {"visual": getattr(report.depth, quantity)["visual"]}
        for curves in ({}, visual):
            found = by_claim(without(report, **{quantity: curves}))
            assert found["updates"][0] == "not measured"
    idle = Curve([-math.inf] * 30, [0.0] * 30)  # all layers change nothing
    still = without(report, log_update={"visual": idle, "text": idle})
    assert by_claim(still)["updates"][0] == "not measured"


@pytest.mark.parametrize("changes", [{"asymmetry": None}, {"log_norm": {}}])
def test_what_is_missing_of_one_of_two_models_is_not_compared(changes):
    ours = diagnosed(1.0, "layer_norm", "ours")
    base = diagnosed(model="base")
    assert by_claim(ours, base)["nearness"][0] != "not measured"
    for pair in ((without(ours, **changes), base), (ours, without(base, **changes))):
        assert by_claim(*pair)["nearness"][0] == "not measured"
    silent = replace(ours, attention=[]), replace(base, attention=[])
    assert by_claim(*silent)["focus"][0] == "not measured"


def test_norms_of_zero_and_rotations_without_an_error_decide_nothing():
    zero = Moments(0.0, 0.0, 4)
    report = paper_model(None, (8.0, 6.0), 2.0)
    of_zero = replace(report, interface=replace(report.interface, visual=zero))
    assert by_claim(of_zero)["decoder"][0] == "unclear"
    norms = replace(report.interface, vocabulary=None, text=zero)
    assert by_claim(replace(report, interface=norms))["decoder"][0] == "not measured"
    for errors, asymmetry in (((None, 0.01), 0.4), ((0.01, None), 0.4), ((0.01, 0.01), 0.0)):
        base = nearing(8.0, asymmetry, errors[0])
        ours = nearing(1.1, 0.9, errors[1], norm="layer_norm")
        assert by_claim(ours, base)["nearness"][0] == "unclear"


def test_without_n_text_the_ratio_to_text_in_the_data_stands_in_the_verdict():
    report = diagnosed()
    norms = replace(report.interface, ratio=None, ratio_data=31.0)
    assert "at 31 ×" in verdict(replace(report, interface=norms))[0]


def test_claims_are_checked_on_the_model_without_the_norm():
    ours = diagnosed(1.02, "layer_norm", "ours")
    base = diagnosed(model="base")
    ours = with_rotation(ours, 0.9)
    base = with_rotation(base, 0.4)
    numbers = ("1.02 ×", "instead of 37.0 ×", "0.900 ×", "instead of 0.400 ×")
    _, problems, compared = verdict(ours, base)
    assert all(number in compared for number in numbers) and "Compared with base," in compared
    assert problems.startswith("base: It has the problem") and "ours: It does not" in problems
    checked = by_claim(ours, base)
    assert "at 27 ×" in checked["projector"][1] and "have 66 ×" in checked["projector"][1]
    for claim, number in {
        "decoder": "at 37 ×",
        "rotation": "0.40 ± 0.01 × as much as text, and less in 29 of 29 layers",
        "updates": "factor of 1.0",
        "bottom": "1.61 ×",
        "nearness": "0.40 ± 0.01 × without it",
    }.items():
        assert checked[claim][0] == "agrees" and number in checked[claim][1], claim
    assert checked["focus"][0] == "too small"
    subjects = {claim: sentence.partition(":")[0] for claim, (_, sentence) in checked.items()}
    assert subjects == dict.fromkeys(NAMES[:5], "base") | dict.fromkeys(NAMES[5:], "ours")


@pytest.mark.parametrize(
    ("norm", "of_other", "decoder", "compared"),
    [
        ("none", "none", "agrees", "does not apply"),
        ("none", "layer_norm", "agrees", "does not apply"),
        ("layer_norm", "rms_norm", "does not apply", "not measured"),
    ],
)
def test_claims_of_a_pair_that_does_not_differ_by_the_norm_are_the_model_s(
    norm, of_other, decoder, compared
):
    ours = diagnosed(norm=norm, model="ours")
    other = diagnosed(norm=of_other, model="other")
    checked = by_claim(ours, other)
    assert all(sentence.startswith("ours: ") for _, sentence in checked.values())
    assert checked["decoder"][0] == decoder
    assert checked["nearness"][0] == checked["focus"][0] == compared


def test_claims_that_fail_or_cannot_be_checked():
    aligned = by_claim(diagnosed(1.0, "layer_norm"))
    assert aligned["decoder"][0] == aligned["rotation"][0] == "does not apply"
    assert aligned["nearness"][0] == aligned["focus"][0] == "not measured"
    assert aligned["bottom"][0] == "does not apply"
    without_text = by_claim(with_rotation(diagnosed(attention=[]), None))
    assert without_text["nearness"][0] == "does not apply"
    assert without_text["rotation"][0] == without_text["bottom"][0] == "not measured"
    same = by_claim(diagnosed(1.0, "layer_norm"), diagnosed(1.0, "none"))
    assert same["nearness"][0] == "too small" and same["decoder"][0] == "too small"
    changes = {"log_update": (math.log(3), "a factor of 3.0"), "update_angle": (0.3, "17")}
    for quantity, (change, number) in changes.items():
        report = diagnosed()
        curves = getattr(report.depth, quantity)
        curves["visual"].mean[:] = [value + change for value in curves["text"].mean]
        checked = by_claim(report)["updates"]
        assert checked[0] == "disagrees" and number in checked[1]
        curves["visual"].mean[3] = math.nan  # of a layer that changes nothing
        assert by_claim(report)["updates"][0] == "disagrees"


def updates(**changes: tuple[float, float, float]) -> Report:
    """Updates whose last layer alone differs: by quantity text, visual, and visual's last."""
    report = diagnosed(layers=5)
    depth = report.depth
    for quantity, (text, visual, last) in changes.items():
        curves = {"text": Curve([text] * 5, [0.0] * 5)}
        curves["visual"] = Curve([visual] * 4 + [last], [0.0] * 5)
        depth = replace(depth, **{quantity: curves})
    return replace(report, depth=depth)


def test_the_claim_on_updates_leaves_the_last_layer_out():
    """It prepares the prediction: sizes 40 times text's there, and another angle, do not count."""
    size = (0.0, math.log(1.2), math.log(40))
    angle = (1.5, 1.6, 3.0)
    outcome, sentence = by_claim(updates(log_update=size, update_angle=angle))["updates"]
    assert outcome == "agrees" and "a factor of 1.20, angles by 5.73 degrees" in sentence
    size = (0.0, math.log(1.3), 0.0)  # the same in the last layer alone
    assert by_claim(updates(log_update=size, update_angle=angle))["updates"][0] == "disagrees"


@pytest.mark.parametrize(
    ("quantity", "deviations", "outcome"),
    [
        ("log_update", (0.6, 0.79), "agrees"),  # up to 1 + 2 * 0.992 / 8, within 1.25
        ("log_update", (0.6, 0.81), "unclear"),  # up to 1 + 2 * 1.008 / 8
        ("update_angle", (0.0, 0.69), "agrees"),  # 2 * 39.5 / 8 degrees, within 10
        ("update_angle", (0.0, 0.71), "unclear"),
    ],
)
def test_the_error_of_a_distance_is_that_of_both_kinds_over_samples(quantity, deviations, outcome):
    same = (0.0, 0.0, 0.0)
    report = updates(log_update=same, update_angle=same)
    assert by_claim(replace(report, samples=1))["updates"][0] == "unclear"
    curves = getattr(report.depth, quantity)
    for kind, deviation in zip(("visual", "text"), deviations, strict=True):
        curves[kind].std[:] = [deviation] * 5
    assert by_claim(report)["updates"][0] == outcome


def nearing(factor: float, asymmetry: float, error: float = 0.01, **changes) -> Report:
    """Norms of all states but the last a factor apart, and this ratio of rotations."""
    report = with_rotation(diagnosed(layers=3, **changes), asymmetry, error)
    visual = [math.log(factor)] * 3 + [0.0]
    curves = {"visual": Curve(visual, [0.0] * 4), "text": Curve([0.0] * 4, [0.0] * 4)}
    return replace(report, depth=replace(report.depth, log_norm=curves))


@pytest.mark.parametrize(
    ("factors", "rotations", "outcome"),
    [
        ((8.0, 1.1), (0.4, 0.9), "agrees"),
        ((8.0, 1.1), (1.6, 1.1), "agrees"),
        ((1.1, 1.1), (0.4, 0.9), "too small"),
        ((8.0, 1.1), (0.9, 0.9), "too small"),
        ((1.1, 8.0), (0.4, 0.9), "disagrees"),
        ((8.0, 1.1), (0.9, 0.4), "disagrees"),
    ],
)
def test_both_norms_and_rotations_must_be_nearer(factors, rotations, outcome):
    (factor_before, factor) = factors
    (before, now) = rotations
    base = nearing(factor_before, before)
    ours = nearing(factor, now, norm="layer_norm")
    found, sentence = by_claim(ours, base)["nearness"]
    assert found == outcome
    # Over four states, of which the last differ by nothing.
    numbers = f"factor of {factor**0.75:.2f} on average, {factor_before**0.75:.2f} without it"
    assert numbers in sentence and f"is {now:.2f} ± 0.01 × text's, {before:.2f} ± 0.01" in sentence


@pytest.mark.parametrize(
    ("error_before", "error", "outcome"),
    [(0.10, 0.0, "agrees"), (0.12, 0.0, "unclear"), (0.0, 0.27, "agrees"), (0.0, 0.29, "unclear")],
)
def test_the_errors_of_both_rotations_count_relative_to_them(error_before, error, outcome):
    """2.5 times nearer, less twice 2.5 * hypot(error_before / 0.4, error), is to be 1.11."""
    base = nearing(8.0, 0.4, error_before)
    ours = nearing(1.1, 1.0, error, norm="layer_norm")
    assert by_claim(ours, base)["nearness"][0] == outcome


def test_a_layer_that_rotates_both_alike_does_not_rotate_visual_tokens_less():
    report = with_rotation(diagnosed(layers=5), 0.9, less=2)
    report.depth.rotation["visual"].mean[2:] = report.depth.rotation["text"].mean[2:]
    assert "less in 2 of 4 layers" in by_claim(report)["rotation"][1]


@pytest.mark.parametrize(
    "asymmetry, error, less, outcome",
    [
        (0.4, 0.01, 29, "agrees"),
        (0.85, 0.01, 20, "agrees"),  # 20 of 29 by a fair coin: 3 %
        (0.85, 0.01, 19, "unclear"),
        (0.963, 0.002, 13, "too small"),  # significant, and does not matter
        (0.963, 0.002, 29, "too small"),
        (0.85, 0.01, 13, "unclear"),  # matters, of a few layers
        (0.85, 0.01, 2, "disagrees"),
        (0.85, 0.04, 29, "unclear"),
        (0.85, None, 29, "unclear"),
        (0.99, 0.1, 29, "unclear"),
        (1.2, 0.01, 0, "disagrees"),
    ],
)
def test_rotation_must_matter_be_significant_and_be_in_most_layers(asymmetry, error, less, outcome):
    report = with_rotation(diagnosed(37.0), asymmetry, error, less)
    found, sentence = by_claim(report)["rotation"]
    assert found == outcome and f"less in {less} of 29 layers" in sentence


@pytest.mark.parametrize(
    "biases, outcome",
    [
        ((1.6, 1.7, 1.8), "agrees"),
        ((0.9, 1.7, 1.6), "unclear"),
        ((1.27, 1.26, 1.20), "unclear"),
        ((1.1, 1.0, 1.05), "too small"),
        ((0.6, 0.5, 0.55), "disagrees"),
        ((1.7,), "unclear"),  # one question has no standard error
        # The standard error of four is 0.577 times the distance from their mean, 1.5.
        ((1.29, 1.29, 1.71, 1.71), "agrees"),
        ((1.27, 1.27, 1.73, 1.73), "unclear"),
    ],
)
def test_attention_at_the_bottom_is_judged_by_the_same_rule(biases, outcome):
    report = diagnosed()
    asked = report.attention[0]
    attention = [replace(asked, bottom_bias=[bias - 0.5, bias + 0.5] * 15) for bias in biases]
    attention.insert(0, replace(asked, bottom_bias=None))  # without a grid
    found, sentence = by_claim(replace(report, attention=attention))["bottom"]
    assert found == outcome and f"questions: {len(biases)}" in sentence


def entropies(values: list[float]) -> list[Attention]:
    asked = attention_of("Where?", 4)
    return [replace(asked, entropy=[value] * 4) for value in values]


@pytest.mark.parametrize(
    "ours, outcome",
    [
        ([0.80, 0.82, 0.81], "agrees"),
        ([0.88, 0.881, 0.882], "too small"),  # lower by 0.02, significantly
        ([0.70, 0.90, 0.95], "unclear"),
        ([0.99, 0.985, 0.99], "disagrees"),
    ],
)
def test_focus_must_matter_and_be_significant(ours, outcome):
    new = diagnosed(1.0, "layer_norm", "ours", attention=entropies(ours))
    old = diagnosed(attention=entropies([0.90, 0.90, 0.90]))
    assert by_claim(new, old)["focus"][0] == outcome


def test_focus_is_not_compared_if_one_of_the_questions_is_another():
    new = entropies([0.80, 0.82, 0.81])
    old = entropies([0.90, 0.90, 0.90])
    old[1] = replace(old[1], question="Is it another?")
    ours = diagnosed(1.0, "layer_norm", "ours", attention=new)
    theirs = diagnosed(attention=old)
    assert by_claim(ours, theirs)["focus"][0] == "not measured"
    same = replace(theirs, attention=entropies([0.90, 0.90, 0.90]))
    sentence = by_claim(ours, same)["focus"][1]
    assert "0.810, 0.900 without it" in sentence and "lower by 0.090 ± 0.006" in sentence


def paper_model(visual: tuple[float, float] | None, entry: tuple[float, float], text: float):
    """A report with norms of the paper: mean and deviation into the projector and the decoder."""
    report = diagnosed()
    received = Moments(*entry, 1024)
    norms = replace(
        report.interface,
        encoder_output=None,
        projector_input=None if visual is None else Moments(*visual, 1024),
        visual=received,
        vocabulary=Moments(text, 0.0, 49152),
        ratio=received.mean / text,
    )
    return replace(report, interface=norms)


@pytest.mark.parametrize(
    ("deviation", "samples", "outcome"),
    [(3.9, 64, "agrees"), (4.1, 64, "unclear"), (1.9, 16, "agrees"), (2.1, 16, "unclear")],
)
def test_each_sample_counts_once_in_the_error_of_a_norm(deviation, samples, outcome):
    """4 minus twice the error is 3 at a deviation of half the root of the samples."""
    report = replace(paper_model(None, (8.0, 2 * deviation), 2.0), samples=samples)
    assert by_claim(report)["decoder"][0] == outcome


@pytest.mark.parametrize(("deviation", "outcome"), [(0.1, "agrees"), (1.0, "unclear")])
def test_without_n_text_the_text_in_the_data_has_an_error_too(deviation, outcome):
    """4 minus twice 4 * hypot(3 / 4, deviation) / 8: 3.24 and 2.75."""
    report = paper_model(None, (8.0, 6.0), 99.0)
    text = Moments(2.0, 2 * deviation, 713)
    report = replace(report, interface=replace(report.interface, vocabulary=None, text=text))
    found, sentence = by_claim(report)["decoder"]
    assert found == outcome and "at 4.0 ×" in sentence


def test_where_no_rows_enter_a_projector_those_that_leave_the_encoder_count():
    report = diagnosed()
    norms = replace(report.interface, projector_input=None)
    outcome, sentence = by_claim(replace(report, interface=norms))["projector"]
    assert outcome == "agrees" and re.findall(r"[\d.]+ ×", sentence) == ["66 ×"]


def test_the_paper_s_own_models_have_its_difference_of_norms():
    """Tables 2 and 3, for the 64 images that a diagnosis takes by default; the paper took 1000."""
    tables = paper_tables()
    assert len(tables["table_2"]) == 4
    for row in tables["table_2"]:
        before = row["before_mean"], row["before_std"]
        after = row["after_mean"], row["after_std"]
        checked = by_claim(paper_model(before, after, row["text_mean"]))
        assert checked["projector"][0] == checked["decoder"][0] == "agrees", row
    ovis = tables["table_3_ovis2_5"]
    after = ovis["visual_mean"], ovis["visual_std"]
    checked = by_claim(paper_model(None, after, ovis["text_mean"]))
    assert checked["decoder"][0] == "agrees" and checked["projector"][0] == "not measured"


def test_the_norm_that_the_projector_receives_decides_not_the_encoder_s_last_layer():
    report = paper_model((4.15, 0.32), (6.08, 1.44), 3.20)
    report = replace(
        report, interface=replace(report.interface, encoder_output=Moments(44.4, 5.5, 1088))
    )
    checked = by_claim(with_rotation(report, 0.963, 0.002, 13))
    outcomes = [checked[name][0] for name in ("projector", "decoder", "rotation")]
    assert outcomes == ["too small"] * 3
    assert "1.3 ×" in checked["projector"][1] and "14 ×" in checked["projector"][1]
    few = replace(report, samples=1)  # nothing is known of other images
    assert by_claim(few)["decoder"][0] == "unclear"


def test_every_outcome_of_the_rule_by_hand():
    above, below, within = (
        CRITERIA[name] for name in ("decoder", "rotation", "update angle")
    )  # at least 3, at most 0.9, within 10
    for criterion, value, error, outcome in (
        (above, 5.0, 0.9, "agrees"),
        (above, 5.0, 1.1, "unclear"),
        (above, 2.0, 0.4, "too small"),
        (above, 2.0, 0.6, "unclear"),
        (above, 0.2, 0.05, "disagrees"),
        (below, 0.8, 0.04, "agrees"),
        (below, 0.8, 0.06, "unclear"),
        (below, 0.99, 0.01, "too small"),
        (below, 1.3, 0.05, "disagrees"),
        (within, 8.0, 0.9, "agrees"),
        (within, 8.0, 1.1, "unclear"),
        (within, 14.0, 1.9, "disagrees"),
        (above, math.nan, 1.0, "unclear"),
        (above, 5.0, 1.0, "agrees"),  # ends of the interval that are at a threshold
        (above, 2.0, 0.5, "unclear"),
        (within, 8.0, 1.0, "agrees"),
        (within, 12.0, 1.0, "unclear"),
    ):
        assert criterion.outcome(Effect(value, error)) == outcome, (value, error)
        assert criterion.outcome(Effect(value, None)) == "unclear"


def test_docs_show_the_table_of_the_code():
    docs = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    section = docs.partition("## When a claim holds")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]
    assert len(rows) == len(CRITERIA)
    for row, criterion in zip(rows, CRITERIA.values(), strict=True):
        claim, effect, holds, error, reason = row.split(" | ")
        assert claim == criterion.claim.partition(":")[0]
        assert holds == f"{criterion.relation} {criterion.matters:.4g}"
        assert (effect, error, reason) == (criterion.effect, criterion.error, criterion.reason)
    claims = {criterion.claim for criterion in CRITERIA.values()}
    assert claims == set(CLAIMS) == {getattr(criteria, name) for name in REACHED}


REACHED = ("RQ1", "RQ2", "RQ3", "UPDATES", "BOTTOM", "NEARNESS", "FOCUS")


def report_of(content: dict) -> Report:
    """The report that a stored one holds; null in a curve is NaN."""
    norms = {name: each and moments(each) for name, each in content["interface"].items()}
    depth = {}
    for name, value in content["depth"].items():
        if name == "final_norm":
            depth[name] = {kind: Moments(**of_kind) for kind, of_kind in value.items()}
        elif isinstance(value, dict):
            depth[name] = {kind: Curve(**known(of_kind)) for kind, of_kind in value.items()}
        else:
            depth[name] = value
    changes = dict(interface=Interface(**norms), depth=Depth(**depth))
    changes["attention"] = [Attention(**asked) for asked in content["attention"]]
    changes["gain"] = content["gain"] and Gain(**content["gain"])
    return Report(**{**content, **changes})


def moments(value):
    return Moments(**value) if isinstance(value, dict) else value


def known(curve: dict) -> dict:
    return {
        name: [math.nan if value is None else value for value in values]
        for name, values in curve.items()
    }


def test_the_stored_report_is_what_today_s_code_writes():
    """Fields, findings and verdict of the report that the docs show, from its own numbers."""
    content = json.loads(STORED.read_text(encoding="utf-8"))
    assert content["schema_version"] == SCHEMA_VERSION
    reports = []
    for name in ("report", "against"):
        assert list(content[name]) == [field.name for field in fields(Report)]
        assert list(content[name]["interface"]) == [field.name for field in fields(Interface)]
        reports.append(report_of(content[name]))
    assert content["verdict"] == verdict(*reports)
    found = [vars(finding) for finding in findings(*reports)]
    assert content["findings"] == found


def test_docs_and_diagnosis_say_the_same_of_the_quickstart_s_model():
    """docs/quickstart.md: without the norm it does not have the paper's problem."""
    content = json.loads(STORED.read_text(encoding="utf-8"))
    report = report_of(content["report"])
    against = report_of(content["against"])
    docs = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert "does not have the paper's problem" in docs
    for model in (report, against):
        assert "does not have the problem" in problem(model)
    shown = re.findall(r"^\| norm, visual over text \| ([\d.]+) \| ([\d.]+) \|", docs, re.MULTILINE)
    assert shown == [(f"{against.interface.ratio:.2f}", f"{report.interface.ratio:.2f}")]
    rotations = re.findall(r"^\| rotation, visual over text \| ([\d.]+)", docs, re.MULTILINE)
    assert rotations == [f"{against.depth.asymmetry:.3f}"]
