"""The rescaled parts compute what they did, bit for bit, at another scale."""

from pathlib import Path
from typing import NamedTuple

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
def hidden_states_and_outputs(model, inputs):
    """Returns all hidden states of a model, and its logits or the output of its last norm."""
    outputs = model(inputs, output_hidden_states=True)
    return outputs.hidden_states, outputs[0]


def load_language_model(folder, **options):
    return LlamaForCausalLM.from_pretrained(folder, **options).eval()


def load_encoder(folder, **options):
    return Dinov2Model.from_pretrained(folder, **options).eval()


def test_logits_are_equal_bit_for_bit(archives):
    model = load_language_model(convert_language(), dtype=torch.float32)
    tokens = torch.tensor([[504, 2591, 314, 253, 8013, 30, 1812, 314, 357, 47]])
    plain_states, plain_logits = hidden_states_and_outputs(model, tokens)
    rescale_language_model(model, 1 / 8)
    scaled_states, scaled_logits = hidden_states_and_outputs(model, tokens)
    assert torch.equal(plain_logits, scaled_logits)
    # The last state is after the last norm.
    assert_scaled(plain_states[:-1], scaled_states[:-1], 1 / 8)


def test_hidden_states_of_the_encoder_are_multiples_bit_for_bit(archives):
    folder = convert_vision(56)
    model = load_encoder(folder, dtype=torch.float32)
    images = [load_image(question.image) for question in held_out(2, 1)[:3]]
    image_processor = AutoImageProcessor.from_pretrained(folder)
    pixel_values = image_processor(images, return_tensors="pt")["pixel_values"]
    plain_states, plain_output = hidden_states_and_outputs(model, pixel_values)
    rescale_encoder(model, 16)
    scaled_states, scaled_output = hidden_states_and_outputs(model, pixel_values)
    assert len(plain_states) == 13
    assert_scaled(plain_states, scaled_states, 16)
    assert torch.equal(plain_output, scaled_output)


class Folders(NamedTuple):
    """The folders of a vision tower and a language model."""

    vision: Path
    language: Path


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def source_folders(request, tmp_path):
    """A tiny vision tower and a language model, whose embeddings are tied or not."""
    return Folders(
        tiny_parts.vision(tmp_path / "vision", "dinov2"),
        tiny_parts.language(tmp_path / "language", tied=request.param),
    )


@pytest.fixture
def output(tmp_path):
    return tmp_path / "parts"


@pytest.fixture
def scaled_folders(source_folders, output):
    """The same, rescaled."""
    vision, language = rescale(*source_folders, output, text=0.125, features=4.0)
    return Folders(vision, language)


def test_folders_of_rescaled_parts_are_named_by_their_factors(scaled_folders, output):
    assert scaled_folders.vision == output / "vision-4"
    assert scaled_folders.language == output / "language-0.125"


def test_a_rescaled_language_model_has_the_same_logits(source_folders, scaled_folders):
    plain_model = load_language_model(source_folders.language)
    scaled_model = load_language_model(scaled_folders.language)
    tokens = torch.arange(3, 20)[None]
    plain_states, plain_logits = hidden_states_and_outputs(plain_model, tokens)
    scaled_states, scaled_logits = hidden_states_and_outputs(scaled_model, tokens)
    # The last state is after the last norm.
    assert_scaled(plain_states[:-1], scaled_states[:-1], 0.125)
    assert torch.equal(plain_logits, scaled_logits)


def test_a_rescaled_encoder_has_multiples_of_the_hidden_states(source_folders, scaled_folders):
    plain_model = load_encoder(source_folders.vision)
    scaled_model = load_encoder(scaled_folders.vision)
    pixel_values = torch.randn(2, 3, 16, 16)
    plain_states, plain_output = hidden_states_and_outputs(plain_model, pixel_values)
    scaled_states, scaled_output = hidden_states_and_outputs(scaled_model, pixel_values)
    assert_scaled(plain_states, scaled_states, 4.0)
    assert torch.equal(plain_output, scaled_output)


def test_rescaled_parts_are_written_once(source_folders, scaled_folders, output):
    written_files = [written_file for written_file in output.rglob("*") if written_file.is_file()]
    file_names = {written_file.name for written_file in written_files}
    assert "tokenizer.json" in file_names
    assert "preprocessor_config.json" in file_names

    written_times = [written_file.stat().st_mtime_ns for written_file in written_files]
    folders_again = rescale(*source_folders, output, text=0.125, features=4.0)
    assert folders_again == scaled_folders
    assert [written_file.stat().st_mtime_ns for written_file in written_files] == written_times
