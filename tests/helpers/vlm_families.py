# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A tiny random model and a batch of two sequences with images, for each family of vision-language models."""

import tiny
import torch
import vlm_batches as batches
from torch import Tensor
from transformers import (
    ConvNextConfig,
    DeepseekV3Config,
    FastVlmConfig,
    FastVlmForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    GraniteConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    Ovis2Config,
    Ovis2ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)


Made = tuple[PreTrainedModel, dict[str, Tensor]]
LAYERS = 3


def make(name: str, seed: int = 0) -> Made:
    """The family's model, in eval mode and float32, and a batch that its forward takes as it is.

    Weights have a scale at which layers turn states by ten or twenty degrees; fresh models this narrow turn them by
    hundredths of a degree. The sequences differ in words and images, and one is padded.
    """
    torch.manual_seed(seed)
    model, batch = _MAKERS[name](seed)
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


def _normalign_llava(seed: int) -> Made:
    return tiny.model(seed, text=_text()), batches.square(4, seed=seed)


def _llava(seed: int) -> Made:
    return tiny.llava(seed, text=_text()), batches.square(4, seed=seed)


_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def _llava_next(seed: int) -> Made:
    config = LlavaNextConfig(
        vision_config=tiny.vision_config("clip"),
        text_config=_text(),
        image_token_index=batches.IMAGE,
        image_grid_pinpoints=_PINPOINTS,
        tie_word_embeddings=True,
    )
    return LlavaNextForConditionalGeneration(config), batches.tiled(seed)


def _llava_onevision(seed: int) -> Made:
    config = LlavaOnevisionConfig(
        vision_config=tiny.vision_config("siglip"),
        text_config=_text(Qwen2Config),
        image_token_index=batches.IMAGE,
        video_token_index=batches.VIDEO,
        image_grid_pinpoints=_PINPOINTS,
    )
    return LlavaOnevisionForConditionalGeneration(config), batches.tiled(seed)


_TOWER = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
)
_BOUNDARIES = dict(
    image_token_id=batches.IMAGE,
    video_token_id=batches.VIDEO,
    vision_start_token_id=batches.START,
    vision_end_token_id=batches.END,
)
_SIZES = dict(vocab_size=tiny.VOCABULARY, hidden_size=tiny.WIDTH, intermediate_size=48, num_hidden_layers=LAYERS)
_HEADS = dict(num_attention_heads=2, num_key_value_heads=1)
_SPECIAL = dict(pad_token_id=batches.PAD, bos_token_id=batches.BOS, eos_token_id=batches.EOS)
_GRID_TOWER = dict(
    depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=tiny.WIDTH
)
_GRID_PATCH = (3 * 2 * 4 * 4,)  # channels, frames, height and width of a patch


def _rope(*sections: int) -> dict:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


def _grid_batch(seed: int) -> dict[str, Tensor]:
    return batches.with_types("mm_token_type_ids", batches.grids(_GRID_PATCH, seed))


def _qwen2_5_vl(seed: int) -> Made:
    config = Qwen2_5_VLConfig(
        text_config={**_SIZES, **_HEADS, **_SPECIAL, "rope_parameters": _rope(2, 3, 3)},
        vision_config={**_GRID_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        **_BOUNDARIES,
    )
    return Qwen2_5_VLForConditionalGeneration(config), _grid_batch(seed)


def _qwen3_vl(seed: int) -> Made:
    config = Qwen3VLConfig(
        text_config={**_SIZES, **_HEADS, **_SPECIAL, "head_dim": 16, "rope_parameters": _rope(4, 2, 2)},
        vision_config={**_GRID_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **_BOUNDARIES,
    )
    return Qwen3VLForConditionalGeneration(config), _grid_batch(seed)


def _ovis2(seed: int) -> Made:
    config = Ovis2Config(
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
    )
    return Ovis2ForConditionalGeneration(config), batches.ovis(seed)


def _qwen2_vl(seed: int) -> Made:
    config = Qwen2VLConfig(
        text_config={**_SIZES, **_HEADS, **_SPECIAL, "rope_parameters": _rope(2, 3, 3)},
        vision_config=dict(depth=2, embed_dim=16, hidden_size=tiny.WIDTH, mlp_ratio=2, num_heads=2, patch_size=4),
        **_BOUNDARIES,
    )
    return Qwen2VLForConditionalGeneration(config), _grid_batch(seed)


def _glm4v(seed: int) -> Made:
    config = Glm4vConfig(
        text_config={**_SIZES, **_HEADS, **_SPECIAL, "rope_parameters": _rope(2, 3, 3)},
        vision_config={**_GRID_TOWER, "image_size": 16},
        image_token_id=batches.IMAGE,
        video_token_id=batches.VIDEO,
        image_start_token_id=batches.START,
        image_end_token_id=batches.END,
        video_start_token_id=batches.START,
        video_end_token_id=batches.END,
    )
    return Glm4vForConditionalGeneration(config), _grid_batch(seed)


def _internvl(seed: int) -> Made:
    config = InternVLConfig(vision_config=_TOWER, text_config=_text(Qwen2Config), image_token_id=batches.IMAGE)
    return InternVLForConditionalGeneration(config), batches.square(4, boundaries=True, seed=seed)


def _smolvlm(seed: int) -> Made:
    config = SmolVLMConfig(vision_config=_TOWER, text_config=_text(), image_token_id=batches.IMAGE)
    return SmolVLMForConditionalGeneration(config), batches.listed(seed)


def _idefics3(seed: int) -> Made:
    config = Idefics3Config(vision_config=_TOWER, text_config=_text(), image_token_id=batches.IMAGE)
    return Idefics3ForConditionalGeneration(config), batches.listed(seed)


def _paligemma(seed: int) -> Made:
    config = PaliGemmaConfig(
        vision_config=tiny.vision_config("siglip"),
        text_config=_text(GemmaConfig),
        image_token_index=batches.IMAGE,
        projection_dim=tiny.WIDTH,
        hidden_size=tiny.WIDTH,
    )
    batch = batches.square(4, seed=seed)
    return PaliGemmaForConditionalGeneration(config), {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}


def _gemma3(seed: int) -> Made:
    config = Gemma3Config(
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
    )
    batch = batches.square(4, boundaries=True, seed=seed)
    return Gemma3ForConditionalGeneration(config), batches.with_types("token_type_ids", batch)


def _kimi_k25(seed: int) -> Made:
    config = Kimi_K25Config(
        text_config=DeepseekV3Config(
            **_SIZES,
            **_SPECIAL,
            num_attention_heads=2,
            num_key_value_heads=2,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            num_mtp_layers=0,
        ),
        vision_config=dict(
            patch_size=4,
            pos_emb_height=4,
            pos_emb_width=4,
            num_attention_heads=2,
            num_hidden_layers=2,
            hidden_size=16,
            intermediate_size=24,
        ),
        projection_hidden_size=16,
        **_BOUNDARIES,
    )
    return Kimi_K25ForConditionalGeneration(config), batches.grids((3, 4, 4), seed)


def _fast_vlm(seed: int) -> Made:
    tower = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16, hidden_size=16)
    config = FastVlmConfig(vision_config=tower, text_config=_text(Qwen2Config), image_token_index=batches.IMAGE)
    return FastVlmForConditionalGeneration(config), batches.square(4, seed=seed)


def _llava_next_granite(seed: int) -> Made:
    config = LlavaNextConfig(
        vision_config=tiny.vision_config("clip"),
        text_config=_text(GraniteConfig, embedding_multiplier=3.0, residual_multiplier=0.8),
        image_token_index=batches.IMAGE,
        image_grid_pinpoints=_PINPOINTS,
        tie_word_embeddings=True,
    )
    return LlavaNextForConditionalGeneration(config), batches.tiled(seed)


def mllama(seed: int = 0) -> Made:
    """Llama 3.2 Vision: its decoder sees images by cross-attention, so no token of the sequence stands for one."""
    torch.manual_seed(seed)
    config = MllamaConfig(
        vision_config=dict(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_global_layers=1,
            attention_heads=2,
            image_size=16,
            patch_size=8,
            max_num_tiles=2,
            supported_aspect_ratios=[[1, 1], [1, 2]],
            intermediate_layers_indices=[0],
            vision_output_dim=32,
        ),
        text_config={**_SIZES, **_HEADS, **_SPECIAL, "cross_attention_layers": [1]},
        image_token_index=batches.IMAGE,
    )
    return MllamaForConditionalGeneration(config).eval(), batches.cross(seed)


_MAKERS = {
    "normalign_llava": _normalign_llava,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_next_granite": _llava_next_granite,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "glm4v": _glm4v,
    "internvl": _internvl,
    "ovis2": _ovis2,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "paligemma": _paligemma,
    "gemma3": _gemma3,
    "kimi_k25": _kimi_k25,
    "fast_vlm": _fast_vlm,
}
FAMILIES = tuple(_MAKERS)
"""Names that `make` takes: each a `model_type`, and LLaVA-NeXT with Granite, which scales what enters its decoder."""
