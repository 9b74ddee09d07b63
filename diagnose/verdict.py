# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The diagnosis in two plain sentences, about what was measured and never about how good answers are."""

import math

from .report import EmbeddingTable, Moments, Report


EQUAL = 1.25
"""Two sizes within this factor of each other count as equal: ratios from 0.8 to 1.25."""

EQUAL_ROTATION = 1.1
"""Two rotations within this factor of each other count as equal if no standard error is known."""

NO_CHANGE = 1.05
"""A ratio is nearer to 1 than another if its distance from 1 is smaller by more than this factor."""


def verdict(report: Report, against: Report | None = None) -> list[str]:
    """Two sentences: how visual tokens enter and rotate, and what that means.

    The second says whether the model has the problem that the paper describes (a ratio of norms above `EQUAL` and a
    ratio of rotations below 1, see [`same_rotation`]) or, with `against`, whether both ratios are nearer to 1 than
    there.
    """
    return [_first(report), _second(report) if against is None else _compared(report, against)]


def number(value: float | None, digits: int = 4) -> str:
    """`value` with `digits` significant digits, whole numbers in full; an en dash if there is no finite value."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if exponent < -4:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}".replace("-", "−")


def spread(moments: Moments | EmbeddingTable | None, digits: int = 4) -> str:
    """Mean and standard deviation, as [`number`] writes them."""
    return f"{number(moments.mean, digits)} ± {number(moments.std, digits)}" if moments else "–"


def with_error(value: float | None, error: float | None, digits: int = 2) -> str:
    """`value` and one digit of its standard error; `value` alone with `digits` digits if there is none."""
    if value is None or not error:
        return number(value, digits)
    places = max(0, -math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}"


def entry_ratio(report: Report) -> float | None:
    """Norm of visual tokens over that of text, as received: of the vocabulary or, without one, of the data."""
    interface = report.interface
    return interface.ratio if interface.ratio is not None else interface.ratio_data


def layers(report: Report) -> int:
    """How many layers the decoder has; 0 if depth was not measured."""
    return len(report.depth.rotation["visual"].mean) if report.depth else 0


def asymmetry(report: Report) -> float | None:
    """Mean rotation of visual tokens over that of text tokens, if it was measured."""
    return report.depth.asymmetry if report.depth else None


def asymmetry_with_error(report: Report) -> str:
    """The asymmetry in as many digits as its standard error allows, or two if that is not known."""
    return with_error(asymmetry(report), report.depth.asymmetry_error if report.depth else None)


def same_rotation(report: Report) -> bool:
    """Whether the asymmetry cannot be told from 1: by two standard errors or, without one, by `EQUAL_ROTATION`."""
    assert report.depth is not None and report.depth.asymmetry is not None
    ratio, error = report.depth.asymmetry, report.depth.asymmetry_error
    return abs(ratio - 1) <= 2 * error if error is not None else is_equal(ratio, EQUAL_ROTATION)


def has_norm(report: Report) -> bool:
    """Whether it is a model of this package with the norm after its projector."""
    return report.norm not in (None, "none")


def is_equal(ratio: float, within: float = EQUAL) -> bool:
    """Whether a ratio counts as 1."""
    return 1 / within <= ratio <= within


def change(new: float, old: float) -> str:
    """How a ratio compares with `old`: "nearer to", "farther from" or "no nearer to" 1, on a logarithmic scale."""
    now, before = (abs(math.log(ratio)) if ratio > 0 else math.inf for ratio in (new, old))
    if now == before or abs(now - before) <= math.log(NO_CHANGE):
        return "no nearer to"
    return "nearer to" if now < before else "farther from"


def _first(report: Report) -> str:
    interface, ratio = report.interface, entry_ratio(report)
    if ratio is None and interface.vocabulary is not None:
        norm = spread(interface.vocabulary, 3)
        return f"Text embeddings enter the language model with a norm of {norm}; there are no visual tokens."
    if ratio is None:
        return f"The encoder's tokens have a norm of {spread(interface.encoder_output, 3)}; there is no text."
    enter = f"Visual tokens enter the decoder at {number(ratio, 2)} × the norm of text"
    rotate = f"rotate {asymmetry_with_error(report)} × as much as text in each layer"
    return f"{enter} and {rotate} (mean over layers 1 to {layers(report) - 1})."


def _second(report: Report) -> str:
    vocabulary, ratio, rotation = report.interface.vocabulary, entry_ratio(report), asymmetry(report)
    if ratio is None and vocabulary is not None:
        gain = number(vocabulary.mean / math.sqrt(report.hidden_size), 3)
        return f"A norm before it would start from a gain of N_text / sqrt(d) = {gain} for visual tokens to match."
    if ratio is None:
        return "Whether this is the problem the paper describes can only be seen together with a language model."
    unclear = False
    rotate = "as much as"
    if rotation is not None and same_rotation(report):
        unclear = not is_equal(rotation, EQUAL_ROTATION)
    elif rotation is not None:
        rotate = "less than" if rotation < 1 else "more than"
    if is_equal(ratio):
        finding = f"not the problem the paper describes: the norms are equal to within a factor of {EQUAL}"
    elif ratio < 1:
        finding = "the opposite of the problem the paper describes: visual tokens are smaller than text"
    elif rotate == "less than":
        finding = "the problem the paper describes: visual tokens are larger than text"
    else:
        half = "at least half" if unclear else "half"
        finding = f"{half} of the problem the paper describes: visual tokens are larger than text"
    if unclear:
        return f"This is {finding}; whether visual tokens rotate as much as text, more images would have to tell."
    known = "" if rotation is None else f", and the visual tokens rotate {rotate} text"
    return f"This is {finding}{known}."


def _compared(report: Report, against: Report) -> str:
    ratios = []
    for name, ratio_of in (("norms", entry_ratio), ("rotations", asymmetry)):
        new, old = ratio_of(report), ratio_of(against)
        if new is not None and old is not None:
            given = f"{number(new, 2)} instead of {number(old, 2)} ({change(new, old)} 1)"
            ratios.append(f"the ratio of {name} is {given}")
    if ratios:
        return f"Compared with {against.model}, {' and '.join(ratios)}."
    for what, name in (("text embeddings", "vocabulary"), ("the encoder's tokens", "encoder_output")):
        norms = [getattr(each.interface, name) for each in (report, against)]
        if None not in norms:
            means = f"{number(norms[0].mean, 3)} instead of {number(norms[1].mean, 3)}"
            sentence = f"Compared with {against.model}, {what} have a norm of {means}."
            # A vision-language model beside a language model: it is judged by itself as well.
            return sentence if entry_ratio(report) is None else f"{_second(report)} {sentence}"
    return f"Nothing was measured of both this model and {against.model}."
