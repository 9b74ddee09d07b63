# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Where models keep what is measured, and what transformers promises of every family, seen on tiny real models."""

import pytest
import tiny
import torch
import vlm_batches as batches
import vlm_families as families
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import CLIPVisionModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from normalign_llava.diagnose.measure.families import find_parts


PROJECTORS = {
    "normalign_llava": "multi_modal_projector",
    "llava": "multi_modal_projector",
    "llava_next": "multi_modal_projector",
    "llava_next_granite": "multi_modal_projector",
    "llava_onevision": "multi_modal_projector",
    "qwen2_vl": "visual.merger",
    "qwen2_5_vl": "visual.merger",
    "qwen3_vl": "visual.merger",
    "glm4v": "visual.merger",
    "internvl": "multi_modal_projector",
    "ovis2": "visual_embeddings_table",
    "idefics3": "connector",
    "smolvlm": "connector",
    "paligemma": "multi_modal_projector",
    "gemma3": "multi_modal_projector",
    "kimi_k25": "mm_projector",
    "fast_vlm": "multi_modal_projector",
}
SCALES = {"llava_next_granite": 3.0}  # by which a decoder multiplies all of its inputs, visual ones too
NEWLINES = ("llava_next", "llava_next_granite", "llava_onevision")
VISUAL = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")

every_family = pytest.mark.parametrize("name", families.FAMILIES)


class Seen:
    """One forward pass, seen from hooks on the decoder's layers and on the projector."""

    def __init__(self, name: str):
        self.model, self.batch = families.make(name)
        self.parts = find_parts(self.model)
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.projected: list[Tensor] = []
        for layer in self.parts.layers:
            layer.register_forward_pre_hook(lambda _, arguments: self.inputs.append(arguments[0]))
            layer.register_forward_hook(lambda _, __, output: self.outputs.append(output))
        hook = self.parts.projector.register_forward_hook(lambda _, __, output: self.projected.append(output))
        with torch.no_grad():
            self.result = self.model(**self.batch, output_hidden_states=True, use_cache=False)
            hook.remove()
            visual = {key: value for key, value in self.batch.items() if key in VISUAL}
            features = self.model.model.get_image_features(**visual, return_dict=True).pooler_output
        self.features = rows(features) * SCALES.get(name, 1.0)
        self.image = self.batch["input_ids"] == batches.IMAGE
        self.attended = self.batch["attention_mask"].bool()


def rows(tensors) -> Tensor:
    """The last dimension's vectors of a tensor, or of several, one below the other."""
    return torch.cat([tensor.flatten(0, -2) for tensor in tensors])


def as_set(vectors: Tensor) -> set[tuple[float, ...]]:
    return {tuple(vector) for vector in vectors.tolist()}


def test_every_family_has_its_place_stated_here():
    assert set(PROJECTORS) == set(families.FAMILIES)


@every_family
def test_modules_are_found_where_they_are(name):
    model, _ = families.make(name)
    parts = find_parts(model)
    decoder = model.model.text_model if name in ("idefics3", "smolvlm") else model.model.language_model
    assert parts.model is model
    assert parts.inner is model.model
    assert parts.image_token == batches.IMAGE
    assert parts.decoder is decoder
    assert parts.layers is decoder.layers and len(parts.layers) == families.LAYERS
    assert parts.final_norm is decoder.norm
    assert parts.embeddings is decoder.embed_tokens
    assert parts.projector_name == f"model.{PROJECTORS[name]}"
    assert parts.projector is model.get_submodule(f"model.{PROJECTORS[name]}")
    assert parts.norm is (parts.projector.norm if name == "normalign_llava" else None)


@every_family
def test_a_base_model_without_head_has_the_same_parts(name):
    model, _ = families.make(name)
    parts, without_head = find_parts(model), find_parts(model.model)
    assert without_head.model is without_head.inner is parts.inner
    assert without_head.projector_name == PROJECTORS[name]
    for part in ("decoder", "layers", "final_norm", "embeddings", "projector", "norm"):
        assert getattr(without_head, part) is getattr(parts, part)


@every_family
def test_hidden_states_are_what_goes_into_the_first_layer_and_comes_out_of_all(name):
    seen = Seen(name)
    assert len(seen.inputs) == len(seen.outputs) == families.LAYERS
    for state in (*seen.inputs, *seen.outputs):
        assert isinstance(state, Tensor)
        assert state.shape == (*seen.batch["input_ids"].shape, tiny.WIDTH)
    states = seen.result.hidden_states
    assert len(states) == families.LAYERS + 1
    assert torch.equal(states[0], seen.inputs[0])
    assert torch.equal(states[-1], seen.parts.final_norm(seen.outputs[-1]))
    for index in range(1, families.LAYERS):
        if name != "qwen3_vl":
            assert torch.equal(seen.outputs[index - 1], seen.inputs[index])
            assert torch.equal(states[index], seen.inputs[index])


def test_qwen3_vl_adds_features_to_image_tokens_between_layers():
    seen = Seen("qwen3_vl")
    for output, entering in zip(seen.outputs[:-1], seen.inputs[1:], strict=True):
        assert torch.equal(output[~seen.image], entering[~seen.image])
        added = (entering - output)[seen.image].norm(dim=-1)
        assert (added > 0.1).all()


@every_family
def test_image_features_stand_at_the_image_tokens_of_the_first_layers_input(name):
    seen = Seen(name)
    assert len(seen.features) == seen.image.sum() > 0
    assert torch.equal(seen.inputs[0][seen.image], seen.features)


@every_family
def test_what_the_projector_gives_is_what_stands_there(name):
    seen = Seen(name)
    at_images = as_set(seen.inputs[0][seen.image])
    if name in NEWLINES:
        newline = tuple((seen.model.model.image_newline * SCALES.get(name, 1.0)).tolist())
        assert (seen.inputs[0][seen.image] == torch.tensor(newline)).all(-1).sum() == 2 + 4
        at_images.remove(newline)
    elif name == "ovis2":
        seen.projected.pop()  # of the indicators, looked up after the image
    assert at_images == as_set(rows(seen.projected) * SCALES.get(name, 1.0))


def test_ovis2_has_rows_of_the_visual_table_at_its_indicators():
    seen = Seen("ovis2")
    table = seen.parts.projector.weight[-len(batches.INDICATORS) :]
    for row, indicator in zip(table, batches.INDICATORS, strict=True):
        at = seen.inputs[0][seen.batch["input_ids"] == indicator]
        assert torch.equal(at, row.expand_as(at))
    assert torch.isin(seen.batch["input_ids"], torch.tensor(batches.INDICATORS)).sum() == 3 + 4


@every_family
def test_batches_tell_sequences_and_seeds_apart(name):
    seen = Seen(name)
    text = seen.attended & ~seen.image
    assert not seen.attended.all() and seen.image.any(1).all() and not (seen.image & ~seen.attended).any()
    for row in range(2):
        places = seen.image[row].nonzero()
        assert text[row, : places.min()].sum() > 1 and text[row, places.max() :].sum() > 1
    first, second = (as_set(seen.inputs[0][row][seen.image[row]]) for row in range(2))
    newline = 1 if name in NEWLINES else 0
    assert len(first & second) == newline
    assert torch.isfinite(seen.result.logits[seen.attended]).all()
    model, batch = families.make(name)
    assert all(torch.equal(value, batch[key]) for key, value in seen.batch.items())
    assert all(torch.equal(a, b) for a, b in zip(seen.model.parameters(), model.parameters(), strict=True))
    model, batch = families.make(name, seed=1)
    assert not torch.equal(seen.batch["pixel_values"], batch["pixel_values"])
    assert not torch.equal(seen.parts.embeddings.weight, model.get_input_embeddings().weight)


def test_models_that_look_at_images_by_cross_attention_are_refused():
    model, batch = families.mllama()
    with torch.no_grad():
        assert torch.isfinite(model(**batch).logits).all()
    with pytest.raises(ValueError, match="MllamaForConditionalGeneration") as error:
        find_parts(model)
    message = str(error.value)
    assert "Not found: get_image_features." in message and "cross-attention" in message


@pytest.mark.parametrize("cls", [LlamaForCausalLM, LlamaModel])
def test_text_models_are_refused(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__} .*Not found: config.image_token_id, get_image_features"):
        find_parts(cls(tiny.text_config(cls=LlamaConfig)))


def test_encoders_are_refused():
    with pytest.raises(ValueError, match="CLIPVisionModel .*Not found: config.image_token_id, get_image_features"):
        find_parts(CLIPVisionModel(tiny.vision_config()))


def test_modules_that_are_no_models_are_refused():
    with pytest.raises(ValueError, match="Linear is not a model of transformers"):
        find_parts(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["normalign_llava", "qwen2_5_vl"])
def test_adapters_are_looked_through(name):
    model, _ = families.make(name)
    bare = find_parts(model)
    wrapped = find_parts(get_peft_model(model, LoraConfig(target_modules=r".*language_model.*q_proj", r=2)))
    assert wrapped == bare


def test_a_projector_that_adapters_train_whole_is_the_trained_one():
    model, batch = families.make("normalign_llava")
    config = LoraConfig(target_modules=r".*language_model.*q_proj", r=2, modules_to_save=["multi_modal_projector"])
    adapted = get_peft_model(model, config)
    parts = find_parts(adapted)
    trained = [parameter for parameter in parts.norm.parameters() if parameter.requires_grad]
    assert len(trained) == len(list(parts.norm.parameters())) > 0
    outputs = []
    parts.projector.register_forward_hook(lambda _, __, output: outputs.append(output))
    parts.norm.register_forward_hook(lambda _, __, output: outputs.append(output))
    adapted(**batch)
    assert len(outputs) == 2 and torch.equal(outputs[0], outputs[1])
