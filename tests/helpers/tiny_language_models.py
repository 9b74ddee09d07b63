"""A tiny configuration and model of any causal language model of transformers, made by rules."""

from pathlib import Path

import tiny_parts as parts
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


SIZES = {
    # Widths.
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "attention_hidden_size": 32,
    "lru_width": 32,
    "embedding_dim": 32,
    "cross_dim": 32,
    "backbone_hidden_size": 32,
    "input_embedding_size": 32,
    "output_embedding_size": 32,
    "pronunciation_embed_dim": 32,
    "shape_embed_dim": 32,
    # Layers.
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "num_blocks": 4,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    # Attention heads.
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "index_n_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "swa_num_key_value_heads": 2,
    # Widths of a head.
    "head_dim": 8,
    "swa_head_dim": 8,
    "dim_head": 8,
    "kv_channels": 8,
    "d_head": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "index_head_dim": 8,
    "attention_head_size": 8,
    "linear_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rotary_dim": 8,
    "d_rel": 8,
    # Heads of linear attention.
    "linear_num_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    # The width of a query with its rotary part, and ranks.
    "qk_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    # Inner widths of MLPs.
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "dense_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "ffn_hidden_size": 48,
    "ffn_dim": 48,
    "dim_ff": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "feed_forward_size": 48,
    "dff": 48,
    "d_inner": 48,
    "intermediate_size_mlp": 48,
    "shared_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "router_hidden_size": 48,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "o_groups": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # Windows of attention.
    "sliding_window": 8,
    "sliding_window_size": 8,
    "window_size": 8,
    "attention_window_size": 8,
    "local_attention": 8,
    "keep_window_size": 8,
    "attention_chunk_size": 8,
    "index_topk": 8,
    "index_block_size": 8,
    # State-space layers.
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 8,
    "mamba_dt_rank": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_n_heads": 8,  # times 8 is twice the width
    "mamba_num_heads": 8,  # times 8 is twice the width
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "block_size": 8,
    "n_mamba_heads": 2,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    # Positions.
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "context_length": 256,
    "max_target_positions": 256,
    "max_source_positions": 256,
    # Others.
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "adapter_rank": 8,
    "layer_group_size": 2,
    "initializer_range": 0.1,
}
"""Small sizes by the names of fields, wherever a configuration has the field and sets it."""

LATENT_ATTENTION = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
MULTIMODAL_ROPE = dict(
    rope_type="default",
    rope_theta=1e4,
    mrope_section=[2, 1, 1],
)
EXCEPTIONS: dict[str, dict] = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "axk2": dict(index_topk=256),
    "blt": dict(
        encoder_hash_byte_group_size=[3, 4],
        encoder_hash_byte_group_vocab=64,
        local_attention_window_len=8,
        cross_attn_k=1,
    ),
    "blt_local_encoder": dict(hidden_size_global=32, cross_attn_k=1),
    "blt_local_decoder": dict(hidden_size_global=32, cross_attn_k=1),
    "cohere_compass_text": dict(
        rope_parameters=dict(
            sliding_attention=MULTIMODAL_ROPE,
            full_attention=MULTIMODAL_ROPE,
        ),
    ),
    "dbrx": dict(
        attn_config=dict(
            kv_n_heads=2,
            rope_theta=1e4,
            clip_qkv=8.0,
        ),
        ffn_config=dict(
            ffn_hidden_size=48,
            moe_num_experts=4,
            moe_top_k=2,
        ),
    ),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "doge": dict(keep_window_size=256),  # in longer texts, a cache changes which tokens are kept
    "dory": dict(n_input_layers=1, n_output_layers=1),
    "dots1": dict(
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
    "dots3_note_text": dict(
        num_key_value_heads=4,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=16,
        swa_head_dim=16,
        swa_qk_nope_head_dim=8,
        swa_v_head_dim=8,
    ),
    "dots3_note_vision_encoder": dict(
        adapter_in_dim=32,
        adapter_out_dim=32,
        pyramid_num_routed=[-1, -1, 2, 2],
    ),
    "dots3_note_audio_encoder": dict(
        adapter_input_size=32,
        adapter_out_dim=32,
        downsample_hidden_size=8,
    ),
    "falcon_h1": dict(mamba_d_ssm=64),
    "gemma3n_text": dict(
        layer_types=SLIDING_AND_FULL,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.95] * 4,
        intermediate_size=48,
    ),
    "gemma4_assistant": dict(
        backbone_hidden_size=32,
        text_config=dict(
            model_type="gemma4_text",
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_kv_shared_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=95,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
        ),
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "mamba2": dict(num_heads=8),
    "ministral": dict(head_dim=8),
    "nemotron": dict(num_key_value_heads=2),
    "qwen4_exp_text": dict(
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
        hc_lowrank=8,
        ple_embed_dim=32,
        ngram_vocab_size_base=50,
        split_ngram_parts=1,
    ),
    "reformer": dict(axial_pos_embds_dim=(16, 16), axial_pos_shape=(16, 16)),
    "zamba": dict(
        layers_block_type=["linear_attention"] * 2 + ["hybrid"] * 2,
        attention_hidden_size=64,
        attention_head_dim=16,
    ),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"] * 2,
        n_mamba_heads=8,
        mamba_ngroups=1,
        attention_hidden_size=64,
        attention_head_dim=16,
    ),
    "zaya": dict(num_experts_per_tok=1),
}
"""Fields by `model_type`, where the sizes do not fit one another."""

VOCABULARY = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
LARGEST = 5_000_000
"""The most parameters that count as tiny."""


def tiny_config(model_type: str, vocabulary_size: int, **fields) -> PreTrainedConfig:
    """Returns a small configuration of a model."""
    return _tiny(CONFIG_MAPPING[model_type], vocabulary_size, **fields)


def _tiny(
    config_class: type[PreTrainedConfig],
    vocabulary_size: int,
    **fields,
) -> PreTrainedConfig:
    exceptions = EXCEPTIONS.get(config_class.model_type, {})
    given_fields = {**exceptions, **fields}
    try:
        default_config = config_class()
    except Exception:  # such as one whose defaults do not fit each other
        default_config = config_class(**given_fields)
    small_fields = _small_fields(default_config, vocabulary_size)
    return config_class(**{**small_fields, **given_fields})


def _small_fields(default_config: PreTrainedConfig, vocabulary_size: int) -> dict:
    default_fields = vars(default_config)
    small_fields = {}
    for field_name, value in default_fields.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_token = field_name.endswith(("_token_id", "_token_index"))
        if isinstance(value, PreTrainedConfig):
            small_fields[field_name] = _tiny(type(value), vocabulary_size)
        elif field_name == "is_decoder":
            small_fields[field_name] = True
        elif field_name in SIZES and is_number:
            small_fields[field_name] = SIZES[field_name]
        elif field_name in VOCABULARY:
            small_fields[field_name] = vocabulary_size
        elif is_token and is_number:
            small_fields[field_name] = 0
    if "kv_lora_rank" in default_fields and "num_key_value_heads" in small_fields:
        small_fields["num_key_value_heads"] = small_fields["num_attention_heads"]
    small_fields["pad_token_id"] = 0
    small_fields["bos_token_id"] = 1
    small_fields["eos_token_id"] = 2
    return small_fields


def language(folder: Path, model_type: str) -> str | None:
    """Saves a tiny model with a tokenizer into a folder.

    Returns why transformers cannot make the model, and None if it can. Its configuration and
    tokenizer are saved either way.
    """
    tokenizer = parts.tokenizer()
    config = tiny_config(model_type, len(tokenizer))
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    torch.manual_seed(2)
    try:
        with torch.device("meta"):
            model_without_data = AutoModelForCausalLM.from_config(config)
        parameter_count = model_without_data.num_parameters()
        assert parameter_count < LARGEST, (
            f"{model_type} is not tiny: {parameter_count:,} parameters"
        )
        model = AutoModelForCausalLM.from_config(config)
        _vary(model)
        model.save_pretrained(folder)
    except (AttributeError, ImportError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@torch.no_grad()
def _vary(model: PreTrainedModel) -> None:
    """Changes parameters that start as one number, such as 0: they may hide what they scale."""
    for parameter in model.parameters():
        if parameter.numel() <= 1:
            continue
        first_value = parameter.flatten()[0]
        if (parameter == first_value).all():
            parameter += 0.1 * torch.randn_like(parameter)
