# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The theory, stated as functions: equations 8 and 13 to 21 (section 3, appendix B). Angles are in radians.

Each docstring says under which assumptions its claim holds, and where it fails; benchmarks/theory.py checks the
claims by simulation.
"""

import math

import torch
from torch import Tensor

from ..report import Curve, Depth


def rotation_angle(norm: float, update: float, angle: float) -> float:
    """Effective rotation omega of a state by a residual update (eqs. 8, 13), in [0, pi].

    tan(omega) = c sin(phi) / (||h|| + c cos(phi)), taken by atan2, so that it is the angle between h and h + dh also
    where the denominator is zero or negative: an update that undoes more than the state turns it by over pi/2, where
    the tangent alone would give an angle of the wrong sign. Exact; where dh = -h nothing is left that has an angle.

    Args:
        norm: ||h||, the norm of the state.
        update: c, the norm of the update.
        angle: phi, between the state and its update, in [0, pi].
    """
    return math.atan2(update * math.sin(angle), norm + update * math.cos(angle))


def next_norm(norm: float, update: float, angle: float) -> float:
    """Norm of the state after the update: ||h + dh||, arguments as in `rotation_angle`."""
    return math.hypot(update * math.sin(angle), norm + update * math.cos(angle))


def retention_factor(omega_visual: float, omega_text: float) -> float:
    """lambda = cos(omega_v) cos(omega_t) (eq. 16): what Theorem 1 keeps of a pair's expected cosine at one layer.

    Of rotations below pi/2 with the same product of tangents, equal ones have the largest lambda (Lemma 1), by
    1 / lambda^2 = 1 + p^2 + tan^2(omega_v) + tan^2(omega_t), with p the product, and AM-GM. What is fixed decides:

    - a fixed product of the angles or a fixed sum of the angles: equal rotations are best too;
    - a fixed sum of the tangents: only while their mean is at most 1 (pi/4); above, equal rotations are not best;
    - one rotation over pi/2: lambda is negative, and equal sizes of the tangents make it *smallest*;
    - **a fixed text rotation, which is what aligning the visual norm to text's leaves fixed: lambda then falls as
      omega_v grows to meet omega_t.** Under Theorem 1 a token that turns loses cosine, and inertia preserves it; the
      lemma does not compare a model before and after norm alignment.
    """
    return math.cos(omega_visual) * math.cos(omega_text)


def expected_cosine(
    cosine: float,
    omega_visual: float,
    omega_text: float,
    *,
    toward_text: float = 0.0,
    toward_visual: float = 0.0,
    shared: float = 0.0,
) -> float:
    """Expected cosine of a pair after both tokens have turned; with the defaults this is Theorem 1 (eq. 15).

    With unit states v, t and unit directions a (orthogonal to v) and b (orthogonal to t), the new states are
    cos(omega_v) v + sin(omega_v) a and cos(omega_t) t + sin(omega_t) b. Their dot product has four terms; a is not
    orthogonal to t, nor b to v, so three of them count on average unless the directions make them vanish:

        lambda cos(theta) + sin(omega_v) cos(omega_t) E[a.t] + cos(omega_v) sin(omega_t) E[v.b]
                          + sin(omega_v) sin(omega_t) E[a.b]

    Theorem 1 is therefore exact, in any dimension from 2 and at any angle, if each direction is as likely as its
    opposite and the two are uncorrelated. Symmetry of each by itself is not enough. It fails

    - where the directions are shared: one random turn of the whole space, symmetric for each token, has
      E[a.b] = cos(theta), and the cosine becomes cos(omega_v - omega_t) cos(theta): equal rotations lose nothing;
    - where a token turns toward the other, as attention between them may: E[a.t] > 0.

    Rotations that vary from token to token, independently, enter by their mean cosines, which for angles up to pi/2
    are below the cosine of the mean rotation. And from layer to layer the recursion is of the mean *cosine*, not of
    the mean angle: in two dimensions that does not move at all (until angles reach 0 or pi).

    Args:
        cosine: cos(theta) before.
        omega_visual, omega_text: How far each token turns.
        toward_text: E[a.t].
        toward_visual: E[v.b].
        shared: E[a.b].
    """
    return (
        retention_factor(omega_visual, omega_text) * cosine
        + math.sin(omega_visual) * math.cos(omega_text) * toward_text
        + math.cos(omega_visual) * math.sin(omega_text) * toward_visual
        + math.sin(omega_visual) * math.sin(omega_text) * shared
    )


def lag_angle(cosine_imbalanced: float, cosine_balanced: float) -> float:
    """Lag angle delta = theta_imbalanced - theta_balanced (eq. 17), from the expected cosines of the two cases.

    Positive after layers that obey Theorem 1 if the pair starts from the same cosine > 0 and each layer's lambda is
    smaller in the imbalanced case (Lemma 1's comparison). From a cosine of 0 there is no lag; from a negative one the
    sign turns round, as decay brings an obtuse angle *nearer*; and compared with a pair whose norms are both text's,
    it is negative (see `retention_factor`).
    """
    return math.acos(cosine_imbalanced) - math.acos(cosine_balanced)


def lagging_states(states: Tensor, directions: Tensor, delta: float) -> Tensor:
    """States that lag by delta (eq. 18): cos(delta) h_v + sin(delta) ||h_v|| a, of the same norm as before.

    Args:
        states: h_v without lag, `(n, d)`.
        directions: a, `(n, d)`: unit rows, each orthogonal to its state.
        delta: Lag angle.
    """
    return math.cos(delta) * states + math.sin(delta) * states.norm(dim=-1, keepdim=True) * directions


def cross_covariance(visual: Tensor, text: Tensor) -> Tensor:
    """C = E[h_v h_t^T], `(d, d)`, over n related pairs `(n, d)`, not centred: so that E[h_t^T M h_v] = tr(M C)."""
    return visual.T @ text / len(visual)


def trace_bound(covariance: Tensor, radius: float = 1.0) -> float:
    """max of tr(M C) over ||M|| <= R: R * sum_i sigma_i(C) (eq. 20, von Neumann's trace inequality).

    The norm is the spectral one (largest singular value); `best_projection` attains the bound. For the Frobenius norm
    it is still a bound, but attained only if C has rank 1: the maximum is R ||C||_F. It fails for a bound on each
    weight by itself: |M_ij| <= R allows R * sum_ij |C_ij|.
    """
    return radius * torch.linalg.svdvals(covariance).sum().item()


def best_projection(covariance: Tensor, radius: float = 1.0) -> Tensor:
    """The M of spectral norm R that attains `trace_bound`: R V U^T, `(d, d)`, for C = U S V^T."""
    left, _, right = torch.linalg.svd(covariance)
    return radius * right.T @ left.T


def signal_to_noise(delta: float, dimension: int) -> float:
    """Score of a related key over the standard deviation of unrelated ones' (eqs. 10, 21): sqrt(d) cos(delta).

    For a query and keys of fixed norm (attention reads normalised states), a related key that without lag would point
    along the query, and unrelated keys in directions independent of the query and even over the sphere: their cosine
    has mean 0 and variance 1/d, with or without lag. Noise does not stay at 0 where unrelated keys share a direction
    that correlates with the query, as states in a narrow cone do.
    """
    return math.sqrt(dimension) * math.cos(delta)


def attention_entropy(scores: Tensor) -> Tensor:
    """Entropy of the softmax over the last dimension, over that of an even one: 1 is even, 0 is one key.

    Of the entropy H in nats, dH/ds = -p (log p + H) for a key of score s and share p. So as the related key's score
    falls and the others stay, entropy rises for certain while that key has the largest score. It may not where another
    key, an attention sink, scores higher: the weaker the related key, the more falls on the sink, and H falls too.

    Args:
        scores: `(..., keys)`, at least 2 keys.
    """
    logs = scores.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1) / math.log(scores.shape[-1])


def predicted_rotation(depth: Depth) -> dict[str, list[float]]:
    """Rotation by layer that section 3.1 predicts, to be set beside `depth.rotation`.

    Size c and angle phi of a layer's update are taken to be the same for both modalities, the mean over the two, so
    that the states' norms alone make the modalities differ (eq. 13). Of sizes and norms the geometric means are taken:
    a few tokens of huge norm (attention sinks) would rule the others. An approximation: means over tokens enter the
    formula, where the measured curve is the mean of the formula over tokens.

    Returns:
        L angles for each of "visual" and "text" that `depth` has.
    """
    kinds = [kind for kind in ("visual", "text") if kind in depth.rotation]

    def common(curves: dict[str, Curve]) -> list[float]:
        return [sum(values) / len(kinds) for values in zip(*(curves[kind].mean for kind in kinds), strict=True)]

    updates, angles = [math.exp(size) for size in common(depth.log_update)], common(depth.update_angle)
    return {
        kind: [
            rotation_angle(math.exp(norm), update, angle)
            for norm, update, angle in zip(depth.log_norm[kind].mean[:-1], updates, angles, strict=True)
        ]
        for kind in kinds
    }
