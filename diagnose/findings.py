# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The paper's claims one by one, and whether what was measured agrees."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from .report import Curve, Report
from .verdict import (
    EQUAL,
    asymmetry,
    asymmetry_error,
    asymmetry_said,
    change,
    entry_ratio,
    has_norm,
    number,
    same_rate,
    with_error,
)


EQUAL_ANGLE = 10.0
"""Degrees within which two angles count as equal."""

NO_CHANGE_ENTROPY = 0.01
"""Attention is less diffuse if its entropy, of at most 1, is lower by more than this."""


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and what this diagnosis has to say on it.

    Attributes:
        claim: The claim and where the paper makes it.
        outcome: "agrees", "disagrees", "unclear" (within two standard errors of the threshold), "no difference"
            (between the two models), "not measured" or "does not apply" (to such a model, or such a part of one).
        sentence: The numbers, or why there are none.
    """

    claim: str
    outcome: str
    sentence: str


def findings(report: Report, against: Report | None = None) -> list[Finding]:
    """The paper's claims, each with what was measured here.

    Claims about models without the norm are checked on `against` where it alone has none. "Larger" and "the same" are
    as `EQUAL` and `EQUAL_ANGLE` say, "at the rate of" as [`same_rate`], "nearer" as `NO_CHANGE`, "less diffuse" as
    `NO_CHANGE_ENTROPY`.
    """
    treated = against is not None and has_norm(report) and not has_norm(against)
    subject = against if against is not None and treated else report
    name = "" if against is None else f"{subject.model}: "
    found = [
        Finding("RQ1: out of the encoder, visual tokens are larger than text embeddings.", *_disparity(subject)),
        Finding("RQ2: the projector does not remove the difference.", *_projector(subject)),
        Finding("RQ3: visual tokens, being larger, turn more slowly than text.", *_asymmetry(subject)),
        Finding("Section 3.1: updates are as large for visual tokens as for text.", *_update_size(subject)),
        Finding("Section 3.1: updates make the same angle with the state for both.", *_update_angle(subject)),
        Finding("Appendix G: without the norm, text looks at the bottom of the image.", *_bottom(subject)),
    ]
    if subject.interface.visual_table is not None:
        claim = "RQ4: tokens of a visual vocabulary are larger, yet turn at the rate of text."
        found.insert(3, Finding(claim, *_vocabulary(subject)))
    found = [Finding(each.claim, each.outcome, name + each.sentence) for each in found]
    if against is not None and treated:
        remedies = [_remedy_norms(report, against), _remedy_rates(report, against), _remedy_focus(report, against)]
    elif has_norm(report):
        remedies = [("not measured", "This takes a model without the norm to compare with.")] * 3
    else:
        remedies = [("does not apply", "The model has no norm after its projector.")] * 3
    claims = (
        "Figure 4a: with the norm, the norms of both stay nearer to each other in depth.",
        "Figure 4b: with the norm, their rates are nearer to each other.",
        "Appendix G: with the norm, attention to the image is less diffuse.",
    )
    return found + [Finding(claim, *remedy) for claim, remedy in zip(claims, remedies, strict=True)]


def attention_mean(curves: Iterable[list[float] | None]) -> float | None:
    """Mean over layers and questions of one of the attention's curves; None where no question has it."""
    values = [value for curve in curves if curve is not None for value in curve]
    return fmean(values) if values else None


def attention_spread(report: Report, name: str) -> tuple[float, float | None] | None:
    """Mean over questions of one of the attention's measures, itself a mean over layers, and its standard error.

    The error is None for one question; None for both where no question has the measure.
    """
    means = [fmean(curve) for each in report.attention if (curve := getattr(each, name)) is not None]
    if not means:
        return None
    return fmean(means), stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None


def _disparity(report: Report) -> tuple[str, str]:
    encoder, text = report.interface.encoder_output, report.interface.vocabulary
    if encoder is None or text is None or not text.mean:
        return _lacking(report), "This takes the encoder's output and a vocabulary."
    ratio = encoder.mean / text.mean
    sentence = f"They have a norm of {number(encoder.mean, 3)}, text embeddings of {number(text.mean, 3)}"
    sentence = f"{sentence}: {number(ratio, 2)} ×"
    if (read := report.interface.projector_input) is not None:
        sentence += f"; the rows that the projector reads have {number(read.mean, 3)}"
    return _when(ratio > EQUAL), f"{sentence}."


def _projector(report: Report) -> tuple[str, str]:
    ratio = entry_ratio(report)
    if has_norm(report):
        return "does not apply", "With a norm behind it, the projector's own scale has no effect."
    if ratio is None:
        return _lacking(report), "This takes visual tokens and text."
    return _when(ratio > EQUAL), f"Visual tokens enter the decoder at {number(ratio, 2)} × the norm of text."


def _asymmetry(report: Report) -> tuple[str, str]:
    ratio, turn, pair = entry_ratio(report), asymmetry(report), _pair(report, "rotation")
    if ratio is None or turn is None or pair is None:
        return _lacking(report), "This takes visual and text tokens in the decoder."
    slower = sum(visual < text for visual, text in zip(*pair, strict=True))
    said = asymmetry_said(report)
    sentence = f"They turn at {said} × the rate of text; more slowly in {slower} of {len(pair[0])} layers."
    if ratio <= EQUAL:
        return "does not apply", f"Visual tokens are not larger here. {sentence}"
    if same_rate(turn, error := asymmetry_error(report)):
        return "unclear" if error else "disagrees", sentence
    return _when(turn < 1), sentence


def _vocabulary(report: Report) -> tuple[str, str]:
    ratio, turn = entry_ratio(report), asymmetry(report)
    if ratio is None or turn is None:
        return _lacking(report), "This takes visual and text tokens in the decoder."
    sentence = f"They enter at {number(ratio, 2)} × the norm of text and turn at {number(turn, 2)} × its rate."
    return _when(ratio > EQUAL and same_rate(turn, asymmetry_error(report))), sentence


def _update_size(report: Report) -> tuple[str, str]:
    pair = _pair(report, "log_update")
    if pair is None:
        return _lacking(report), "This takes visual and text tokens in the decoder."
    factor = _factor(*pair)
    larger = sum(visual > text for visual, text in zip(*pair, strict=True))
    sentence = f"They differ by a factor of {number(factor, 2)} on average; visual tokens' are the larger in {larger}"
    return _when(factor <= EQUAL), f"{sentence} of {len(pair[0])} layers."


def _update_angle(report: Report) -> tuple[str, str]:
    pair = _pair(report, "update_angle")
    if pair is None:
        return _lacking(report), "This takes visual and text tokens in the decoder."
    visual, text = ([math.degrees(angle) for angle in curve] for curve in pair)
    apart = fmean(abs(a - b) for a, b in zip(visual, text, strict=True))
    sentence = (
        f"{number(fmean(visual), 3)}° for visual and {number(fmean(text), 3)}° for text on average; layer by layer"
    )
    return _when(apart <= EQUAL_ANGLE), f"{sentence} they differ by {number(apart, 2)}°."


def _bottom(report: Report) -> tuple[str, str]:
    if has_norm(report):
        return "does not apply", "This is said of models without the norm."
    spread = attention_spread(report, "bottom_bias")
    if spread is None:
        return _lacking(report), "This takes a question about an image whose visual tokens form one grid."
    said = with_error(*spread, digits=3)
    sentence = f"The bottom third gets {said} × what even attention would give it ({_asked(report)})."
    return _above(spread[0], EQUAL, spread[1]), sentence


def _remedy_norms(report: Report, against: Report) -> tuple[str, str]:
    new, old = _pair(report, "log_norm"), _pair(against, "log_norm")
    if new is None or old is None:
        return "not measured", "This takes visual and text tokens in both decoders."
    ours, theirs = _factor(*new), _factor(*old)
    sentence = f"They differ by a factor of {number(ours, 3)} on average, of {number(theirs, 3)} without it."
    return _nearer(ours, theirs), sentence


def _remedy_rates(report: Report, against: Report) -> tuple[str, str]:
    new, old = asymmetry(report), asymmetry(against)
    if new is None or old is None:
        return "not measured", "This takes visual and text tokens in both decoders."
    sentence = f"Visual tokens turn at {number(new, 3)} × the rate of text, at {number(old, 3)} × without it."
    return _nearer(new, old), sentence


def _remedy_focus(report: Report, against: Report) -> tuple[str, str]:
    pairs = list(zip(report.attention, against.attention, strict=False))
    if not pairs or any(new.question != old.question for new, old in pairs):
        return "not measured", "This takes the same questions asked of both."
    new, old = (fmean(fmean(each.entropy) for each in model) for model in zip(*pairs, strict=True))
    fallen = [fmean(theirs.entropy) - fmean(ours.entropy) for ours, theirs in pairs]
    error = stdev(fallen) / math.sqrt(len(fallen)) if len(fallen) > 1 else None
    sentence = f"Entropy {number(new, 3)}, {number(old, 3)} without it; 1 is even ({_asked(report)})."
    return _above(fmean(fallen), NO_CHANGE_ENTROPY, error), sentence


def _lacking(report: Report) -> str:
    """The outcome where numbers are lacking: a part alone has nothing to measure."""
    return "not measured" if report.interface.visual is not None else "does not apply"


def _asked(report: Report) -> str:
    count = len(report.attention)
    return f"{count} question{'' if count == 1 else 's'}"


def _above(value: float, threshold: float, error: float | None) -> str:
    """Whether a value is above a threshold, where its standard error lets that be said."""
    if error is not None and abs(value - threshold) < 2 * error:
        return "unclear"
    return _when(value > threshold)


def _nearer(new: float, old: float) -> str:
    return {"nearer to": "agrees", "farther from": "disagrees"}.get(change(new, old), "no difference")


def _when(agrees: bool) -> str:
    return "agrees" if agrees else "disagrees"


def _pair(report: Report, quantity: str) -> tuple[list[float], list[float]] | None:
    """Means by layer of visual and of text tokens: of every state, or of the layers 1 to L - 1."""
    curves: dict[str, Curve] = getattr(report.depth, quantity) if report.depth else {}
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
