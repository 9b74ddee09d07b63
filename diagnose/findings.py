# SPDX-License-Identifier: Apache-2.0
"""The measurement in words: the main numbers, and whether they agree with the paper's claims.

It is never about how good answers are.
"""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from .report import Curve, Report, number, with_error


EQUAL = 1.25
"""Two sizes within this factor of each other count as equal: ratios from 0.8 to 1.25."""

EQUAL_ROTATION = 1.1
"""Two rotations within this factor of each other count as equal if no standard error is known."""

EQUAL_ANGLE = 10.0
"""Angles that differ by at most this many degrees count as equal."""

NO_CHANGE = 1.05
"""A ratio is nearer to 1 than another if its distance from 1 is smaller by more than this factor."""

NO_CHANGE_ENTROPY = 0.01
"""Attention is less diffuse if its entropy, of at most 1, is lower by more than this."""

Checked = tuple[str, str] | None
"""Outcome and sentence; None if what a claim is about was not measured."""


@dataclass(frozen=True)
class Finding:
    """A claim of the paper and its place there, whether this diagnosis agrees, and the numbers or why none."""

    claim: str
    outcome: str  # agrees, disagrees, unclear (within 2 standard errors), no difference, not measured, does not apply
    sentence: str


def verdict(report: Report, against: Report | None = None) -> list[str]:
    """Two sentences for the top of the page: the main numbers, and how they compare.

    They are compared with `against` or, without it, with the paper's claims.
    """
    first = (
        f"Visual tokens enter the decoder at {number(report.entry_ratio, 2)} × the norm of text and rotate "
        f"{_rotation(report)} × as much as text in each layer (mean over layers 1 to {report.layers - 1})."
    )
    if against is None:
        outcomes = [finding.outcome for finding in findings(report)]
        checked = [outcome for outcome in outcomes if outcome in ("agrees", "disagrees", "unclear")]
        agree = f"{checked.count('agrees')} of the {len(checked)}"
        return [first, f"The measurement agrees with {agree} claims of the paper that it can check."]
    pairs = {
        "norm": (report.entry_ratio, against.entry_ratio),
        "rotation": (report.depth.asymmetry, against.depth.asymmetry),
    }
    compared = [
        f"their {what} is {number(new, 2)} × that of text instead of {number(old, 2)} ×"
        for what, (new, old) in pairs.items()
    ]
    return [first, f"Compared with {against.model}, {' and '.join(compared)}."]


def findings(report: Report, against: Report | None = None) -> list[Finding]:
    """The paper's claims, each with what was measured here.

    Claims about models without the norm are checked on `against` if only `report` has the norm. The constants above
    say what "larger", "as large", "the same angle", "nearer" and "less diffuse" mean.
    """
    treated = against is not None and report.has_norm and not against.has_norm
    subject = against if against is not None and treated else report
    claims = [
        ("RQ1: out of the encoder, visual tokens are larger than text embeddings.", _disparity),
        ("RQ2: the projector does not remove the difference.", _projector),
        ("RQ3: visual tokens, being larger, rotate less per layer than text.", _asymmetry),
        ("Section 3.1: updates are as large for visual tokens as for text.", _update_size),
        ("Section 3.1: updates make the same angle with the state for both.", _update_angle),
        ("Appendix G: without the norm, text looks at the bottom of the image.", _bottom),
    ]
    if subject.interface.visual_table is not None:
        claims.insert(3, ("RQ4: tokens of a visual vocabulary are larger, yet rotate as much as text.", _vocabulary))
    name = "" if against is None else f"{subject.model}: "
    checked = []
    for claim, check in claims:
        outcome, sentence = check(subject) or ("not measured", "What this is about was not measured.")
        checked.append(Finding(claim, outcome, name + sentence))
    for claim, compare in (
        ("Figure 4a: with the norm, the norms of both stay nearer to each other in depth.", _remedy_norms),
        ("Figure 4b: with the norm, their rotations are nearer to each other.", _remedy_rotations),
        ("Appendix G: with the norm, attention to the image is less diffuse.", _remedy_focus),
    ):
        if not report.has_norm:
            outcome, sentence = "does not apply", "The model has no norm after its projector."
        elif against is None or not treated:
            outcome, sentence = "not measured", "A model without the norm is needed to compare with."
        else:
            unmeasured = "not measured", "The same has to be measured of both models."
            outcome, sentence = compare(report, against) or unmeasured
        checked.append(Finding(claim, outcome, sentence))
    return checked


def _rotation(report: Report) -> str:
    """The asymmetry in as many digits as its standard error allows, or two if that is not known."""
    return with_error(report.depth.asymmetry, report.depth.asymmetry_error)


def _same_rotation(ratio: float, error: float | None) -> bool:
    """Whether a ratio of rotations cannot be told from 1: by two standard errors or, without one, `EQUAL_ROTATION`."""
    return 1 / EQUAL_ROTATION <= ratio <= EQUAL_ROTATION if error is None else abs(ratio - 1) <= 2 * error


def _disparity(report: Report) -> Checked:
    encoder, text = report.interface.encoder_output, report.interface.vocabulary
    if encoder is None or text is None:
        return None
    ratio = encoder.mean / text.mean
    norms = f"They have a norm of {number(encoder.mean, 3)}, text embeddings of {number(text.mean, 3)}"
    return _agrees(ratio > EQUAL), f"{norms}: {number(ratio, 2)} ×."


def _projector(report: Report) -> Checked:
    if report.has_norm:
        return "does not apply", "A norm follows the projector, so the projector's own scale has no effect."
    if (ratio := report.entry_ratio) is None:
        return None
    return _agrees(ratio > EQUAL), f"Visual tokens enter the decoder at {number(ratio, 2)} × the norm of text."


def _asymmetry(report: Report) -> Checked:
    ratio, rotation, error = report.entry_ratio, report.depth.asymmetry, report.depth.asymmetry_error
    if ratio is None or rotation is None:
        return None
    sentence = f"They rotate {_rotation(report)} × as much as text."
    if ratio <= EQUAL:
        return "does not apply", f"Visual tokens are not larger here. {sentence}"
    if _same_rotation(rotation, error):
        return "unclear" if error else "disagrees", sentence
    return _agrees(rotation < 1), sentence


def _vocabulary(report: Report) -> Checked:
    ratio, rotation = report.entry_ratio, report.depth.asymmetry
    if ratio is None or rotation is None:
        return None
    sentence = f"They enter at {number(ratio, 2)} × the norm of text and rotate {number(rotation, 2)} × as much."
    return _agrees(ratio > EQUAL and _same_rotation(rotation, report.depth.asymmetry_error)), sentence


def _update_size(report: Report) -> Checked:
    if (pair := _pair(report, "log_update")) is None:
        return None
    factor = _factor(*pair)
    return _agrees(factor <= EQUAL), f"They differ by a factor of {number(factor, 2)} on average."


def _update_angle(report: Report) -> Checked:
    if (pair := _pair(report, "update_angle")) is None:
        return None
    visual, text = ([math.degrees(angle) for angle in curve] for curve in pair)
    apart = fmean(abs(a - b) for a, b in zip(visual, text, strict=True))
    means = f"{number(fmean(visual), 3)}° for visual and {number(fmean(text), 3)}° for text on average"
    return _agrees(apart <= EQUAL_ANGLE), f"{means}; layer by layer they differ by {number(apart, 2)}°."


def _bottom(report: Report) -> Checked:
    if report.has_norm:
        return "does not apply", "The claim is about models without the norm."
    biases = [fmean(answer.bottom_bias) for answer in report.attention if answer.bottom_bias is not None]
    if not biases:
        return None
    bias, error = fmean(biases), _standard_error(biases)
    gets = f"The bottom third gets {with_error(bias, error, digits=3)} × what even attention would give it"
    return _above(bias, EQUAL, error), f"{gets} (questions: {len(biases)})."


def _remedy_norms(report: Report, against: Report) -> Checked:
    new, old = _pair(report, "log_norm"), _pair(against, "log_norm")
    if new is None or old is None:
        return None
    now, before = _factor(*new), _factor(*old)
    sentence = f"They differ by a factor of {number(now, 3)} on average, of {number(before, 3)} without it."
    return _nearer(now, before), sentence


def _remedy_rotations(report: Report, against: Report) -> Checked:
    new, old = report.depth.asymmetry, against.depth.asymmetry
    if new is None or old is None:
        return None
    sentence = f"Visual tokens rotate {number(new, 3)} × as much as text, {number(old, 3)} × without it."
    return _nearer(new, old), sentence


def _remedy_focus(report: Report, against: Report) -> Checked:
    pairs = list(zip(report.attention, against.attention, strict=False))
    if not pairs or any(new.question != old.question for new, old in pairs):
        return None
    new, old = (fmean(fmean(answer.entropy) for answer in model) for model in zip(*pairs, strict=True))
    fallen = [fmean(before.entropy) - fmean(now.entropy) for now, before in pairs]
    sentence = f"Entropy {number(new, 3)}, {number(old, 3)} without it; 1 is even (questions: {len(pairs)})."
    return _above(fmean(fallen), NO_CHANGE_ENTROPY, _standard_error(fallen)), sentence


def _standard_error(values: list[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _above(value: float, threshold: float, error: float | None) -> str:
    """Whether a value is above a threshold; "unclear" within two standard errors of it."""
    if error is not None and abs(value - threshold) < 2 * error:
        return "unclear"
    return _agrees(value > threshold)


def _nearer(new: float, old: float) -> str:
    """Whether a ratio is nearer to 1 than `old`, on a logarithmic scale."""
    now, before = (abs(math.log(ratio)) if ratio > 0 else math.inf for ratio in (new, old))
    if now == before or abs(now - before) <= math.log(NO_CHANGE):
        return "no difference"
    return _agrees(now < before)


def _agrees(agrees: bool) -> str:
    return "agrees" if agrees else "disagrees"


def _pair(report: Report, quantity: str) -> tuple[list[float], list[float]] | None:
    """Means by layer of visual and of text tokens: of every state, or of the layers 1 to L - 1."""
    curves: dict[str, Curve] = getattr(report.depth, quantity)
    if "visual" not in curves or "text" not in curves:
        return None
    pairs = list(zip(curves["visual"].mean, curves["text"].mean, strict=True))
    pairs = pairs if quantity == "log_norm" else pairs[:-1]
    # A layer that changes nothing has an update without size or angle.
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    return ([visual for visual, _ in pairs], [text for _, text in pairs]) if pairs else None


def _factor(visual: list[float], text: list[float]) -> float:
    """The factor, at least 1, by which geometric means differ on average over layers, given their logarithms."""
    return math.exp(fmean(abs(a - b) for a, b in zip(visual, text, strict=True)))
