"""The rescaled parts compute what they did, bit for bit, at another scale."""

import pytest
import torch
from rescale import rescale_encoder, rescale_language_model
from transformers import AutoImageProcessor, Dinov2Model, LlamaForCausalLM

from normalign_llava.fetched.convert import convert_language, convert_vision
from normalign_llava.fetched.easy_vqa import held_out, load_image


pytestmark = pytest.mark.slow


@torch.no_grad()
def test_logits_are_equal_bit_for_bit(archives):
    model = LlamaForCausalLM.from_pretrained(convert_language(), dtype=torch.float32).eval()
    tokens = torch.tensor([[504, 2591, 314, 253, 8013, 30, 1812, 314, 357, 47]])
    before = model(tokens, output_hidden_states=True)
    rescale_language_model(model, 1 / 8)
    after = model(tokens, output_hidden_states=True)
    assert torch.equal(before.logits, after.logits)
    for state, scaled in zip(before.hidden_states[:-1], after.hidden_states[:-1], strict=True):
        assert torch.equal(state / 8, scaled)


@torch.no_grad()
def test_hidden_states_of_the_encoder_are_multiples_bit_for_bit(archives):
    folder = convert_vision(56)
    model = Dinov2Model.from_pretrained(folder, dtype=torch.float32).eval()
    images = [load_image(question.image) for question in held_out(2, 1)[:3]]
    inputs = AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt")
    before = model(inputs["pixel_values"], output_hidden_states=True)
    rescale_encoder(model, 16)
    after = model(inputs["pixel_values"], output_hidden_states=True)
    assert len(before.hidden_states) == 13
    for state, scaled in zip(before.hidden_states, after.hidden_states, strict=True):
        assert torch.equal(state * 16, scaled)
    assert torch.equal(before.last_hidden_state, after.last_hidden_state)
