"""Generation as LLaVA's with a norm behind its projector; training after it in quantized models."""

import inspect

import pytest
import tiny
import torch
from transformers import BitsAndBytesConfig

from normalign_llava import (
    NormAlignLlavaForConditionalGeneration,
    modeling_normalign_llava as modeling,
)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def generate(model, batch, **options):
    """The ids of a greedy answer of six tokens, and the logits of each step."""
    torch.manual_seed(0)
    outputs = model.generate(
        **batch,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    prompt_length = batch["input_ids"].shape[1]
    return outputs.sequences[:, prompt_length:], torch.stack(outputs.logits)


@pytest.fixture(scope="module")
def reference(model):
    """Stock LLaVA with the same weights, its projector followed by torch's layer_norm in a hook."""
    llava = tiny.llava()
    llava_tensors = {}
    for tensor_name, tensor in model.state_dict().items():
        if "projector.norm" not in tensor_name:
            llava_tensors[tensor_name] = tensor
    llava.load_state_dict(llava_tensors)
    norm = model.model.multi_modal_projector.norm

    def normalise(module, arguments, output):
        return torch.nn.functional.layer_norm(
            output,
            norm.normalized_shape,
            norm.weight,
            norm.bias,
            norm.eps,
        )

    llava.model.multi_modal_projector.register_forward_hook(normalise)
    return llava


@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_generate_as_llava_with_a_norm_in_a_hook(model, reference, options, images):
    batch = tiny.inputs(images=images)
    expected_ids, expected_logits = generate(reference, batch, **options)
    answer_ids, logits = generate(model, batch, **options)
    assert torch.equal(answer_ids, expected_ids)
    # An untrained model repeats one token, whatever the image is; its logits differ.
    torch.testing.assert_close(logits, expected_logits)


@pytest.fixture
def warned(model, caplog):
    """Generates, and returns the warnings of images that are not there."""

    def run(**batch) -> list[str]:
        modeling.logger.warning_once.cache_clear()
        caplog.clear()
        model.generate(**batch, max_new_tokens=2, do_sample=False)
        return [message for message in caplog.messages if "image" in message]

    return run


def test_a_prompt_with_placeholders_but_no_image_is_warned_of(warned):
    # So does pipeline("text-generation") ask a model about an image.
    batch = tiny.inputs(images=2)
    del batch["pixel_values"]
    (warning,) = warned(**batch)
    assert 'Pass pixel_values, or use pipeline("image-text-to-text")' in warning


def test_prompts_that_miss_no_image_are_not_warned_of(warned, model):
    assert warned(**tiny.inputs(images=0)) == []
    batch = tiny.inputs(images=2)
    assert warned(**batch) == []

    # A second turn: the images are in the cache.
    parameters = inspect.signature(model.forward).parameters
    cache_name = "past_key_values"
    if "cache" in parameters:  # from transformers 5.24 on
        cache_name = "cache"
    first_turn = model(**batch, use_cache=True)
    new_ids = torch.tensor([[5, 6, 7]])
    input_ids = torch.cat([batch["input_ids"], new_ids], dim=1)
    second_turn = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        cache_name: first_turn[cache_name],
    }
    assert warned(**second_turn) == []


@pytest.fixture
def load_float32(tmp_path):
    """Loads a checkpoint with layers that are wide enough for 4 bits."""
    text_config = tiny.text_config(
        hidden_size=64,
        intermediate_size=128,
        head_dim=32,
    )
    tiny.model(text=text_config).save_pretrained(tmp_path)

    def load(**options):
        return NormAlignLlavaForConditionalGeneration.from_pretrained(
            tmp_path,
            dtype=torch.float32,
            **options,
        )

    return load


@pytest.fixture
def load_in_4_bits(load_float32):
    def load():
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
        )
        return load_float32(quantization_config=quantization)

    return load


def copy_quantized_values(quantized_model, reference):
    """Writes the values of 4-bit layers into ordinary float32 matrices."""
    from bitsandbytes.functional import dequantize_4bit

    for module_name, module in quantized_model.named_modules():
        if type(module).__name__ == "Linear4bit":
            values = dequantize_4bit(module.weight, module.weight.quant_state)
            with torch.no_grad():
                reference.get_submodule(module_name).weight.copy_(values)


def test_quantized_models_train_rightly_after_a_generate(load_float32, load_in_4_bits):
    """On AVX512, bitsandbytes repacks 4-bit weights in the first forward in eval mode, for good."""
    pytest.importorskip("bitsandbytes")
    quantized_model = load_in_4_bits()
    batch = {}
    for input_name, tensor in tiny.inputs().items():
        batch[input_name] = tensor.to(quantized_model.device)
    labels = batch["input_ids"]
    answer_ids, _ = generate(quantized_model, batch)
    assert answer_ids.shape == (1, 6)
    quantized_model.train()
    quantized_model(**batch, labels=labels).loss.backward()

    reference = load_float32().to(quantized_model.device).train()
    copy_quantized_values(load_in_4_bits(), reference)
    reference(**batch, labels=labels).loss.backward()

    trained_names = []
    for parameter_name, parameter in quantized_model.named_parameters():
        if parameter.grad is None:
            continue
        trained_names.append(parameter_name)
        expected = reference.get_parameter(parameter_name).grad
        if expected.norm() > 1e-6:
            difference = parameter.grad - expected
            assert difference.norm() <= 1e-4 * expected.norm(), parameter_name
    assert "model.multi_modal_projector.norm.weight" in trained_names
    assert any("vision_tower" in parameter_name for parameter_name in trained_names)
