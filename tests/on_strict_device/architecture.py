"""The architecture and its alignment: the same numbers as on the CPU."""

import pytest
import tiny
import torch
from strict_device import STRICT, assert_close_on_device, on_device

from normalign_llava import NormAlignLlavaForConditionalGeneration


def train_step(model, batch):
    """The loss and the gradients of one step."""
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    gradients = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[parameter_name] = parameter.grad.clone()
    model.zero_grad()
    return loss, gradients


def generate(model, batch):
    return model.generate(**batch, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize(
    "norm_options",
    [
        {},
        {"projector_norm": "rms_norm"},
        {"projector_norm": "none", "gradient_compensation": "none"},
    ],
)
@pytest.mark.parametrize("images", [0, 2])
def test_forward_backward_and_generation(norm_options, images):
    model = tiny.model(**norm_options)
    batch = tiny.inputs(images=images, batch=2)
    expected_loss, expected_gradients = train_step(model, batch)
    expected_answer = generate(model, batch)

    model = model.to(STRICT)
    batch = on_device(batch)
    loss, gradients = train_step(model, batch)
    assert_close_on_device(loss, expected_loss)
    assert gradients.keys() == expected_gradients.keys()
    for parameter_name, gradient in gradients.items():
        expected = expected_gradients[parameter_name]
        assert_close_on_device(gradient, expected, rtol=1e-4, atol=1e-5)
    assert_close_on_device(generate(model, batch), expected_answer)


def test_a_llava_checkpoint_is_aligned_as_it_is_loaded(tmp_path):
    tiny.llava().save_pretrained(tmp_path)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, device_map=STRICT)
    text_norm = tiny.reference_n_text(model.get_input_embeddings().weight)
    gain = model.base_model.multi_modal_projector.norm.weight.detach()
    expected_gain = torch.full((tiny.WIDTH,), text_norm / tiny.WIDTH**0.5)
    assert_close_on_device(gain, expected_gain)
