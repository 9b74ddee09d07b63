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
QUERY = f"{LAYERS}q_proj.weight"
KEY = f"{LAYERS}k_proj.weight"
VALUE = f"{LAYERS}v_proj.weight"
OUTPUT = f"{LAYERS}o_proj.weight"
GATE = f"{LAYERS}gate_proj.weight"
UP = f"{LAYERS}up_proj.weight"
DOWN = f"{LAYERS}down_proj.weight"
LINEAR = {QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN}
SECOND_QUERY = "*.language_model.layers.1.self_attn.q_proj.weight"
SECOND_BLOCK = "language_model.layers.1.mlp"
NORM = "*.input_layernorm.weight"
EMBED = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"
TOKENS = [68, 87]  # a and t are in every row


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Checkpoints, tied and not, whose queries, keys and values have biases."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        False: training.checkpoint(folder / "untied", tied=False, cls=Qwen2Config),
        True: training.checkpoint(folder / "tied", cls=Qwen2Config),
    }


@pytest.fixture
def untied(bases):
    return bases[False]


def tensors(folder):
    """The tensors of a checkpoint, also the head of a tied one."""
    stored_weights = weights(folder)
    return {HEAD: stored_weights[EMBED], **stored_weights}


def trained(adapters, base, folder, quantization=None):
    trainer = NormAlignTrainer(
        base,
        training.arguments(folder, learning_rate=1e-2),
        train_dataset=training.rows(),
        quantization_config=quantization,
        peft_config=adapters,
    )
    trainer.train()
    trainer.save_model()
    return trainer


def adapters_of(options):
    """By TRL's names or PEFT's."""
    trl_names = {field.name for field in fields(ModelConfig)}
    if options.keys() <= trl_names:
        trl_options = {"use_peft": True, "lora_dropout": 0.0, **options}
        return get_peft_config(ModelArguments(**trl_options))
    return LoraConfig(**{"r": 4, **options})


def merged(folder, base, quantization=None):
    """Merges the adapters in a folder; the tensors of the base and of the result."""
    merged_folder = folder / "merged"
    merge_adapter(folder, merged_folder)
    assert_merged(merged_folder, folder, base, quantization)
    return tensors(base), tensors(merged_folder)


def assert_only_tokens_changed(before, after):
    """The embeddings of `TOKENS` changed, and no others."""
    changed_rows = (before[EMBED] != after[EMBED]).any(-1)
    assert changed_rows.nonzero().flatten().tolist() == TOKENS


def assert_computes_the_same(trainer, folder):
    """The trained model, the merged one, and the adapter on its base, as asked and evaluated."""
    inputs = trainer.data_collator([trainer.train_dataset[0]])
    adapted = open_adapter(folder).load()
    evaluated = MultimodalLM(adapted, trainer.processing_class, batch_size=1).model
    merged_model = AutoModelForImageTextToText.from_pretrained(folder / "merged")
    with torch.no_grad():
        expected = trainer.model.eval()(**inputs).logits
        for model in (evaluated, merged_model):
            logits = model.eval()(**inputs).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


TRAINED = [
    pytest.param(
        {
            "lora_r": 3,
            "lora_alpha": 5,
            "lora_dropout": 0.4,
            "lora_task_type": "CAUSAL_LM",
        },
        LINEAR,
        id="TRL's options",
    ),
    pytest.param(
        {"use_rslora": True, "use_dora": True},
        LINEAR,
        id="RSLoRA and DoRA",
    ),
    pytest.param(
        {"lora_target_modules": ["q_proj"]},
        {QUERY},
        id="one target by TRL's name",
    ),
    pytest.param(
        {"lora_modules_to_save": ["lm_head", "input_layernorm"]},
        {*LINEAR, HEAD, NORM},
        id="modules to save by TRL's name",
    ),
    pytest.param(
        {"target_modules": "q_proj, v_proj"},
        {QUERY, VALUE},
        id="targets in a string",
    ),
    pytest.param(
        {"target_modules": r".*\.language_model\..*\.(q|down)_proj"},
        {QUERY, DOWN},
        id="targets of a pattern",
    ),
    pytest.param(
        {"target_modules": "all-linear", "exclude_modules": ["q_proj", "lm_head"]},
        LINEAR - {QUERY},
        id="all linear layers but some",
    ),
    pytest.param(
        {"target_modules": ["layers.1.self_attn.q_proj"], "init_lora_weights": "gaussian"},
        {SECOND_QUERY},
        id="a target in one layer",
    ),
    pytest.param(
        {"target_modules": ["q_proj"], "layers_to_transform": 1},
        {SECOND_QUERY},
        id="layers to transform",
    ),
    pytest.param(
        {"init_lora_weights": False},
        LINEAR,
        id="random initial weights",
    ),
    pytest.param(
        {"modules_to_save": ["embed_tokens"]},
        {*LINEAR, EMBED},
        id="embeddings in full",
    ),
    pytest.param(
        {"target_modules": ["q_proj"], "modules_to_save": [SECOND_BLOCK]},
        {QUERY, f"*.{SECOND_BLOCK}.*"},
        id="a block in full",
    ),
    pytest.param(
        {"modules_to_save": ["multi_modal_projector"], "fan_in_fan_out": True},
        LINEAR,
        id="the projector in full",
    ),
    pytest.param(
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
        {QUERY, EMBED},
        id="DoRA on embeddings",
    ),
    pytest.param(
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": TOKENS}},
        {QUERY, EMBED},
        id="some tokens",
    ),
]
"""Options of TRL or PEFT, and the tensors that change, where the embeddings are not the head."""

TRAINED_IF_TIED = [
    pytest.param(
        {},
        LINEAR,
        id="defaults",
    ),
    pytest.param(
        {"lora_modules_to_save": ["lm_head"]},
        {*LINEAR, HEAD},
        id="the head in full",
    ),
    pytest.param(
        {"modules_to_save": ["embed_tokens"]},
        {*LINEAR, EMBED},
        id="embeddings in full",
    ),
    pytest.param(
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {*LINEAR, EMBED, HEAD},
        id="embeddings that stay tied",
    ),
]
"""The same where embeddings and head are one tensor."""


def assert_only_what_is_named_is_trained_and_merged(base, folder, options, patterns):
    adapters = adapters_of(options)
    before_training = copy.deepcopy(adapters)
    trainer = trained(adapters, base, folder)
    assert adapters == before_training
    assert str(base) not in (folder / "README.md").read_text()  # as it is in PEFT's card
    before, after = merged(folder, base)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    expected = set()
    for pattern in [*patterns, "model.multi_modal_projector.*"]:
        matching_names = fnmatch.filter(before, pattern)
        assert matching_names, pattern
        expected.update(matching_names)
    assert changed == expected
    if "trainable_token_indices" in options:
        assert_only_tokens_changed(before, after)
    assert_computes_the_same(trainer, folder)
    check_checkpoint(folder / "merged")


@pytest.mark.parametrize(("options", "patterns"), TRAINED)
def test_nothing_but_what_is_named_is_trained_and_merged(bases, tmp_path, options, patterns):
    assert_only_what_is_named_is_trained_and_merged(bases[False], tmp_path, options, patterns)


@pytest.mark.parametrize(("options", "patterns"), TRAINED_IF_TIED)
def test_nothing_but_what_is_named_is_trained_and_merged_in_a_tied_model(
    bases, tmp_path, options, patterns
):
    assert_only_what_is_named_is_trained_and_merged(bases[True], tmp_path, options, patterns)


def test_what_is_trained_in_full_on_a_quantized_base_is_not_rounded(untied, tmp_path):
    # TRL rounds it to bfloat16, in which a head does not take a base's float32 hidden states.
    adapters = LoraConfig(r=4, modules_to_save=["lm_head"], trainable_token_indices=TOKENS)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    trainer = trained(adapters, untied, tmp_path, quantization)
    before, after = merged(tmp_path, untied, quantization)
    assert_only_tokens_changed(before, after)
    rounded_head = after[HEAD].bfloat16().float()
    assert not torch.equal(after[HEAD], before[HEAD])
    assert not torch.equal(after[HEAD], rounded_head)
    assert_computes_the_same(trainer, tmp_path)


NO_EFFECT = "peft_config names {}, but this would have no effect. .* down_proj, .* in layers 0 to 1"
NOT_SUPPORTED = "sets {}, but this is not supported here"
TIED_HEAD = "The embeddings of this model are its head too"
REFUSED = [
    pytest.param(
        {"target_modules": ["q_proj", "w_proj"]},
        NO_EFFECT.format("w_proj"),
        id="an unknown target",
    ),
    pytest.param(
        {"target_modules": ["q_proj", "fc1"]},
        NO_EFFECT.format("fc1"),
        id="a target in the vision tower",
    ),
    pytest.param(
        {"target_modules": r".*\.(q_proj|fc1)"},
        NO_EFFECT.format("fc1"),
        id="a pattern with a target in the vision tower",
    ),
    pytest.param(
        {"target_modules": r".*\.(q_proj|no_such)"},
        NO_EFFECT.format("no_such"),
        id="a pattern with an unknown target",
    ),
    pytest.param(
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]},
        NO_EFFECT.format("v_proj"),
        id="a target that is excluded",
    ),
    pytest.param(
        {"target_modules": "*q_proj"},
        "adapter of peft_config .* nothing to repeat",
        id="a broken pattern",
    ),
    pytest.param(
        {"target_modules": ["q_proj", "lm_head"]},
        "An adapter on lm_head is not trained",
        id="the head",
    ),
    pytest.param(
        {"target_modules": ["self_attn"]},
        "adapter of peft_config .* Target module Qwen2Attention",
        id="a module that is not linear",
    ),
    pytest.param(
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 7]},
        NO_EFFECT.format("layer 7"),
        id="a layer that is not there",
    ),
    pytest.param(
        {"exclude_modules": ["w_proj", "layers.0"]},
        NO_EFFECT.format("layers.0, w_proj"),
        id="unknown modules excluded",
    ),
    pytest.param(
        {"modules_to_save": ["lm_haed"]},
        NO_EFFECT.format("lm_haed"),
        id="an unknown module to save",
    ),
    pytest.param(
        {"modules_to_save": ["norm"]},
        "modules_to_save names norm: .* its own learning rate",
        id="the norm to save",
    ),
    pytest.param(
        {"lora_modules_to_save": ["vision_tower"]},
        "names vision_tower: .* its own learning rate",
        id="the vision tower to save",
    ),
    pytest.param(
        {"trainable_token_indices": {"lm_head": [5]}},
        NO_EFFECT.format("lm_head"),
        id="tokens of the head",
    ),
    pytest.param(
        {"trainable_token_indices": [5, 5000, 96]},
        NO_EFFECT.format("token 5000, token 96"),
        id="unknown tokens",
    ),
    pytest.param(
        {"lora_task_type": "SEQ_CLS"},
        NOT_SUPPORTED.format("task_type .*"),
        id="another task",
    ),
    pytest.param(
        {"init_lora_weights": "pissa"},
        NOT_SUPPORTED.format("init_lora_weights 'pissa'"),
        id="PiSSA",
    ),
    pytest.param(
        {"lora_alpha": 0},
        NOT_SUPPORTED.format("lora_alpha 0"),
        id="alpha 0",
    ),
    pytest.param(
        {"bias": "lora_only"},
        NOT_SUPPORTED.format("bias 'lora_only'"),
        id="biases",
    ),
    pytest.param(
        {"lora_target_parameters": ["k_proj.weight"]},
        NOT_SUPPORTED.format("target_parameters .*"),
        id="target parameters",
    ),
    pytest.param(
        {"layers_to_transform": [0], "layers_pattern": ["layers"]},
        NOT_SUPPORTED.format("layers_pattern .*"),
        id="a pattern of layers",
    ),
]


@pytest.fixture(scope="module")
def unloadable(bases, tmp_path_factory):
    """The same without a tensor, so that loading them fails."""
    folder = tmp_path_factory.mktemp("unloadable")
    copies = {}
    for tied, base in bases.items():
        copied = shutil.copytree(base, folder / str(tied))
        stored_weights = weights(copied)
        del stored_weights["model.language_model.layers.0.self_attn.o_proj.weight"]
        store(copied, stored_weights)
        copies[tied] = copied
    return copies


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_would_not_be_trained_or_merged_is_refused_before_weights_are_loaded(
    unloadable, tmp_path, options, message
):
    with pytest.raises(ValueError, match=message):
        trained(adapters_of(options), unloadable[False], tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {"trainable_token_indices": TOKENS},
    ],
    ids=["adapters", "tokens"],
)
def test_embeddings_that_are_the_head_are_refused_before_weights_are_loaded(
    unloadable, tmp_path, options
):
    with pytest.raises(ValueError, match=TIED_HEAD):
        trained(adapters_of(options), unloadable[True], tmp_path)


def test_weights_without_a_tensor_do_not_load(unloadable, tmp_path):
    with pytest.raises(ValueError, match="lacks 1 tensors"):
        trained(LoraConfig(), unloadable[True], tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--use_peft", "--lora_target_modules", "q_proj", "w_proj"],
            "peft_config names w_proj",
            id="an unknown target",
        ),
        pytest.param(
            ["--use_peft", "--lora_modules_to_save", "gate_proj"],
            "gate_proj.* would be quantized",
            id="a quantized module to save",
        ),
        pytest.param(
            [],
            "language_learning_rate .* would train quantized weights",
            id="no adapters",
        ),
    ],
)
def test_a_command_refuses_it_before_rows_are_read(unloadable, tmp_path, options, message):
    command_line = [
        "--stage=tune",
        f"--output_dir={tmp_path}/run",
        "--load_in_4bit",
        f"--model_name_or_path={unloadable[True]}",
        f"--dataset_name={tmp_path}/none",
    ]
    with pytest.raises(ValueError, match=message):
        main([*command_line, *options])


def test_a_trainer_of_a_loaded_model_refuses_it_too(bases, tmp_path):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(bases[True])
    with pytest.raises(ValueError, match=TIED_HEAD):
        trained(LoraConfig(target_modules=["embed_tokens"]), model, tmp_path)
