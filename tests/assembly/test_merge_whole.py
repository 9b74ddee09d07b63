"""Merging loses nothing of an adapter, whatever PEFT trained: compared with PEFT's own model."""

import pytest
import tiny
import tiny_parts as parts
import torch
from adapters import LINEARS, load, logits, make_adapter
from safetensors.torch import load_file
from stored import weights
from transformers import GPT2Config, MixtralConfig

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter


pytestmark = pytest.mark.slow

Q = r".*\.language_model\..*\.q_proj"
WITH_BIAS = r".*(vision_tower.*fc1|multi_modal_projector\.linear_1)"  # these have a bias
TOKENS = [5, 9, 30]
EMBEDDINGS, HEAD = r".*\.embed_tokens", r"lm_head"
BOTH = ["embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    vision = parts.vision(root / "vision", "siglip")
    sizes = dict(hidden_size=64, intermediate_size=128)
    moe = dict(sizes, cls=MixtralConfig, num_local_experts=3, num_experts_per_tok=2)
    kinds = {
        "tied": dict(sizes, tied=True),
        "untied": dict(sizes, tied=False),
        "experts": dict(moe, tied=False),
        "conv1d": dict(tied=True, cls=GPT2Config, hidden_size=32),
    }
    for name, how in kinds.items():
        language = parts.language(root / f"{name}-language", **how)
        build_checkpoint(vision, language, root / name)
    return {name: root / name for name in kinds}


CASES = [
    # base, what is trained, whether embeddings and head are one tensor in the result
    ("tied", dict(bias="all"), True),
    ("untied", dict(bias="all", modules_to_save=None), False),
    ("untied", dict(bias="all", use_dora=True), False),
    ("tied", dict(bias="lora_only", target_modules=WITH_BIAS, modules_to_save=None), True),
    ("tied", dict(lora_bias=True, target_modules=WITH_BIAS, modules_to_save=None), True),
    ("tied", dict(target_modules=EMBEDDINGS), False),
    ("tied", dict(target_modules=EMBEDDINGS, use_dora=True), False),
    ("untied", dict(target_modules=EMBEDDINGS), False),
    ("tied", dict(target_modules=HEAD), False),
    ("untied", dict(target_modules=HEAD), False),
    ("tied", dict(target_modules=BOTH), False),
    ("untied", dict(target_modules=BOTH, use_rslora=True), False),
    ("tied", dict(target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True), True),
    ("tied", dict(trainable_token_indices=TOKENS), True),
    ("tied", dict(trainable_token_indices={"embed_tokens": TOKENS, "lm_head": [7]}), False),
    ("untied", dict(trainable_token_indices=TOKENS), False),
    ("untied", dict(trainable_token_indices={"embed_tokens": [4], "lm_head": TOKENS}), False),
    ("tied", dict(modules_to_save=["embed_tokens"]), False),
    ("tied", dict(modules_to_save=["lm_head"]), False),
    ("tied", dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True), True),
    ("untied", dict(modules_to_save=BOTH), False),
    ("tied", dict(modules_to_save=["lm_head"], bias="all"), False),
    ("tied", dict(rank_pattern={"q_proj": 7}, alpha_pattern={"v_proj": 31, "fc1": 3}), True),
    ("tied", dict(target_modules=r".*patch_embedding"), True),
    ("tied", dict(target_modules=[], target_parameters=["layers.1.self_attn.q_proj.weight"]), True),
    (
        "experts",
        dict(target_modules=Q, target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
        False,
    ),
    ("conv1d", dict(target_modules=r".*language_model.*c_attn", fan_in_fan_out=True), True),
    ("conv1d", dict(target_modules=r".*language_model.*c_fc", bias="all"), True),
]


@pytest.mark.parametrize("base, trained, tied", CASES)
def test_everything_that_peft_trained_is_in_the_result(bases, tmp_path, base, trained, tied):
    model = make_adapter(bases[base], tmp_path / "adapter", **trained)
    expected = logits(model, bases[base])
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = load(tmp_path / "merged")
    # Seen at most 2e-5 of up to 40, from the order of sums.
    torch.testing.assert_close(logits(merged, bases[base]), expected, rtol=1e-5, atol=3e-5)
    assert (logits(load(bases[base]), bases[base]) - expected).abs().max() > 1e-2
    assert report.difference < 1e-5
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == tied
    assert ("lm_head.weight" in weights(tmp_path / "merged")) == (not tied)


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_embeddings_that_peft_saves_besides_are_used(bases, tmp_path, base):
    """Whatever they hold in the file, as PEFT would load them into its base."""
    how = dict(save_embedding_layers=True, target_modules=EMBEDDINGS)
    make_adapter(bases[base], tmp_path / "adapter", **how)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(name.endswith("embed_tokens.base_layer.weight") for name in tensors)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
