# SPDX-License-Identifier: Apache-2.0
"""The rescaled parts compute what they did, bit for bit, at another scale."""

import pytest
import torch
from rescale import rescale_encoder, rescale_language_model
from transformers import AutoImageProcessor, Dinov2Model, LlamaForCausalLM

from normalign_llava.fetched.convert import convert_language, convert_vision
from normalign_llava.fetched.easy_vqa import held_out, load_image


pytestmark = pytest.mark.slow

TEXT, FEATURES = 1 / 8, 16
TOKENS = torch.tensor([[504, 2591, 314, 253, 8013, 30, 1812, 314, 357, 47]])


@pytest.fixture(scope="module")
def parts(archives):
    return convert_vision(56), convert_language()


@torch.no_grad()
def test_logits_are_equal_bit_for_bit(parts):
    model = LlamaForCausalLM.from_pretrained(parts[1], dtype=torch.float32).eval()
    before = model(TOKENS, output_hidden_states=True)
    rescale_language_model(model, TEXT)
    after = model(TOKENS, output_hidden_states=True)
    assert torch.equal(before.logits, after.logits)
    for state, scaled in zip(before.hidden_states[:-1], after.hidden_states[:-1], strict=True):
        assert torch.equal(state * TEXT, scaled)


@torch.no_grad()
def test_hidden_states_of_the_encoder_are_multiples_bit_for_bit(parts):
    model = Dinov2Model.from_pretrained(parts[0], dtype=torch.float32).eval()
    images = [load_image(question.image) for question in held_out(2, 1)[:3]]
    inputs = AutoImageProcessor.from_pretrained(parts[0])(images, return_tensors="pt")
    before = model(inputs["pixel_values"], output_hidden_states=True)
    rescale_encoder(model, FEATURES)
    after = model(inputs["pixel_values"], output_hidden_states=True)
    assert len(before.hidden_states) == 13
    for state, scaled in zip(before.hidden_states, after.hidden_states, strict=True):
        assert torch.equal(state * FEATURES, scaled)
    assert torch.equal(before.last_hidden_state, after.last_hidden_state)
