# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What `simulate` found: the dataclasses that its dict is made of. Angles are in radians."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """A Monte Carlo check of Theorem 1 (eqs. 15, 16): mean cosine after both tokens of a pair have turned.

    Attributes:
        dimension: d.
        theta: Angle between the tokens before.
        omega_visual, omega_text: How far each turns.
        directions: How the directions of turning were drawn: "independent" (the theorem's case), "shared" (one turn of
            the whole space moves both) or "toward" (the visual token turns partly toward the text token).
        predicted: lambda * cos(theta), the theorem's.
        exact: `expected_cosine` with what the directions have in common: the same where they are independent.
        simulated, standard_error: Mean cosine over the samples, and its standard error.
    """

    dimension: int
    theta: float
    omega_visual: float
    omega_text: float
    directions: str
    predicted: float
    exact: float
    simulated: float
    standard_error: float


@dataclass(frozen=True)
class Lemma:
    """Lemma 1: the retention factor lambda against how unequal the two rotations are.

    Attributes:
        ratio: tan(omega_text) / tan(omega_visual), from 1 up.
        product_fixed: lambda where the product of the tangents stays what it is at ratio 1 (the lemma's case: falls).
        text_fixed: lambda where the text token's rotation stays and the visual token's shrinks (rises; what aligning
            visual norms to text undoes).
    """

    ratio: list[float]
    product_fixed: list[float]
    text_fixed: list[float]


@dataclass(frozen=True)
class Lag:
    """Lag angle (eq. 17) over layers: arccos of the expected cosine of a pair, updates of one size for all.

    Attributes:
        layer: 0 to L.
        norms: For each case, the norms (visual, text) that its pair starts from. Cases: "imbalanced"; "balanced" (both
            at the geometric mean, Lemma 1's comparison); "aligned" (both at the text token's norm).
        angle: For each case, the angle by the recursion (eqs. 13, 15, 16), L + 1 values.
        simulated: The same by Monte Carlo.
        delta: angle["imbalanced"] - angle["balanced"], positive.
        delta_aligned: angle["imbalanced"] - angle["aligned"], negative: Lemma 1 says nothing of this comparison.
    """

    layer: list[int]
    norms: dict[str, list[float]]
    angle: dict[str, list[float]]
    simulated: dict[str, list[float]]
    delta: list[float]
    delta_aligned: list[float]


@dataclass(frozen=True)
class TraceBound:
    """Trace bound (eqs. 18 to 20) against the lag angle: all values over the bound without lag.

    Attributes:
        delta: Lag angles.
        predicted: cos(delta) (eq. 19).
        bound: R * sum of the singular values of the sampled cross-covariance.
        attained: tr(M C) of the projection that is best for it.
        random: Largest tr(M C) of many random M of spectral norm R; never above the bound.
        same_turn: The bound where all visual tokens lag by one and the same turn: it does not fall.
    """

    delta: list[float]
    predicted: list[float]
    bound: list[float]
    attained: list[float]
    random: list[float]
    same_turn: list[float]


@dataclass(frozen=True)
class SignalToNoise:
    """Attention of a query over one related and many unrelated keys (eqs. 10, 21) against the lag angle.

    Attributes:
        dimension, keys: d, and how many keys are unrelated.
        delta: Lag angles of the related key.
        signal: Mean score of the related key, sqrt(d) * cosine.
        noise: Mean score of the unrelated keys: stays at 0.
        snr: Mean score of the related key over the standard deviation of the unrelated ones'.
        predicted_snr: sqrt(d) * cos(delta).
        entropy: Of the softmax over all keys, over that of an even one: 1 is even, 0 is one key.
        share: Share of the attention that falls on the related key.
    """

    dimension: int
    keys: int
    delta: list[float]
    signal: list[float]
    noise: list[float]
    snr: list[float]
    predicted_snr: list[float]
    entropy: list[float]
    share: list[float]


@dataclass(frozen=True)
class Simulation:
    """What `simulate` returns, as plain dicts, lists, numbers and strings."""

    retention: list[Retention]
    lemma: Lemma
    lag: Lag
    trace: TraceBound
    attention: SignalToNoise
