# SPDX-License-Identifier: Apache-2.0
"""Configurations of models of known size. Models with random weights are made from them."""

from typing import Any

from transformers import LlamaConfig, LlavaConfig, PreTrainedConfig, Qwen2Config, SiglipVisionConfig


def sizes(width: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """Returns the sizes of a transformer by the names that configurations give them."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


SIGLIP_10M = sizes(192, 768, 4, 3, image_size=64, patch_size=16)
SIGLIP_50M = sizes(384, 1536, 6, 6, image_size=128, patch_size=16)
SIGLIP_BASE = sizes(768, 3072, 12, 12, image_size=224, patch_size=16)
SIGLIP_SO400M = sizes(1152, 4304, 27, 16, image_size=384, patch_size=14)

TINY = sizes(64, 128, 2, 2)
SIGLIP_TINY = {**TINY, "image_size": 32, "patch_size": 8}
LLAMA_10M = sizes(256, 1024, 6, 4, vocab_size=8192)
QWEN2_50M = sizes(512, 1536, 8, 8, num_key_value_heads=2, vocab_size=32_768)
SMOLLM2_135M = sizes(576, 1536, 30, 9, num_key_value_heads=3, vocab_size=49_152)
LLAMA_3_2_1B = sizes(2048, 8192, 16, 32, num_key_value_heads=8, vocab_size=128_256)
LLAMA_3_2_3B = sizes(3072, 8192, 28, 24, num_key_value_heads=8, vocab_size=128_256, head_dim=128)
QWEN2_5_7B = sizes(3584, 18_944, 28, 28, num_key_value_heads=4, vocab_size=152_064)

SHAPES: dict[str, tuple[dict[str, Any], PreTrainedConfig]] = {
    "tiny": (SIGLIP_TINY, LlamaConfig(**TINY, vocab_size=300)),
    "10m": (SIGLIP_10M, LlamaConfig(**LLAMA_10M, tie_word_embeddings=True)),
    "50m": (SIGLIP_50M, Qwen2Config(**QWEN2_50M, tie_word_embeddings=False)),
    "135m": (SIGLIP_BASE, LlamaConfig(**SMOLLM2_135M, tie_word_embeddings=True)),
    "1b": (SIGLIP_SO400M, LlamaConfig(**LLAMA_3_2_1B, tie_word_embeddings=True)),
    "3b": (SIGLIP_SO400M, LlamaConfig(**LLAMA_3_2_3B, tie_word_embeddings=True)),
    "7b": (SIGLIP_SO400M, Qwen2Config(**QWEN2_5_7B, tie_word_embeddings=False)),
}
"""Vision encoder and language model: for tests; two small ones; SigLIP-base with SmolLM2-135M; 1B;
the paper's two (appendix E)."""


def llava_config(shape: str, cls: type[LlavaConfig]) -> LlavaConfig:
    """Returns the configuration of a model. Its image token is the vocabulary's last."""
    vision_sizes, language_config = SHAPES[shape]
    return cls(
        vision_config=SiglipVisionConfig(**vision_sizes, vision_use_head=False),
        text_config=language_config,
        image_token_index=language_config.vocab_size - 1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=language_config.tie_word_embeddings,
    )
