# SPDX-License-Identifier: Apache-2.0
"""The measurement in words: the main numbers, and whether they agree with the paper's claims."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from .criteria import (
    AGREES,
    BOTTOM,
    CRITERIA,
    DISAGREES,
    DOES_NOT_APPLY,
    EQUAL,
    FOCUS,
    NEARNESS,
    NOT_MEASURED,
    RQ1,
    RQ2,
    RQ3,
    TOO_SMALL,
    UNCLEAR,
    UPDATES,
    Effect,
    combined,
)
from .report import Moments, Report, number, with_error


CHECKED = (AGREES, DISAGREES, TOO_SMALL, UNCLEAR)
"""Outcomes of claims that could be checked."""


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and whether this diagnosis agrees, by the rule in [`CRITERIA`]."""

    claim: str  # and its place in the paper
    outcome: str  # agrees, disagrees, too small, unclear, not measured, does not apply
    sentence: str  # the numbers, or why there are none


def verdict(report: Report, against: Report | None = None) -> list[str]:
    """The main numbers, whether this is the paper's problem, and a count or a comparison."""
    depth = report.depth
    first = (
        f"Visual tokens enter the decoder at {number(report.entry_ratio, 2)} × the norm of text "
        f"and rotate {with_error(depth.asymmetry, depth.asymmetry_error)} × as much as text in "
        f"each layer (mean over layers 1 to {report.layers - 1})."
    )
    if against is None:
        outcomes = [finding.outcome for finding in findings(report)]
        checked = [outcome for outcome in outcomes if outcome in CHECKED]
        agree = checked.count(AGREES)
        counted = f"Of the paper's claims, this can check {len(checked)}, and agrees with {agree}."
        return [first, problem(report), counted]
    values = (report.entry_ratio, against.entry_ratio, depth.asymmetry, against.depth.asymmetry)
    norm, norm_before, rotation, rotation_before = (f"{number(value, 3)} ×" for value in values)
    compared = (
        f"Compared with {against.model}, their norm is {norm} that of text instead of "
        f"{norm_before}, and their rotation {rotation} that of text instead of {rotation_before}."
    )
    problems = [f"{model.model}: {problem(model)}" for model in (against, report)]
    return [first, " ".join(problems), compared]


def problem(report: Report) -> str:
    """Whether the model has the problem that the paper describes, by the rule for RQ2 and RQ3."""
    size, rotation = _size(report.interface.visual, report), _rotation(report)
    if size is None or rotation is None:
        return "Whether it has the problem that the paper describes was not measured."
    outcomes = CRITERIA["decoder"].outcome(size), _rotation_outcome(report)
    if outcomes == (AGREES, AGREES):
        return "It has the problem that the paper describes."
    reasons = []
    if outcomes[0] in (DISAGREES, TOO_SMALL):
        reasons.append("are not much larger than text")
    if outcomes[1] in (DISAGREES, TOO_SMALL):
        reasons.append("do not rotate clearly less")
    if reasons:
        words = " and ".join(reasons)
        return f"It does not have the problem that the paper describes: visual tokens {words}."
    return "Whether it has the problem that the paper describes is unclear."


def findings(report: Report, against: Report | None = None) -> list[Finding]:
    """The paper's claims; those about models without the norm are about `against` if it is one."""
    baseline = against if against and report.has_norm and not against.has_norm else None
    subject = baseline or report
    checked = [
        (subject, _at_projector(subject)),
        (subject, _at_decoder(subject)),
        (subject, _asymmetry(subject)),
        (subject, _updates(subject)),
        (subject, _bottom(subject)),
    ]
    if baseline:
        compared = [_nearness(report, baseline), _focus(report, baseline)]
    elif report.has_norm:
        reason = "A model without the norm is needed to compare with."
        compared = [Finding(claim, NOT_MEASURED, reason) for claim in (NEARNESS, FOCUS)]
    else:
        reason = "The model has no norm after its projector."
        compared = [Finding(claim, DOES_NOT_APPLY, reason) for claim in (NEARNESS, FOCUS)]
    checked += [(report, finding) for finding in compared]
    if against is None:
        return [finding for _, finding in checked]
    return [
        Finding(finding.claim, finding.outcome, f"{model.model}: {finding.sentence}")
        for model, finding in checked
    ]


def _not_measured(claim: str) -> Finding:
    return Finding(claim, NOT_MEASURED, "It was not measured, or not of both.")


def _at_projector(report: Report) -> Finding:
    """RQ1, of the rows that the projector reads; of the encoder's where there are none (Ovis)."""
    received, last = report.interface.projector_input, report.interface.encoder_output
    effect, of_last = _size(received, report), _size(last, report)
    if effect is None and of_last is None:
        return _not_measured(RQ1)
    if effect is None:
        effect, of_last = of_last, None
        sentence = f"They leave the encoder at {_times(effect)} the norm of text."
    else:
        sentence = f"They enter the projector at {_times(effect)} the norm of text."
    if of_last is not None:
        sentence += f" All tokens of the encoder's own last layer have {_times(of_last)}."
    assert effect is not None
    return Finding(RQ1, CRITERIA["projector"].outcome(effect), sentence)


def _at_decoder(report: Report) -> Finding:
    if report.has_norm:
        reason = "The norm after the projector sets the norm of visual tokens."
        return Finding(RQ2, DOES_NOT_APPLY, reason)
    effect = _size(report.interface.visual, report)
    if effect is None:
        return _not_measured(RQ2)
    sentence = f"They enter the decoder at {_times(effect)} the norm of text."
    return Finding(RQ2, CRITERIA["decoder"].outcome(effect), sentence)


def _asymmetry(report: Report) -> Finding:
    size, rotation = report.entry_ratio, _rotation(report)
    if size is None or rotation is None:
        return _not_measured(RQ3)
    less, layers = _layers_rotating_less(report)
    turned = f"They rotate {with_error(rotation.value, rotation.error)} × as much as text"
    sentence = f"{turned}, and less in {less} of {layers} layers."
    if size <= EQUAL:
        return Finding(RQ3, DOES_NOT_APPLY, f"Visual tokens are not larger here. {sentence}")
    if rotation.error is None:
        sentence += " One batch has no standard error: take more samples or smaller batches."
    return Finding(RQ3, _rotation_outcome(report), sentence)


def _updates(report: Report) -> Finding:
    size, angle = _distance(report, "log_update"), _distance(report, "update_angle")
    if size is None or angle is None:
        return _not_measured(UPDATES)
    factor, apart = _exponential(size), _in_degrees(angle)
    outcomes = [
        CRITERIA["update size"].outcome(factor),
        CRITERIA["update angle"].outcome(apart),
    ]
    means = f"Sizes differ by a factor of {_number(factor)}, angles by {_number(apart)} degrees"
    return Finding(UPDATES, combined(outcomes), f"{means} on average over layers.")


def _bottom(report: Report) -> Finding:
    if report.has_norm:
        return Finding(BOTTOM, DOES_NOT_APPLY, "The claim is about models without the norm.")
    biases = [fmean(answer.bottom_bias) for answer in report.attention if answer.bottom_bias]
    if not biases:
        return _not_measured(BOTTOM)
    effect = _mean(biases)
    share = f"The bottom third gets {_number(effect)} × an even share"
    sentence = f"{share} (questions: {len(biases)})."
    return Finding(BOTTOM, CRITERIA["bottom"].outcome(effect), sentence)


def _nearness(report: Report, against: Report) -> Finding:
    norm, norm_before = _distance(report, "log_norm"), _distance(against, "log_norm")
    rotation, rotation_before = _rotation(report), _rotation(against)
    if norm is None or norm_before is None or rotation is None or rotation_before is None:
        return _not_measured(NEARNESS)
    norms = _fall(norm_before, norm)
    rotations = _fall(_off_one(rotation_before), _off_one(rotation))
    outcomes = [
        CRITERIA["nearer norms"].outcome(norms),
        CRITERIA["nearer rotations"].outcome(rotations),
    ]
    factor, factor_before = _exponential(norm), _exponential(norm_before)
    sentence = (
        f"Norms differ by a factor of {_number(factor)} on average, {_number(factor_before)} "
        f"without it; rotation is {_number(rotation)} × text's, {_number(rotation_before)} × "
        "without it."
    )
    return Finding(NEARNESS, combined(outcomes), sentence)


def _focus(report: Report, against: Report) -> Finding:
    pairs = list(zip(report.attention, against.attention, strict=False))
    if not pairs or any(new.question != old.question for new, old in pairs):
        return _not_measured(FOCUS)
    new = [fmean(answer.entropy) for answer, _ in pairs]
    old = [fmean(answer.entropy) for _, answer in pairs]
    effect = _mean([before - now for now, before in zip(new, old, strict=True)])
    means = f"{number(fmean(new), 3)}, {number(fmean(old), 3)} without it"
    sentence = f"Entropy {means}; 1 is even (lower by {_number(effect)}, questions: {len(new)})."
    return Finding(FOCUS, CRITERIA["entropy"].outcome(effect), sentence)


def _size(visual: Moments | None, report: Report) -> Effect | None:
    """Mean norm of visual tokens over N_text, or over that of the text in the data without it."""
    norms, samples = report.interface, report.samples
    text = norms.vocabulary or norms.text
    if visual is None or text is None or not text.mean:
        return None
    ratio = visual.mean / text.mean
    relative = _error_over_samples(visual, samples)
    if relative is not None and norms.vocabulary is None:  # the vocabulary's mean has no error
        of_text = _error_over_samples(text, samples)
        assert of_text is not None
        relative = math.hypot(relative, of_text)
    return Effect(ratio, None if relative is None else ratio * relative)


def _error_over_samples(norms: Moments, samples: int) -> float | None:
    """Standard error of the mean over itself, at most.

    Tokens of an image are alike, so each sample counts once: the deviation between the means of
    samples is at most that between tokens.
    """
    if samples < 2 or not norms.mean:
        return None
    return norms.std / norms.mean / math.sqrt(samples)


def _rotation(report: Report) -> Effect | None:
    if report.depth.asymmetry is None:
        return None
    return Effect(report.depth.asymmetry, report.depth.asymmetry_error)


def _rotation_outcome(report: Report) -> str:
    """Whether visual tokens rotate less: on average, and in more layers than chance gives."""
    rotation = _rotation(report)
    less, layers = _layers_rotating_less(report)
    assert rotation is not None
    share = Effect(math.nan, None)
    if layers:
        share = Effect(less / layers, 0.5 / math.sqrt(layers))  # the error of a fair coin
    return combined([CRITERIA["rotation"].outcome(rotation), CRITERIA["layers"].outcome(share)])


def _layers_rotating_less(report: Report) -> tuple[int, int]:
    """In how many layers visual tokens rotate less than text, and of how many; without the last."""
    rotation = report.depth.rotation
    if "visual" not in rotation or "text" not in rotation:
        return 0, 0
    pairs = list(zip(rotation["visual"].mean, rotation["text"].mean, strict=True))[:-1]
    return sum(visual < text for visual, text in pairs), len(pairs)


def _distance(report: Report, quantity: str) -> Effect | None:
    """Mean distance of visual from text tokens over states, or over layers but the last."""
    curves = getattr(report.depth, quantity)
    visual, text = curves.get("visual"), curves.get("text")
    if not visual or not text:
        return None
    layers = list(zip(visual.mean, text.mean, visual.std, text.std, strict=True))
    if quantity != "log_norm":
        layers = layers[:-1]
    layers = [layer for layer in layers if all(map(math.isfinite, layer))]  # no idle layers
    if not layers:
        return None
    distance = fmean(abs(mean - of_text) for mean, of_text, _, _ in layers)
    if report.samples < 2:
        return Effect(distance, None)
    # Layers see the same tokens, so averaging over layers does not lower the error.
    spread = fmean(math.hypot(std, of_text) for _, _, std, of_text in layers)
    return Effect(distance, spread / math.sqrt(report.samples))


def _off_one(ratio: Effect) -> Effect:
    """How far a ratio is from 1, on a logarithmic scale."""
    if not ratio.value > 0:
        return Effect(math.inf, None)
    error = None if ratio.error is None else ratio.error / ratio.value
    return Effect(abs(math.log(ratio.value)), error)


def _fall(before: Effect, now: Effect) -> Effect:
    """The factor by which two quantities come nearer, from the logarithmic distances."""
    if before.error is None or now.error is None:
        return Effect(math.nan, None)
    return _exponential(Effect(before.value - now.value, math.hypot(before.error, now.error)))


def _exponential(logarithm: Effect) -> Effect:
    factor = math.exp(logarithm.value)
    return Effect(factor, None if logarithm.error is None else factor * logarithm.error)


def _in_degrees(angle: Effect) -> Effect:
    error = None if angle.error is None else math.degrees(angle.error)
    return Effect(math.degrees(angle.value), error)


def _mean(values: list[float]) -> Effect:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Effect(fmean(values), error)


def _number(effect: Effect) -> str:
    return with_error(effect.value, effect.error, digits=3)


def _times(effect: Effect | None) -> str:
    assert effect is not None
    return f"{number(effect.value, 2)} ×"
