# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA options: what is named is trained and merged, or refused before loading weights."""

import copy
import fnmatch
import shutil
from dataclasses import fields

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
from normalign_llava.evaluation.engine import MultimodalLM
from normalign_llava.hub_cards.push.checks import check_checkpoint
from normalign_llava.train.options import ModelArguments
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


LAYERS = "model.language_model.layers.*"
LINEAR = {f"{LAYERS}{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")}
Q, V, DOWN = (f"{LAYERS}{name}_proj.weight" for name in ("q", "v", "down"))
SECOND = "*.language_model.layers.1.self_attn.q_proj.weight"
BLOCK = "language_model.layers.1.mlp"
NORM = "*.input_layernorm.weight"
EMBED = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"
TOKENS = [68, 87]  # a and t, which are in every row


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Checkpoints, tied and not, whose queries, keys and values have biases."""
    folder = tmp_path_factory.mktemp("bases")
    untied = training.checkpoint(folder / "untied", tied=False, cls=Qwen2Config)
    return {False: untied, True: training.checkpoint(folder / "tied", cls=Qwen2Config)}


def tensors(folder):
    """The tensors of a checkpoint, also the head of a tied one."""
    stored = weights(folder)
    return {HEAD: stored[EMBED], **stored}


def trained(adapters, base, folder, quantization=None):
    args = training.arguments(folder, learning_rate=1e-2)
    options = dict(quantization_config=quantization, peft_config=adapters)
    trainer = NormAlignTrainer(base, args, None, training.rows(), **options)
    trainer.train()
    trainer.save_model()
    return trainer


TRAINED = [
    (dict(lora_r=3, lora_alpha=5, lora_dropout=0.4, lora_task_type="CAUSAL_LM"), LINEAR),
    (dict(use_rslora=True, use_dora=True), LINEAR),
    (dict(lora_target_modules=["q_proj"]), {Q}),
    (dict(lora_modules_to_save=["lm_head", "input_layernorm"]), {*LINEAR, HEAD, NORM}),
    (dict(target_modules="q_proj, v_proj"), {Q, V}),
    (dict(target_modules=r".*\.language_model\..*\.(q|down)_proj"), {Q, DOWN}),
    (dict(target_modules="all-linear", exclude_modules=["q_proj", "lm_head"]), LINEAR - {Q}),
    (dict(target_modules=["layers.1.self_attn.q_proj"], init_lora_weights="gaussian"), {SECOND}),
    (dict(target_modules=["q_proj"], layers_to_transform=1), {SECOND}),
    (dict(init_lora_weights=False), LINEAR),
    (dict(modules_to_save=["embed_tokens"]), {*LINEAR, EMBED}),
    (dict(target_modules=["q_proj"], modules_to_save=[BLOCK]), {Q, f"*.{BLOCK}.*"}),
    (dict(modules_to_save=["multi_modal_projector"], fan_in_fan_out=True), LINEAR),
    (dict(target_modules=["q_proj", "embed_tokens"], use_dora=True), {Q, EMBED}),
    (dict(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": TOKENS}), {Q, EMBED}),
]
"""Options of TRL or PEFT, and the tensors that change, where the embeddings are not the head."""

TIED = [
    (dict(), LINEAR),
    (dict(lora_modules_to_save=["lm_head"]), {*LINEAR, HEAD}),
    (dict(modules_to_save=["embed_tokens"]), {*LINEAR, EMBED}),
    (dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True), {*LINEAR, EMBED, HEAD}),
]
"""The same where embeddings and head are one tensor."""


def assert_computes_the_same(trainer, folder):
    """The trained model, the merged one, and the adapter on its base, as asked and evaluated."""
    inputs = trainer.data_collator([trainer.train_dataset[0]])
    adapted = open_adapter(folder).load()
    models = [trainer.model, MultimodalLM(adapted, trainer.processing_class, batch_size=1).model]
    models.append(AutoModelForImageTextToText.from_pretrained(folder / "merged"))
    with torch.no_grad():
        expected, *others = (model.eval()(**inputs).logits for model in models)
    for logits in others:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def adapters_of(options):
    """By TRL's names or PEFT's."""
    if options.keys() <= {field.name for field in fields(ModelConfig)}:
        return get_peft_config(ModelArguments(use_peft=True, **{"lora_dropout": 0.0, **options}))
    return LoraConfig(**{"r": 4, **options})


def cases(untied, tied):
    return [*((False, *case) for case in untied), *((True, *case) for case in tied)]


@pytest.mark.parametrize("tied, options, patterns", cases(TRAINED, TIED))
def test_nothing_but_what_is_named_is_trained_and_merged(bases, tmp_path, tied, options, patterns):
    adapters = adapters_of(options)
    before_training = copy.deepcopy(adapters)
    trainer = trained(adapters, bases[tied], tmp_path)
    assert adapters == before_training
    assert str(bases[tied]) not in (tmp_path / "README.md").read_text()  # as it is in PEFT's card
    merge_adapter(tmp_path, tmp_path / "merged")
    assert_merged(tmp_path / "merged", tmp_path, bases[tied])
    before = tensors(bases[tied])
    after = tensors(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    patterns = [*patterns, "model.multi_modal_projector.*"]
    matches = [{*fnmatch.filter(before, pattern)} for pattern in patterns]
    assert all(matches) and changed == set().union(*matches)
    if "trainable_token_indices" in options:
        assert (before[EMBED] != after[EMBED]).any(-1).nonzero().flatten().tolist() == TOKENS
    assert_computes_the_same(trainer, tmp_path)
    check_checkpoint(tmp_path / "merged")


def test_what_is_trained_in_full_on_a_quantized_base_is_not_rounded(bases, tmp_path):
    # TRL rounds it to bfloat16, in which a head does not take a base's float32 hidden states.
    adapters = LoraConfig(r=4, modules_to_save=["lm_head"], trainable_token_indices=TOKENS)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    trainer = trained(adapters, bases[False], tmp_path, quantization)
    merge_adapter(tmp_path, tmp_path / "merged")
    assert_merged(tmp_path / "merged", tmp_path, bases[False], quantization)
    before = tensors(bases[False])
    after = tensors(tmp_path / "merged")
    assert (before[EMBED] != after[EMBED]).any(-1).nonzero().flatten().tolist() == TOKENS
    for head in (before[HEAD], after[HEAD].bfloat16().float()):
        assert not torch.equal(after[HEAD], head)
    assert_computes_the_same(trainer, tmp_path)


IDLE = "peft_config names {}, but this would have no effect. .* down_proj, .* in layers 0 to 1"
OTHER = "sets {}, but this is not supported here"
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
    (dict(modules_to_save=["norm"]), "modules_to_save names norm: .* its own learning rate"),
    (dict(lora_modules_to_save=["vision_tower"]), "names vision_tower: .* its own learning rate"),
    (dict(trainable_token_indices={"lm_head": [5]}), IDLE.format("lm_head")),
    (dict(trainable_token_indices=[5, 5000, 96]), IDLE.format("token 5000, token 96")),
    (dict(lora_task_type="SEQ_CLS"), OTHER.format("task_type .*")),
    (dict(init_lora_weights="pissa"), OTHER.format("init_lora_weights 'pissa'")),
    (dict(lora_alpha=0), OTHER.format("lora_alpha 0")),
    (dict(bias="lora_only"), OTHER.format("bias 'lora_only'")),
    (dict(lora_target_parameters=["k_proj.weight"]), OTHER.format("target_parameters .*")),
    (dict(layers_to_transform=[0], layers_pattern=["layers"]), OTHER.format("layers_pattern .*")),
]
REFUSED_IF_TIED = [
    (dict(target_modules=["embed_tokens"], use_dora=True), TIES),
    (dict(trainable_token_indices=TOKENS), TIES),
]


@pytest.fixture(scope="module")
def unloadable(bases, tmp_path_factory):
    """The same without a tensor, so that loading them fails."""
    folder = tmp_path_factory.mktemp("unloadable")
    copies = {tied: shutil.copytree(base, folder / str(tied)) for tied, base in bases.items()}
    for copied in copies.values():
        values = weights(copied)
        del values["model.language_model.layers.0.self_attn.o_proj.weight"]
        store(copied, values)
    return copies


@pytest.mark.parametrize("tied, options, message", cases(REFUSED, REFUSED_IF_TIED))
def test_what_would_not_be_trained_or_merged_is_refused_before_weights_are_loaded(
    unloadable, tmp_path, tied, options, message
):
    with pytest.raises(ValueError, match=message):
        trained(adapters_of(options), unloadable[tied], tmp_path)


def test_a_command_refuses_it_before_rows_are_read_and_a_trainer_too(bases, unloadable, tmp_path):
    with pytest.raises(ValueError, match="lacks 1 tensors"):
        trained(LoraConfig(), unloadable[True], tmp_path)
    command = ["--stage", "tune", "--output_dir", f"{tmp_path}/run", "--load_in_4bit"]
    command += ["--model_name_or_path", str(unloadable[True]), "--dataset_name", f"{tmp_path}/none"]
    for words, message in (
        (["--use_peft", "--lora_target_modules", "q_proj", "w_proj"], "peft_config names w_proj"),
        (["--use_peft", "--lora_modules_to_save", "gate_proj"], "gate_proj.* would be quantized"),
        ([], "language_learning_rate .* would train quantized weights"),
    ):
        with pytest.raises(ValueError, match=message):
            main([*command, *words])
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(bases[True])
    with pytest.raises(ValueError, match=TIES):
        trained(LoraConfig(target_modules=["embed_tokens"]), model, tmp_path)
