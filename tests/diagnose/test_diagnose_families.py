# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The modules that are measured, found in tiny real models of every family."""

import pytest
import tiny
import torch
import vlm_batches as batches
import vlm_families as families
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CLIPVisionModel, LlamaForCausalLM, LlamaModel

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

every_family = pytest.mark.parametrize("name", families.FAMILIES)


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


def test_models_with_cross_attention_are_refused():
    model, _ = families.mllama()
    with pytest.raises(ValueError, match="MllamaForConditionalGeneration") as error:
        find_parts(model)
    message = str(error.value)
    assert "Not found: get_image_features." in message and "cross-attention" in message


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: LlamaForCausalLM(tiny.text_config()), "Not found: config.image_token_id, get_image_features"),
        (lambda: LlamaModel(tiny.text_config()), "Not found: config.image_token_id, get_image_features"),
        (lambda: CLIPVisionModel(tiny.vision_config()), "Not found: config.image_token_id, get_image_features"),
        (lambda: nn.Linear(2, 2), "not a model of transformers"),
    ],
)
def test_other_models_are_refused(model, said):
    model = model()
    with pytest.raises(ValueError, match=f"{type(model).__name__} .*{said}"):
        find_parts(model)


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
