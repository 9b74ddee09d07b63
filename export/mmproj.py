# SPDX-License-Identifier: Apache-2.0
"""Writes vision encoder, projector and norm of a checkpoint as `mmproj-NAME.gguf`.

Nothing of its language model is read.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel

from ..checkpoint.opening import Checkpoint
from ..checkpoint.untrusted import fetch_checked_weights, refuse_unreadable
from .projector import Projector, computed_by_llama_cpp, projector_tensors
from .requirements import NO_TILES, TOWER_ACTIVATIONS, feature_layers, is_padded


LARGEST_DIFFERENCE = 0.01
"""Largest allowed difference of visual tokens, over their largest number.

That GELU is computed with tanh makes some 1e-4.
"""

_FILE_TYPES = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}
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
_POSITIONS = "v.position_embd.weight"


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
        The difference of [`project_for_llama_cpp`].

    Raises:
        ValueError: Weights are damaged, missing or quantized, do not fit in `dtype`, or llama.cpp's
            arithmetic would differ by more than `LARGEST_DIFFERENCE`.
    """
    tower, projector = read_vision_parts(checkpoint)
    features = sample_features(checkpoint, tower)
    tower_eps = checkpoint.config.vision_config.layer_norm_eps
    projector_part, difference = project_for_llama_cpp(projector, features, tower_eps)
    tower_part = {
        "v.patch_embd.weight": tower[f"{_PATCHES}.weight"],
        "v.patch_embd.bias": tower[f"{_PATCHES}.bias"],
        _POSITIONS: tower["embeddings.position_embedding.weight"],
    }
    for layer in range(max(feature_layers(checkpoint.config))):
        for part_name, gguf_name in _LAYER_NAMES.items():
            for kind in ("weight", "bias"):
                tensor = tower[f"encoder.layers.{layer}.{part_name}.{kind}"]
                tower_part[f"v.blk.{layer}.{gguf_name}.{kind}"] = tensor
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_type("mmproj")
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[dtype])
    _add_settings(writer, checkpoint)
    for tensor_name, tensor in (tower_part | projector_part).items():
        stored_dtype = torch.float32
        if tensor_name in tower_part and tensor.ndim > 1 and tensor_name != _POSITIONS:
            stored_dtype = dtype
        values = tensor.to(stored_dtype)
        if not values.isfinite().all():
            raise ValueError(
                f"{tensor_name} has values that are not finite in {stored_dtype}. Choose float32."
            )
        if stored_dtype == torch.bfloat16:
            quantization = gguf.GGMLQuantizationType.BF16
            rows = gguf.quants.quantize(values.float().numpy(), quantization)
            writer.add_tensor(tensor_name, rows, raw_dtype=quantization)
        else:
            writer.add_tensor(tensor_name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return difference


def read_vision_parts(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], Projector]:
    """Reads the vision encoder's tensors, by their names in its own model, and the projector.

    Fetches weights from the Hub.

    Raises:
        ValueError: Weights are damaged or missing, or quantized.
        OSError: They cannot be fetched.
    """
    tower = {}
    tensors = {}
    for file in fetch_checked_weights(checkpoint.name, checkpoint.revision):
        with refuse_unreadable(str(file)), safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (it is not a dictionary)
                _, in_tower, name_in_tower = name.partition("vision_tower.")
                _, in_projector, name_in_projector = name.partition("multi_modal_projector.")
                if not in_tower and not in_projector:
                    continue
                tensor = stored.get_tensor(name)
                if not tensor.is_floating_point() or tensor.itemsize < 2:
                    raise ValueError(
                        f"{name} of {checkpoint.name} is quantized. Export the checkpoint before "
                        "it is quantized."
                    )
                if in_projector:
                    tensors[name_in_projector] = tensor.double()
                else:
                    # transformers 5 has no level `vision_model.`, older checkpoints have it.
                    tower[name_in_tower.removeprefix("vision_model.")] = tensor
    wanted_names = [f"{_PATCHES}.weight", "linear_1.weight", "linear_2.weight"]
    missing_names = [name for name in wanted_names if name not in tower | tensors]
    if missing_names:
        raise ValueError(f"{checkpoint.name} lacks tensors: {', '.join(missing_names)}.")
    weight_1 = tensors["linear_1.weight"]
    weight_2 = tensors["linear_2.weight"]
    gain = tensors.get("norm.weight")
    norm_bias = None
    if gain is not None:
        norm_bias = tensors.get("norm.bias", torch.zeros_like(gain))
    projector = Projector(
        weight_1=weight_1,
        bias_1=tensors.get("linear_1.bias", weight_1.new_zeros(len(weight_1))),
        weight_2=weight_2,
        bias_2=tensors.get("linear_2.bias", weight_2.new_zeros(len(weight_2))),
        gain=gain,
        norm_bias=norm_bias,
        eps=getattr(checkpoint.config, "projector_norm_eps", 1e-5),
    )
    return tower, projector


@torch.no_grad()
def sample_features(checkpoint: Checkpoint, tower: dict[str, Tensor]) -> Tensor:
    """Returns the features that the projector reads of sample pictures `(..., d_vision)`, float32.

    The pictures are noise, gradients, stripes and single colours: no data is needed.
    """
    side = 224
    ramp = np.tile(np.linspace(0, 255, side), (side, 1))
    stripes = np.tile((np.arange(side) // 7 % 2) * 255.0, (side, 1))
    pictures = [Image.new("RGB", (side, side), colour) for colour in ("black", "white", "red")]
    for grey in (ramp, ramp.T, stripes, stripes.T):
        pictures.append(Image.fromarray(grey.astype(np.uint8)).convert("RGB"))
    generator = np.random.default_rng(0)
    for noise_side in (side, 8):
        noise = generator.integers(0, 256, (noise_side, noise_side, 3), dtype=np.uint8)
        pictures.append(Image.fromarray(noise).resize((side, side)))
    pixels = checkpoint.processor.image_processor(pictures, return_tensors="pt")
    config = checkpoint.config
    model = AutoModel.from_config(config.vision_config, dtype=torch.float32).eval()
    # What the exported tower lacks comes after the layers whose features are read.
    values = {
        name: tower.get(name.removeprefix("vision_model."), value)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(values)
    outputs = model(pixels["pixel_values"].float(), output_hidden_states=True)
    return torch.cat([outputs.hidden_states[layer] for layer in feature_layers(config)], dim=-1)


def project_for_llama_cpp(
    projector: Projector, features: Tensor, tower_eps: float
) -> tuple[dict[str, Tensor], float]:
    """Finds the tensors of a projector, and computes with them what llama.cpp will.

    Args:
        projector: The projector.
        features: Visual features of the sample pictures `(..., d_vision)`.
        tower_eps: The epsilon of all norms of the file.

    Returns:
        Tensors by their names in llama.cpp, float32. Then the largest difference of visual tokens
        of the sample pictures, over their largest number.

    Raises:
        ValueError: If visual tokens would differ by more than `LARGEST_DIFFERENCE`.
    """
    features = features.double()
    largest_hidden = projector.hidden(features).norm(dim=-1).max().item()
    exact_tensors = projector_tensors(projector, tower_eps, largest_hidden)
    tensors = {name: tensor.float() for name, tensor in exact_tensors.items()}
    expected = projector.project(features)
    computed = computed_by_llama_cpp(tensors, features.float(), tower_eps)
    difference = ((computed - expected).abs().max() / expected.abs().max()).item()
    if not difference <= LARGEST_DIFFERENCE:
        raise ValueError(
            f"Visual tokens that llama.cpp computes would differ by {difference:.2g} of the "
            f"largest number, and at most {LARGEST_DIFFERENCE} is allowed. Are the weights finite?"
        )
    return tensors, difference


def _add_settings(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    vision = config.vision_config
    image_processor = checkpoint.processor.image_processor
    layers = feature_layers(config)
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
