# SPDX-License-Identifier: Apache-2.0
"""Reads vision encoder and projector of a checkpoint, and nothing of its language model."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from ..checkpoint.opening import Checkpoint
from ..checkpoint.untrusted import fetch_checked_weights, refuse_unreadable
from .projector import Projector
from .requirements import feature_layers


_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_PATCHES = "embeddings.patch_embedding"


@dataclass(frozen=True)
class VisionParts:
    """The parts of a checkpoint that see images.

    Attributes:
        tower: The vision encoder's tensors by their names in its own model.
        projector: Projector and norm.
    """

    tower: dict[str, Tensor]
    projector: Projector


def read_vision_parts(checkpoint: Checkpoint) -> VisionParts:
    """Reads the tensors of vision encoder and projector.

    Raises:
        ValueError: Weights are damaged or missing, or quantized.
    """
    tower = {}
    projector = {}
    for name, tensor in _read_vision_tensors(checkpoint):
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            remedy = "Export the checkpoint before it is quantized."
            raise ValueError(f"{name} of {checkpoint.name} is quantized. {remedy}")
        if "multi_modal_projector." in name:
            projector[name.partition("multi_modal_projector.")[2]] = tensor
        else:
            # transformers 5 has no level `vision_model.`, older checkpoints have it.
            own_name = name.partition("vision_tower.")[2]
            tower[own_name.removeprefix("vision_model.")] = tensor
    wanted_names = [f"{_PATCHES}.weight", "linear_1.weight", "linear_2.weight"]
    missing_names = [name for name in wanted_names if name not in tower | projector]
    if missing_names:
        raise ValueError(f"{checkpoint.name} lacks tensors: {', '.join(missing_names)}.")
    return VisionParts(tower, _projector(checkpoint.config, projector))


def _read_vision_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors of vision tower and projector. Fetches weights from the Hub.

    Raises ValueError and OSError as [`fetch_checked_weights`] does.
    """
    for file in fetch_checked_weights(checkpoint.name, checkpoint.revision):
        with refuse_unreadable(str(file)), safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is not a dictionary)
                if "vision_tower." in name or "multi_modal_projector." in name:
                    yield name, tensors.get_tensor(name)


def _projector(config: PreTrainedConfig, tensors: dict[str, Tensor]) -> Projector:
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    weight_1 = tensors["linear_1.weight"]
    weight_2 = tensors["linear_2.weight"]
    gain = tensors.get("norm.weight")
    norm_bias = None
    if gain is not None:
        norm_bias = tensors.get("norm.bias", torch.zeros(len(gain)).double())
    return Projector(
        weight_1=weight_1,
        bias_1=tensors.get("linear_1.bias", torch.zeros(len(weight_1)).double()),
        weight_2=weight_2,
        bias_2=tensors.get("linear_2.bias", torch.zeros(len(weight_2)).double()),
        gain=gain,
        norm_bias=norm_bias,
        eps=getattr(config, "projector_norm_eps", 1e-5),
    )


def tower_tensors(tower: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Returns the tensors of a SigLIP encoder's first layers by their names in llama.cpp."""
    tensors = {
        "v.patch_embd.weight": tower[f"{_PATCHES}.weight"],
        "v.patch_embd.bias": tower[f"{_PATCHES}.bias"],
        "v.position_embd.weight": tower["embeddings.position_embedding.weight"],
    }
    for layer in range(layers):
        for name, gguf_name in _LAYER_NAMES.items():
            for kind in ("weight", "bias"):
                tensor = tower[f"encoder.layers.{layer}.{name}.{kind}"]
                tensors[f"v.blk.{layer}.{gguf_name}.{kind}"] = tensor
    return tensors


@torch.no_grad()
def sample_features(checkpoint: Checkpoint, tower: dict[str, Tensor]) -> Tensor:
    """Returns the features that the projector reads of sample pictures `(..., d_vision)`, float32.

    The pictures are noise, gradients, stripes and single colours: no data is needed.
    """
    config = checkpoint.config
    model = AutoModel.from_config(config.vision_config, dtype=torch.float32).eval()
    values = {}
    for name, value in model.state_dict().items():
        values[name] = tower.get(name.removeprefix("vision_model."), value)
    model.load_state_dict(values)
    pixels = checkpoint.processor.image_processor(_sample_pictures(), return_tensors="pt")
    outputs = model(pixels["pixel_values"].float(), output_hidden_states=True)
    features = [outputs.hidden_states[layer] for layer in feature_layers(config)]
    return torch.cat(features, dim=-1)


def _sample_pictures(side: int = 224) -> list[Image.Image]:
    numbers = np.random.default_rng(0)
    ramp = np.tile(np.linspace(0, 255, side), (side, 1))
    stripes = np.tile((np.arange(side) // 7 % 2) * 255.0, (side, 1))
    pictures = [Image.new("RGB", (side, side), colour) for colour in ("black", "white", "red")]
    for grey in (ramp, ramp.T, stripes, stripes.T):
        pictures.append(Image.fromarray(grey.astype(np.uint8)).convert("RGB"))
    noise = numbers.integers(0, 256, (side, side, 3), dtype=np.uint8)
    coarse_noise = numbers.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    pictures.append(Image.fromarray(noise))
    pictures.append(Image.fromarray(coarse_noise).resize((side, side)))
    return pictures
