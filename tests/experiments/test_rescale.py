# SPDX-License-Identifier: Apache-2.0
"""The rescaled parts compute what they did, bit for bit, at another scale."""

import copy

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


@pytest.fixture(scope="module")
def language(parts):
    return LlamaForCausalLM.from_pretrained(parts[1], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rescaled_language(language):
    model = copy.deepcopy(language)
    rescale_language_model(model, TEXT)
    return model


@torch.no_grad()
def test_logits_are_equal_bit_for_bit(language, rescaled_language):
    before, after = (model(TOKENS, output_hidden_states=True) for model in (language, rescaled_language))
    assert torch.equal(before.logits, after.logits)
    for state, scaled in zip(before.hidden_states[:-1], after.hidden_states[:-1], strict=True):
        assert torch.equal(state * TEXT, scaled)


@torch.no_grad()
def test_hidden_states_of_the_encoder_are_multiples_bit_for_bit(parts):
    before = Dinov2Model.from_pretrained(parts[0], dtype=torch.float32).eval()
    after = copy.deepcopy(before)
    rescale_encoder(after, FEATURES)
    images = [load_image(question.image) for question in held_out(2, 1)[:3]]
    pixels = AutoImageProcessor.from_pretrained(parts[0])(images, return_tensors="pt")["pixel_values"]
    plain, scaled = (model(pixels, output_hidden_states=True) for model in (before, after))
    assert len(plain.hidden_states) == 13
    for state, other in zip(plain.hidden_states, scaled.hidden_states, strict=True):
        assert torch.equal(state * FEATURES, other)
    assert torch.equal(plain.last_hidden_state, scaled.last_hidden_state)
