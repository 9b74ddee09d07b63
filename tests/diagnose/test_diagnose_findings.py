"""The verdict, and the paper's claims checked on reports made by hand."""

import math
from dataclasses import replace

import pytest
from diagnosed import diagnosed

from normalign_llava.diagnose.findings import findings, verdict
from normalign_llava.diagnose.report import Report


CLAIMS = ("disparity", "rotation", "updates", "bottom", "nearness", "focus")


def with_rotation(report: Report, asymmetry: float | None, error: float | None = None) -> Report:
    depth = replace(report.depth, asymmetry=asymmetry, asymmetry_error=error)
    return replace(report, depth=depth)


def by_claim(report, against=None):
    checked = ((finding.outcome, finding.sentence) for finding in findings(report, against))
    return dict(zip(CLAIMS, checked, strict=True))


@pytest.mark.parametrize(
    "ratio, asymmetry, error, numbers, agreed",
    [
        (37.0, 0.4, None, ("37 ×", "0.40 ×"), "4, and agrees with 4"),
        (1.03, 0.97, None, ("1.0 ×", "0.97 ×"), "3, and agrees with 2"),  # rotation: does not apply
        (37.0, 0.8, 0.2, ("37 ×", "0.8 ± 0.2 ×"), "4, and agrees with 3"),  # unclear
        (46.0, 1.2, None, ("46 ×", "1.2 ×"), "4, and agrees with 3"),
    ],
)
def test_the_verdict_on_one_model(ratio, asymmetry, error, numbers, agreed):
    first, second = verdict(with_rotation(diagnosed(ratio), asymmetry, error))
    assert all(number in first for number in numbers) and f"can check {agreed}." in second


def test_claims_are_checked_on_the_model_without_the_norm():
    ours, base = diagnosed(1.02, "layer_norm", "ours"), diagnosed(model="base")
    numbers = ("1.0 ×", "instead of 37 ×", "0.90 ×", "instead of 0.40 ×")
    _, compared = verdict(with_rotation(ours, 0.9), with_rotation(base, 0.4))
    assert all(number in compared for number in numbers)
    checked = by_claim(ours, base)
    numbers = ("66 × the norm of text, as received 37 ×", "0.11", "of 1.0", "1.61", "without it")
    for claim, number in zip(CLAIMS, numbers, strict=False):
        assert checked[claim][0] == "agrees" and number in checked[claim][1], claim
    assert checked["focus"][0] == "disagrees"


def test_claims_that_fail_or_cannot_be_checked():
    aligned = by_claim(diagnosed(1.0, "layer_norm"))
    assert aligned["disparity"][0] == aligned["rotation"][0] == "does not apply"
    assert aligned["nearness"][0] == aligned["focus"][0] == "not measured"
    without_text = by_claim(with_rotation(diagnosed(attention=[]), None))
    assert without_text["nearness"][0] == "does not apply"
    assert without_text["rotation"][0] == without_text["bottom"][0] == "not measured"
    same = by_claim(diagnosed(1.0, "layer_norm"), diagnosed(1.0, "none"))
    assert same["nearness"][0] == "no difference" and same["disparity"][0] == "disagrees"
    changes = {"log_update": (math.log(3), "a factor of 3.0"), "update_angle": (0.2, "11°")}
    for quantity, (change, number) in changes.items():
        report = diagnosed()
        curves = getattr(report.depth, quantity)
        curves["visual"].mean[:] = [value + change for value in curves["text"].mean]
        checked = by_claim(report)["updates"]
        assert checked[0] == "disagrees" and number in checked[1]
        curves["visual"].mean[3] = math.nan  # of a layer that changes nothing
        assert by_claim(report)["updates"] == checked


def test_what_lies_within_two_standard_errors_of_a_threshold_is_unclear():
    report = diagnosed(37.0, "none")
    for asymmetry, outcome in ((0.95, "agrees"), (0.99, "unclear"), (1.03, "disagrees")):
        checked = by_claim(with_rotation(report, asymmetry, 0.01))["rotation"]
        assert checked[0] == outcome and f"{asymmetry:.2f} ± 0.01 ×" in checked[1]
    means = {"agrees": (1.6, 1.7, 1.8), "unclear": (0.9, 1.7, 1.6), "disagrees": (0.9, 1.0, 1.1)}
    for outcome, biases in means.items():
        attention = [replace(report.attention[0], bottom_bias=[bias] * 30) for bias in biases]
        checked = by_claim(replace(report, attention=attention))["bottom"]
        assert checked[0] == outcome and ("1.70 ± 0.06 ×" in checked[1]) == (outcome == "agrees")
