# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a diagnosis says in two plain sentences. Only what was measured is said; nothing of how good answers are."""

import math

from .report import Interface, Report


EQUAL = 1.25
"""Two sizes within this factor of each other count as equal: ratios from 0.8 to 1.25."""

EQUAL_RATE = 1.1
"""Two rates within this factor of each other are nearly equal: the whole that can be said without a standard error."""

NO_CHANGE = 1.05
"""A ratio has come nearer to 1, or gone farther from it, if its distance from 1 changed by more than this factor."""


def verdict(report: Report, against: Report | None = None) -> list[str]:
    """Two sentences for a person: how visual tokens enter and turn, and what that means.

    The second answers whether the model has the problem that the paper describes (a ratio of norms above `EQUAL` and
    a ratio of rates below 1, see [`same_rate`]) or, with `against`, whether norms and rates are nearer to each other
    than there.
    """
    return [_first(report), _second(report) if against is None else _compared(report, against)]


def number(value: float | None, digits: int = 4) -> str:
    """`value` with `digits` significant digits, whole numbers in full; an en dash where there is no finite value."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if exponent < -4:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}".replace("-", "−")


def entry_ratio(report: Report) -> float | None:
    """Norm of visual tokens over that of text, as received: over the vocabulary or, without one, over the data."""
    interface = report.interface
    return interface.ratio if interface.ratio is not None else interface.ratio_data


def layers(report: Report) -> int:
    """How many layers the decoder has; 0 where depth was not measured."""
    return max((len(curve.mean) for curve in report.depth.rotation.values()), default=0) if report.depth else 0


def asymmetry(report: Report) -> float | None:
    """Mean rotation of visual over mean rotation of text tokens, where it was measured."""
    return report.depth.asymmetry if report.depth else None


def asymmetry_error(report: Report) -> float | None:
    """Standard error of the asymmetry, where it is known."""
    return report.depth.asymmetry_error if report.depth else None


def asymmetry_said(report: Report) -> str:
    """The asymmetry, in as many digits as its standard error allows, or two where that is not known."""
    return with_error(asymmetry(report), asymmetry_error(report))


def same_rate(turn: float, error: float | None) -> bool:
    """Whether a ratio of rates cannot be told from 1: by two standard errors or, without one, by `EQUAL_RATE`."""
    return abs(turn - 1) <= 2 * error if error is not None else is_equal(turn, EQUAL_RATE)


def with_error(value: float | None, error: float | None, digits: int = 2) -> str:
    """`value` and its standard error, of which one digit is given; alone with `digits` where there is none."""
    if value is None or not error:
        return number(value, digits)
    places = max(0, -math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}"


def has_norm(report: Report) -> bool:
    """Whether it is a model of this package with the norm after its projector."""
    return report.norm not in (None, "none")


def is_equal(ratio: float, within: float = EQUAL) -> bool:
    """Whether a ratio counts as 1: of two sizes (`EQUAL`), or of what else `within` says."""
    return 1 / within <= ratio <= within


def distance(ratio: float) -> float:
    """How far `ratio` is from 1 on a logarithmic scale: the same for 4 and for 1/4."""
    return abs(math.log(ratio)) if ratio > 0 else math.inf


def change(new: float, old: float) -> str:
    """Where a ratio is now, compared with `old`: "nearer to", "farther from" or "no nearer to" 1 (`NO_CHANGE`)."""
    now, before = distance(new), distance(old)
    if now == before or abs(now - before) <= math.log(NO_CHANGE):
        return "no nearer to"
    return "nearer to" if now < before else "farther from"


def _first(report: Report) -> str:
    interface, ratio, turn = report.interface, entry_ratio(report), asymmetry(report)
    if ratio is None:
        return _one_part(interface)
    data, seen = interface.ratio_data, ""
    if interface.ratio is not None and data is not None and is_equal(data) != is_equal(ratio):
        seen = f", {number(data, 2)} × that of the text in the data"
    if is_equal(ratio):
        enter = f"Visual tokens enter with the norm of text ({number(ratio, 2)} ×{seen})"
    else:
        enter = f"Visual tokens enter at {number(ratio, 2)} × the norm of text{seen and f' ({seen[2:]})'}"
    if turn is None:
        reason = "how fast they turn was not measured"
        if report.depth is not None and "text" not in report.depth.rotation:
            reason = "the data hold no text tokens whose rate theirs could be compared with"
        return f"{enter}; {reason}."
    over = f"mean over layers 1 to {layers(report) - 1}"
    if same_rate(turn, asymmetry_error(report)) and is_equal(turn, EQUAL_RATE):
        return f"{enter} and turn at the rate of text ({asymmetry_said(report)} ×, {over})."
    return f"{enter} and turn at {asymmetry_said(report)} × the rate of text ({over})."


def _one_part(interface: Interface) -> str:
    if interface.visual is not None:
        return f"Visual tokens enter with a norm of {number(interface.visual.mean, 3)}; that of text was not measured."
    if interface.vocabulary is not None:
        moments = interface.vocabulary
        spread = f"{number(moments.mean, 3)} ± {number(moments.std, 3)}"
        return f"Text embeddings enter the language model with a norm of {spread}; there are no visual tokens."
    if interface.encoder_output is not None:
        moments = interface.encoder_output
        spread = f"{number(moments.mean, 3)} ± {number(moments.std, 3)}"
        return f"The encoder's tokens have a norm of {spread}; there is no text."
    return "Neither visual tokens nor text were measured."


def _second(report: Report) -> str:
    interface, ratio, turn = report.interface, entry_ratio(report), asymmetry(report)
    if ratio is None:
        if interface.visual is None and interface.vocabulary is not None:
            gain = number(interface.vocabulary.mean / math.sqrt(report.hidden_size), 3)
            return f"A norm before it would start from a gain of N_text / sqrt(d) = {gain} for visual tokens to match."
        return "Whether this is the problem the paper describes shows only beside a language model."
    if is_equal(ratio):
        data = interface.ratio_data
        of = " of visual tokens and of the vocabulary" if data is not None and not is_equal(data) else ""
        no = f"This is not the problem the paper describes: the norms{of} are equal to within a factor of {EQUAL}"
        if turn is None:
            return f"{no}."
        equal = same_rate(turn, asymmetry_error(report)) and is_equal(turn, EQUAL_RATE)
        rates = "so are the rates" if equal else f"visual tokens turn {_pace(report)} all the same"
        return f"{no}, and {rates}."
    if ratio < 1:
        opposite = "This is the opposite of the problem the paper describes: visual tokens are smaller than text"
        return f"{opposite}." if turn is None else f"{opposite}, and turn {_pace(report)}."
    if turn is None:
        return "This is the difference in norm that the paper describes; whether it slows visual tokens is not known."
    larger = "visual tokens are larger than text"
    if turn < 1 and not same_rate(turn, asymmetry_error(report)):
        return f"This is the problem the paper describes: {larger}, and turn {_pace(report)}."
    return f"This is half of the problem the paper describes: {larger}, yet turn {_pace(report)}."


def _compared(report: Report, against: Report) -> str:
    ours, theirs = report.interface, against.interface
    pairs = [
        ("the ratio of norms", entry_ratio(report), entry_ratio(against)),
        ("the ratio of rates", asymmetry(report), asymmetry(against)),
    ]
    ratios = [(name, new, old) for name, new, old in pairs if new is not None and old is not None]
    if ratios:
        printed = [(name, number(new, 2), number(old, 2)) for name, new, old in ratios]
        said = " and ".join(
            f"{name} is {new} in both" if new == old else f"{name} is {new} instead of {old}"
            for name, new, old in printed
        )
        changes = {
            which: change(new, old)
            for which, (_, new, old), (_, shown, before) in zip(("first", "second"), ratios, printed, strict=False)
            if shown != before
        }
        norm = "with the norm " if has_norm(report) and not has_norm(against) else ""
        outcomes = [f"the {which} is {changed} 1" for which, changed in changes.items()]
        if len(ratios) == 1:
            outcomes = [f"{changed} 1" for changed in changes.values()]
        elif len(changes) == 2 and len(set(changes.values())) == 1:
            outcomes = [f"both are {changes['first']} 1".replace("both are no nearer", "neither is nearer")]
        return f"Against {against.model} {said}{f': {norm}' if outcomes else ''}{', '.join(outcomes)}."
    for name, new, old in (
        ("text embeddings have", ours.vocabulary, theirs.vocabulary),
        ("the encoder's tokens have", ours.encoder_output, theirs.encoder_output),
    ):
        if new is not None and old is not None:
            said = f"{name} a norm of {number(new.mean, 3)} instead of {number(old.mean, 3)}"
            if entry_ratio(report) is not None:  # a base without images: the model is judged by itself
                return f"{_second(report)[:-1]}; against {against.model} {said}."
            return f"Against {against.model} {said}."
    return f"Nothing that was measured of it was measured of {against.model} too."


def _pace(report: Report) -> str:
    turn, error = asymmetry(report) or 0.0, asymmetry_error(report)
    slower, near = "more slowly" if turn < 1 else "faster", is_equal(turn, EQUAL_RATE)
    if same_rate(turn, error):
        return "at its rate" if near else f"{slower} by no more than two standard errors"
    return f"a little {slower}" if near else slower
