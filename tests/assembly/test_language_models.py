"""Language models that LLaVA cannot hold: each is refused with the reason, and nothing is left."""

import pytest
import tiny_language_models
import tiny_parts as parts
from transformers import CONFIG_MAPPING

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.parts import check_language_model
from normalign_llava.checkpoint.opening import open_checkpoint


BY_CONFIGURATION = {
    "minimax": "cache is of a kind of its own",
    "gemma4_text": "read a second embedding of each token, and a visual token has none",
    "qwen4_exp_text": "read a second embedding of each token",
    "trocr": "'trocr' model, not a causal language model with a cache",  # AutoModel has no class
    "gemma3": "with a cache. Save its 'gemma3_text' model by itself, and use that",
    "musicgen": "'musicgen' model, not a causal language model with a cache",  # has two texts
}


FIELDS = {"qwen4_exp_text": dict(ple_layer_ids=[1], eos_token_id=2)}  # without them, it is built


@pytest.mark.parametrize("kind", BY_CONFIGURATION)
def test_a_configuration_is_enough_to_refuse(tmp_path, kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    CONFIG_MAPPING[kind](**FIELDS.get(kind, {})).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=BY_CONFIGURATION[kind]):
        check_language_model(open_checkpoint(tmp_path))


BY_MODEL = {
    "dory": "its head is more than a matrix",  # logits have scales of their own
    "inkling2_text": "its embeddings are more than a matrix",  # N_text would be another
    "blt": "its configuration has no hidden_size",
    "deepseek_v4": "gets embeddings in place of token ids, and fails: AttributeError: 'NoneType'",
}


@pytest.mark.parametrize("kind", BY_MODEL)
def test_what_a_loaded_model_is_refused_for_is_named(tmp_path, kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    assert tiny_language_models.language(tmp_path / "language", kind) is None
    vision = parts.vision(tmp_path / "vision")
    with pytest.raises(ValueError, match=BY_MODEL[kind]):
        build_checkpoint(vision, str(tmp_path / "language"), tmp_path / "built")
    assert not (tmp_path / "built").exists()
