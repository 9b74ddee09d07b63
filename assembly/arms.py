# SPDX-License-Identifier: Apache-2.0
"""The paper's arms: which norm a model has after its projector."""

from ..configuration_normalign_llava import NormAlignLlavaConfig


ARMS = {
    "none": {"projector_norm": "none"},
    "unit": {"projector_gain_init": "one", "gradient_compensation": "none"},
    "aligned": {"gradient_compensation": "none"},
    "gwc": {},
}
"""Arms as configuration: no norm, gain 1, aligned without compensation, and with it (default)."""

ARM_FIELDS = ("projector_norm", "projector_gain_init", "gradient_compensation")
"""The fields of the configuration that an arm sets."""


def arm_of(config: NormAlignLlavaConfig) -> str:
    """Returns the paper's arm that a configuration is."""
    if config.projector_norm == "none":
        return "none"
    if config.projector_gain_init == "one" and config.gradient_compensation == "none":
        return "unit"
    return "gwc" if config.gradient_compensation == "global" else "aligned"


def restarts_norm(stored: NormAlignLlavaConfig, config: NormAlignLlavaConfig) -> bool:
    """Returns whether a checkpoint's norm starts anew if its arm becomes the one of `config`.

    It does if the arm adds the norm, or changes its kind or the start of its gain. Training does
    so, and loading and merging an adapter do it again.
    """
    if config.projector_norm == "none":
        return False
    stored_norm = (stored.projector_norm, stored.projector_gain_init)
    return stored_norm != (config.projector_norm, config.projector_gain_init)
