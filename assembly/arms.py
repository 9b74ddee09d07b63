# SPDX-License-Identifier: Apache-2.0
"""The paper's arms."""

from ..configuration_normalign_llava import NormAlignLlavaConfig


ARMS = {
    "none": {"projector_norm": "none"},
    "unit": {"projector_gain_init": "one", "gradient_compensation": "none"},
    "aligned": {"gradient_compensation": "none"},
    "gwc": {},
}
"""The paper's four arms as configuration: no norm; gain 1; aligned without compensation; aligned with it (default)."""

ARM_FIELDS = ("projector_norm", "projector_gain_init", "gradient_compensation")
"""The fields of the configuration that an arm sets."""


def arm_of(config: NormAlignLlavaConfig) -> str:
    """The paper's arm that a configuration is."""
    if config.projector_norm == "none":
        return "none"
    if config.projector_gain_init == "one" and config.gradient_compensation == "none":
        return "unit"
    return "gwc" if config.gradient_compensation == "global" else "aligned"
