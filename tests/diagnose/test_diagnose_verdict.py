import dataclasses
import math

import pytest
from diagnosed import diagnosed

from normalign_llava.diagnose.findings import findings
from normalign_llava.diagnose.report import Interface, Moments, Report
from normalign_llava.diagnose.verdict import change, number, verdict


def with_rate(report: Report, asymmetry: float | None) -> Report:
    return dataclasses.replace(report, depth=dataclasses.replace(report.depth, asymmetry=asymmetry))


def part(**interface) -> Report:
    return Report("part", "siglip", "float32", 576, interface=Interface(**interface))


@pytest.mark.parametrize(
    "value, digits, written",
    [
        (39.96, 4, "39.96"),
        (3484.24, 4, "3,484"),
        (0.0134, 4, "0.01340"),
        (0.99996, 4, "1.000"),
        (9.996, 3, "10.0"),
        (37.0, 2, "37"),
        (0.4, 2, "0.40"),
        (-0.25, 2, "−0.25"),
        (2.5e-7, 3, "2.50e−07"),
        (0.0, 4, "0"),
        (None, 4, "–"),
        (float("nan"), 4, "–"),
        (float("inf"), 2, "–"),
    ],
)
def test_numbers_have_significant_digits(value, digits, written):
    assert number(value, digits) == written


@pytest.mark.parametrize(
    "ratio, asymmetry, first, second",
    [
        (37.0, 0.4, "enter at 37 × the norm of text and turn at 0.40 × the rate of text", "This is the problem"),
        (1.03, 0.97, "enter with the norm of text (1.0 ×) and turn at the rate of text", "not the problem"),
        (0.42, 1.9, "enter at 0.42 × the norm of text and turn at 1.9 × the rate", "opposite of the problem"),
        (46.0, 1.1, "enter at 46 × the norm of text and turn at the rate of text (1.1 ×", "half of the problem"),
        (46.0, 1.5, "turn at 1.5 × the rate", "larger than text, yet turn faster."),
        (1.0, 0.5, "enter with the norm of text", "visual tokens turn more slowly all the same"),
        (1.2501, 0.9, "(1.1 × that of the text in the data) and turn at 0.90 × the rate", "This is the problem"),
        (0.82, 0.97, "(0.82 ×, 0.72 × that of the text in the data)", "the norms of visual tokens and of the vocab"),
        (1.25, 0.92, "enter with the norm of text (1.2 ×) and turn at the rate of text (0.92 ×", "not the problem"),
    ],
)
def test_one_model(ratio, asymmetry, first, second):
    said = verdict(with_rate(diagnosed(ratio), asymmetry))
    assert len(said) == 2
    assert first in said[0] and "mean over layers 1 to 29" in said[0]
    assert second in said[1]


@pytest.mark.parametrize(
    "ratio, rate, error, first, second",
    [
        (37.0, 0.945, 0.004, "turn at 0.945 ± 0.004 × the rate of text", "This is the problem"),
        (37.0, 0.945, 0.004, "turn at 0.945 ± 0.004 × the rate of text", "and turn a little more slowly."),
        (37.0, 0.945, 0.04, "turn at the rate of text (0.94 ± 0.04 ×", "yet turn at its rate."),
        (37.0, 0.8, 0.2, "turn at 0.8 ± 0.2 × the rate of text", "slowly by no more than two standard errors."),
        (1.0, 1.03, 0.01, "turn at 1.03 ± 0.01 × the rate of text", "turn a little faster all the same."),
        (1.0, 1.01, 0.01, "turn at the rate of text (1.01 ± 0.01 ×", "and so are the rates."),
    ],
)
def test_a_rate_is_the_rate_of_text_only_as_far_as_its_error_allows(ratio, rate, error, first, second):
    report = diagnosed(ratio)
    depth = dataclasses.replace(report.depth, asymmetry=rate, asymmetry_error=error)
    said = verdict(dataclasses.replace(report, depth=depth))
    assert first in said[0] and second in said[1]


def test_what_was_not_measured_is_said():
    no_depth = verdict(diagnosed(depth=None))
    assert no_depth[0] == "Visual tokens enter at 37 × the norm of text; how fast they turn was not measured."
    assert no_depth[1].endswith("whether it slows visual tokens is not known.")
    report = with_rate(diagnosed(), None)
    del report.depth.rotation["text"]
    assert "the data hold no text tokens" in verdict(report)[0]
    assert verdict(Report("x", "x", "float32", 8))[0] == "Neither visual tokens nor text were measured."


def test_parts_alone():
    encoder = verdict(part(encoder_output=Moments(71.78, 13.97, 729)))
    assert encoder[0] == "The encoder's tokens have a norm of 71.8 ± 14.0; there is no text."
    assert "only beside a language model" in encoder[1]
    text = part(vocabulary=Moments(0.8, 0.18, 1000), vocabulary_raw=Moments(0.8, 0.18, 1000))
    assert "a norm of 0.800 ± 0.180; there are no visual tokens." in verdict(text)[0]
    assert "N_text / sqrt(d) = 0.0333" in verdict(text)[1]  # 0.8 / 24
    base = part(vocabulary=Moments(0.69, 0.16, 1000))
    assert verdict(text, base)[1] == "Against part text embeddings have a norm of 0.800 instead of 0.690."
    assert verdict(text, part())[1] == "Nothing that was measured of it was measured of part too."


@pytest.mark.parametrize(
    "norm, ratio, rate, ending",
    [
        ("layer_norm", 1.0, 0.9, "instead of 0.40: with the norm both are nearer to 1."),
        (
            "layer_norm",
            1.0,
            0.2,
            "instead of 0.40: with the norm the first is nearer to 1, the second is farther from 1.",
        ),
        ("rms_norm", 37.5, 0.41, "instead of 0.40: with the norm neither is nearer to 1."),
        ("none", 1 / 60, 0.2, "instead of 0.40: both are farther from 1."),
        (None, 1.0, None, "the ratio of norms is 1.0 instead of 37: nearer to 1."),
        (
            "layer_norm",
            37.3,
            0.9,
            "is 37 in both and the ratio of rates is 0.90 instead of 0.40: with the norm the second is nearer to 1.",
        ),
        (
            "layer_norm",
            1.0,
            0.401,
            "1.0 instead of 37 and the ratio of rates is 0.40 in both: with the norm the first is nearer to 1.",
        ),
        ("layer_norm", 37.3, 0.401, "the ratio of norms is 37 in both and the ratio of rates is 0.40 in both."),
        (None, 37.3, None, "the ratio of norms is 37 in both."),
    ],
)
def test_two_models(norm, ratio, rate, ending):
    said = verdict(with_rate(diagnosed(ratio, norm, "ours"), rate), with_rate(diagnosed(model="base"), 0.4))
    assert said[1].startswith("Against base the ratio of norms is ")
    assert said[1].endswith(ending)


def test_distance_is_logarithmic():
    assert change(1 / 3, 4.0) == "nearer to"
    assert change(1 / 5, 4.0) == "farther from"
    assert change(0.25, 4.0) == "no nearer to"
    assert change(0.0, 4.0) == "farther from"
    assert change(0.0, 0.0) == "no nearer to"


def test_claims_are_checked_on_the_model_without_the_norm():
    found = {finding.claim.split(":")[0]: [] for finding in findings(diagnosed())}
    for finding in findings(diagnosed(1.02, "layer_norm", "ours"), diagnosed(model="base")):
        found[finding.claim.split(":")[0]].append(finding)
    (encoder,), (projector,), (rates,) = found["RQ1"], found["RQ2"], found["RQ3"]
    assert (
        encoder.outcome == "agrees"
        and "71.8, text embeddings of 1.08: 66 ×; the rows that the projector reads have 28.7." in encoder.sentence
    )
    assert projector.outcome == "agrees" and "37 × the norm" in projector.sentence
    assert rates.outcome == "agrees" and "more slowly in 29 of 29 layers" in rates.sentence
    size, angle = found["Section 3.1"]
    assert size.outcome == "agrees" and "a factor of 1.0 on average" in size.sentence
    assert angle.outcome == "agrees" and "97.4° for visual and 97.4° for text" in angle.sentence
    bottom, focus = found["Appendix G"]
    assert bottom.outcome == "agrees" and "1.61 ×" in bottom.sentence
    assert focus.outcome == "disagrees" and focus.sentence.startswith("Entropy 0.930, 0.930 without it")
    assert [finding.outcome for name in ("Figure 4a", "Figure 4b") for finding in found[name]] == ["agrees", "agrees"]


def test_claims_that_fail_or_cannot_be_checked():
    aligned = {finding.claim[:3]: finding for finding in findings(diagnosed(1.0, "layer_norm"))}
    assert aligned["RQ2"].outcome == aligned["RQ3"].outcome == "does not apply"
    assert aligned["Fig"].outcome == "not measured" and "without the norm to compare with" in aligned["Fig"].sentence
    plain = {finding.claim[:6]: finding for finding in findings(diagnosed(depth=None))}
    assert plain["Figure"].outcome == "does not apply" and plain["RQ3: v"].outcome == "not measured"
    assert "the projector's own scale has no effect" in aligned["RQ2"].sentence
    assert "not larger here" in aligned["RQ3"].sentence
    alone = findings(part(encoder_output=Moments(71.78, 13.95, 729)))
    assert {finding.outcome for finding in alone} == {"does not apply"}
    report = diagnosed()
    report.depth.log_update["visual"].mean[:] = [size + math.log(3) for size in report.depth.log_update["text"].mean]
    report.depth.update_angle["visual"].mean[:] = [angle + 0.2 for angle in report.depth.update_angle["text"].mean]
    size, angle = (finding for finding in findings(report) if finding.claim.startswith("Section 3.1"))
    assert size.outcome == "disagrees"
    assert "a factor of 3.0 on average; visual tokens' are the larger in 29 of 29 layers." in size.sentence
    assert angle.outcome == "disagrees" and angle.sentence.endswith("they differ by 11°.")  # 0.2 rad


def test_visual_vocabulary():
    table = dataclasses.replace(diagnosed().interface, visual_table=Moments(64.0, 0.71, 65536))
    report = with_rate(diagnosed(46.4, None, interface=table), 1.05)
    (finding,) = (finding for finding in findings(report) if finding.claim.startswith("RQ4"))
    assert finding.outcome == "agrees"
    assert "RQ4" not in "".join(each.claim for each in findings(diagnosed()))


def test_a_layer_that_changes_nothing_is_passed_over():
    report = diagnosed(37.0, "none")
    curves = {
        kind: dataclasses.replace(curve, mean=list(curve.mean)) for kind, curve in report.depth.update_angle.items()
    }
    curves["visual"].mean[3] = math.nan
    changed = dataclasses.replace(report, depth=dataclasses.replace(report.depth, update_angle=curves))
    before, after = (next(each for each in findings(of) if "same angle" in each.claim) for of in (report, changed))
    assert before == after and after.outcome == "agrees" and "nan" not in after.sentence


def test_attention_says_of_how_many_questions():
    report = diagnosed(37.0, "none")
    (said,) = (each.sentence for each in findings(report) if "bottom of the image" in each.claim)
    assert said.endswith("(1 question).")
    report = dataclasses.replace(report, attention=report.attention * 3)
    assert any(each.sentence.endswith("(3 questions).") for each in findings(report))


def test_what_lies_within_two_standard_errors_of_a_threshold_is_unclear():
    report = diagnosed(37.0, "none")

    def of(claim, said):
        (found,) = (each for each in findings(said) if claim in each.claim)
        return found

    for asymmetry, error, outcome in ((0.95, 0.01, "agrees"), (0.99, 0.01, "unclear"), (1.03, 0.01, "disagrees")):
        depth = dataclasses.replace(report.depth, asymmetry=asymmetry, asymmetry_error=error)
        found = of("turn more slowly", dataclasses.replace(report, depth=depth))
        assert found.outcome == outcome and f"{asymmetry:.2f} ± 0.01 ×" in found.sentence

    def asked(*biases):
        asked = [dataclasses.replace(report.attention[0], bottom_bias=[bias] * 30) for bias in biases]
        return of("bottom of the image", dataclasses.replace(report, attention=asked))

    assert asked(1.6, 1.7, 1.8).outcome == "agrees" and "1.70 ± 0.06 ×" in asked(1.6, 1.7, 1.8).sentence
    assert asked(0.9, 1.7, 1.6).outcome == "unclear" and asked(0.9, 1.0, 1.1).outcome == "disagrees"


def test_two_models_that_do_not_differ():
    same = {each.claim[:9]: each.outcome for each in findings(diagnosed(1.0, "layer_norm"), diagnosed(1.0, "none"))}
    assert same["Figure 4a"] == same["Figure 4b"] == "no difference"
