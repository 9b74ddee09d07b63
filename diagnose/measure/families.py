# SPDX-License-Identifier: Apache-2.0
"""The modules of vision-language models of transformers that are measured.

Found by conventions of transformers: `config.image_token_id`, `get_image_features`, and a decoder with `layers` and
`norm`. There is no convention for the projector's name; `PROJECTORS` has it by family.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel


PROJECTORS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "visual.merger"),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "exaone4_5"), "visual.merger"),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), "connector"),
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid", "janus"), "aligner"),
    **dict.fromkeys(("hyperclovax_vision_v2", "paddleocr_vl", "video_llama_3"), "projector"),
    "ernie4_5_vl_moe": "resampler_model",
    "kimi_k25": "mm_projector",
    "lighton_ocr": "vision_projection",
    "ovis2": "visual_embeddings_table",
}
"""The projector's module within the base model, by `model_type`; for others `multi_modal_projector`."""

RESAMPLED = {"aria", "idefics2"}
"""Families, by `model_type`, whose visual tokens are learned queries, without a place in the image."""


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
            raise ValueError("Prompt tuning adds tokens that are not in the batch. Measure the model without it.")
        return find_parts(model.get_base_model())  # type: ignore[operator]
    family = model.config.model_type
    if family == "hunyuan_vl":
        raise ValueError("HunYuan-VL puts learned rows among the visual tokens, which cannot be told apart.")
    inner, decoder = model.base_model, model.get_decoder()
    needed = (getattr(model.config, "image_token_id", None), getattr(inner, "get_image_features", None))
    layers, final_norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if None in needed or decoder is inner or not isinstance(layers, nn.ModuleList) or final_norm is None:
        raise ValueError(
            f"{type(model).__name__} ({family}) cannot be read: no language model alone can, and none "
            "with cross-attention. It needs config.image_token_id, get_image_features, and "
            "get_decoder() with layers and norm."
        )
    name = PROJECTORS.get(family, "multi_modal_projector")
    projector = dict(inner.named_modules()).get(name)
    path = name if inner is model else f"{model.base_model_prefix}.{name}"
    has_norm = family == "normalign_llava" and model.config.projector_norm != "none"
    norm = inner.multi_modal_projector.norm if has_norm else None
    return Parts(model, inner, decoder, path if projector is not None else None, projector, norm)
