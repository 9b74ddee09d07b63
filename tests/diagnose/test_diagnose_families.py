# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The modules that are measured, found in tiny real models of every family."""

import pytest
import tiny
import vlm_batches as batches
import vlm_families as families
from torch import nn
from transformers import LlamaForCausalLM

from normalign_llava.diagnose.measure.families import find_parts


PROJECTORS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"), "visual.merger"),
    **dict.fromkeys(("idefics3", "smolvlm"), "connector"),
    "ovis2": "visual_embeddings_table",
    "kimi_k25": "mm_projector",
}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_modules_are_found_where_they_are(name):
    model, _ = families.make(name)
    parts, projector = find_parts(model), PROJECTORS.get(name, "multi_modal_projector")
    decoder = model.model.text_model if name in ("idefics3", "smolvlm") else model.model.language_model
    assert parts.model is model
    assert parts.inner is model.model
    assert parts.image_token == batches.IMAGE
    assert parts.decoder is decoder
    assert parts.layers is decoder.layers and len(parts.layers) == families.LAYERS
    assert parts.final_norm is decoder.norm
    assert parts.embeddings is decoder.embed_tokens
    assert parts.projector_name == f"model.{projector}"
    assert parts.projector is model.get_submodule(f"model.{projector}")
    assert parts.norm is (parts.projector.norm if name == "normalign_llava" else None)
    without_head = find_parts(model.model)
    assert without_head.model is without_head.inner is parts.inner and without_head.projector_name == projector
    assert without_head.projector is parts.projector and without_head.layers is parts.layers


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
        (lambda: nn.Linear(2, 2), "not a model of transformers"),
    ],
)
def test_other_models_are_refused(model, said):
    model = model()
    with pytest.raises(ValueError, match=f"{type(model).__name__} .*{said}"):
        find_parts(model)
