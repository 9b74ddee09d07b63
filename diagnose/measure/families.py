# SPDX-License-Identifier: Apache-2.0
"""The modules of transformers' vision-language models that are measured, in which mode, and tokens.

transformers has no convention for the projector's name, so `PROJECTORS` has it by family.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


PROJECTORS = {
    **dict.fromkeys(
        (
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "exaone4_5",
            "glm_ocr",
            "glm4v",
            "glm4v_moe",
            "glm46v",
        ),
        "visual.merger",
    ),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), "connector"),
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid", "janus"), "aligner"),
    **dict.fromkeys(("hyperclovax_vision_v2", "paddleocr_vl", "video_llama_3"), "projector"),
    "ernie4_5_vl_moe": "resampler_model",
    "kimi_k25": "mm_projector",
    "lighton_ocr": "vision_projection",
    "ovis2": "visual_embeddings_table",
}
"""The projector's name in the base model, by `model_type`, where not `multi_modal_projector`."""

RESAMPLED = {"aria", "idefics2"}
"""Families (`model_type`) whose visual tokens are learned queries, without a place in the image."""


@dataclass(frozen=True)
class Parts:
    """The modules of a vision-language model.

    Attributes:
        model: The model without adapters around it.
        inner: The base model. Its forward pass merges image features and text.
        decoder: The language model without its head. It has `layers` and `norm`.
        projector_name: Name of the projector in `model`, if it is known for this family.
        projector: The projector.
        norm: The norm at the end of the projector of this package's models.
    """

    model: PreTrainedModel
    inner: PreTrainedModel
    decoder: Any
    projector_name: str | None
    projector: nn.Module | None
    norm: nn.Module | None


def decoder_layers(decoder: PreTrainedModel) -> nn.ModuleList:
    """Returns a language model's layers, whatever their name. Raises ValueError without any."""
    count = decoder.config.get_text_config().num_hidden_layers
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(decoder).__name__} has no list of {count} layers.")


def find_parts(model: nn.Module) -> Parts:
    """Finds the parts of `model`, with or without PEFT adapters.

    Raises ValueError if it lacks some, or if its kinds of token cannot be distinguished.
    """
    if not isinstance(model, PreTrainedModel):  # PEFT's wrapper
        if model.active_peft_config.is_prompt_learning:  # type: ignore[union-attr]
            raise ValueError("Prompt tuning adds tokens to a batch. Measure the model without it.")
        return find_parts(model.get_base_model())  # type: ignore[operator]
    family = model.config.model_type
    if family == "hunyuan_vl":
        raise ValueError("HunYuan-VL's visual tokens and learned rows cannot be distinguished.")
    inner = model.base_model
    decoder = model.get_decoder()
    is_multimodal = (
        getattr(model.config, "image_token_id", None) is not None
        and hasattr(inner, "get_image_features")
        and decoder is not inner
    )
    has_layers = isinstance(getattr(decoder, "layers", None), nn.ModuleList)
    if not is_multimodal or not has_layers or getattr(decoder, "norm", None) is None:
        raise ValueError(
            f"{type(model).__name__} ({family}) cannot be read. It must be a vision-language model "
            "without cross-attention, with config.image_token_id, get_image_features, and "
            "get_decoder() with layers and norm."
        )
    projector_name = PROJECTORS.get(family, "multi_modal_projector")
    projector = dict(inner.named_modules()).get(projector_name)
    modules = model.named_modules()
    projector_path = next((path for path, module in modules if module is projector), None)
    projector_norm = None
    if family == "normalign_llava" and model.config.projector_norm != "none":
        projector_norm = inner.multi_modal_projector.norm
    return Parts(model, inner, decoder, projector_path, projector, projector_norm)


def boundary_ids(config: PreTrainedConfig) -> set[int]:
    """Returns a configuration's ids of padding, and of starts and ends of images and sequences."""
    candidates = []
    for setting, value in [*config.to_dict().items(), *config.get_text_config().to_dict().items()]:
        if setting.endswith(("_token_id", "_token_ids", "_token_index")):
            candidates += value if isinstance(value, list) else [value]
    token_ids = {candidate for candidate in candidates if type(candidate) is int}
    return token_ids - {config.image_token_id}


def tokenizer_ids(tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Returns the ids of a tokenizer's special tokens, with those that were added later."""
    if tokenizer is None:
        return set()
    added_tokens = tokenizer.added_tokens_decoder.items()
    special_ids = {token_id for token_id, token in added_tokens if token.special}
    return special_ids.union(tokenizer.all_special_ids)


def token_positions(ids: Tensor, attention_mask: Tensor | None, image_id: int) -> dict[str, Tensor]:
    """Returns masks `(batch, tokens)` of `"visual"` tokens, and of `"text"`: others but padding."""
    is_image = ids == image_id
    is_attended = torch.ones_like(is_image)
    if attention_mask is not None and attention_mask.dim() == 2:
        is_attended = attention_mask.to(ids.device).bool()
    return {"visual": is_image & is_attended, "text": ~is_image & is_attended}


def token_kinds(
    inputs: Mapping, config: PreTrainedConfig, special: set[int], newline: Tensor | None = None
) -> Tensor:
    """Returns a mask for each kind of token, in the order of `report.KINDS`. Padding is in none.

    Args:
        inputs: Model inputs with `input_ids`, `(batch, tokens)`.
        special: Ids of special tokens.
        newline: Which of the image tokens, in order, are learned newlines. By default, none.

    Returns:
        Boolean masks, `(kinds, batch * tokens)`.
    """
    ids = inputs["input_ids"]
    positions = token_positions(ids, inputs.get("attention_mask"), config.image_token_id)
    is_image = positions["visual"]
    is_text = positions["text"]
    is_newline = torch.zeros_like(is_image)
    if newline is not None:
        is_newline[ids == config.image_token_id] = newline.to(ids.device)
    indicator_ids = getattr(config, "visual_indicator_token_ids", None) or []
    is_indicator = torch.isin(ids, ids.new_tensor(indicator_ids))
    is_special = torch.isin(ids, ids.new_tensor(sorted(special))) & ~is_indicator
    kind_masks = [
        is_image & ~is_newline,  # visual
        is_text & ~is_indicator & ~is_special,  # text
        is_text & is_special,
        is_image & is_newline,
        is_text & is_indicator,
    ]
    return torch.stack(kind_masks).flatten(1)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode, without gradients, and restores each module's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
