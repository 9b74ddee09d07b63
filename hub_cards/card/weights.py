# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Facts read from a checkpoint's weights: size, gain of the norm, and whether it was trained."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import initial_gain


@dataclass(frozen=True)
class Gain:
    """The norm after the projector: mean |gain| and |bias| (None for an RMSNorm), and the gain's start if known."""

    now: float
    bias: float | None
    start: float | None


@dataclass(frozen=True)
class Weights:
    """Facts about safetensors files, whose `size` is in bytes.

    Attributes:
        gain: None without the norm.
        moved: Whether the norm differs from a newly built one; None if unknown.
        parameters: Their count; 0 if quantized, as the weights are packed.
    """

    gain: Gain | None
    moved: bool | None
    parameters: int
    size: int


def read_weights(files: Iterable[Path], config: NormAlignLlavaConfig | None) -> Weights:
    """Reads headers and norm from those of `files`, of a checkpoint or an adapter, that exist."""
    norm: dict[str, torch.Tensor] = {}
    parameters = size = 0
    for path in (path for path in files if path.is_file()):
        size += path.stat().st_size
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    parameters += math.prod(file.get_slice(name).get_shape())
                    if "multi_modal_projector.norm." in name:
                        norm[name.rpartition(".")[2]] = file.get_tensor(name).double()
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}. Was it cut short? Copy it again.") from error
    if getattr(config, "quantization_config", None):
        parameters = 0
    if "weight" not in norm:
        return Weights(None, None, parameters, size)
    gain, bias = norm["weight"], norm.get("bias")
    start = moved = None
    if config is not None and (config.text_embedding_norm is not None or config.projector_gain_init == "one"):
        start = initial_gain(config, config.text_embedding_norm or math.nan)
        moved = not torch.allclose(gain, torch.full_like(gain, start), rtol=1e-6, atol=0.0)
        moved = moved or (bias is not None and bool(bias.any()))
    mean = gain.abs().mean().item()
    found = Gain(mean, None if bias is None else bias.abs().mean().item(), start)
    return Weights(found, moved, parameters, size)
