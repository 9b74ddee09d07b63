# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The rotation per layer that the theory predicts from norms (equation 13, section 3.1)."""

from typing import Any

import numpy as np

from ..report import Depth


def rotation_angle(norm: Any, update: Any, angle: Any) -> Any:
    """Angle omega between a state h and h + dh, in [0, pi] (eqs. 8, 13); of numbers, or of arrays of one shape.

    tan(omega) = c sin(phi) / (||h|| + c cos(phi)), by atan2, which is right also where the denominator is negative: an
    update that more than undoes the state turns it by over pi/2.

    Args:
        norm: ||h||, the norm of the state.
        update: c, the norm of the update dh.
        angle: phi, the angle between the state and its update, in radians.
    """
    return np.arctan2(update * np.sin(angle), norm + update * np.cos(angle))


def predicted_rotation(depth: Depth) -> dict[str, list[float]]:
    """Rotation of each layer in radians, as section 3.1 predicts it; to be compared with `depth.rotation`.

    Section 3.1 takes size c and angle phi of a layer's update to be the same for both modalities, so that only the
    states' norms make them differ. Here both are the mean over the two modalities, and norms and sizes are geometric
    means over tokens, which a few tokens of huge norm (attention sinks) move little. An approximation: means over
    tokens enter the formula, while the measured curve is the mean of the formula over tokens.

    Returns:
        L angles for each of "visual" and "text" that `depth` has.
    """
    kinds = [kind for kind in ("visual", "text") if kind in depth.rotation]
    size = np.exp(np.mean([depth.log_update[kind].mean for kind in kinds], axis=0))
    angle = np.mean([depth.update_angle[kind].mean for kind in kinds], axis=0)
    return {kind: rotation_angle(np.exp(depth.log_norm[kind].mean[:-1]), size, angle).tolist() for kind in kinds}
