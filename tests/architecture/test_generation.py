"""Generation and attention: every decoding mode, batching, several images, and the errors that must come."""

import pytest
import tiny
import torch
from transformers import BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration


OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beam": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
}


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def generate(model, batch, tokens=6, **options):
    torch.manual_seed(0)
    out = model.generate(**batch, max_new_tokens=tokens, min_new_tokens=tokens, **{"do_sample": False, **options})
    return out[:, batch["input_ids"].shape[1] :]


@pytest.fixture(scope="module")
def reference(model):
    """Stock LLaVA with the same weights, its projector followed by torch's own layer_norm in a hook."""
    stock = tiny.llava()
    stock.load_state_dict({k: v for k, v in model.state_dict().items() if "projector.norm" not in k})
    norm = model.model.multi_modal_projector.norm

    def normalise(module, args, output):
        return torch.nn.functional.layer_norm(output, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    stock.model.multi_modal_projector.register_forward_hook(normalise)
    return stock


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("images", [0, 1, 3])
def test_generate_as_llava_with_a_norm_in_a_hook(model, reference, mode, images):
    batch = tiny.inputs(images=images)
    out = generate(model, batch, **OPTIONS[mode])
    assert out.shape == (1, 6)
    assert torch.equal(out, generate(reference, batch, **OPTIONS[mode]))


def test_left_padded_batch_equals_one_by_one(model):
    singles = [tiny.inputs(text=n, seed=n) for n in (3, 6, 9)]
    width = max(b["input_ids"].shape[1] for b in singles)
    pad = [width - b["input_ids"].shape[1] for b in singles]
    batch = {
        "input_ids": torch.cat(
            [torch.nn.functional.pad(b["input_ids"], (p, 0)) for b, p in zip(singles, pad, strict=True)]
        ),
        "attention_mask": torch.cat(
            [torch.nn.functional.pad(b["attention_mask"], (p, 0)) for b, p in zip(singles, pad, strict=True)]
        ),
        "pixel_values": torch.cat([b["pixel_values"] for b in singles]),
    }
    together = generate(model, batch)
    for row, single in zip(together, singles, strict=True):
        assert torch.equal(row, generate(model, single)[0])


def test_the_whole_model_compiles_without_a_graph_break(model):
    torch._dynamo.reset()
    batch = tiny.inputs()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits  # first: transformers then installs hooks, under a lock
        torch.testing.assert_close(compiled(**batch, use_cache=False).logits, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_models_train_rightly_after_a_generate(tmp_path, bits):
    """bitsandbytes repacks 4-bit weights on AVX512 processors in the first forward in eval mode, for good."""
    wide = dict(hidden_size=64, intermediate_size=128, head_dim=32)
    tiny.model(text=tiny.text_config(**wide)).save_pretrained(tmp_path)
    quantization = (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        if bits == 4
        else BitsAndBytesConfig(load_in_8bit=True)
    )

    def load(**kwargs):
        return NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32, **kwargs)

    quantized = load(quantization_config=quantization)
    batch = tiny.inputs()
    assert generate(quantized, batch).shape == (1, 6)
    quantized.train()
    loss = quantized(**batch, labels=batch["input_ids"]).loss
    loss.backward()

    # The reference holds the same quantized values as ordinary float32 matrices.
    fresh = load(quantization_config=quantization)
    reference = load().train()
    with torch.no_grad():
        for name, module in fresh.named_modules():
            if type(module).__name__ == "Linear4bit":
                import bitsandbytes.functional as bnb

                reference.get_submodule(name).weight.copy_(
                    bnb.dequantize_4bit(module.weight, module.weight.quant_state)
                )
            elif type(module).__name__ == "Linear8bitLt":
                scale = module.weight.SCB.view(-1, 1) / 127.0
                reference.get_submodule(name).weight.copy_(module.weight.data.float() * scale)
    reference(**batch, labels=batch["input_ids"]).loss.backward()

    trained = {name: p for name, p in quantized.named_parameters() if p.requires_grad and p.grad is not None}
    assert "model.multi_modal_projector.norm.weight" in trained
    assert any("vision_tower" in name for name in trained)
    tolerance = 1e-4 if bits == 4 else 5e-2  # LLM.int8 also rounds the activations
    for name, parameter in trained.items():
        expected = reference.get_parameter(name).grad
        if expected.norm() > 1e-6:
            assert (parameter.grad - expected).norm() <= tolerance * expected.norm(), name
