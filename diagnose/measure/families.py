# SPDX-License-Identifier: Apache-2.0
"""The modules of transformers' vision-language models that are measured, and the kinds of token.

transformers has no convention for the projector's name; `PROJECTORS` has it by family.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


PROJECTORS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "visual.merger"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "exaone4_5", "glm_ocr"), "visual.merger"),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), "visual.merger"),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), "connector"),
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid", "janus"), "aligner"),
    **dict.fromkeys(("hyperclovax_vision_v2", "paddleocr_vl", "video_llama_3"), "projector"),
    "ernie4_5_vl_moe": "resampler_model",
    "kimi_k25": "mm_projector",
    "lighton_ocr": "vision_projection",
    "ovis2": "visual_embeddings_table",
}
"""The projector's name in the base model, by `model_type`; of others `multi_modal_projector`."""

RESAMPLED = {"aria", "idefics2"}
"""Families (`model_type`) whose visual tokens are learned queries, without a place in the image."""


@dataclass(frozen=True)
class Parts:
    """The modules of a vision-language model."""

    model: PreTrainedModel  # without adapters around it
    inner: PreTrainedModel  # the base model, whose forward merges image features and text
    decoder: Any  # the language model without its head; it has `layers` and `norm`
    projector_name: str | None  # in `model`; None if not known for this family
    projector: nn.Module | None
    norm: nn.Module | None  # at the end of the projector of this package's models


def decoder_layers(decoder: PreTrainedModel) -> nn.ModuleList:
    """A language model's layers, whatever their name."""
    count = decoder.config.get_text_config().num_hidden_layers
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    return next(layers for layers in lists if len(layers) == count)


def find_parts(model: nn.Module) -> Parts:
    """The parts of `model`, with or without PEFT adapters. Raises ValueError if it lacks some."""
    if not isinstance(model, PreTrainedModel):
        if model.active_peft_config.is_prompt_learning:  # type: ignore[union-attr]
            raise ValueError("Prompt tuning adds tokens to a batch. Measure the model without it.")
        return find_parts(model.get_base_model())  # type: ignore[operator]
    family = model.config.model_type
    if family == "hunyuan_vl":
        raise ValueError("HunYuan-VL's visual tokens cannot be told from learned rows among them.")
    inner, decoder = model.base_model, model.get_decoder()
    needed = (model.config, "image_token_id"), (inner, "get_image_features"), (decoder, "norm")
    lacking = any(getattr(owner, name, None) is None for owner, name in needed)
    layers = getattr(decoder, "layers", None)
    if lacking or decoder is inner or not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} ({family}) cannot be read: no language model alone can, and "
            "none with cross-attention. It needs config.image_token_id, get_image_features, and "
            "get_decoder() with layers and norm."
        )
    name = PROJECTORS.get(family, "multi_modal_projector")
    projector = dict(inner.named_modules()).get(name)
    path = name if inner is model else f"{model.base_model_prefix}.{name}"
    has_norm = family == "normalign_llava" and model.config.projector_norm != "none"
    norm = inner.multi_modal_projector.norm if has_norm else None
    return Parts(model, inner, decoder, path if projector is not None else None, projector, norm)


def boundary_ids(config: PreTrainedConfig) -> set[int]:
    """Ids in a configuration of starts and ends of vision, of a sequence, and padding."""
    ids: set[int] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                values = value if isinstance(value, list) else [value]
                ids.update(number for number in values if type(number) is int)
    return ids - {config.image_token_id}


def tokenizer_ids(tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Ids of a tokenizer's special tokens, including those added later."""
    if tokenizer is None:
        return set()
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def token_positions(ids: Tensor, attention_mask: Tensor | None, image_id: int) -> dict[str, Tensor]:
    """Masks `(batch, tokens)` of `"visual"` tokens and of all others but padding, `"text"`."""
    image = ids == image_id
    attended = torch.ones_like(image)
    if attention_mask is not None and attention_mask.dim() == 2:
        attended = attention_mask.to(ids.device).bool()
    return {"visual": image & attended, "text": ~image & attended}


def token_kinds(
    inputs: Mapping, config: PreTrainedConfig, special: set[int], newline: Tensor | None = None
) -> Tensor:
    """Boolean masks `(kinds, batch * tokens)` in the order of `report.KINDS`; padding is in none.

    `special` are ids of special tokens, and `newline` tells which of the image tokens, in order,
    are learned newlines.
    """
    ids = inputs["input_ids"]
    image, text = token_positions(ids, inputs.get("attention_mask"), config.image_token_id).values()
    ends = torch.zeros_like(image)
    if newline is not None:
        ends[ids == config.image_token_id] = newline.to(ids.device)

    def among(wanted: Iterable[int]) -> Tensor:
        return torch.isin(ids, torch.tensor(sorted(wanted), dtype=ids.dtype, device=ids.device))

    indicators = among(getattr(config, "visual_indicator_token_ids", None) or ())
    other = among(special) & ~indicators
    words = text & ~indicators & ~other
    kinds = (image & ~ends, words, text & other, image & ends, text & indicators)
    return torch.stack([mask.flatten() for mask in kinds])
