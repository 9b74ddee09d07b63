# SPDX-License-Identifier: Apache-2.0
"""Configurations of models of known size, by which models with random weights are made."""

from typing import Any

from transformers import LlamaConfig, LlavaConfig, PreTrainedConfig, Qwen2Config, SiglipVisionConfig


SIGLIP_BASE = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
SIGLIP_SO400M = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16)

TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
LLAMA_10M = dict(
    vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
    tie_word_embeddings=True,
)  # fmt: skip
QWEN2_50M = dict(
    vocab_size=32_768, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
SMOLLM2_135M = dict(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_3_2_1B = dict(
    vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_3_2_3B = dict(
    vocab_size=128_256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
QWEN2_5_7B = dict(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip

SHAPES: dict[str, tuple[dict[str, Any], PreTrainedConfig]] = {
    "tiny": (TINY | dict(image_size=32, patch_size=8), LlamaConfig(**TINY, vocab_size=300)),
    "10m": (
        dict(hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=3)
        | dict(image_size=64, patch_size=16),
        LlamaConfig(**LLAMA_10M),
    ),
    "50m": (
        dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6)
        | dict(image_size=128, patch_size=16),
        Qwen2Config(**QWEN2_50M),
    ),
    "135m": (SIGLIP_BASE | dict(image_size=224, patch_size=16), LlamaConfig(**SMOLLM2_135M)),
    "1b": (SIGLIP_SO400M | dict(image_size=384, patch_size=14), LlamaConfig(**LLAMA_3_2_1B)),
    "3b": (SIGLIP_SO400M | dict(image_size=384, patch_size=14), LlamaConfig(**LLAMA_3_2_3B)),
    "7b": (SIGLIP_SO400M | dict(image_size=384, patch_size=14), Qwen2Config(**QWEN2_5_7B)),
}
"""Vision encoder and language model of each: for tests; two small ones; SigLIP-base with SmolLM2-135M; 1B; the paper
(appendix E)."""


def llava_config(shape: str, cls: type[LlavaConfig]) -> LlavaConfig:
    """The configuration of a model of this shape, whose image token is the last of the vocabulary."""
    vision, language = SHAPES[shape]
    return cls(
        vision_config=SiglipVisionConfig(**vision, vision_use_head=False),
        text_config=language,
        image_token_index=language.vocab_size - 1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=language.tie_word_embeddings,
    )
