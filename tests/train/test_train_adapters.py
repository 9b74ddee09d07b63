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
from peft.tuners.lora.config import ArrowConfig, KasaConfig, LoftQConfig, LoraGAConfig, MontecloraConfig
from stored import assert_merged, store, weights
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig, Qwen2Config
from trl import ModelConfig, get_peft_config

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignTrainer
from normalign_llava.assembly.adapter import open_adapter
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.evaluate.engine import MultimodalLM
from normalign_llava.hub_cards.push.checkpoint_checks import check_checkpoint
from normalign_llava.train.options.arguments import ModelArguments
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


LAYERS = "model.language_model.layers.*"
LINEARS = {f"{LAYERS}{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")}
QUERIES = {f"{LAYERS}q_proj.weight"}
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


MODEL_CONFIG = {
    "lora_r": (dict(lora_r=3), LINEARS),
    "lora_alpha": (dict(lora_alpha=5), LINEARS),
    "lora_dropout": (dict(lora_dropout=0.4), LINEARS),
    "lora_target_modules": (dict(lora_target_modules=["q_proj"]), QUERIES),
    "lora_modules_to_save": (
        dict(lora_modules_to_save=["lm_head", "input_layernorm"]),
        {*LINEARS, HEAD, f"{LAYERS}.input_layernorm.weight"},
    ),
    "lora_task_type": (dict(lora_task_type="CAUSAL_LM"), LINEARS),
    "use_rslora": (dict(use_rslora=True), LINEARS),
    "use_dora": (dict(use_dora=True), LINEARS),
}
"""TRL's options -> values, and the tensors that change in the language model."""

PEFT = {
    "names in one text": (dict(target_modules="q_proj, v_proj"), {*QUERIES, f"{LAYERS}v_proj.weight"}),
    "a pattern": (
        dict(target_modules=r".*\.language_model\..*\.(q|down)_proj"),
        {*QUERIES, f"{LAYERS}.down_proj.weight"},
    ),
    "all-linear but": (dict(target_modules="all-linear", exclude_modules=["q_proj", "lm_head"]), LINEARS - QUERIES),
    "a path": (
        dict(target_modules=["layers.1.self_attn.q_proj"]),
        {"*.language_model.layers.1.self_attn.q_proj.weight"},
    ),
    "one layer": (
        dict(target_modules=["q_proj"], layers_to_transform=1),
        {"*.language_model.layers.1.*.q_proj.weight"},
    ),
    "gaussian": (dict(init_lora_weights="gaussian"), LINEARS),
    "random": (dict(init_lora_weights=False), LINEARS),
    "embeddings in full": (dict(modules_to_save=["embed_tokens"]), {*LINEARS, EMBEDDINGS}),
    "a block in full": (
        dict(target_modules=["q_proj"], modules_to_save=["language_model.layers.1.mlp"]),
        {*QUERIES, "*.language_model.layers.1.mlp.*"},
    ),
    "named parts": (dict(modules_to_save=["multi_modal_projector"], fan_in_fan_out=True), LINEARS),
}
ALIKE = {
    "embeddings": (dict(target_modules=["q_proj", "embed_tokens"]), {*QUERIES, EMBEDDINGS}),
    "DoRA of embeddings": (dict(target_modules=["embed_tokens"], use_dora=True), {EMBEDDINGS}),
    "tokens": (dict(target_modules=["q_proj"], trainable_token_indices=TOKENS), {*QUERIES, EMBEDDINGS}),
    "tokens by name": (
        dict(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": TOKENS}),
        {*QUERIES, EMBEDDINGS},
    ),
}
"""Refused where embeddings and head are one tensor."""
TRAINED = [
    *((tied, *case) for case in (MODEL_CONFIG | PEFT).items() for tied in (True, False)),
    *((False, *case) for case in ALIKE.items()),
    (
        True,
        "embeddings and head",
        (dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True), {*LINEARS, EMBEDDINGS, HEAD}),
    ),
]


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
    "tied, name, case", TRAINED, ids=[f"{name}-{'tied' if tied else 'untied'}" for tied, name, _ in TRAINED]
)
def test_what_is_named_is_trained_and_merged_and_nothing_else(bases, tmp_path, tied, name, case):
    options, patterns = case
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
        rows = (before[EMBEDDINGS] != after[EMBEDDINGS]).any(-1).nonzero().flatten().tolist()
        assert rows == TOKENS

    assert_computes_the_same(trainer, tmp_path)
    check_checkpoint(tmp_path / "merged")


def test_what_is_trained_in_full_on_a_quantized_base_is_not_rounded(bases, tmp_path):
    # TRL rounds it to bfloat16, in which a head does not take the hidden states of a base in float32.
    adapters = LoraConfig(r=4, modules_to_save=["lm_head"], trainable_token_indices=TOKENS)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    trainer = trained(adapters, bases[False], tmp_path, quantization)
    merge_adapter(tmp_path, tmp_path / "merged")
    assert_merged(tmp_path / "merged", tmp_path, bases[False], quantization)
    before, after = tensors(bases[False]), tensors(tmp_path / "merged")
    assert (before[EMBEDDINGS] != after[EMBEDDINGS]).any(-1).nonzero().flatten().tolist() == TOKENS
    assert not torch.equal(after[HEAD], after[HEAD].bfloat16().float()) and not torch.equal(before[HEAD], after[HEAD])
    assert_computes_the_same(trainer, tmp_path)


def test_every_option_that_trl_has_is_in_the_table():
    names = {field.name for field in fields(ModelConfig) if field.name.startswith(("lora_", "use_"))}
    assert names - {"use_peft", "use_bnb_nested_quant", "lora_target_parameters"} == MODEL_CONFIG.keys()


MODULES = "target_modules names {}, which would get no adapter: {}"
NEITHER = {
    "a typing error": (
        dict(target_modules=["q_proj", "w_proj"]),
        MODULES.format("w_proj", "there is no such module.*: down_proj, gate_proj"),
    ),
    "the tower": (dict(target_modules=["q_proj", "fc1"]), MODULES.format("fc1", "it is not in the language model")),
    "the projector": (
        dict(target_modules=["linear_1"]),
        MODULES.format("linear_1", "it is not in the language model"),
    ),
    "the tower in a pattern": (
        dict(target_modules=r".*\.(q_proj|fc1)"),
        MODULES.format("fc1", "it is not in the language model"),
    ),
    "a pattern of nothing": (
        dict(target_modules=r".*\.c_attn"),
        MODULES.format("c_attn", "there is no such module"),
    ),
    "a typing error in a pattern": (
        dict(target_modules=r".*\.(q_proj|no_such)"),
        MODULES.format("no_such", "there is no such module"),
    ),
    "no effect": (dict(lora_alpha=0), "lora_alpha 0 multiplies each adapter by 0"),
    "no pattern": (dict(target_modules="*q_proj"), "is no regular expression: nothing to repeat"),
    "excluded too": (
        dict(target_modules=["q_proj", "v_proj"], exclude_modules=["v_proj"]),
        MODULES.format("v_proj", "exclude_modules, .* leaves it out"),
    ),
    "the head": (dict(target_modules=["q_proj", "lm_head"]), "names lm_head, whose adapter would not be trained"),
    "the head in a pattern": (
        dict(target_modules=r".*(\.q_proj|lm_head)"),
        "names lm_head, whose adapter would not be trained",
    ),
    "a block": (dict(target_modules=["self_attn"]), "PEFT cannot put .*self_attn|Target module Qwen2Attention"),
    "a layer": (
        dict(target_modules=["q_proj"], layers_to_transform=[0, 7]),
        "layers_to_transform names 7, where no adapter would be. Layers are 0 to 1",
    ),
    "an exclusion": (dict(exclude_modules=["w_proj"]), "exclude_modules has w_proj, which excludes no adapter"),
    "an excluded block": (
        dict(exclude_modules=["layers.0"]),
        "which excludes no adapter. A module does not stand for the layers in it",
    ),
    "a rank": (dict(rank_pattern={"q_proj": 2}), "peft_config sets rank_pattern, with which"),
    "a module to save": (
        dict(modules_to_save=["lm_haed"]),
        "modules_to_save names lm_haed, and the model has no module of that name",
    ),
    "a norm to save": (
        dict(modules_to_save=["norm"]),
        "modules_to_save names norm, .* have learning rates of their own",
    ),
    "everything": (
        dict(modules_to_save=["model"]),
        "modules_to_save names model, .* have learning rates of their own",
    ),
    "a frozen tower": (
        dict(lora_modules_to_save=["vision_tower"]),
        "modules_to_save names vision_tower, but its learning rate is 0",
    ),
    "tokens of the head": (
        dict(trainable_token_indices={"lm_head": [5]}),
        "tie_word_embeddings|names lm_head. Only the input embeddings can be: embed_tokens",
    ),
    "a sequence classifier": (dict(lora_task_type="SEQ_CLS"), "task_type is 'SEQ_CLS'"),
    "inference": (dict(inference_mode=True), "sets inference_mode, with which adapters would not be trained"),
    "aLoRA": (dict(alora_invocation_tokens=[5], task_type="CAUSAL_LM"), "sets alora_invocation_tokens"),
    "more layers": (dict(layer_replication=[(0, 2), (1, 2)]), "sets layer_replication"),
    "QALoRA": (dict(use_qalora=True), "sets use_qalora"),
    "Arrow": (dict(arrow_config=ArrowConfig()), "sets arrow_config"),
    "KaSA": (dict(kasa_config=KasaConfig()), "sets kasa_config"),
    "Monteclora": (dict(monteclora_config=MontecloraConfig()), "sets monteclora_config"),
    **{
        start: (
            dict(init_lora_weights=start, **more),
            f"init_lora_weights is '{start}'. Use True, False or 'gaussian'",
        )
        for start, more in {
            "orthogonal": {},
            "pissa": {},
            "pissa_niter_4": {},
            "olora": {},
            "corda": {},
            "eva": {},
            "mica": {},
            "loftq": {"loftq_config": LoftQConfig()},
            "lora_ga": {"lora_ga_config": LoraGAConfig()},
        }.items()
    },
}
TIED = {
    "embeddings": "The embeddings of this model are its head too",
    "DoRA of embeddings": "The embeddings of this model are its head too",
    "tokens": "trainable_token_indices needs embeddings of their own",
    "tokens by name": "trainable_token_indices needs embeddings of their own",
}
REFUSED = [
    *((tied, *case) for tied in (True, False) for case in NEITHER.items()),
    *((True, name, (ALIKE[name][0], message)) for name, message in TIED.items()),
    (
        True,
        "embeddings of both",
        (dict(target_modules=["embed_tokens"], ensure_weight_tying=True), "are its head too"),
    ),
    *(
        (
            False,
            "tokens",
            (dict(trainable_token_indices=[5, index]), f"trainable_token_indices has {index}. The vocab"),
        )
        for index in (-1, 5000, 96)
    ),
    (
        False,
        "table",
        (dict(trainable_token_indices={"position_embedding": [5]}), "names position_embedding. Only the input"),
    ),
]


@pytest.fixture(scope="module")
def unloadable(bases, tmp_path_factory):
    """The same without a tensor, so that loading them fails."""
    made = {}
    for tied, base in bases.items():
        made[tied] = shutil.copytree(base, tmp_path_factory.mktemp("unloadable") / "model")
        found = weights(base)
        del found[next(name for name in found if "o_proj" in name)]
        store(made[tied], found)
    return made


@pytest.mark.parametrize(
    "tied, name, case", REFUSED, ids=[f"{name}-{'tied' if tied else 'untied'}" for tied, name, _ in REFUSED]
)
def test_what_would_not_be_trained_or_merged_is_refused_before_weights_are_loaded(
    unloadable, tmp_path, tied, name, case
):
    options, message = case
    with pytest.raises(ValueError, match=message):
        trained(adapters_of(options), unloadable[tied], tmp_path)


def test_a_command_refuses_it_before_rows_are_read_and_a_trainer_for_a_model_too(bases, unloadable, tmp_path):
    with pytest.raises(ValueError, match="lacks 1 tensors"):
        trained(LoraConfig(), unloadable[True], tmp_path)
    command = ["--stage", "tune", "--output_dir", str(tmp_path / "run"), "--dataset_name", str(tmp_path / "none.json")]
    command += ["--model_name_or_path", str(unloadable[True]), "--use_peft", "--report_to", "none"]
    with pytest.raises(ValueError, match="target_modules names w_proj"):
        main([*command, "--lora_target_modules", "q_proj", "w_proj"])
    with pytest.raises(ValueError, match="modules_to_save names w_norm, and the model has no module of that name"):
        main([*command, "--lora_modules_to_save", "input_layernorm,w_norm"])
    with pytest.raises(ValueError, match="modules_to_save names gate_proj, of which model.*gate_proj would be"):
        main([*command, "--load_in_4bit", "--lora_modules_to_save", "gate_proj"])
    for words in (["--use_dora"], ["--use_rslora"], ["--bnb_4bit_quant_type", "fp4"]):
        without = [word for word in command if word != "--use_peft"]
        with pytest.raises(
            ValueError, match=f"{words[0][2:]}: (adapters are trained with use_peft|nothing is quantized)"
        ):
            main([*without, *words])
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(bases[True])
    with pytest.raises(ValueError, match="The embeddings of this model are its head too"):
        trained(LoraConfig(target_modules=["embed_tokens"]), model, tmp_path)
