"""A tiny configuration and model of any causal language model of transformers, made by rules."""

from pathlib import Path

import tiny_parts as parts
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


SIZES = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "embedding_dim", "cross_dim"), 32),
    **dict.fromkeys(("backbone_hidden_size", "input_embedding_size"), 32),
    **dict.fromkeys(("output_embedding_size", "pronunciation_embed_dim", "shape_embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("attention_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "kv_channels", "d_head"), 8),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("attention_head_size", "linear_head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "rotary_dim", "d_rel"), 8),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 4),
    "qk_head_dim": 16,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size", "ffn_dim", "dim_ff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "dff"), 48),
    **dict.fromkeys(("d_inner", "intermediate_size_mlp", "shared_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "router_hidden_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "o_groups"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size"), 8),
    **dict.fromkeys(("attention_window_size", "local_attention", "keep_window_size"), 8),
    **dict.fromkeys(("attention_chunk_size", "index_topk", "index_block_size"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_dt_rank", "mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),  # times 8 is twice the width
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 8),
    **dict.fromkeys(("n_mamba_heads", "n_groups", "mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("context_length", "max_target_positions", "max_source_positions"), 256),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "adapter_rank"), 8),
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
HALVES = ["sliding_attention", "full_attention"] * 2
EXCEPTIONS: dict[str, dict] = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "axk2": dict(index_topk=256),
    "blt": dict(
        encoder_hash_byte_group_size=[3, 4],
        encoder_hash_byte_group_vocab=64,
        local_attention_window_len=8,
        cross_attn_k=1,
    ),
    **dict.fromkeys(
        ("blt_local_encoder", "blt_local_decoder"), dict(hidden_size_global=32, cross_attn_k=1)
    ),
    "cohere_compass_text": dict(
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
            for kind in HALVES[:2]
        }
    ),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "doge": dict(keep_window_size=256),  # from here on, a cache changes which tokens are kept
    "dory": dict(n_input_layers=1, n_output_layers=1),
    "dots1": dict(n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2),
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
        adapter_in_dim=32, adapter_out_dim=32, pyramid_num_routed=[-1, -1, 2, 2]
    ),
    "dots3_note_audio_encoder": dict(
        adapter_input_size=32, adapter_out_dim=32, downsample_hidden_size=8
    ),
    "falcon_h1": dict(mamba_d_ssm=64),
    "gemma3n_text": dict(
        layer_types=HALVES,
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
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"] * 2),
    "deepseek_v2": dict(num_experts_per_tok=2),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), dict(head_dim=8)),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "mamba2": dict(num_heads=8),
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
        layers_block_type=["linear_attention", "linear_attention", "hybrid", "hybrid"],
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


def tiny_config(model_type: str, rows: int, **fields) -> PreTrainedConfig:
    """Returns a small configuration of a model, with a vocabulary of `rows`."""
    return _tiny(CONFIG_MAPPING[model_type], rows, **fields)


def _tiny(cls: type[PreTrainedConfig], rows: int, **fields) -> PreTrainedConfig:
    given = {**EXCEPTIONS.get(cls.model_type, {}), **fields}
    try:
        default = cls()
    except Exception:  # such as one whose defaults do not fit each other
        default = cls(**given)
    return cls(**{**_small_fields(default, rows), **given})


def _small_fields(default: PreTrainedConfig, rows: int) -> dict:
    small = {}
    for name, value in vars(default).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, PreTrainedConfig):
            small[name] = _tiny(type(value), rows)
        elif name == "is_decoder":
            small[name] = True
        elif name in SIZES and is_number:
            small[name] = SIZES[name]
        elif name in VOCABULARY:
            small[name] = rows
        elif name.endswith(("_token_id", "_token_index")) and is_number:
            small[name] = 0
    if "kv_lora_rank" in vars(default) and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return small | ids


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
            parameters = AutoModelForCausalLM.from_config(config).num_parameters()
        assert parameters < LARGEST, f"{model_type} is not tiny: {parameters:,} parameters"
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
        if parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all():
            parameter += 0.1 * torch.randn_like(parameter)
