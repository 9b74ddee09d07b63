# SPDX-License-Identifier: Apache-2.0
"""When a diagnosis agrees with a claim of the paper: the rule, and its table of thresholds.

A claim is about one or two effects. Each is measured with a standard error, and has a smallest size
that matters. The claim holds here if every effect, less two standard errors, has at least this
size. An effect that is significant but does not matter is "too small". An effect that may matter
but is not significant is "unclear".
"""

from dataclasses import dataclass


AGREES = "agrees"
DISAGREES = "disagrees"
TOO_SMALL = "too small"
UNCLEAR = "unclear"
NOT_MEASURED = "not measured"
DOES_NOT_APPLY = "does not apply"

CHECKED = (DISAGREES, TOO_SMALL, UNCLEAR, AGREES)
"""Outcomes of claims that could be checked, the least favourable first."""

ERRORS = 2.0  # standard errors on each side of a measured effect: about 95 %
EQUAL = 1.25  # sizes within this factor of each other count as equal

ABOVE = "at least"
BELOW = "at most"
WITHIN = "within"


@dataclass(frozen=True)
class Effect:
    """A measured value, and its standard error, None if that is not known."""

    value: float
    error: float | None

    def mapped(self, value: float, slope: float) -> "Effect":
        """Returns the effect on another scale, given its value and the slope there."""
        error = None if self.error is None else self.error * slope
        return Effect(value, error)


@dataclass(frozen=True)
class Criterion:
    """What is asked of one effect, and why.

    Attributes:
        claim: The claim of the paper, and its place there.
        effect: What is measured.
        relation: "at least", "at most" or "within".
        matters: The smallest effect that matters. For "within", the largest that does not.
        opposite: An effect this far on the other side is against the claim. None for "within".
        error: What the standard error is taken over.
        reason: Why `matters` has this value.
    """

    claim: str
    effect: str
    relation: str
    matters: float
    opposite: float | None
    error: str
    reason: str

    def outcome(self, effect: Effect) -> str:
        """Returns "agrees", "disagrees", "too small" or "unclear", by two standard errors."""
        if effect.error is None:
            return UNCLEAR
        sign = -1 if self.relation == BELOW else 1  # "at most" is "at least" of what is negated
        matters = sign * self.matters
        low = sign * effect.value - ERRORS * effect.error
        high = sign * effect.value + ERRORS * effect.error
        if self.relation == WITHIN:
            if high <= matters:
                return AGREES
            return DISAGREES if low > matters else UNCLEAR
        assert self.opposite is not None
        if low >= matters:
            return AGREES
        if high <= sign * self.opposite:
            return DISAGREES
        return TOO_SMALL if high < matters else UNCLEAR


RQ1 = "RQ1: visual tokens that enter the projector are much larger than text."
RQ2 = "RQ2: visual tokens that enter the decoder are much larger than text."
RQ3 = "RQ3: visual tokens, being larger, rotate less per layer than text."
UPDATES = "Section 3.1: updates of both have the same size and angle to the state."
BOTTOM = "Appendix G: without the norm, text looks at the bottom of the image."
NEARNESS = "Figures 4a, 4b: with the norm, norms and rotations of both are nearer to each other."
FOCUS = "Appendix G: with the norm, attention to the image is less diffuse."

MUCH_LARGER = "Half an order of magnitude. The paper speaks of an order. Its smallest ratio is 5.6."
SAME_AS_CRITICAL = "`normalign gain --critical` has the same limit."

CRITERIA = {
    "projector": Criterion(
        RQ1, "norm entering the projector over text's", ABOVE, 3.0, 1 / 3.0, "samples", MUCH_LARGER
    ),
    "decoder": Criterion(
        RQ2, "norm entering the decoder over text's", ABOVE, 3.0, 1 / 3.0, "samples", MUCH_LARGER
    ),
    "rotation": Criterion(
        RQ3, "rotation over text's", BELOW, 0.9, 1 / 0.9, "batches", SAME_AS_CRITICAL
    ),
    "layers": Criterion(
        RQ3,
        "share of layers where visual tokens rotate less",
        ABOVE,
        0.5,
        0.5,
        "layers",
        "In the paper all layers differ. A few can lower a mean. By chance the share is half.",
    ),
    "update size": Criterion(
        UPDATES,
        "factor between sizes of updates",
        WITHIN,
        EQUAL,
        None,
        "samples",
        "The ratios of norms should explain rotation. A quarter is small beside them.",
    ),
    "update angle": Criterion(
        UPDATES,
        "degrees between angles of updates",
        WITHIN,
        10.0,
        None,
        "samples",
        "At a right angle, 10 degrees change the sine, and so rotation, by 1.5 %.",
    ),
    "bottom": Criterion(
        BOTTOM,
        "attention on the bottom third over an even share",
        ABOVE,
        EQUAL,
        1 / EQUAL,
        "questions",
        "A quarter more than even. The paper shows maps, without numbers.",
    ),
    "nearer norms": Criterion(
        NEARNESS,
        "factor between norms without the norm, over the factor with it",
        ABOVE,
        EQUAL,
        1 / EQUAL,
        "samples",
        "Sizes within this factor count as equal everywhere in this table.",
    ),
    "nearer rotations": Criterion(
        NEARNESS,
        "factor between rotations without the norm, over the factor with it",
        ABOVE,
        1 / 0.9,
        0.9,
        "batches",
        "The change of rotation that matters in RQ3.",
    ),
    "entropy": Criterion(
        FOCUS,
        "entropy of attention without the norm, minus entropy with it",
        ABOVE,
        0.05,
        -0.05,
        "questions",
        "A twentieth of the entropy of even attention. The paper shows maps, without numbers.",
    ),
}
"""Every threshold of a finding. docs/diagnose.md shows this table."""


def outcome_of(effects: dict[str, Effect]) -> str:
    """Returns the least favourable outcome of a claim's effects, by their names in `CRITERIA`."""
    outcomes = [CRITERIA[name].outcome(effect) for name, effect in effects.items()]
    return min(outcomes, key=CHECKED.index)
