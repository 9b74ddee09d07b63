"""A tiny Qwen2 with a tokenizer that llama.cpp knows, and its GGUF, written without its script."""

import json

import gguf
import tiny_parts
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
_WORDS = "what is this where are they which colour has it a red kite over the sea in the park"
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def language(folder, chat_template=tiny_parts.CHATML):
    """Saves a Qwen2 of two layers with a byte-level tokenizer."""
    tokenizer = _trained_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=None,
    )
    model = transformers.Qwen2ForCausalLM(config)
    tiny_parts.scale_matrices(model, 4.0)  # so that what was said before matters
    model.save_pretrained(folder)
    return str(folder)


def _trained_tokenizer() -> transformers.PreTrainedTokenizerFast:
    backend_tokenizer = Tokenizer(models.BPE())
    backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend_tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend_tokenizer.train_from_iterator([_WORDS], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend_tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )


def write(model, processor, file, dtype=gguf.GGMLQuantizationType.F32):
    """Writes the Qwen2 in a NormAlign-LLaVA model. Matrices of its layers have `dtype`."""
    language_model = model.model.language_model
    config = language_model.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer, processor, len(model.get_input_embeddings().weight))
    _add_tensors(writer, model, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer, model, dtype):
    language_model = model.model.language_model
    tensors = {
        "token_embd.weight": language_model.embed_tokens.weight,
        "output_norm.weight": language_model.norm.weight,
        "output.weight": model.lm_head.weight,
    }
    for layer_index, layer in enumerate(language_model.layers):
        layer_weights = layer.state_dict()
        for weight_name, gguf_name in _LAYER.items():
            tensors[f"blk.{layer_index}.{gguf_name}"] = layer_weights[weight_name]
    for tensor_name, tensor in tensors.items():
        array = tensor.detach().float().numpy()
        if tensor_name.startswith("blk.") and array.ndim == 2:
            quantized_rows = gguf.quants.quantize(array, dtype)
            writer.add_tensor(tensor_name, quantized_rows, raw_dtype=dtype)
        else:
            writer.add_tensor(tensor_name, array)


def _add_tokenizer(writer, processor, embedding_rows):
    tokenizer = processor.tokenizer
    token_texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for index in range(len(token_texts), embedding_rows):
        token_texts.append(f"[PAD{index}]")
    special_texts = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    token_types = []
    for token_text in token_texts:
        if token_text in special_texts:
            token_types.append(gguf.TokenType.CONTROL)
        else:
            token_types.append(gguf.TokenType.NORMAL)
    backend_state = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = [" ".join(pair) for pair in backend_state["model"]["merges"]]

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(token_texts)
    writer.add_token_types(token_types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(processor.chat_template)
