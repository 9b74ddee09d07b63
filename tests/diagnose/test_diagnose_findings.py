"""The verdict, and the paper's claims checked on reports made by hand."""

import dataclasses
import math

import pytest
from diagnosed import diagnosed

from normalign_llava.diagnose.findings import findings, verdict
from normalign_llava.diagnose.report import Report


CLAIMS = ("disparity", "projector", "rotation", "size", "angle", "bottom", "norms", "rotations", "focus")


def with_rotation(report: Report, asymmetry: float | None, error: float | None = None) -> Report:
    depth = dataclasses.replace(report.depth, asymmetry=asymmetry, asymmetry_error=error)
    return dataclasses.replace(report, depth=depth)


def by_claim(report, against=None):
    """Outcome and sentence of each claim."""
    checked = findings(report, against)
    return {name: (one.outcome, one.sentence) for name, one in zip(CLAIMS, checked, strict=True)}


@pytest.mark.parametrize(
    "ratio, asymmetry, error, numbers, agreed",
    [
        (37.0, 0.4, None, ("37 ×", "0.40 ×"), "6 of the 6"),
        (1.03, 0.97, None, ("1.0 ×", "0.97 ×"), "4 of the 5"),  # rotation: does not apply
        (37.0, 0.8, 0.2, ("37 ×", "0.8 ± 0.2 ×"), "5 of the 6"),  # unclear
        (46.0, 1.2, None, ("46 ×", "1.2 ×"), "5 of the 6"),
    ],
)
def test_the_verdict_on_one_model(ratio, asymmetry, error, numbers, agreed):
    first, second = verdict(with_rotation(diagnosed(ratio), asymmetry, error))
    assert all(number in first for number in numbers) and f"agrees with {agreed} claims" in second


def test_the_verdict_on_two_models():
    _, compared = verdict(with_rotation(diagnosed(1.0), 0.9), with_rotation(diagnosed(model="base"), 0.4))
    assert all(number in compared for number in ("1.0 ×", "instead of 37 ×", "0.90 ×", "instead of 0.40 ×"))


def test_claims_are_checked_on_the_model_without_the_norm():
    checked = by_claim(diagnosed(1.02, "layer_norm", "ours"), diagnosed(model="base"))
    numbers = {"disparity": "66 ×", "projector": "37 ×", "rotation": "0.11 ×", "size": "1.0", "angle": "97.4°"}
    for claim, number in {**numbers, "bottom": "1.61 ×", "norms": "", "rotations": ""}.items():
        assert checked[claim][0] == "agrees" and number in checked[claim][1], claim
    assert checked["focus"][0] == "disagrees"


def test_claims_that_fail_or_cannot_be_checked():
    aligned = by_claim(diagnosed(1.0, "layer_norm"))
    assert aligned["projector"][0] == aligned["rotation"][0] == "does not apply"
    assert {aligned[claim][0] for claim in ("norms", "rotations", "focus")} == {"not measured"}
    without_text = by_claim(with_rotation(diagnosed(attention=[]), None))
    assert (without_text["norms"][0], without_text["rotation"][0]) == ("does not apply", "not measured")
    assert without_text["bottom"][0] == "not measured"
    report = diagnosed()
    text = report.depth.log_update["text"].mean, report.depth.update_angle["text"].mean
    report.depth.log_update["visual"].mean[:] = [size + math.log(3) for size in text[0]]
    report.depth.update_angle["visual"].mean[:] = [angle + 0.2 for angle in text[1]]
    checked = by_claim(report)
    assert checked["size"][0] == "disagrees" and "a factor of 3.0" in checked["size"][1]
    assert checked["angle"][0] == "disagrees" and "11°" in checked["angle"][1]  # 0.2 rad
    report.depth.update_angle["visual"].mean[3] = math.nan  # of a layer that changes nothing
    assert by_claim(report)["angle"] == checked["angle"]
    same = by_claim(diagnosed(1.0, "layer_norm"), diagnosed(1.0, "none"))
    assert same["norms"][0] == same["rotations"][0] == "no difference"


def test_what_lies_within_two_standard_errors_of_a_threshold_is_unclear():
    report = diagnosed(37.0, "none")
    for asymmetry, outcome in ((0.95, "agrees"), (0.99, "unclear"), (1.03, "disagrees")):
        checked = by_claim(with_rotation(report, asymmetry, 0.01))["rotation"]
        assert checked[0] == outcome and f"{asymmetry:.2f} ± 0.01 ×" in checked[1]
    for biases, outcome in (((1.6, 1.7, 1.8), "agrees"), ((0.9, 1.7, 1.6), "unclear"), ((0.9, 1.0, 1.1), "disagrees")):
        attention = [dataclasses.replace(report.attention[0], bottom_bias=[bias] * 30) for bias in biases]
        checked = by_claim(dataclasses.replace(report, attention=attention))["bottom"]
        assert checked[0] == outcome
        assert outcome != "agrees" or "1.70 ± 0.06 ×" in checked[1]
