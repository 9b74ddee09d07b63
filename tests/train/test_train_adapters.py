# SPDX-License-Identifier: Apache-2.0
"""PEFT's options of LoRA: what is named is trained and merged, or refused before weights are loaded."""

import copy
import shutil
from dataclasses import fields
from fnmatch import fnmatch

import pytest
import torch
import training
from peft import LoraConfig
from stored import assert_merged, store, weights
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig, Qwen2Config
from trl import ModelConfig, get_peft_config

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignTrainer
from normalign_llava.assembly.adapter import open_adapter
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.evaluate.engine import MultimodalLM
from normalign_llava.hub_cards.push.checks import check_checkpoint
from normalign_llava.train.options import ModelArguments
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


LAYERS = "model.language_model.layers.*"
LINEARS = {f"{LAYERS}{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")}
Q, V, DOWN = (f"{LAYERS}{name}_proj.weight" for name in ("q", "v", "down"))
SECOND = "*.language_model.layers.1.self_attn.q_proj.weight"
BLOCK = "language_model.layers.1.mlp"
EMBEDDINGS, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
TOKENS = [68, 87]  # a and t, which are in every row


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Checkpoints, tied and not, whose queries, keys and values have biases."""
    folder = tmp_path_factory.mktemp("bases")
    return {tied: training.checkpoint(folder / str(tied), tied=tied, cls=Qwen2Config) for tied in (True, False)}


def tensors(folder):
    """Those of a checkpoint, with the head of a tied one."""
    found = weights(folder)
    return {HEAD: found[EMBEDDINGS], **found}


def trained(adapters, base, folder, quantization=None):
    trainer = NormAlignTrainer(
        base if isinstance(base, torch.nn.Module) else str(base),
        training.arguments(folder, learning_rate=1e-2),
        None,
        training.rows(),
        quantization_config=quantization,
        peft_config=adapters,
    )
    trainer.train()
    trainer.save_model()
    return trainer


TRAINED = [
    (dict(lora_r=3, lora_alpha=5, lora_dropout=0.4, lora_task_type="CAUSAL_LM"), LINEARS),
    (dict(use_rslora=True, use_dora=True), LINEARS),
    (dict(lora_target_modules=["q_proj"]), {Q}),
    (dict(lora_modules_to_save=["lm_head", "input_layernorm"]), {*LINEARS, HEAD, f"{LAYERS}.input_layernorm.weight"}),
    (dict(target_modules="q_proj, v_proj"), {Q, V}),
    (dict(target_modules=r".*\.language_model\..*\.(q|down)_proj"), {Q, DOWN}),
    (dict(target_modules="all-linear", exclude_modules=["q_proj", "lm_head"]), LINEARS - {Q}),
    (dict(target_modules=["layers.1.self_attn.q_proj"], init_lora_weights="gaussian"), {SECOND}),
    (dict(target_modules=["q_proj"], layers_to_transform=1), {SECOND}),
    (dict(init_lora_weights=False), LINEARS),
    (dict(modules_to_save=["embed_tokens"]), {*LINEARS, EMBEDDINGS}),
    (dict(target_modules=["q_proj"], modules_to_save=[BLOCK]), {Q, f"*.{BLOCK}.*"}),
    (dict(modules_to_save=["multi_modal_projector"], fan_in_fan_out=True), LINEARS),
    (dict(target_modules=["q_proj", "embed_tokens"], use_dora=True), {Q, EMBEDDINGS}),
    (dict(target_modules=["q_proj"], trainable_token_indices=TOKENS), {Q, EMBEDDINGS}),
]
"""Options of TRL or PEFT, and the tensors that change in a language model whose head is not its embeddings."""

TIED = [
    (dict(), LINEARS),
    (dict(lora_modules_to_save=["lm_head"]), {*LINEARS, HEAD}),
    (dict(modules_to_save=["embed_tokens"]), {*LINEARS, EMBEDDINGS}),
    (dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True), {*LINEARS, EMBEDDINGS, HEAD}),
]
"""The same where embeddings and head are one tensor."""


def assert_computes_the_same(trainer, folder):
    """The model that was trained, the merged one and the adapter on its base, as asked and evaluated."""
    inputs = trainer.data_collator([trainer.train_dataset[0]])
    merged = AutoModelForImageTextToText.from_pretrained(folder / "merged")
    evaluated = MultimodalLM(open_adapter(folder).load(), trainer.processing_class, batch_size=1).model
    with torch.no_grad():
        expected, *found = (model.eval()(**inputs).logits for model in (trainer.model, merged, evaluated))
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def adapters_of(options):
    """By TRL's names or PEFT's."""
    if options.keys() <= {field.name for field in fields(ModelConfig)}:
        return get_peft_config(ModelArguments(use_peft=True, **{"lora_dropout": 0.0, **options}))
    return LoraConfig(**{"r": 4, **options})


@pytest.mark.parametrize(
    "tied, options, patterns", [*((False, *case) for case in TRAINED), *((True, *case) for case in TIED)]
)
def test_what_is_named_is_trained_and_merged_and_nothing_else(bases, tmp_path, tied, options, patterns):
    adapters = adapters_of(options)
    given = copy.deepcopy(adapters)
    trainer = trained(adapters, bases[tied], tmp_path)
    assert adapters == given
    assert str(bases[tied]) not in (tmp_path / "README.md").read_text()  # PEFT's card would name the base by its path
    merge_adapter(tmp_path, tmp_path / "merged")
    assert_merged(tmp_path / "merged", tmp_path, bases[tied])
    before, after = tensors(bases[tied]), tensors(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    patterns = {*patterns, "model.multi_modal_projector.*"}
    assert changed == {name for name in before if any(fnmatch(name, pattern) for pattern in patterns)}
    assert all(any(fnmatch(name, pattern) for name in changed) for pattern in patterns)
    if "trainable_token_indices" in options:
        assert (before[EMBEDDINGS] != after[EMBEDDINGS]).any(-1).nonzero().flatten().tolist() == TOKENS
    assert_computes_the_same(trainer, tmp_path)
    check_checkpoint(tmp_path / "merged")


def test_what_is_trained_in_full_on_a_quantized_base_is_not_rounded(bases, tmp_path):
    # TRL rounds it to bfloat16, in which a head does not take the hidden states of a base in float32.
    adapters = LoraConfig(r=4, modules_to_save=["lm_head"], trainable_token_indices={"embed_tokens": TOKENS})
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    trainer = trained(adapters, bases[False], tmp_path, quantization)
    merge_adapter(tmp_path, tmp_path / "merged")
    assert_merged(tmp_path / "merged", tmp_path, bases[False], quantization)
    before, after = tensors(bases[False]), tensors(tmp_path / "merged")
    assert (before[EMBEDDINGS] != after[EMBEDDINGS]).any(-1).nonzero().flatten().tolist() == TOKENS
    assert not torch.equal(after[HEAD], after[HEAD].bfloat16().float()) and not torch.equal(before[HEAD], after[HEAD])
    assert_computes_the_same(trainer, tmp_path)


IDLE = "peft_config names {}, which would have no effect. .* down_proj, .* in layers 0 to 1"
OTHER = "sets {}: such adapters are not trained here"
TIES = "The embeddings of this model are its head too"
REFUSED = [
    (dict(target_modules=["q_proj", "w_proj"]), IDLE.format("w_proj")),
    (dict(target_modules=["q_proj", "fc1"]), IDLE.format("fc1")),
    (dict(target_modules=r".*\.(q_proj|fc1)"), IDLE.format("fc1")),
    (dict(target_modules=r".*\.(q_proj|no_such)"), IDLE.format("no_such")),
    (dict(target_modules=["q_proj", "v_proj"], exclude_modules=["v_proj"]), IDLE.format("v_proj")),
    (dict(target_modules="*q_proj"), "adapter of peft_config .* nothing to repeat"),
    (dict(target_modules=["q_proj", "lm_head"]), "An adapter on lm_head is not trained"),
    (dict(target_modules=["self_attn"]), "adapter of peft_config .* Target module Qwen2Attention"),
    (dict(target_modules=["q_proj"], layers_to_transform=[0, 7]), IDLE.format("layer 7")),
    (dict(exclude_modules=["w_proj", "layers.0"]), IDLE.format("layers.0, w_proj")),
    (dict(modules_to_save=["lm_haed"]), IDLE.format("lm_haed")),
    (dict(modules_to_save=["norm"]), "modules_to_save names norm, .* its own learning rate"),
    (dict(lora_modules_to_save=["vision_tower"]), "names vision_tower, .* its own learning rate"),
    (dict(trainable_token_indices={"lm_head": [5]}), IDLE.format("lm_head")),
    (dict(trainable_token_indices=[5, 5000, 96]), IDLE.format("token 5000, token 96")),
    (dict(lora_task_type="SEQ_CLS"), OTHER.format("task_type .*")),
    (dict(init_lora_weights="pissa"), OTHER.format("init_lora_weights 'pissa'")),
    (dict(lora_alpha=0), OTHER.format("lora_alpha 0")),
    (dict(bias="lora_only"), OTHER.format("bias 'lora_only'")),
    (dict(lora_target_parameters=["k_proj.weight"]), OTHER.format("target_parameters .*")),
    (dict(layers_to_transform=[0], layers_pattern=["layers", "h"]), OTHER.format("layers_pattern .*")),
]
REFUSED_IF_TIED = [
    (dict(target_modules=["embed_tokens"], use_dora=True), TIES),
    (dict(trainable_token_indices=TOKENS), TIES),
]


@pytest.fixture(scope="module")
def unloadable(bases, tmp_path_factory):
    """The same without a tensor, so that loading them fails."""
    made = {tied: shutil.copytree(base, tmp_path_factory.mktemp("un") / "model") for tied, base in bases.items()}
    for folder in made.values():
        store(
            folder, {name: value for name, value in weights(folder).items() if "layers.0.self_attn.o_proj" not in name}
        )
    return made


@pytest.mark.parametrize(
    "tied, options, message", [*((False, *case) for case in REFUSED), *((True, *case) for case in REFUSED_IF_TIED)]
)
def test_what_would_not_be_trained_or_merged_is_refused_before_weights_are_loaded(
    unloadable, tmp_path, tied, options, message
):
    with pytest.raises(ValueError, match=message):
        trained(adapters_of(options), unloadable[tied], tmp_path)


def test_a_command_refuses_it_before_rows_are_read_and_a_trainer_for_a_model_too(bases, unloadable, tmp_path):
    with pytest.raises(ValueError, match="lacks 1 tensors"):
        trained(LoraConfig(), unloadable[True], tmp_path)
    command = ["--stage", "tune", "--output_dir", str(tmp_path / "run"), "--dataset_name", str(tmp_path / "none.json")]
    command += ["--model_name_or_path", str(unloadable[True]), "--report_to", "none", "--load_in_4bit"]
    for words, message in (
        (["--use_peft", "--lora_target_modules", "q_proj", "w_proj"], "peft_config names w_proj"),
        (["--use_peft", "--lora_modules_to_save", "gate_proj"], "names model.*gate_proj, which would be quantized"),
        ([], "language_learning_rate .* would train quantized weights"),
    ):
        with pytest.raises(ValueError, match=message):
            main([*command, *words])
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(bases[True])
    with pytest.raises(ValueError, match=TIES):
        trained(LoraConfig(target_modules=["embed_tokens"]), model, tmp_path)
