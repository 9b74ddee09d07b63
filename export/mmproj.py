# SPDX-License-Identifier: Apache-2.0
"""Writes vision encoder, projector and norm of a checkpoint as `mmproj-NAME.gguf`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from ..checkpoint.opening import Checkpoint
from .projector import Projector, computed_by_llama_cpp, projector_tensors
from .requirements import TOWER_ACTIVATIONS, feature_layers
from .resizing import NO_TILES, is_padded
from .tower import read_vision_parts, sample_features, tower_tensors


LARGEST_DIFFERENCE = 0.01
"""Largest allowed difference of visual tokens, over their largest number.

That GELU is computed with tanh makes some 1e-4.
"""

_FILE_TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


@dataclass(frozen=True)
class Projection:
    """The tensors of a projector, and how near llama.cpp's arithmetic comes to ours.

    Attributes:
        tensors: Tensors by their names in llama.cpp, float32.
        difference: Largest difference of visual tokens of the sample pictures, over their largest
            number.
    """

    tensors: dict[str, Tensor]
    difference: float


def write_mmproj(checkpoint: Checkpoint, file: Path, name: str, dtype: torch.dtype) -> float:
    """Writes the GGUF file of everything before the language model.

    Matrices of the vision encoder have `dtype`. Its biases and norms, and projector and norm, are
    float32.

    Args:
        checkpoint: A checkpoint that [`check_exportable`] accepts.
        file: The file to write.
        name: The model's name in the file.
        dtype: float32, float16 or bfloat16.

    Returns:
        The difference of [`Projection`].

    Raises:
        ValueError: Weights are damaged, missing or quantized, do not fit in `dtype`, or llama.cpp's
            arithmetic would differ by more than `LARGEST_DIFFERENCE`.
    """
    parts = read_vision_parts(checkpoint)
    features = sample_features(checkpoint, parts.tower)
    tower_eps = checkpoint.config.vision_config.layer_norm_eps
    projection = project_for_llama_cpp(parts.projector, features, tower_eps)
    layers = max(feature_layers(checkpoint.config))
    writer = gguf.GGUFWriter(file, "clip")
    _add_settings(writer, checkpoint, name, _FILE_TYPES[dtype][1])
    for tensor_name, tensor in tower_tensors(parts.tower, layers).items():
        is_matrix = tensor.ndim > 1 and tensor_name != "v.position_embd.weight"
        _add_tensor(writer, tensor_name, tensor, dtype if is_matrix else torch.float32)
    for tensor_name, tensor in projection.tensors.items():
        _add_tensor(writer, tensor_name, tensor, torch.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return projection.difference


def project_for_llama_cpp(projector: Projector, features: Tensor, tower_eps: float) -> Projection:
    """Finds the tensors of a projector, and computes with them what llama.cpp will.

    Args:
        projector: The projector.
        features: Visual features of the sample pictures `(..., d_vision)`.
        tower_eps: The epsilon of all norms of the file.

    Raises:
        ValueError: If visual tokens would differ by more than `LARGEST_DIFFERENCE`.
    """
    features = features.double()
    largest_hidden = projector.hidden(features).norm(dim=-1).max().item()
    tensors = {}
    for name, tensor in projector_tensors(projector, tower_eps, largest_hidden).items():
        tensors[name] = tensor.float()
    expected = projector.project(features)
    computed = computed_by_llama_cpp(tensors, features.float(), tower_eps)
    difference = ((computed - expected).abs().max() / expected.abs().max()).item()
    if not difference <= LARGEST_DIFFERENCE:
        raise ValueError(
            f"Visual tokens that llama.cpp computes would differ by {difference:.2g} of the "
            f"largest number, and at most {LARGEST_DIFFERENCE} is allowed. Are the weights finite?"
        )
    return Projection(tensors, difference)


def _add_settings(
    writer: gguf.GGUFWriter, checkpoint: Checkpoint, name: str, file_type: gguf.LlamaFileType
) -> None:
    config = checkpoint.config
    vision = config.vision_config
    image_processor: Any = checkpoint.processor.image_processor
    layers = feature_layers(config)
    writer.add_type("mmproj")
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(max(layers))
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_projection_dim(config.text_config.hidden_size)
    writer.add_vision_image_mean(list(image_processor.image_mean))
    writer.add_vision_image_std(list(image_processor.image_std))
    writer.add_array("clip.vision.feature_layer", layers)
    if not is_padded(image_processor):
        writer.add_array("clip.vision.image_grid_pinpoints", NO_TILES)
    activation = TOWER_ACTIVATIONS[vision.hidden_act]
    writer.add_vision_use_gelu(activation == "gelu")
    writer.add_vision_use_silu(activation == "silu")


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Adds a tensor to a GGUF file. Raises ValueError if a value is not finite in `dtype`."""
    values = tensor.to(dtype)
    if not values.isfinite().all():
        raise ValueError(f"{name} has values that are not finite in {dtype}. Choose float32.")
    quantization, _ = _FILE_TYPES[dtype]
    if dtype == torch.bfloat16:
        rows = gguf.quants.quantize(values.float().numpy(), quantization)
        writer.add_tensor(name, rows, raw_dtype=quantization)
    else:
        writer.add_tensor(name, values.numpy())
