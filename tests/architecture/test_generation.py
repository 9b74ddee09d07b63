"""Generation as LLaVA's with a norm behind its projector; training after it in quantized models."""

from functools import partial

import pytest
import tiny
import torch
from transformers import BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def generate(model, batch, tokens=6, **options):
    torch.manual_seed(0)
    options = {"do_sample": False, "min_new_tokens": tokens, **options}
    out = model.generate(**batch, max_new_tokens=tokens, **options)
    return out[:, batch["input_ids"].shape[1] :]


@pytest.fixture(scope="module")
def reference(model):
    """Stock LLaVA with the same weights, its projector followed by torch's layer_norm in a hook."""
    stock = tiny.llava()
    state = model.state_dict()
    stock.load_state_dict({name: state[name] for name in state if "projector.norm" not in name})
    norm = model.model.multi_modal_projector.norm

    def normalise(module, args, output):
        shape = norm.normalized_shape
        return torch.nn.functional.layer_norm(output, shape, norm.weight, norm.bias, norm.eps)

    stock.model.multi_modal_projector.register_forward_hook(normalise)
    return stock


@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_generate_as_llava_with_a_norm_in_a_hook(model, reference, options, images):
    batch = tiny.inputs(images=images)
    assert torch.equal(generate(model, batch, **options), generate(reference, batch, **options))


def test_quantized_models_train_rightly_after_a_generate(tmp_path):
    """On AVX512, bitsandbytes repacks 4-bit weights in the first forward in eval mode, for good."""
    dequantize_4bit = pytest.importorskip("bitsandbytes").functional.dequantize_4bit
    wide = dict(hidden_size=64, intermediate_size=128, head_dim=32)
    tiny.model(text=tiny.text_config(**wide)).save_pretrained(tmp_path)
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    cls = NormAlignLlavaForConditionalGeneration
    dtype = torch.float32
    load = partial(cls.from_pretrained, tmp_path, dtype=dtype)
    quantized = load(quantization_config=BitsAndBytesConfig(**nf4))
    batch = {name: tensor.to(quantized.device) for name, tensor in tiny.inputs().items()}
    assert generate(quantized, batch).shape == (1, 6)
    quantized.train()
    loss = quantized(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    # The reference holds the same quantized values as ordinary float32 matrices.
    fresh = load(quantization_config=BitsAndBytesConfig(**nf4))
    reference = load().to(quantized.device).train()
    with torch.no_grad():
        for name, module in fresh.named_modules():
            if type(module).__name__ == "Linear4bit":
                values = dequantize_4bit(module.weight, module.weight.quant_state)
                reference.get_submodule(name).weight.copy_(values)
    reference(**batch, labels=batch["input_ids"]).loss.backward()
    trained = {name: p for name, p in quantized.named_parameters() if p.grad is not None}
    assert "model.multi_modal_projector.norm.weight" in trained
    assert any("vision_tower" in name for name in trained)
    for name, parameter in trained.items():
        expected = reference.get_parameter(name).grad
        if expected.norm() > 1e-6:
            assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm(), name
