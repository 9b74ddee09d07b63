"""The rescaled parts compute what they did, bit for bit, at another scale."""

import pytest
import tiny_parts
import torch
from rescale import rescale, rescale_encoder, rescale_language_model
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


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_both_parts_are_written_once_at_their_own_scale(tmp_path, tied):
    vision = tiny_parts.vision(tmp_path / "vision", "dinov2")
    language = tiny_parts.language(tmp_path / "language", tied=tied)
    output = tmp_path / "parts"
    encoder, decoder = rescale(vision, language, output, text=0.125, features=4.0)
    assert (encoder, decoder) == (output / "vision-4", output / "language-0.125")
    tokens = torch.arange(3, 20)[None]
    pixels = torch.randn(2, 3, 16, 16)
    for model_class, source, result, inputs, factor in (
        (LlamaForCausalLM, language, decoder, tokens, 0.125),
        (Dinov2Model, vision, encoder, pixels, 4.0),
    ):
        plain, scaled = (model_class.from_pretrained(file).eval() for file in (source, result))
        before, after = (model(inputs, output_hidden_states=True) for model in (plain, scaled))
        last = -1 if model_class is LlamaForCausalLM else None  # after the last norm
        pairs = zip(before.hidden_states[:last], after.hidden_states[:last], strict=True)
        assert all(torch.equal(state * factor, changed) for state, changed in pairs)
        assert torch.equal(before[0], after[0])  # logits, or the last norm's output
    files = [path for path in output.rglob("*") if path.is_file()]
    written = {path: path.stat().st_mtime_ns for path in files}
    assert {"tokenizer.json", "preprocessor_config.json"} <= {path.name for path in files}
    assert rescale(vision, language, output, text=0.125, features=4.0) == (encoder, decoder)
    assert {path: path.stat().st_mtime_ns for path in files} == written
