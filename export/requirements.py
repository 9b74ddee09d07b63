# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp cannot hold: refused before anything is written. How it resizes pictures.

llama.cpp's LLaVA pads a picture to a square. If the file lists sizes of tilings, as for LLaVA 1.6,
llama.cpp stretches the whole picture to a square, and puts tiles of it beside. In a tiling of 0 x 0
pixels, only the stretched picture is left. SigLIP's processor makes the same pixels.
"""

from typing import Any

from PIL.Image import Resampling
from transformers import PreTrainedConfig

from ..configuration_normalign_llava import NormAlignLlavaConfig, embedding_scales


MODEL_TYPES = (NormAlignLlavaConfig.model_type, "llava")
TOWER_ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}
"""transformers' names of activations, and llama.cpp's. Its GELU is the one with tanh."""

NO_TILES = [0, 0]
"""Width and height of the tiling that makes llama.cpp stretch pictures."""

_PROJECTOR_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new")
_WITH_CLASS_TOKEN = {
    "beit", "chinese_clip_vision_model", "clip_vision_model", "data2vec-vision", "deit", "dinov2",
    "dinov2_with_registers", "dinov3_vit", "internvl_vision", "metaclip_2_vision_model",
    "mlcd_vision_model", "pixio", "radio", "sapiens2", "tipsv2_vision_model", "vit", "vit_msn",
}  # fmt: skip


def check_exportable(name: str, config: PreTrainedConfig, image_processor: Any) -> None:
    """Raises ValueError if llama.cpp cannot compute what this model computes.

    Args:
        name: The model's name in the error.
        config: Its configuration.
        image_processor: Its image processor.
    """
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"{name} is a {config.model_type} model. `normalign export` writes NormAlign-LLaVA and "
            "LLaVA. For others, use llama.cpp's own convert_hf_to_gguf.py."
        )
    problem = (
        _quantization_problem(config)
        or _tower_problem(config)
        or _visual_tokens_problem(config)
        or _processor_problem(image_processor, config.vision_config)
    )
    if problem:
        raise ValueError(f"{name} cannot be exported to llama.cpp: {problem}")


def feature_layers(config: PreTrainedConfig) -> list[int]:
    """Returns the numbers of the hidden states that the projector reads, from 0 (embeddings)."""
    given_layers = config.vision_feature_layer
    if isinstance(given_layers, int):
        given_layers = [given_layers]
    hidden_states = config.vision_config.num_hidden_layers + 1
    return [layer % hidden_states for layer in given_layers]


def _quantization_problem(config: PreTrainedConfig) -> str | None:
    for part in (config, config.text_config, config.vision_config):
        settings = getattr(part, "quantization_config", None)
        if settings:
            method = settings.get("quant_method", "by an unknown method")
            return (
                f"its weights are stored quantized ({method}), and llama.cpp's script needs them "
                "in full precision. Export the checkpoint before it is quantized. For an adapter, "
                "give that checkpoint with --base, and --base-quantization."
            )
    return None


def _tower_problem(config: PreTrainedConfig) -> str | None:
    vision = config.vision_config
    kind = vision.model_type
    if kind in _WITH_CLASS_TOKEN:
        return (
            f"its vision encoder ({kind}) has a class token. llama.cpp computes such encoders "
            "wrongly for LLaVA: it puts the class token behind the patches, where position "
            "embeddings take it to be before them, and drops the first patch in its place. Train "
            "with SigLIP: it has no class token."
        )
    if kind != "siglip_vision_model":
        return f"llama.cpp's LLaVA has no vision encoder of type {kind}. Train with SigLIP."
    if vision.hidden_act not in TOWER_ACTIVATIONS:
        return f"llama.cpp has no activation {vision.hidden_act} in a vision encoder."
    layers = feature_layers(config)
    if layers != sorted(set(layers)):
        return f"llama.cpp joins feature layers in rising order, and these are {layers}."
    return None


def _visual_tokens_problem(config: PreTrainedConfig) -> str | None:
    if config.projector_hidden_act not in _PROJECTOR_ACTIVATIONS:
        return f"llama.cpp's projector has GELU, and this one has {config.projector_hidden_act}."
    if getattr(config, "projector_norm", "none") == "rms_norm":
        return (
            "its norm is an RMSNorm, and llama.cpp's projector ends in a LayerNorm. Build one "
            "with a LayerNorm, `normalign build`'s default, and train that."
        )
    text_only_scale, _ = embedding_scales(config.text_config)
    kind = config.text_config.model_type
    if text_only_scale != 1.0 and not kind.startswith("gemma"):
        return (
            f"llama.cpp would scale visual tokens of {kind} by {text_only_scale:g}, as it does "
            "text."
        )
    return None


def _processor_problem(image_processor: Any, vision: PreTrainedConfig) -> str | None:
    size = vision.image_size
    square = {"height": size, "width": size}
    final_size = image_processor.size
    if getattr(image_processor, "do_center_crop", False):
        final_size = image_processor.crop_size
    if dict(final_size) != square:
        return f"its images are {dict(final_size)}, and llama.cpp makes {size} x {size} pixels."
    is_scaled = image_processor.do_rescale and abs(255 * image_processor.rescale_factor - 1) < 1e-6
    if not is_scaled or not image_processor.do_normalize:
        return "its pixels are not scaled by 1 / 255 and normalized, as llama.cpp does it."
    return None


def is_padded(image_processor: Any) -> bool:
    """Whether pictures were padded to a square in training, as `LlavaImageProcessor` can."""
    return bool(getattr(image_processor, "do_pad", False))


def describe_resizing(image_processor: Any) -> str:
    """Returns what is done with a picture of another size, in training and by llama.cpp."""
    if is_padded(image_processor):
        return "padded, as in training"
    if getattr(image_processor, "do_center_crop", False):
        return "stretched, but cropped in training"
    interpolation = Resampling(image_processor.resample)
    if interpolation != Resampling.BICUBIC:
        return (
            "stretched with bicubic interpolation, but with "
            f"{interpolation.name.lower()} in training"
        )
    return "stretched, as in training"
