# SPDX-License-Identifier: Apache-2.0
"""The measurement in words: the main numbers, and whether they agree with the paper's claims."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from .report import Report, number, with_error


CLAIMS = (
    "RQ1, RQ2: visual tokens are larger than text, before and after the projector.",
    "RQ3: visual tokens, being larger, rotate less per layer than text.",
    "Section 3.1: updates of both have the same size and angle to the state.",
    "Appendix G: without the norm, text looks at the bottom of the image.",
    "Figures 4a, 4b: with the norm, norms and rotations of both are nearer to each other.",
    "Appendix G: with the norm, attention to the image is less diffuse.",
)

EQUAL = 1.25  # sizes within this factor of each other count as equal
EQUAL_ROTATION = 1.1  # likewise rotations, if no standard error is known
EQUAL_ANGLE = 10.0  # angles that differ by at most so many degrees count as equal
NO_CHANGE = 1.05  # a ratio is nearer to 1 if its distance is smaller by more than this factor
NO_CHANGE_ENTROPY = 0.01  # attention is less diffuse if its entropy is lower by more than this

Checked = tuple[str, str] | None  # outcome and sentence; None if it was not measured


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and whether this diagnosis agrees: unclear within 2 standard errors."""

    claim: str  # and its place in the paper
    outcome: str  # agrees, disagrees, unclear, no difference, not measured, does not apply
    sentence: str  # the numbers, or why there are none


def verdict(report: Report, against: Report | None = None) -> list[str]:
    """Two sentences: the main numbers, and how they compare with `against` or the paper."""
    depth = report.depth
    first = (
        f"Visual tokens enter the decoder at {number(report.entry_ratio, 2)} × the norm of text "
        f"and rotate {with_error(depth.asymmetry, depth.asymmetry_error)} × as much as text in "
        f"each layer (mean over layers 1 to {report.layers - 1})."
    )
    if against is None:
        outcomes = [finding.outcome for finding in findings(report)]
        checked = [outcome for outcome in outcomes if outcome in ("agrees", "disagrees", "unclear")]
        agree = checked.count("agrees")
        second = f"Of the paper's claims, this can check {len(checked)}, and agrees with {agree}."
        return [first, second]
    values = (report.entry_ratio, against.entry_ratio, depth.asymmetry, against.depth.asymmetry)
    norm, norm_before, rotation, rotation_before = (f"{number(value, 2)} ×" for value in values)
    second = (
        f"Compared with {against.model}, their norm is {norm} that of text instead of "
        f"{norm_before}, and their rotation {rotation} that of text instead of {rotation_before}."
    )
    return [first, second]


def findings(report: Report, against: Report | None = None) -> list[Finding]:
    """The paper's claims; those about models without the norm are about `against` if it is one."""
    baseline = against if against and report.has_norm and not against.has_norm else None
    subject = baseline or report
    checked = [_disparity(subject), _asymmetry(subject), _updates(subject), _bottom(subject)]
    if baseline:
        checked += [_nearness(report, baseline), _focus(report, baseline)]
    elif report.has_norm:
        checked += [("not measured", "A model without the norm is needed to compare with.")] * 2
    else:
        checked += [("does not apply", "The model has no norm after its projector.")] * 2
    claims, models = [], [subject] * 4 + [report] * 2
    for claim, model, measured in zip(CLAIMS, models, checked, strict=True):
        outcome, sentence = measured or ("not measured", "It was not measured, or not of both.")
        sentence = f"{model.model}: {sentence}" if against else sentence
        claims.append(Finding(claim, outcome, sentence))
    return claims


def _disparity(report: Report) -> Checked:
    if report.has_norm:
        return "does not apply", "The norm after the projector sets the norm of visual tokens."
    encoder, text = report.interface.encoder_output, report.interface.vocabulary
    entry = report.entry_ratio
    if encoder is None or text is None or entry is None:
        return None
    out = encoder.mean / text.mean
    norms = f"{number(out, 2)} × the norm of text, as received {number(entry, 2)} ×"
    return _agrees(min(out, entry) > EQUAL), f"Out of the encoder they have {norms}."


def _asymmetry(report: Report) -> Checked:
    size, rotation, error = report.entry_ratio, report.depth.asymmetry, report.depth.asymmetry_error
    if size is None or rotation is None:
        return None
    sentence = f"They rotate {with_error(rotation, error)} × as much as text."
    if size <= EQUAL:
        return "does not apply", f"Visual tokens are not larger here. {sentence}"
    if error and abs(rotation - 1) <= 2 * error:
        return "unclear", sentence
    return _agrees(rotation < (1 / EQUAL_ROTATION if error is None else 1)), sentence


def _updates(report: Report) -> Checked:
    size, angle = _distance(report, "log_update"), _distance(report, "update_angle")
    if size is None or angle is None:
        return None
    factor, apart = math.exp(size), math.degrees(angle)
    means = f"Sizes differ by a factor of {number(factor, 2)}, angles by {number(apart, 2)}°"
    return _agrees(factor <= EQUAL and apart <= EQUAL_ANGLE), f"{means} on average over layers."


def _bottom(report: Report) -> Checked:
    if report.has_norm:
        return "does not apply", "The claim is about models without the norm."
    biases = [fmean(answer.bottom_bias) for answer in report.attention if answer.bottom_bias]
    if not biases:
        return None
    outcome, bias = _above(biases, EQUAL)
    return outcome, f"The bottom third gets {bias} × an even share (questions: {len(biases)})."


def _nearness(report: Report, against: Report) -> Checked:
    norm, norm_before = _distance(report, "log_norm"), _distance(against, "log_norm")
    rotation, before = report.depth.asymmetry, against.depth.asymmetry
    if norm is None or norm_before is None or rotation is None or before is None:
        return None
    factor, factor_before = math.exp(norm), math.exp(norm_before)
    outcomes = _nearer(factor, factor_before), _nearer(rotation, before)
    sentence = (
        f"Norms differ by a factor of {number(factor, 3)} on average, {number(factor_before, 3)} "
        f"without it; rotation is {number(rotation, 3)} × text's, {number(before, 3)} × without it."
    )
    outcome = next(word for word in ("disagrees", "no difference", "agrees") if word in outcomes)
    return outcome, sentence


def _focus(report: Report, against: Report) -> Checked:
    pairs = list(zip(report.attention, against.attention, strict=False))
    if not pairs or any(new.question != old.question for new, old in pairs):
        return None
    new, old = ([fmean(answer.entropy) for answer in side] for side in zip(*pairs, strict=True))
    lower = [before - now for now, before in zip(new, old, strict=True)]
    outcome, _ = _above(lower, NO_CHANGE_ENTROPY)
    means = f"{number(fmean(new), 3)}, {number(fmean(old), 3)} without it"
    return outcome, f"Entropy {means}; 1 is even (questions: {len(new)})."


def _above(values: list[float], threshold: float) -> tuple[str, str]:
    """Whether the mean is above a threshold, or within two standard errors of it; and the mean."""
    mean, error = fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    outcome = "unclear" if abs(mean - threshold) < 2 * error else _agrees(mean > threshold)
    return outcome, with_error(mean, error, digits=3)


def _nearer(new: float, old: float) -> str:
    """Whether a ratio is nearer to 1 than `old`, on a logarithmic scale."""
    now, before = (abs(math.log(ratio)) if ratio > 0 else math.inf for ratio in (new, old))
    same = now == before or abs(now - before) <= math.log(NO_CHANGE)
    return "no difference" if same else _agrees(now < before)


def _agrees(agrees: bool) -> str:
    return "agrees" if agrees else "disagrees"


def _distance(report: Report, quantity: str) -> float | None:
    """Mean distance of visual from text tokens over states, or over layers but the last."""
    visual, text = (getattr(report.depth, quantity).get(kind) for kind in ("visual", "text"))
    pairs = zip(visual.mean, text.mean, strict=True) if visual and text else ()
    distances = [abs(mean - of_text) for mean, of_text in pairs]
    distances = distances if quantity == "log_norm" else distances[:-1]
    finite = [distance for distance in distances if math.isfinite(distance)]  # no idle layers
    return fmean(finite) if finite else None
