# SPDX-License-Identifier: Apache-2.0
"""The measurement in words: the main numbers, and whether they agree with the paper's claims."""

import math
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

from .criteria import (
    AGREES,
    BOTTOM,
    CHECKED,
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
    UPDATES,
    Effect,
    outcome_of,
)
from .report import Moments, Report, number, with_error


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and whether this diagnosis agrees with it.

    Attributes:
        claim: The claim, and its place in the paper.
        outcome: "agrees", "disagrees", "too small", "unclear", "not measured" or "does not apply",
            by the rule in [`CRITERIA`].
        sentence: The numbers, or why there are none.
    """

    claim: str
    outcome: str
    sentence: str


def verdict(report: Report, against: Report | None = None) -> list[str]:
    """Returns the main numbers, whether this is the paper's problem, and a count or a comparison.

    Without a baseline, the last sentence counts the claims that agree.
    """
    asymmetry = report.depth.asymmetry
    numbers = (
        f"Visual tokens enter the decoder at {number(report.entry_ratio, 2)} × the norm of text "
        f"and rotate {with_error(asymmetry, report.depth.asymmetry_error)} × as much as text in "
        f"each layer (mean over layers 1 to {report.layers - 1})."
    )
    if against is None:
        outcomes = [finding.outcome for finding in findings(report)]
        checked = sum(outcome in CHECKED for outcome in outcomes)
        count = (
            f"Of the paper's claims, this can check {checked}, and agrees with "
            f"{outcomes.count(AGREES)}."
        )
        return [numbers, problem(report), count]
    problems = f"{against.model}: {problem(against)} {report.model}: {problem(report)}"
    comparison = (
        f"Compared with {against.model}, their norm is {number(report.entry_ratio, 3)} × text's "
        f"instead of {number(against.entry_ratio, 3)} ×, and their rotation "
        f"{number(asymmetry, 3)} × text's instead of {number(against.depth.asymmetry, 3)} ×."
    )
    return [numbers, problems, comparison]


def problem(report: Report) -> str:
    """Says whether the model has the problem that the paper describes, by the rule for RQ2, RQ3."""
    size = _relative_norm(report.interface.visual, report)
    rotation = _rotation(report)
    if size is None or rotation is None:
        return "Whether it has the problem that the paper describes was not measured."
    size_outcome = outcome_of({"decoder": size})
    rotation_outcome = _rotation_outcome(report, rotation)
    if size_outcome == rotation_outcome == AGREES:
        return "It has the problem that the paper describes."
    reasons = []
    if size_outcome in (DISAGREES, TOO_SMALL):
        reasons.append("are not much larger than text")
    if rotation_outcome in (DISAGREES, TOO_SMALL):
        reasons.append("do not rotate clearly less")
    if reasons:
        return (
            "It does not have the problem that the paper describes: visual tokens "
            f"{' and '.join(reasons)}."
        )
    return "Whether it has the problem that the paper describes is unclear."


def findings(report: Report, against: Report | None = None) -> list[Finding]:
    """Returns the paper's claims, and whether each holds here.

    Claims about models without the norm are about `against`, if only `report` has the norm.
    """
    subject = report
    if against is not None and report.has_norm and not against.has_norm:
        subject = against
        about_norm = [_nearness(report, against), _focus(report, against)]
    elif report.has_norm:
        reason = "A model without the norm is needed to compare with."
        about_norm = [Finding(claim, NOT_MEASURED, reason) for claim in (NEARNESS, FOCUS)]
    else:
        reason = "The model has no norm after its projector."
        about_norm = [Finding(claim, DOES_NOT_APPLY, reason) for claim in (NEARNESS, FOCUS)]
    about_subject = [
        _at_projector(subject),
        _at_decoder(subject),
        _asymmetry(subject),
        _updates(subject),
        _bottom(subject),
    ]
    if against is None:
        return about_subject + about_norm
    return _named(about_subject, subject) + _named(about_norm, report)


def _named(unnamed: list[Finding], model: Report) -> list[Finding]:
    """Puts the model's name before the sentences of findings about it."""
    return [replace(finding, sentence=f"{model.model}: {finding.sentence}") for finding in unnamed]


def _not_measured(claim: str) -> Finding:
    return Finding(claim, NOT_MEASURED, "It was not measured, or not of both.")


def _at_projector(report: Report) -> Finding:
    """Checks RQ1 for the rows that the projector reads, or else for the encoder's (Ovis)."""
    projector_input = _relative_norm(report.interface.projector_input, report)
    encoder_output = _relative_norm(report.interface.encoder_output, report)
    effect = projector_input or encoder_output
    if effect is None:
        return _not_measured(RQ1)
    if projector_input is None:
        sentence = f"They leave the encoder at {number(effect.value, 2)} × the norm of text."
    else:
        sentence = f"They enter the projector at {number(effect.value, 2)} × the norm of text."
        if encoder_output is not None:
            ratio = number(encoder_output.value, 2)
            sentence += f" All tokens of the encoder's own last layer have {ratio} ×."
    return Finding(RQ1, outcome_of({"projector": effect}), sentence)


def _at_decoder(report: Report) -> Finding:
    if report.has_norm:
        reason = "The norm after the projector sets the norm of visual tokens."
        return Finding(RQ2, DOES_NOT_APPLY, reason)
    effect = _relative_norm(report.interface.visual, report)
    if effect is None:
        return _not_measured(RQ2)
    sentence = f"They enter the decoder at {number(effect.value, 2)} × the norm of text."
    return Finding(RQ2, outcome_of({"decoder": effect}), sentence)


def _asymmetry(report: Report) -> Finding:
    rotation = _rotation(report)
    if report.entry_ratio is None or rotation is None:
        return _not_measured(RQ3)
    less, layers = _layers_rotating_less(report)
    sentence = (
        f"They rotate {with_error(rotation.value, rotation.error)} × as much as text, "
        f"and less in {less} of {layers} layers."
    )
    if report.entry_ratio <= EQUAL:
        return Finding(RQ3, DOES_NOT_APPLY, f"Visual tokens are not larger here. {sentence}")
    if rotation.error is None:
        sentence += " One batch has no standard error: take more samples or smaller batches."
    return Finding(RQ3, _rotation_outcome(report, rotation), sentence)


def _updates(report: Report) -> Finding:
    log_size = _distance(report, "log_update")
    angle = _distance(report, "update_angle")
    if log_size is None or angle is None:
        return _not_measured(UPDATES)
    factor = _exponential(log_size)
    degrees = angle.mapped(math.degrees(angle.value), math.degrees(1))
    outcome = outcome_of({"update size": factor, "update angle": degrees})
    sentence = (
        f"Sizes differ by a factor of {_number(factor)}, angles by {_number(degrees)} degrees "
        "on average over layers."
    )
    return Finding(UPDATES, outcome, sentence)


def _bottom(report: Report) -> Finding:
    if report.has_norm:
        return Finding(BOTTOM, DOES_NOT_APPLY, "The claim is about models without the norm.")
    biases = [fmean(answer.bottom_bias) for answer in report.attention if answer.bottom_bias]
    if not biases:
        return _not_measured(BOTTOM)
    effect = _mean(biases)
    sentence = (
        f"The bottom third gets {_number(effect)} × an even share (questions: {len(biases)})."
    )
    return Finding(BOTTOM, outcome_of({"bottom": effect}), sentence)


def _nearness(report: Report, against: Report) -> Finding:
    norm = _distance(report, "log_norm")
    norm_before = _distance(against, "log_norm")
    rotation = _rotation(report)
    rotation_before = _rotation(against)
    if norm is None or norm_before is None or rotation is None or rotation_before is None:
        return _not_measured(NEARNESS)
    norms = _fall(norm_before, norm)
    rotations = _fall(_distance_from_one(rotation_before), _distance_from_one(rotation))
    outcome = outcome_of({"nearer norms": norms, "nearer rotations": rotations})
    sentence = (
        f"Norms differ by a factor of {_number(_exponential(norm))} on average, "
        f"{_number(_exponential(norm_before))} without it; "
        f"rotation is {_number(rotation)} × text's, {_number(rotation_before)} × without it."
    )
    return Finding(NEARNESS, outcome, sentence)


def _focus(report: Report, against: Report) -> Finding:
    entropies = []
    entropies_before = []
    differences = []
    for answer, answer_before in zip(report.attention, against.attention, strict=False):
        if answer.question != answer_before.question:
            return _not_measured(FOCUS)
        entropies.append(fmean(answer.entropy))
        entropies_before.append(fmean(answer_before.entropy))
        differences.append(entropies_before[-1] - entropies[-1])
    if not differences:
        return _not_measured(FOCUS)
    effect = _mean(differences)
    sentence = (
        f"Entropy {number(fmean(entropies), 3)}, {number(fmean(entropies_before), 3)} without it; "
        f"1 is even (lower by {_number(effect)}, questions: {len(entropies)})."
    )
    return Finding(FOCUS, outcome_of({"entropy": effect}), sentence)


def _relative_norm(norms: Moments | None, report: Report) -> Effect | None:
    """Returns the ratio of a mean norm to N_text or, if that is unknown, to text's in the data."""
    reference = report.interface.vocabulary or report.interface.text
    if norms is None or reference is None or not reference.mean:
        return None
    ratio = norms.mean / reference.mean
    if report.samples < 2 or not norms.mean:
        return Effect(ratio, None)
    error = _relative_error(norms, report.samples)
    if report.interface.vocabulary is None:  # the vocabulary's mean has no error
        error = math.hypot(error, _relative_error(reference, report.samples))
    return Effect(ratio, ratio * error)


def _relative_error(norms: Moments, samples: int) -> float:
    """Returns the standard error of the mean, at most, over the mean.

    Tokens of an image are alike, so each sample counts once: the deviation between the means of
    samples is at most the deviation between tokens.
    """
    return norms.std / norms.mean / math.sqrt(samples)


def _rotation(report: Report) -> Effect | None:
    if report.depth.asymmetry is None:
        return None
    return Effect(report.depth.asymmetry, report.depth.asymmetry_error)


def _rotation_outcome(report: Report, rotation: Effect) -> str:
    """Judges whether visual tokens rotate less, on average and in more layers than by chance."""
    less, layers = _layers_rotating_less(report)
    share = Effect(less / layers, 0.5 / math.sqrt(layers))  # the error of a fair coin
    return outcome_of({"rotation": rotation, "layers": share})


def _layers_rotating_less(report: Report) -> tuple[int, int]:
    """Returns in how many layers visual tokens rotate less than text, and the number of layers.

    The last layer is left out. Both kinds of token must have been measured.
    """
    visual_angles = report.depth.rotation["visual"].mean[:-1]
    text_angles = report.depth.rotation["text"].mean[:-1]
    is_less = np.less(visual_angles, text_angles)
    return int(is_less.sum()), len(is_less)


def _distance(report: Report, quantity: str) -> Effect | None:
    """Returns the mean distance of visual from text tokens, over states or layers but the last."""
    curves = getattr(report.depth, quantity)
    if "visual" not in curves or "text" not in curves:
        return None
    distances = np.abs(np.subtract(curves["visual"].mean, curves["text"].mean))
    deviations = np.hypot(curves["visual"].std, curves["text"].std)
    is_counted = np.isfinite(distances + deviations)  # where the layer changes its input
    if quantity != "log_norm":
        is_counted[-1] = False
    if not is_counted.any():
        return None
    error = None
    if report.samples > 1:
        # Layers see the same tokens, so averaging over layers does not lower the error.
        error = deviations[is_counted].mean().item() / math.sqrt(report.samples)
    return Effect(distances[is_counted].mean().item(), error)


def _distance_from_one(ratio: Effect) -> Effect:
    """Returns how far a ratio is from 1, on a logarithmic scale."""
    if not ratio.value > 0:
        return Effect(math.inf, None)
    return ratio.mapped(abs(math.log(ratio.value)), 1 / ratio.value)


def _fall(before: Effect, now: Effect) -> Effect:
    """Returns by what factor a ratio has come nearer to 1, given its logarithm before and now."""
    if before.error is None or now.error is None:
        return Effect(math.nan, None)
    error = math.hypot(before.error, now.error)
    return _exponential(Effect(before.value - now.value, error))


def _exponential(logarithm: Effect) -> Effect:
    factor = math.exp(logarithm.value)
    return logarithm.mapped(factor, slope=factor)


def _mean(values: list[float]) -> Effect:
    """Returns the mean, with its standard error if there are several values."""
    error = None
    if len(values) > 1:
        error = stdev(values) / math.sqrt(len(values))
    return Effect(fmean(values), error)


def _number(effect: Effect) -> str:
    return with_error(effect.value, effect.error, digits=3)
