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
    assert has in second


def test_claims_are_checked_on_the_model_without_the_norm():
    ours, base = diagnosed(1.02, "layer_norm", "ours"), diagnosed(model="base")
    ours, base = with_rotation(ours, 0.9), with_rotation(base, 0.4)
    numbers = ("1.02 ×", "instead of 37.0 ×", "0.900 ×", "instead of 0.400 ×")
    _, problems, compared = verdict(ours, base)
    assert all(number in compared for number in numbers)
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


def test_claims_that_fail_or_cannot_be_checked():
    aligned = by_claim(diagnosed(1.0, "layer_norm"))
    assert aligned["decoder"][0] == aligned["rotation"][0] == "does not apply"
    assert aligned["nearness"][0] == aligned["focus"][0] == "not measured"
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
    size, angle = (0.0, math.log(1.2), math.log(40)), (1.5, 1.6, 3.0)
    outcome, sentence = by_claim(updates(log_update=size, update_angle=angle))["updates"]
    assert outcome == "agrees" and "a factor of 1.20, angles by 5.73 degrees" in sentence
    size = (0.0, math.log(1.3), 0.0)  # the same in the last layer alone
    assert by_claim(updates(log_update=size, update_angle=angle))["updates"][0] == "disagrees"


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
    ],
)
def test_attention_at_the_bottom_is_judged_by_the_same_rule(biases, outcome):
    report = diagnosed()
    attention = [replace(report.attention[0], bottom_bias=[bias] * 30) for bias in biases]
    assert by_claim(replace(report, attention=attention))["bottom"][0] == outcome


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
    new, old = entropies([0.80, 0.82, 0.81]), entropies([0.90, 0.90, 0.90])
    old[1] = replace(old[1], question="Is it another?")
    ours, theirs = diagnosed(1.0, "layer_norm", "ours", attention=new), diagnosed(attention=old)
    assert by_claim(ours, theirs)["focus"][0] == "not measured"


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
    report, against = report_of(content["report"]), report_of(content["against"])
    docs = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert "does not have the paper's problem" in docs
    for model in (report, against):
        assert "does not have the problem" in problem(model)
    shown = re.findall(r"^\| norm, visual over text \| ([\d.]+) \| ([\d.]+) \|", docs, re.MULTILINE)
    assert shown == [(f"{against.interface.ratio:.2f}", f"{report.interface.ratio:.2f}")]
    rotations = re.findall(r"^\| rotation, visual over text \| ([\d.]+)", docs, re.MULTILINE)
    assert rotations == [f"{against.depth.asymmetry:.3f}"]
