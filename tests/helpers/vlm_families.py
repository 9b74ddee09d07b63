# SPDX-License-Identifier: Apache-2.0
"""A tiny random model and a batch of two sequences with images, for each family of vision-language models."""

import copy
from functools import partial

import tiny
import torch
import vlm_batches as batches
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    ConvNextConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


Made = tuple[PreTrainedModel, dict[str, Tensor]]
LAYERS = 3


def make(name: str, seed: int = 0) -> Made:
    """The family's model, in eval mode and float32, and a batch that its forward takes as it is.

    Weights have a scale at which layers turn states by ten or twenty degrees; fresh models this narrow turn them by
    hundredths of a degree. The sequences differ in words and images, and one is padded.
    """
    torch.manual_seed(seed)
    if name in ("normalign_llava", "llava"):
        maker = tiny.model if name == "normalign_llava" else tiny.llava
        model, batch = maker(seed, text=_text()), batches.square(4, seed=seed)
    else:
        settings, make_batch = _FAMILIES[name]
        config = CONFIG_MAPPING[name.removesuffix("_granite")](**copy.deepcopy(settings))
        model, batch = AutoModelForImageTextToText.from_config(config), make_batch(seed=seed)
    _rescale(model)
    if name == "normalign_llava":
        model.align_projector_norm()
    return model.eval(), batch


def _rescale(model: PreTrainedModel) -> None:
    # Norms' gains and biases leave their defaults too: a reference that forgot one of them would not show it else.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            elif "visual_embeddings_table" in name:
                parameter.normal_()  # an image's token is a mean of many of these rows
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 0.3).mul_(1.0 + 0.5 * torch.rand(len(parameter), 1))
            else:
                fan_in = parameter[0].numel() if parameter.dim() > 3 else parameter.shape[-1]
                parameter.normal_(0.0, fan_in**-0.5)
        for parameter in model.get_decoder().layers.parameters():
            if parameter.dim() > 1:
                parameter *= 0.5


def _text(cls: type[PreTrainedConfig] = LlamaConfig, **kwargs) -> PreTrainedConfig:
    return tiny.text_config(cls=cls, num_hidden_layers=LAYERS, **kwargs)


_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_TOWER = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
)
_GRID_TOWER = dict(
    depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=tiny.WIDTH
)
_GRID_PATCH = (3 * 2 * 4 * 4,)  # channels, frames, height and width of a patch
_IMAGE_AND_VIDEO = dict(image_token_id=batches.IMAGE, video_token_id=batches.VIDEO)
_BOUNDARIES = dict(**_IMAGE_AND_VIDEO, vision_start_token_id=batches.START, vision_end_token_id=batches.END)
_SIZES = dict(vocab_size=tiny.VOCABULARY, hidden_size=tiny.WIDTH, intermediate_size=48, num_hidden_layers=LAYERS)
_HEADS = dict(num_attention_heads=2, num_key_value_heads=1)
_SPECIAL = dict(pad_token_id=batches.PAD, bos_token_id=batches.BOS, eos_token_id=batches.EOS)


def _rope(*sections: int) -> dict:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {**_SIZES, **_HEADS, **_SPECIAL, "rope_parameters": rope}


def _grids(seed: int) -> dict[str, Tensor]:
    return batches.with_types("mm_token_type_ids", batches.grids(_GRID_PATCH, seed))


def _paligemma(seed: int) -> dict[str, Tensor]:
    batch = batches.square(4, seed=seed)
    return {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}


def _gemma3(seed: int) -> dict[str, Tensor]:
    return batches.with_types("token_type_ids", batches.square(4, boundaries=True, seed=seed))


def _llava_next(text: PreTrainedConfig) -> dict:
    return dict(
        vision_config=tiny.vision_config("clip"),
        text_config=text,
        image_token_index=batches.IMAGE,
        image_grid_pinpoints=_PINPOINTS,
        tie_word_embeddings=True,
    )


_LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
_EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
_FAMILIES = {
    "llava_next": (_llava_next(_text()), batches.tiled),
    "llava_next_granite": (
        _llava_next(_text(GraniteConfig, embedding_multiplier=3.0, residual_multiplier=0.8)),
        batches.tiled,
    ),
    "llava_onevision": (
        dict(
            vision_config=tiny.vision_config("siglip"),
            text_config=_text(Qwen2Config),
            image_token_index=batches.IMAGE,
            video_token_index=batches.VIDEO,
            image_grid_pinpoints=_PINPOINTS,
        ),
        batches.tiled,
    ),
    "qwen2_vl": (
        dict(
            text_config=_rope(2, 3, 3),
            vision_config=dict(depth=2, embed_dim=16, hidden_size=tiny.WIDTH, mlp_ratio=2, num_heads=2, patch_size=4),
            **_BOUNDARIES,
        ),
        _grids,
    ),
    "qwen2_5_vl": (
        dict(
            text_config=_rope(2, 3, 3),
            vision_config={**_GRID_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
            **_BOUNDARIES,
        ),
        _grids,
    ),
    "qwen3_vl": (
        dict(
            text_config={**_rope(4, 2, 2), "head_dim": 16},
            vision_config={**_GRID_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            **_BOUNDARIES,
        ),
        _grids,
    ),
    "glm4v": (
        dict(
            text_config=_rope(2, 3, 3),
            vision_config={**_GRID_TOWER, "image_size": 16},
            **_IMAGE_AND_VIDEO,
            **{f"{kind}_start_token_id": batches.START for kind in ("image", "video")},
            **{f"{kind}_end_token_id": batches.END for kind in ("image", "video")},
        ),
        _grids,
    ),
    "internvl": (
        dict(vision_config=_TOWER, text_config=_text(Qwen2Config), image_token_id=batches.IMAGE),
        partial(batches.square, 4, boundaries=True),
    ),
    "ovis2": (
        dict(
            vision_config={
                **_TOWER,
                "patch_size": 8,
                "vocab_size": 40,
                "num_visual_indicator_tokens": len(batches.INDICATORS),
            },
            text_config=_text(Qwen2Config),
            image_token_id=batches.IMAGE,
            visual_indicator_token_ids=list(batches.INDICATORS),
            vocab_size=tiny.VOCABULARY,
            hidden_size=tiny.WIDTH,
        ),
        batches.ovis,
    ),
    "idefics3": (dict(vision_config=_TOWER, text_config=_text(), image_token_id=batches.IMAGE), batches.listed),
    "smolvlm": (dict(vision_config=_TOWER, text_config=_text(), image_token_id=batches.IMAGE), batches.listed),
    "paligemma": (
        dict(
            vision_config=tiny.vision_config("siglip"),
            text_config=_text(GemmaConfig),
            image_token_index=batches.IMAGE,
            projection_dim=tiny.WIDTH,
            hidden_size=tiny.WIDTH,
        ),
        _paligemma,
    ),
    "gemma3": (
        dict(
            vision_config=SiglipVisionConfig(**_TOWER, vision_use_head=False),
            text_config=_text(
                Gemma3TextConfig,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            mm_tokens_per_image=4,
            image_token_index=batches.IMAGE,
            boi_token_index=batches.START,
            eoi_token_index=batches.END,
        ),
        _gemma3,
    ),
    "kimi_k25": (
        dict(
            text_config=DeepseekV3Config(
                **{**_SIZES, **_SPECIAL, **_HEADS, "num_key_value_heads": 2},
                **_EXPERTS,
                **_LATENT,
                first_k_dense_replace=1,
                num_mtp_layers=0,
            ),
            vision_config={**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
            projection_hidden_size=16,
            **_BOUNDARIES,
        ),
        partial(batches.grids, (3, 4, 4)),
    ),
    "fast_vlm": (
        dict(
            vision_config=ConvNextConfig(
                hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16, hidden_size=16
            ),
            text_config=_text(Qwen2Config),
            image_token_index=batches.IMAGE,
        ),
        partial(batches.square, 4),
    ),
}
FAMILIES = ("normalign_llava", "llava", *_FAMILIES)
"""Names that `make` takes: each a `model_type`, and LLaVA-NeXT with Granite, which scales what enters its decoder."""
