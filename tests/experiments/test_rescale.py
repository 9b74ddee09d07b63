"""The rescaled parts compute what they did, bit for bit, at another scale."""

import pytest
import tiny_parts
import torch
from rescale import rescale, rescale_encoder, rescale_language_model
from transformers import AutoImageProcessor, Dinov2Model, LlamaForCausalLM

from normalign_llava.fetched.convert import convert_language, convert_vision
from normalign_llava.fetched.easy_vqa import held_out, load_image


pytestmark = pytest.mark.slow


def assert_scaled(hidden_states, scaled_states, factor):
    for hidden_state, scaled_state in zip(hidden_states, scaled_states, strict=True):
        assert torch.equal(hidden_state * factor, scaled_state)


@torch.no_grad()
def test_logits_are_equal_bit_for_bit(archives):
    model = LlamaForCausalLM.from_pretrained(convert_language(), dtype=torch.float32).eval()
    tokens = torch.tensor([[504, 2591, 314, 253, 8013, 30, 1812, 314, 357, 47]])
    plain_outputs = model(tokens, output_hidden_states=True)
    rescale_language_model(model, 1 / 8)
    scaled_outputs = model(tokens, output_hidden_states=True)
    assert torch.equal(plain_outputs.logits, scaled_outputs.logits)
    # The last state is after the last norm.
    assert_scaled(plain_outputs.hidden_states[:-1], scaled_outputs.hidden_states[:-1], 1 / 8)


@torch.no_grad()
def test_hidden_states_of_the_encoder_are_multiples_bit_for_bit(archives):
    folder = convert_vision(56)
    model = Dinov2Model.from_pretrained(folder, dtype=torch.float32).eval()
    images = [load_image(question.image) for question in held_out(2, 1)[:3]]
    inputs = AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt")
    plain_outputs = model(inputs["pixel_values"], output_hidden_states=True)
    rescale_encoder(model, 16)
    scaled_outputs = model(inputs["pixel_values"], output_hidden_states=True)
    assert len(plain_outputs.hidden_states) == 13
    assert_scaled(plain_outputs.hidden_states, scaled_outputs.hidden_states, 16)
    assert torch.equal(plain_outputs.last_hidden_state, scaled_outputs.last_hidden_state)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def source_folders(request, tmp_path):
    """A tiny vision tower and a language model, whose embeddings are tied or not."""
    vision = tiny_parts.vision(tmp_path / "vision", "dinov2")
    language = tiny_parts.language(tmp_path / "language", tied=request.param)
    return vision, language


@pytest.fixture
def output(tmp_path):
    return tmp_path / "parts"


@pytest.fixture
def scaled_folders(source_folders, output):
    """The folders of the rescaled encoder and language model."""
    return rescale(*source_folders, output, text=0.125, features=4.0)


def test_folders_of_rescaled_parts_are_named_by_their_factors(scaled_folders, output):
    encoder, decoder = scaled_folders
    assert encoder == output / "vision-4"
    assert decoder == output / "language-0.125"


@torch.no_grad()
def test_a_rescaled_language_model_has_the_same_logits(source_folders, scaled_folders):
    _, language = source_folders
    _, decoder = scaled_folders
    plain_model = LlamaForCausalLM.from_pretrained(language).eval()
    scaled_model = LlamaForCausalLM.from_pretrained(decoder).eval()
    tokens = torch.arange(3, 20)[None]
    plain_outputs = plain_model(tokens, output_hidden_states=True)
    scaled_outputs = scaled_model(tokens, output_hidden_states=True)
    # The last state is after the last norm.
    assert_scaled(plain_outputs.hidden_states[:-1], scaled_outputs.hidden_states[:-1], 0.125)
    assert torch.equal(plain_outputs.logits, scaled_outputs.logits)


@torch.no_grad()
def test_a_rescaled_encoder_has_multiples_of_the_hidden_states(source_folders, scaled_folders):
    vision, _ = source_folders
    encoder, _ = scaled_folders
    plain_model = Dinov2Model.from_pretrained(vision).eval()
    scaled_model = Dinov2Model.from_pretrained(encoder).eval()
    pixel_values = torch.randn(2, 3, 16, 16)
    plain_outputs = plain_model(pixel_values, output_hidden_states=True)
    scaled_outputs = scaled_model(pixel_values, output_hidden_states=True)
    assert_scaled(plain_outputs.hidden_states, scaled_outputs.hidden_states, 4.0)
    # This is the output of the last norm.
    assert torch.equal(plain_outputs.last_hidden_state, scaled_outputs.last_hidden_state)


def test_rescaled_parts_are_written_once(source_folders, scaled_folders, output):
    written_files = [written_file for written_file in output.rglob("*") if written_file.is_file()]
    file_names = {written_file.name for written_file in written_files}
    assert "tokenizer.json" in file_names
    assert "preprocessor_config.json" in file_names

    written_times = [written_file.stat().st_mtime_ns for written_file in written_files]
    folders_again = rescale(*source_folders, output, text=0.125, features=4.0)
    assert folders_again == scaled_folders
    assert [written_file.stat().st_mtime_ns for written_file in written_files] == written_times
