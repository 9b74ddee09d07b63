# SPDX-License-Identifier: Apache-2.0
"""Options and recipes: what they stand for, what is refused and why, and their page."""

import copy
import dataclasses
import importlib.util
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_multi_gpu_env
from documented import PAGE, page_from_fields
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import BitsAndBytesConfig
from transformers.integrations.deepspeed import deepspeed_config, unset_hf_deepspeed_config
from trl import SFTConfig

from normalign_llava import NormAlignLlavaConfig
from normalign_llava.checkpoint import precision
from normalign_llava.errors import Terminated
from normalign_llava.train.command import (
    OVERRULED,
    RECIPES,
    REFUSED,
    REPLACED,
    TrainingOptions,
    check_command,
    check_names,
    launch,
    names_in,
    read_command,
    read_options,
    read_recipe,
    recipe_file,
    without_overruled,
)
from normalign_llava.train.elsewhere import ELSEWHERE, answer_for
from normalign_llava.train.modules.load import frozen_dtype
from normalign_llava.train.options import WITHOUT_WARMUP, ModelArguments, NormAlignConfig
from normalign_llava.train.parsing import number, option_parser, parse, truth, whole_number
from normalign_llava.train.prepare import GivenModel, accumulation_steps, check_options, open_model
from normalign_llava.train.settings import RunConfig, best_metric, complete


BASE = ["--model_name_or_path", "model", "--dataset_name", "data", "--bf16", "false"]
UNSEEDED = {"use_seedable_sampler": False}
HELD_OUT = {"eval_strategy": "steps", "eval_steps": 100}
BEST = {
    **HELD_OUT,
    "load_best_model_at_end": True,
    "early_stopping_patience": 2,
}
REFUSALS = {
    option.name: option.default
    for option in dataclasses.fields(TrainingOptions)
    if option.metadata["help"].startswith(REFUSED)
}
"""Options that are refused, with their defaults."""

has_deepspeed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not has_deepspeed, reason="needs deepspeed")


def from_recipe(tmp_path, *words, **recipe) -> RunConfig:
    """The options of a run with this recipe file and these words on the command line."""
    recipe_path = tmp_path / "recipe.yaml"
    recipe = {"output_dir": str(tmp_path / "out"), **recipe}
    recipe_path.write_text(yaml.safe_dump(recipe))
    train_options = parse([str(recipe_path), *BASE, *words])[1]
    return complete(train_options)[0]


def as_given(folder, **options) -> NormAlignConfig:
    options = {
        "output_dir": str(folder),
        "bf16": False,
        "use_cpu": True,
        **options,
    }
    return NormAlignConfig(**options)


def config(folder, **options) -> RunConfig:
    """Options with their values on this machine."""
    return complete(as_given(folder, **options))[0]


def rates(train_options, use_peft=False) -> list[float]:
    """The learning rates of vision tower, projector, norm and language model."""
    return list(train_options.learning_rates(use_peft).values())


def test_the_stage_align_is_the_papers(tmp_path):
    align = from_recipe(tmp_path, stage="align")
    assert rates(align) == [0.0, 1e-3, 1e-3, 0.0]
    assert align.global_batch_size == 256
    assert align.per_device_train_batch_size == 2
    assert align.lr_scheduler_type == "cosine"
    assert align.warmup_steps == 0.03
    assert align.seed == 42
    assert align.weight_decay == 0.0
    assert align.num_train_epochs == 1.0
    assert align.max_length == 2048
    assert align.save_steps == 0.1
    assert align.save_total_limit == 2


def test_the_stage_tune_is_the_papers(tmp_path):
    tune = from_recipe(tmp_path, stage="tune")
    assert rates(tune) == [2e-6, 1e-5, 1e-5, 1e-5]
    assert tune.global_batch_size == 128
    assert tune.per_device_train_batch_size == 1


def test_a_stage_in_python_is_the_one_of_a_recipe(tmp_path):
    align = config(tmp_path, stage="align")
    assert align.global_batch_size == 256
    assert rates(align) == rates(from_recipe(tmp_path, stage="align"))


def test_steps_between_checkpoints_are_a_multiple_of_those_between_evaluations(tmp_path):
    tune = config(
        tmp_path,
        stage="tune",
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=100,
    )
    assert tune.save_steps == 500


@pytest.mark.parametrize(
    "name",
    [
        "per_device_train_batch_size",
        "lr_scheduler_type",
        "learning_rate",
        "warmup_steps",
        "seed",
    ],
)
def test_without_a_stage_defaults_are_those_of_trl(tmp_path, name):
    stock_config = SFTConfig(str(tmp_path), bf16=False, use_cpu=True)
    assert getattr(config(tmp_path), name) == getattr(stock_config, name)


@pytest.mark.parametrize(
    "words, learning_rate",
    [
        pytest.param([], 1e-5, id="stage of the recipe"),
        pytest.param(["--stage", "align"], 1e-3, id="stage of the command line"),
    ],
)
def test_a_recipe_overrides_the_stage_and_the_command_line_the_recipe(
    tmp_path, words, learning_rate
):
    train_options = from_recipe(
        tmp_path,
        "--seed",
        "7",
        *words,
        stage="tune",
        seed=3,
        vision_learning_rate="3e-6",
        max_steps=5,
    )
    assert train_options.seed == 7
    assert train_options.vision_learning_rate == 3e-6
    assert train_options.max_steps == 5
    assert train_options.learning_rate == learning_rate


def as_text(train_options) -> dict[str, str]:
    """All options, with their values as text."""
    texts = {}
    for option in dataclasses.fields(train_options):
        texts[option.name] = str(getattr(train_options, option.name))
    return texts


def replaced_by_nothing(train_options):
    return dataclasses.replace(train_options, output_dir=train_options.output_dir)


def pickled(train_options):
    return pickle.loads(pickle.dumps(train_options))


def printed(train_options):
    repr(train_options)
    str(train_options)
    return train_options


def unchanged(train_options):
    return train_options


COPIES = {
    "replace": replaced_by_nothing,
    "pickle": pickled,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "printed": printed,
}


def assert_equal_options(train_options, expected):
    """All options are the same, and the learning rates with and without adapters."""
    assert as_text(train_options) == as_text(expected)
    assert rates(train_options) == rates(expected)
    assert rates(train_options, use_peft=True) == rates(expected, use_peft=True)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("stage", ["align", "tune", None])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"packing": True, "learning_rate": 3e-4}, id="packing"),
        pytest.param({"eval_strategy": "steps", "load_best_model_at_end": True}, id="held out"),
    ],
)
def test_a_copy_of_the_options_means_the_same(tmp_path, make_copy, stage, options):
    train_options = as_given(tmp_path, stage=stage, **options)
    copied = make_copy(make_copy(train_options))
    assert_equal_options(copied, train_options)
    changed = dataclasses.replace(copied, seed=1)
    assert changed.seed == 1
    assert rates(changed, use_peft=True) == rates(train_options, use_peft=True)


@pytest.mark.parametrize(
    "given, changes",
    [
        ({"stage": "tune"}, {"stage": "align"}),
        ({"stage": "tune"}, {"stage": None}),
        ({"stage": "align", "learning_rate": 5e-4}, {"stage": "tune"}),
        # The learning rate would follow, and is given now.
        ({"stage": "tune"}, {"learning_rate": 1e-5}),
        ({"stage": "tune"}, {"learning_rate": None, "seed": 3}),
        ({"packing": True}, {"packing": False}),
        ({"eval_strategy": "steps"}, {"eval_strategy": "no"}),
        ({"eval_strategy": "steps"}, {"logging_steps": 3}),
        ({"dataloader_num_workers": 2}, {"dataloader_num_workers": 0}),
        ({"bad_steps": "skip"}, {"bad_steps": "stop"}),
        ({"stage": "tune", "lr_scheduler_type": "constant"}, {"lr_scheduler_type": "cosine"}),
        ({"gradient_checkpointing": True}, {"gradient_checkpointing": False}),
        ({"bf16": None, "fp16": True}, {"fp16": False}),
        (
            {
                "eval_strategy": "steps",
                "load_best_model_at_end": True,
                "save_steps": 500,
                "eval_steps": 500,
            },
            {"metric_for_best_model": "eval_accuracy"},
        ),
    ],
)
@pytest.mark.parametrize("make_copy", [unchanged, pickled])
def test_options_that_are_replaced_are_as_if_given_at_once(
    tmp_path, processor, given, changes, make_copy
):
    processor(5.0)
    expected = config(tmp_path, **{**given, **changes})
    copied = make_copy(as_given(tmp_path, **given))
    replaced = dataclasses.replace(copied, **changes)
    assert_equal_options(complete(replaced)[0], expected)


def test_an_option_that_is_set_later_is_a_given_one(tmp_path):
    train_options = as_given(tmp_path, stage="tune")
    train_options.learning_rate = 3e-4
    assert rates(train_options) == [3e-4] * 4
    assert rates(config(tmp_path, stage="tune", learning_rate=3e-4)) == [3e-4] * 4
    replaced = dataclasses.replace(pickled(train_options), seed=2)
    assert rates(replaced, use_peft=True)[1:] == [3e-4] * 3


@pytest.mark.parametrize("make_copy", [unchanged, pickled, copy.copy])
def test_the_options_of_a_run_may_be_given_to_another_one(tmp_path, make_copy):
    given = as_given(tmp_path, stage="tune", global_batch_size=8, weight_decay=0.1)
    settings = make_copy(complete(given)[0])
    settings.settle(gradient_accumulation_steps=4)  # which follows
    assert as_text(settings.to_give()) == as_text(given)

    changed = dataclasses.replace(settings, seed=7, global_batch_size=16)
    expected = dataclasses.replace(given, seed=7, global_batch_size=16)
    assert as_text(changed.to_give()) == as_text(expected)
    assert rates(changed, use_peft=True) == rates(given, use_peft=True)

    settings.learning_rate = 3e-4  # somebody's own from now on
    assert settings.to_give().learning_rate == 3e-4
    assert rates(settings) == [3e-4] * 4


@pytest.mark.parametrize(
    "given, changes",
    [
        ({"stage": "tune"}, {"gradient_checkpointing": True}),
        ({"bf16": None}, {"fp16": True}),
        (
            {"stage": "tune"},
            {"eval_strategy": "steps", "eval_steps": 100, "load_best_model_at_end": True},
        ),
        ({"stage": "tune"}, {"lr_scheduler_type": "constant"}),
        ({"stage": "tune"}, {"stage": "align"}),
    ],
)
@pytest.mark.parametrize("make_copy", [unchanged, pickled])
def test_what_follows_in_the_options_of_a_run_follows_anew_in_a_copy(
    tmp_path, processor, given, changes, make_copy
):
    processor(0.3)  # fast in bfloat16
    settings = config(tmp_path, **given)
    settings.settle(gradient_accumulation_steps=4)
    replaced = dataclasses.replace(make_copy(settings), **changes)
    expected = config(tmp_path, **{**given, **changes})
    assert as_text(replaced) == as_text(expected)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("stage", "tuna", "stage must be one of 'align'"),
        ("max_steps", 0, "for all epochs"),
    ],
)
def test_an_option_that_is_set_later_is_checked(tmp_path, name, value, message):
    train_options = as_given(tmp_path)
    setattr(train_options, name, value)
    with pytest.raises(ValueError, match=message):
        complete(train_options)


def test_a_path_that_is_set_later_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train_options = as_given(tmp_path)
    train_options.output_dir = "~/later"
    assert complete(train_options)[0].output_dir == str(tmp_path / "later")


def test_a_number_that_is_a_text_is_refused(tmp_path):
    with pytest.raises(TypeError, match="learning_rate must be a number, got '1e-3'"):
        NormAlignConfig(str(tmp_path), learning_rate="1e-3")


def test_a_config_is_passive(tmp_path, monkeypatch):
    """It measures nothing, sets nothing in the environment, and opens no process group."""
    monkeypatch.setattr(precision, "_seconds", lambda: pytest.fail("the machine was measured"))
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    environment = dict(os.environ)
    train_options = NormAlignConfig(str(tmp_path), stage="tune")
    before = dict(vars(train_options))
    for make_copy in COPIES.values():
        assert vars(make_copy(train_options)) == before
        assert vars(train_options) == before
    replaced = dataclasses.replace(train_options, seed=train_options.seed)
    assert vars(replaced) == before
    assert PartialState._shared_state == {}
    assert dict(os.environ) == environment
    assert train_options.bf16 is None
    assert train_options.learning_rate is None
    assert train_options.dataloader_num_workers is None


@pytest.mark.parametrize("to_text", [repr, str, "{}".format], ids=["repr", "str", "format"])
def test_a_token_is_not_printed(tmp_path, to_text):
    train_options = config(tmp_path, hub_token="hf_secret", stage="tune")
    text = to_text(train_options)
    assert "hf_secret" not in text
    assert "stage=tune" in text


def test_a_token_has_no_white_space_around_it(tmp_path):
    assert config(tmp_path, hub_token=" hf_secret\n").hub_token == "hf_secret"
    assert config(tmp_path, hub_token=" \n").hub_token is None
    train_options = config(tmp_path, hub_token="hf_secret\n")
    replaced = dataclasses.replace(train_options, seed=1)
    assert replaced.hub_token == "hf_secret"  # it was given


@pytest.mark.parametrize(
    "options, use_peft, expected",
    [
        pytest.param({"stage": "tune"}, False, [5e-5] * 4, id="tune"),
        pytest.param({}, False, [5e-5] * 4, id="no stage"),
        pytest.param({"stage": "align"}, False, [0.0, 5e-5, 5e-5, 0.0], id="align"),
        pytest.param({"stage": "tune"}, True, [0.0, 5e-5, 5e-5, 5e-5], id="adapters"),
        pytest.param(
            {
                "stage": "tune",
                "vision_learning_rate": 1e-6,
                "projector_learning_rate": 1e-4,
            },
            False,
            [1e-6, 1e-4, 5e-5, 5e-5],
            id="rates of modules",
        ),
        pytest.param(
            {
                "stage": "tune",
                "learning_rate": 0.0,
                "norm_learning_rate": 1e-4,
            },
            False,
            [0.0, 0.0, 1e-4, 0.0],
            id="only the norm",
        ),
    ],
)
def test_a_given_learning_rate_is_that_of_every_module_the_stage_trains(
    tmp_path, options, use_peft, expected
):
    train_options = config(tmp_path, **{"learning_rate": 5e-5, **options})
    assert rates(train_options, use_peft) == expected


has_newer_name = pytest.mark.skipif(
    not hasattr(SFTConfig, "activation_checkpointing"),
    reason="a former name",
)


@has_newer_name
@pytest.mark.parametrize("given", [True, False])
def test_checkpointing_may_be_given_under_its_newer_name(tmp_path, given):
    train_options = config(tmp_path, activation_checkpointing=given)
    assert train_options.activation_checkpointing is given
    assert train_options.gradient_checkpointing is given


@pytest.mark.filterwarnings("error::FutureWarning")
def test_nobody_is_warned_of_an_option_that_nobody_set(tmp_path):
    assert config(tmp_path, stage="tune").gradient_checkpointing
    assert not config(tmp_path, gradient_checkpointing=False).gradient_checkpointing
    checkpointing = {"use_reentrant": False}
    train_options = config(tmp_path, gradient_checkpointing_kwargs=checkpointing)
    assert train_options.gradient_checkpointing_kwargs


@has_newer_name
@pytest.mark.parametrize(
    "name",
    ["activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"],
)
def test_how_checkpointing_is_done_may_be_given_under_its_newer_name(tmp_path, name):
    checkpointing = {"use_reentrant": False}
    train_options = config(tmp_path, **{name: checkpointing})
    assert train_options.activation_checkpointing_kwargs == checkpointing
    assert train_options.gradient_checkpointing_kwargs == checkpointing


@pytest.mark.parametrize(
    "options, expected",
    [
        pytest.param({"stage": "tune"}, [0.0, 2e-5, 2e-5, 2e-4], id="tune"),
        pytest.param(
            {"stage": "tune", "learning_rate": 1e-3, "norm_learning_rate": 1e-4},
            [0.0, 1e-3, 1e-4, 1e-3],
            id="given",
        ),
        pytest.param({}, [0.0, 2e-5, 2e-5, 2e-5], id="TRL's"),
    ],
)
def test_under_tune_adapters_have_learning_rates_of_their_own(tmp_path, options, expected):
    train_options = from_recipe(tmp_path, use_peft=True, **options)
    assert rates(train_options, use_peft=True) == expected


def value_of(parsed, name):
    """The value of an option in whichever part has it: data, training or model."""
    owners = [part for part in parsed if name in vars(part)]
    assert len(owners) == 1
    return getattr(owners[0], name)


@pytest.mark.parametrize("file_name", sorted(entry.name for entry in RECIPES.iterdir()))
def test_recipes_are_read_and_say_nothing_that_is_the_default(file_name):
    recipe_path = recipe_file(file_name.removesuffix(".yaml"))
    recipe = yaml.safe_load(recipe_path.read_text())
    paths = [] if "model_name_or_path" in recipe else BASE[:4]
    parsed = parse([str(recipe_path), *paths, "--bf16", "false"])
    use_peft = str("use_peft" in recipe)
    stage_only = parse(["--stage", recipe["stage"], "--use_peft", use_peft, *BASE])
    for name, value in recipe.items():
        parsed_value = value_of(parsed, name)
        if isinstance(value, float):
            assert parsed_value == pytest.approx(value), name
        else:
            assert parsed_value == value, name
        if name not in ("stage", "use_peft"):
            assert parsed_value != value_of(stage_only, name), f"{name} is the default"


def options_of_batch(folder, total, rows, accumulation, **options) -> RunConfig:
    return config(
        folder,
        global_batch_size=total,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        **options,
    )


@pytest.mark.parametrize(
    "total, rows, processes, accumulation, expected",
    [
        (256, 2, 64, 1, 2),
        (128, 1, 32, 1, 4),
        (256, 2, 1, 1, 128),
        (16, 8, 1, 2, 2),
        (None, 8, 2, 3, 3),
    ],
)
def test_accumulation_keeps_the_global_batch(
    tmp_path, total, rows, processes, accumulation, expected
):
    train_options = options_of_batch(tmp_path, total, rows, accumulation)
    assert train_options.world_size == 1
    assert accumulation_steps(train_options, world_size=processes) == expected


def test_a_global_batch_that_does_not_divide_is_refused(tmp_path):
    train_options = options_of_batch(tmp_path, total=16, rows=2, accumulation=4)
    with pytest.raises(ValueError, match=r"16 is not a multiple of .* 2 x 3 process\(es\)"):
        accumulation_steps(train_options, world_size=3)


def test_accumulation_that_contradicts_the_global_batch_is_refused(tmp_path):
    train_options = options_of_batch(tmp_path, total=16, rows=2, accumulation=4)
    with pytest.raises(ValueError, match="4 contradicts .* 16. Leave gradient_.* out: 8 would"):
        accumulation_steps(train_options)


@pytest.mark.parametrize(
    "accelerator_config",
    [
        {"split_batches": True},
        {"dispatch_batches": True},
        {"gradient_accumulation_kwargs": {"num_steps": 2}},
    ],
)
def test_an_accelerator_that_changes_the_rows_of_a_step_is_refused(tmp_path, accelerator_config):
    train_options = options_of_batch(
        tmp_path,
        total=8,
        rows=2,
        accumulation=1,
        accelerator_config=accelerator_config,
    )
    with pytest.raises(ValueError, match="accelerator_config would change the rows in a step"):
        accumulation_steps(train_options)


@pytest.fixture
def parse_here(tmp_path):
    """Options of a command without a precision, on this machine."""

    def complete_words(*words):
        command = [*BASE[:4], "--output_dir", str(tmp_path), "--use_cpu", *words]
        return complete(parse(command)[1])[0]

    return complete_words


@pytest.mark.parametrize("launcher", [None, "no"])
@pytest.mark.parametrize(
    "ratio, is_bf16, mixed_precision",
    [
        pytest.param(0.3, True, "bf16", id="fast in bfloat16"),
        pytest.param(5.0, False, "no", id="slow in bfloat16"),
    ],
)
def test_precision_follows_the_machine(
    monkeypatch, processor, parse_here, launcher, ratio, is_bf16, mixed_precision
):
    processor(ratio)
    if launcher:
        # As accelerate's launcher does by default.
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    train_options = parse_here()
    assert train_options.bf16 is is_bf16
    assert train_options.fp16 is False
    assert train_options.mixed_precision == mixed_precision


each_machine = pytest.mark.parametrize("ratio", [0.3, 5.0])


@each_machine
@pytest.mark.parametrize("bf16", [True, False])
def test_precision_follows_an_option(tmp_path, processor, parse_here, ratio, bf16):
    processor(ratio)
    assert parse_here("--bf16", str(bf16)).bf16 is bf16
    assert config(tmp_path, bf16=bf16).bf16 is bf16


@each_machine
def test_steps_in_float16_are_not_in_bfloat16(tmp_path, processor, ratio):
    processor(ratio)
    assert not config(tmp_path, bf16=None, fp16=True).bf16


@each_machine
@pytest.mark.parametrize(
    "mixed_precision, bf16, fp16",
    [
        ("bf16", True, False),
        ("fp16", False, True),
    ],
)
def test_precision_follows_a_configuration_of_accelerate(
    monkeypatch, processor, parse_here, ratio, mixed_precision, bf16, fp16
):
    processor(ratio)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed_precision)
    train_options = parse_here()
    assert train_options.bf16 is bf16
    assert train_options.fp16 is fp16
    assert train_options.mixed_precision == mixed_precision


def test_steps_on_a_gpu_that_is_not_here_are_in_bfloat16(tmp_path, processor):
    processor(5.0)  # this machine is slow in it
    dry_run = {"bf16": None, "dry_run": True}
    assert config(tmp_path, **dry_run, device_memory="24GiB").bf16
    assert not config(tmp_path, **dry_run).bf16
    assert not config(tmp_path, **dry_run, device_memory="24GiB", fp16=True).bf16


def test_a_bad_loss_is_in_the_log_unless_its_step_is_skipped(tmp_path):
    assert not config(tmp_path).logging_nan_inf_filter
    assert config(tmp_path, bad_steps="skip").logging_nan_inf_filter


# Some schedules follow an evaluation.
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.mark.parametrize("schedule", WITHOUT_WARMUP)
def test_a_schedule_without_warm_up_has_none(tmp_path, schedule):
    train_options = config(tmp_path, stage="tune", lr_scheduler_type=schedule, **EVALUATED)
    assert train_options.get_warmup_steps(120) == 0
    with pytest.raises(ValueError, match="type has no warm-up. Leave warmup_steps .* out"):
        config(tmp_path, lr_scheduler_type=schedule, warmup_steps=4, **EVALUATED)


def test_a_schedule_with_warm_up_has_the_stage_s(tmp_path):
    schedule = "constant_with_warmup"
    train_options = config(tmp_path, stage="tune", lr_scheduler_type=schedule, **EVALUATED)
    assert train_options.get_warmup_steps(120) == 4


@pytest.mark.parametrize(
    "options, workers, are_persistent",
    [
        pytest.param({}, 0, False, id="by default"),
        pytest.param({"dataloader_num_workers": 2}, 2, True, id="given"),
        pytest.param(
            {"dataloader_num_workers": 2, "dataloader_persistent_workers": False},
            2,
            False,
            id="not persistent",
        ),
    ],
)
def test_batches_are_read_by_no_others_on_a_cpu(tmp_path, options, workers, are_persistent):
    train_options = config(tmp_path, **options)
    assert train_options.dataloader_num_workers == workers
    assert train_options.dataloader_persistent_workers is are_persistent


def test_tokenizers_have_no_threads_unless_somebody_wants_them(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    config(tmp_path)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    config(tmp_path)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


@pytest.mark.parametrize(
    "cores, processes, expected",
    [
        (1, 1, 0),
        (2, 1, 1),
        (64, 1, 8),
        (64, 16, 3),
        (4, None, 3),
    ],
)
def test_batches_are_read_by_all_other_cores(tmp_path, monkeypatch, cores, processes, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process_id: set(range(cores)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert config(tmp_path, use_cpu=False).dataloader_num_workers == expected


def test_the_page_has_the_help_and_the_refusals_of_the_fields():
    text = PAGE.read_text()
    assert page_from_fields(text) == text, "run tests/helpers/documented.py"


@pytest.mark.parametrize(
    "recipe, message",
    [
        ({"stage": "pretrain"}, "stage must be one of 'align', 'tune', got 'pretrain'"),
        ({"stage": "align", "learning_rate": 0}, "nothing would be trained"),
        ({"norm_learning_rate": -1}, "norm_learning_rate must be at least 0, got -1"),
        ({"learning_rate": float("nan")}, "learning_rate must be at least 0, got nan"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1, got 0"),
        ({"probe_rows": 0}, "probe_rows must be at least 1, got 0"),
        ({"sample_count": -1}, "sample_count must be at least 0, got -1"),
        ({"sample_max_new_tokens": 0}, "sample_max_new_tokens must be at least 1, got 0"),
        ({"save_steps": 0}, "save_steps 0 saves nothing. Use save_strategy: no"),
        ({"max_steps": 0}, "max_steps 0 would train for all epochs. Leave it out"),
        ({"report_to": "nothing"}, "report_to 'nothing' is not installed"),
        ({"test_split_size": 2}, "between 0 and 1, got 2"),
        ({"test_split_size": 0.1}, "test_split_size needs eval_strategy steps or epoch"),
        ({"do_eval": True}, "do_eval alone evaluates nothing. Set eval_strategy"),
        (
            {"padding_free": True, "neftune_noise_alpha": 5.0},
            "_alpha cannot .* with padding_free",
        ),
        (
            {"packing": True, "pad_to_multiple_of": 8},
            "pad_to_multiple_of cannot be .* with packing",
        ),
        (
            {"packing": True, "train_sampling_strategy": "batch_rebalance"},
            "batch_rebalance cannot",
        ),
        (
            {"packing": True, "average_tokens_across_devices": False},
            "_across_devices false cannot",
        ),
        (
            {"packing": True, "save_strategy": "no", "accelerator_config": UNSEEDED},
            "sampler false cannot",
        ),
        ({"lora_r": 4}, "lora_r is for adapters. Add --use_peft"),
        (
            {"bnb_4bit_quant_type": "fp4"},
            "bnb_4bit_quant_type is for 4 bits. Add --load_in_4bit",
        ),
        (
            {"bnb_4bit_quant_storage": "uint8"},
            "_quant_storage cannot be used here: .*FSDP",
        ),
        ({"learing_rate": 1}, "no option --learing_rate. Did you mean --learning_rate?"),
        ({"max_steps": 1.5}, "max_steps.* must be a whole number, got '1.5'"),
        ({"use_peft": "maybe"}, "use_peft.* must be true or false, got 'maybe'"),
        (
            {"early_stopping_patience": 2},
            "needs eval_strategy .*, and load_best_model_at_end",
        ),
        (
            {"early_stopping_patience": 0},
            "early_stopping_patience must be at least 1, got 0",
        ),
        ({"early_stopping_threshold": 0.1}, "_threshold needs early_stopping_patience"),
        (
            {"early_stopping_patience": 2, **HELD_OUT},
            "patience needs load_best_model_at_end true",
        ),
        (
            {"early_stopping_patience": 2, "load_best_model_at_end": True},
            r"patience needs eval_strategy steps \(with eval_steps\) or epoch\.$",
        ),
        (
            {"early_stopping_threshold": -0.1, **BEST},
            "_threshold must be at least 0, got -0.1",
        ),
        (
            {"early_stopping_threshold": ".nan", **BEST},
            "_threshold must be at least 0, got nan",
        ),
        (
            {"eval_dataset_name": "held"},
            "eval_dataset_name needs eval_strategy steps or epoch",
        ),
        ({"max_steps": -2}, "max_steps -2 would train for all epochs"),
        ({"save_steps": -3}, "save_steps -3 saves nothing"),
        ({"device_memory": "24GiB"}, "device_memory is for a dry run. Add --dry_run"),
        (
            {"device_memory": 24, "dry_run": True},
            "device_memory must have a unit, .* got 24",
        ),
        ({"device_memory": "24GBs", "dry_run": True}, "device_memory must have a unit"),
        (
            {"padding_free": True, "pad_to_multiple_of": 8},
            "_multiple_of cannot .* with padding_free",
        ),
        ({"packing": True, "neftune_noise_alpha": 5.0}, "_alpha cannot .* with packing"),
        ({"use_dora": True}, "use_dora is for adapters. Add --use_peft"),
        ({"use_rslora": True}, "use_rslora is for adapters. Add --use_peft"),
        ({"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save is for adapters"),
    ],
)
def test_bad_values_in_a_recipe_are_named(tmp_path, recipe, message):
    with pytest.raises(ValueError, match=message):
        from_recipe(tmp_path, **recipe)


@pytest.mark.parametrize(
    "expected",
    [
        {"save_strategy": "no", "save_steps": 0},
        {"padding_free": True, "train_sampling_strategy": "batch_rebalance"},
        {"padding_free": True, "average_tokens_across_devices": False},
        {"neftune_noise_alpha": 5.0, "pad_to_multiple_of": 8},
        {"dry_run": True, "device_memory": "80gb"},
        {"dry_run": True, "device_memory": "1.5GiB"},
        {"do_eval": True, **HELD_OUT},
        {"lr_scheduler_type": "constant", "warmup_steps": 0},
        {"max_steps": 1},
        {**BEST, "early_stopping_patience": 1},
        {
            "projector_learning_rate": 0,
            "norm_learning_rate": 0,
            "vision_learning_rate": 0,
        },
        # The vision tower is trained, as it would not be with adapters.
        {
            "stage": "tune",
            "projector_learning_rate": 0,
            "norm_learning_rate": 0,
            "language_learning_rate": 0,
        },
        {"dry_run": True, "device_memory": "512MB"},
        {"dry_run": True, "device_memory": "65536KiB"},
    ],
    ids=str,
)
def test_values_at_the_edge_of_what_is_refused_are_taken(tmp_path, expected):
    train_options = config(tmp_path, **expected)
    values = {name: getattr(train_options, name) for name in expected}
    assert values == expected


def test_an_order_of_rows_that_no_run_finds_again_needs_a_run_without_checkpoints(tmp_path):
    train_options = config(tmp_path, save_strategy="no", accelerator_config=UNSEEDED)
    assert train_options.accelerator_config.use_seedable_sampler is False
    with pytest.raises(ValueError, match="use_seedable_sampler false .* set save_strategy: no"):
        config(tmp_path, accelerator_config=UNSEEDED)


@pytest.mark.parametrize(
    "name, least",
    [
        ("per_device_train_batch_size", 1),
        ("global_batch_size", 1),
        ("learning_rate", 0),
        ("probe_rows", 1),
        ("vision_learning_rate", 0),
        ("projector_learning_rate", 0),
        ("norm_learning_rate", 0),
        ("language_learning_rate", 0),
        ("sample_count", 0),
        ("sample_max_new_tokens", 1),
    ],
)
def test_a_number_may_be_its_least_and_no_less(tmp_path, name, least):
    # Something else must be trained.
    trained = "norm_learning_rate"
    if name == trained:
        trained = "projector_learning_rate"
    train_options = config(tmp_path, **{trained: 1e-3, name: least})
    assert getattr(train_options, name) == least
    with pytest.raises(ValueError, match=f"^{name} must be at least {least}, got {least - 1}"):
        config(tmp_path, **{trained: 1e-3, name: least - 1})


def test_defaults_of_refused_options_are_those_of_trl():
    defaults_of_trl = {option.name: option.default for option in dataclasses.fields(SFTConfig)}
    changed = set()
    for name, default in REFUSALS.items():
        if default != defaults_of_trl.get(name):
            changed.add(name)
    assert changed == {
        "assistant_only_loss",
        "remove_unused_columns",
        "hub_strategy",
        "router_aux_loss_coef",
    }


def test_an_option_that_is_refused_may_be_left_without_a_value(tmp_path):
    config(tmp_path, use_liger_kernel=None, do_predict=None, auto_find_batch_size=None)
    assert config(tmp_path, router_aux_loss_coef=None).router_aux_loss_coef == 0.0


def other_values(name) -> list:
    """Values of a refused option that are not its default."""
    values = {
        "completion_only_loss": [True, False],
        "include_num_input_tokens_seen": [True, "all"],
        "hub_strategy": ["every_save", "checkpoint", "all_checkpoints"],
    }
    if name in values:
        return values[name]
    if REFUSALS[name] is None:
        return [{"a": 1}, "other"]
    return [not REFUSALS[name]]


@pytest.mark.parametrize("name", REFUSALS)
def test_an_option_that_does_nothing_or_harm_is_refused(tmp_path, name):
    for value in other_values(name):
        with pytest.raises(ValueError, match=f"^{name} cannot be used here: .*Leave it out"):
            config(tmp_path, **{name: value})


@needs_deepspeed
@pytest.mark.parametrize(
    "section, options, message",
    [
        (
            {"optimizer": {"type": "AdamW"}},
            {},
            "section 'optimizer' would undo optim",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            {},
            "'scheduler' would undo lr_scheduler_type",
        ),
        (
            {"torch_autocast": {"enabled": True}},
            {},
            "'torch_autocast' would undo bf16",
        ),
        (
            {"bf16": {"enabled": True}},
            {},
            "bf16 is True in DeepSpeed's configuration. Remove it",
        ),
        (
            {"bf16": {"enabled": False}},
            {"bf16": True},
            "bf16 is False in DeepSpeed's",
        ),
        (
            {"fp16": {"enabled": True}},
            {},
            "fp16 is True in DeepSpeed's configuration. Remove it",
        ),
        ({}, {"fp16": True}, "fp16 would round the gain under DeepSpeed. Use bf16"),
        ({}, {"bad_steps": "skip"}, "bad_steps cannot be 'skip': DeepSpeed takes the"),
    ],
)
def test_a_deepspeed_configuration_that_undoes_options_is_refused(
    tmp_path, section, options, message
):
    deepspeed = {
        "zero_optimization": {"stage": 2},
        "train_batch_size": "auto",
        **section,
    }
    with pytest.raises(ValueError, match=message):
        config(tmp_path, deepspeed=deepspeed, **options)


@pytest.fixture
def zero(tmp_path):
    """Makes options with a stage of ZeRO, whose configuration ends with the test."""
    kept = []

    def make(stage=2, section=None, **options) -> RunConfig:
        deepspeed = {
            "zero_optimization": {"stage": stage},
            "train_batch_size": "auto",
            **(section or {}),
        }
        train_options = config(tmp_path, deepspeed=deepspeed, **options)
        kept.append(train_options)
        return train_options

    yield make
    unset_hf_deepspeed_config()


@needs_deepspeed
def test_deepspeed_keeps_weights_in_float32_and_autocasts_where_steps_do(zero):
    train_options = zero(section={"bf16": {"enabled": "auto"}}, bf16=True)
    plugin_config = train_options.deepspeed_plugin.deepspeed_config
    assert "bf16" not in plugin_config
    assert "bf16" not in deepspeed_config()  # ZeRO-3 loads a model by this one
    assert plugin_config["torch_autocast"] == {
        "enabled": True,
        "dtype": "bfloat16",
        # No weight and no gradient is sent in bfloat16.
        "lower_precision_safe_modules": [],
    }


@needs_deepspeed
@pytest.mark.parametrize("section", [{}, {"bf16": {"enabled": False}}])
def test_deepspeed_does_not_autocast_where_steps_do_not(zero, section):
    train_options = zero(section=section)
    assert "torch_autocast" not in train_options.deepspeed_plugin.deepspeed_config


@needs_deepspeed
def test_under_zero_3_nothing_is_counted(zero, checkpoint):
    train_options = zero(stage=3, bf16=True, dry_run=True)
    with pytest.raises(ValueError, match="dry_run cannot count ZeRO-3. Count with fsdp2"):
        check_options(train_options, str(checkpoint))


@needs_deepspeed
def test_under_zero_3_nothing_is_quantized(zero, checkpoint):
    train_options = zero(stage=3, bf16=True, dry_run=True)
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    given_model = GivenModel(str(checkpoint), quantization=four_bits)
    with pytest.raises(ValueError, match="do not go with ZeRO-3. Use zero2"):
        open_model(given_model, train_options)


@needs_deepspeed
def test_under_zero_3_all_is_float32(zero):
    half_config = NormAlignLlavaConfig(dtype="bfloat16")
    assert frozen_dtype(half_config, zero(stage=3, bf16=True, dry_run=True)) == "float32"


@needs_deepspeed
def test_under_zero_2_a_dry_run_counts_and_what_is_frozen_may_be_bfloat16(zero, checkpoint):
    train_options = zero(stage=2, bf16=True, dry_run=True)
    check_options(train_options, str(checkpoint))
    half_config = NormAlignLlavaConfig(dtype="bfloat16")
    assert frozen_dtype(half_config, train_options) == "bfloat16"


def read(tmp_path, text: str, *words: str):
    """Data, training and model of a recipe's text, which names data itself if it is to."""
    recipe_path = tmp_path / "recipe.yaml"
    recipe_path.write_text(text)
    base = ["--model_name_or_path", "model", "--bf16", "false", "--output_dir", str(tmp_path)]
    data, train_options, model = parse([str(recipe_path), *base, *words])
    return data, complete(train_options)[0], model


FALSE = ("no", "No", "off", "false", "False", "n")
TRUE = ("yes", "on", "True", "true", "y")
NONE = ("none", "no", "off", "false", "None", "No")


def each_word(name, words, meaning) -> list[tuple]:
    """The same meaning of several words."""
    return [(name, word, meaning) for word in words]


MEANINGS = [
    *each_word("save_strategy", ["no", "off", "false", "'no'", "No"], "no"),
    *each_word("eval_strategy", ["no", "off", "False"], "no"),
    *each_word("logging_strategy", ["no", "off"], "no"),
    *each_word("gradient_checkpointing", FALSE, False),
    *each_word("gradient_checkpointing", TRUE, True),
    *each_word("use_peft", FALSE, False),
    *each_word("use_peft", TRUE, True),
    *each_word("dataset_streaming", TRUE, True),
    *each_word("disable_tqdm", FALSE, False),
    *each_word("report_to", NONE, []),
    *each_word("max_length", ["null", "none", "None"], None),
    *each_word("fsdp", ["True", "yes", "on", "true"], True),
    *each_word("fsdp", ["no", "off", "false"], False),
    *each_word("include_num_input_tokens_seen", ["no", "off", "false"], "no"),
    *each_word("deepspeed", ["No", "no"], None),
    *each_word("max_steps", ["1e3", "1_000"], 1000),
    ("learning_rate", "5e-1", 0.5),
    ("learning_rate", "1", 1.0),
    ("weight_decay", ".5", 0.5),
    ("seed", "007", 7),
    ("dataset_config", "2024-01-01", "2024-01-01"),
    ("dataset_config", "no", "no"),
    ("dataset_config", "010", "010"),
    ("model_revision", "1234567", "1234567"),
    ("model_revision", "12e4567", "12e4567"),
    ("bad_rows", "1e-2", "1e-2"),
    ("max_grad_norm", ".inf", math.inf),
    ("early_stopping_threshold", "0", 0.0),
    ("gradient_checkpointing_kwargs", "no", None),
]
DATA = "dataset_name: data\n"


def assert_same_value(value, expected):
    """Equal and of one type, but that a text may be of a subclass, such as an enumeration."""
    assert value == expected
    if not isinstance(value, str):
        assert type(value) is type(expected)


@pytest.mark.parametrize("name, word, meaning", MEANINGS)
def test_a_recipe_means_what_people_mean(tmp_path, name, word, meaning):
    parsed = read(tmp_path, f"{DATA}{name}: {word}\n")
    assert_same_value(value_of(parsed, name), meaning)


WORDS_OF_YAML = ("null", "'no'")


@pytest.mark.parametrize(
    "name, word, meaning",
    [case for case in MEANINGS if case[1] not in WORDS_OF_YAML],
)
def test_the_command_line_means_what_people_mean(tmp_path, name, word, meaning):
    parsed = read(tmp_path, DATA, f"--{name}", word)
    assert_same_value(value_of(parsed, name), meaning)


def test_a_run_is_not_resumed_if_a_recipe_or_the_command_line_says_no(tmp_path):
    by_recipe = read(tmp_path, f"{DATA}resume_from_checkpoint: no\n")
    by_words = read(tmp_path, DATA, "--resume_from_checkpoint", "no")
    assert value_of(by_recipe, "resume_from_checkpoint") in ("no", None)
    assert value_of(by_words, "resume_from_checkpoint") in ("no", None)


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "t", "y", "1"])
def test_words_for_true(word):
    assert truth(word) is True


@pytest.mark.parametrize("word", ["false", "False", "no", "off", "f", "n", "0"])
def test_words_for_false(word):
    assert truth(word) is False


@pytest.mark.parametrize("word", ["none", "", "2", "maybe"])
def test_words_for_neither_true_nor_false(word):
    with pytest.raises(ArgumentTypeError, match=re.escape(repr(word))):
        truth(word)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0.5", 0.5),
        ("5e-1", 0.5),
        ("1_000", 1000),
        (".5", 0.5),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("-2", -2),
    ],
)
def test_numbers_as_people_and_yaml_write_them(text, expected):
    assert number(text) == expected


def test_no_number_as_yaml_writes_it():
    assert math.isnan(number(".nan"))


def test_a_word_is_no_number():
    with pytest.raises(ArgumentTypeError, match="'many'"):
        number("many")


@pytest.mark.parametrize(
    "value, expected",
    [
        ("1000", 1000),
        ("1e3", 1000),
        ("1_000", 1000),
        ("-2", -2),
        (5.0, 5),
    ],
)
def test_whole_numbers_as_people_and_yaml_write_them(value, expected):
    assert whole_number(value) == expected


@pytest.mark.parametrize("text", ["1.5", "5e-1", "many", ".inf"])
def test_what_is_no_whole_number(text):
    with pytest.raises(ArgumentTypeError, match=re.escape(repr(text))):
        whole_number(text)


def test_options_in_python_are_read_as_in_a_recipe(tmp_path):
    recipe = {
        "output_dir": str(tmp_path),
        "save_strategy": False,
        "probe_steps": ["0", "1e2"],
        "gradient_checkpointing": False,
        "env": None,
    }
    train_options = parse(BASE, recipe)[1]
    assert train_options.save_strategy == "no"
    assert train_options.probe_steps == [0, 100]
    assert train_options.gradient_checkpointing is False


def test_a_recipe_in_python_may_have_numbers_for_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMALIGN_TEST_NUMBER", raising=False)
    parse(BASE, {"output_dir": str(tmp_path), "env": {"NORMALIGN_TEST_NUMBER": 3}})
    assert os.environ.pop("NORMALIGN_TEST_NUMBER") == "3"


@pytest.mark.parametrize("word", ["null", "Null", "none"])
def test_the_command_line_may_take_a_default_away(tmp_path, word):
    parsed = read(tmp_path, DATA, "--max_length", word)
    assert parsed[1].max_length is None


@pytest.mark.parametrize(
    "model_init_kwargs",
    [
        pytest.param({}, id="options"),
        pytest.param({"dtype": "bfloat16", "use_kernels": False}, id="a mapping beside options"),
    ],
)
def test_how_a_checkpoint_is_opened_is_told_to_the_trainer(tmp_path, model_init_kwargs):
    options = {
        "model_revision": "v2",
        "dtype": "float32",
        "attn_implementation": "eager",
    }
    if model_init_kwargs:
        options["model_init_kwargs"] = model_init_kwargs
    train_options = from_recipe(tmp_path, **options)
    assert train_options.model_init_kwargs == {
        "revision": "v2",
        "dtype": "float32",
        "attn_implementation": "eager",
        **model_init_kwargs,
    }


@pytest.mark.parametrize(
    "given, expected",
    [
        ("lm_head, embed_tokens", ["lm_head", "embed_tokens"]),
        (["lm_head,embed_tokens"], ["lm_head", "embed_tokens"]),
        (["lm_head", "embed_tokens"], ["lm_head", "embed_tokens"]),
        ([], None),
        (r".*\.(lm_head|embed_tokens)", [r".*\.(lm_head|embed_tokens)"]),
    ],
)
def test_names_may_be_in_one_text_or_in_several(given, expected):
    model_options = ModelArguments(use_peft=True, lora_modules_to_save=given)
    assert model_options.lora_modules_to_save == expected


def test_a_model_is_quantized_to_4_bits():
    quantization = ModelArguments(load_in_4bit=True).quantization
    assert quantization.load_in_4bit
    assert not quantization.load_in_8bit
    assert quantization.bnb_4bit_quant_type == "nf4"
    assert quantization.bnb_4bit_use_double_quant is True
    assert quantization.bnb_4bit_compute_dtype == torch.float32


def test_a_model_is_quantized_to_4_bits_as_the_options_say():
    model_options = ModelArguments(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4",
        use_bnb_nested_quant=False,
    )
    assert model_options.quantization.bnb_4bit_quant_type == "fp4"
    assert model_options.quantization.bnb_4bit_use_double_quant is False


def test_a_model_is_quantized_to_8_bits():
    quantization = ModelArguments(load_in_8bit=True).quantization
    assert quantization.load_in_8bit
    assert not quantization.load_in_4bit


def test_a_model_is_not_quantized_by_default():
    assert ModelArguments().quantization is None


@pytest.mark.parametrize(
    "metric, expected",
    [
        (None, "eval_loss"),
        ("loss", "eval_loss"),
        ("eval_loss", "eval_loss"),
        ("accuracy", "eval_accuracy"),
        ("eval_accuracy", "eval_accuracy"),
        ("evals", "eval_evals"),
    ],
)
def test_the_best_step_is_told_by_a_key_of_the_log(tmp_path, metric, expected):
    assert best_metric(config(tmp_path, metric_for_best_model=metric)) == expected


def test_numbers_and_booleans_in_mappings_are_read_as_people_mean(tmp_path):
    text = """
    dataset_name: data
    lr_scheduler_type: cosine_with_min_lr
    lr_scheduler_kwargs: {min_lr: 1e-7}
    gradient_checkpointing_kwargs: {use_reentrant: no}
    accelerator_config: {use_seedable_sampler: off}
    save_strategy: no
    probe_steps: [0, 1e2]
    lora_target_modules: [q_proj, no]
    use_peft: yes
    env: {NORMALIGN_TEST_WORD: no}
    """
    _, train_options, model_options = read(tmp_path, text)
    assert train_options.lr_scheduler_kwargs == {"min_lr": 1e-7}
    assert train_options.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert train_options.accelerator_config.use_seedable_sampler is False
    assert train_options.probe_steps == [0, 100]
    assert model_options.lora_target_modules == ["q_proj", "no"]
    assert os.environ.pop("NORMALIGN_TEST_WORD") == "no"


def test_a_mixture_is_read_as_people_mean(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    text = """
    image_folder: ~/all
    datasets:
      - {path: ~/a.json, fraction: 5e-1, name: no, data_files: [~/x.json, y.json]}
      - {path: owner/b, fraction: 1, split: on, image_folder: ~/own, columns: {image: no}}
    """
    data, _, _ = read(tmp_path, text)
    first, second = data.sources
    assert first.path == f"{tmp_path}/a.json"
    assert first.image_folder == f"{tmp_path}/all"
    assert first.fraction == 0.5
    assert first.name == "no"
    assert first.data_files == [f"{tmp_path}/x.json", "y.json"]
    assert second.path == "owner/b"
    assert second.image_folder == f"{tmp_path}/own"
    assert second.fraction == 1.0
    assert second.split == "on"
    assert second.columns == {"image": "no"}


PATHS = (
    "output_dir",
    "model_name_or_path",
    "resume_from_checkpoint",
    "dataset_name",
    "eval_dataset_name",
    "image_folder",
)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("in_recipe", [True, False], ids=["recipe", "command line"])
def test_the_home_folder_stands_for_a_tilde_in_every_path(tmp_path, monkeypatch, name, in_recipe):
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "eval_strategy: steps\n"
    words = ["--bf16", "false"]
    if name != "dataset_name":
        text += DATA
    if name != "model_name_or_path":
        words += ["--model_name_or_path", "model"]
    if in_recipe:
        text += f"{name}: ~/x y\n"
    else:
        words.append(f"--{name}=~/x y")
    (tmp_path / "recipe.yaml").write_text(text)
    parsed = parse(["~/recipe.yaml", *words])
    assert value_of(parsed, name) == f"{tmp_path}/x y"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write_mapping(folder, content):
    (folder / "mapping.json").write_text(json.dumps(content))


def test_the_home_folder_stands_for_a_tilde_in_the_path_of_fsdp_s_file(home):
    write_mapping(home, {"version": 2})
    train_options = config(home, fsdp=True, fsdp_config="~/mapping.json")
    assert train_options.fsdp_plugin_args["fsdp_version"] == 2


def test_the_home_folder_stands_for_a_tilde_in_the_path_of_accelerate_s_file(home):
    write_mapping(home, {"even_batches": False})
    train_options = config(home, fsdp=False, accelerator_config="~/mapping.json")
    assert train_options.accelerator_config.even_batches is False


@needs_deepspeed
def test_the_home_folder_stands_for_a_tilde_in_the_path_of_deepspeed_s_file(home):
    write_mapping(home, {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"})
    try:
        plugin = config(home, deepspeed="~/mapping.json").deepspeed_plugin
        assert plugin.deepspeed_config["zero_optimization"] == {"stage": 2}
    finally:
        unset_hf_deepspeed_config()


STOP_EARLY = (
    "eval_strategy: epoch\n"
    "save_strategy: epoch\n"
    "load_best_model_at_end: true\n"
    "early_stopping_patience: 2\n"
)


@pytest.mark.parametrize(
    "recipe, words",
    [
        (
            "use_peft: true\nlora_r: 8\nlora_dropout: 0.1\nuse_dora: true",
            ["--use_peft", "false"],
        ),
        ("load_in_4bit: true\nbnb_4bit_quant_type: fp4", ["--load-in-4bit=no"]),
        ("eval_strategy: steps\ntest_split_size: 0.1", ["--eval_strategy", "no"]),
        ("eval_strategy: steps\neval_dataset_name: held", ["--eval_strategy", "no"]),
        (STOP_EARLY, ["--eval_strategy", "no"]),
        (
            f"{STOP_EARLY}metric_for_best_model: eval_loss",
            ["--load_best_model_at_end", "no", "--eval_strategy", "no"],
        ),
        ("use_peft: true\nuse_rslora: true", ["--use_peft", "false"]),
        ("dry_run: true\ndevice_memory: 24GiB", ["--dry_run", "false"]),
        (
            "lr_scheduler_type: cosine\nwarmup_steps: 5",
            ["--lr_scheduler_type", "constant"],
        ),
        (
            "gradient_accumulation_steps: 4\nglobal_batch_size: 32",
            ["--global_batch_size", "8"],
        ),
    ],
)
def test_what_the_command_line_switches_off_takes_its_own_options_along(tmp_path, recipe, words):
    data, train_options, model_options = read(tmp_path, f"{DATA}{recipe}\n", *words)
    expected_data, _, expected_model_options = read(tmp_path, DATA, *words)
    assert data == expected_data
    if "load_in_4bit" not in recipe:
        assert model_options == expected_model_options
    assert train_options.eval_strategy == "no"
    assert train_options.early_stopping_patience is None
    accumulation_steps(train_options)


def test_a_data_set_of_the_command_line_replaces_the_recipes_mixture(tmp_path):
    data, _, _ = read(tmp_path, "datasets: [{path: a}]\n", "--dataset_name", "b")
    assert [source.path for source in data.sources] == ["b"]


def test_a_data_set_and_a_mixture_in_one_recipe_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Give dataset_name .* or datasets .*, not both"):
        read(tmp_path, "datasets: [{path: a}]\ndataset_name: b\n")


def option_names() -> set[str]:
    return {action.dest for action in option_parser()._actions}


@pytest.mark.parametrize("name, prefixes", {**OVERRULED, **REPLACED}.items())
def test_what_is_taken_along_are_options(name, prefixes):
    names = option_names()
    assert name in names
    for prefix in prefixes:
        assert any(option_name.startswith(prefix) for option_name in names), prefix


def test_names_of_other_tools_are_no_options_and_lead_to_some():
    names = option_names()
    assert not ELSEWHERE.keys() & names
    for name, (options_here, remark) in ELSEWHERE.items():
        assert set(options_here) <= names, name
        assert options_here or remark, name
        assert not set(options_here) & REFUSALS.keys(), name


THEIRS = {
    "adam_beta1": [
        "beta1",
    ],
    "adam_beta2": [
        "beta2",
    ],
    "attn_implementation": [
        "flash_attn",  # LLaMA-Factory
        "sdp_attention",  # axolotl
        "attn_impl",
        "xformers_attention",
        "eager_attention",
        "flash_attention",
        "use_flash_attn",
    ],
    "bnb_4bit_quant_type": [
        "quantization_type",  # LLaMA-Factory
        "bnb_quant_type",
        "quant_type",
    ],
    "dataloader_num_workers": [
        "num_workers",
    ],
    "dataset_name": [
        "data_path",  # LLaVA
        "dataset_dir",  # LLaMA-Factory
        "dataset",
        "train_file",
        "dataset_path",
        "train_data",
    ],
    "dataset_num_proc": [
        "preprocessing_num_workers",
        "dataset_processes",
        "preprocess_workers",
    ],
    "dataset_streaming": [
        "streaming",
    ],
    "datasets": [
        "mix_strategy",  # LLaMA-Factory
        "interleave_probs",  # LLaMA-Factory
    ],
    "dtype": [
        "torch_dtype",
        "compute_dtype",
        "weight_dtype",
    ],
    "early_stopping_patience": [
        "early_stop_interval",
        "early_stopping_steps",
    ],
    "eval_dataset_name": [
        "eval_dataset",
        "val_dataset",
        "validation_file",
        "test_datasets",
    ],
    "eval_steps": [
        "evals_per_epoch",  # axolotl
        "eval_interval",
        "val_check_interval",
        "eval_every",
    ],
    "global_batch_size": [
        "effective_batch_size",
        "total_batch_size",
    ],
    "gradient_accumulation_steps": [
        "grad_accum_steps",
        "accumulation_steps",
    ],
    "gradient_checkpointing": [
        "use_gradient_checkpointing",
        "vit_gradient_checkpointing",
    ],
    "hub_model_id": [
        "hub_repo_id",
        "hub_model_name",
    ],
    "image_folder": [
        "media_dir",  # LLaMA-Factory
        "image_dir",
        "images_dir",
        "image_path",
    ],
    "language_learning_rate": [
        "freeze_language_model",  # LLaMA-Factory
        "freeze_llm",  # ms-swift
        "finetune_language_layers",  # unsloth
        "freeze_backbone",
    ],
    "learning_rate": [
        "lr",
        "base_lr",
        "lr_rate",
    ],
    "load_in_4bit": [
        "load_in_4_bit",
    ],
    "load_in_8bit": [
        "load_in_8_bit",
    ],
    "logging_steps": [
        "log_interval",
        "log_every",
    ],
    "lora_modules_to_save": [
        "additional_target",  # LLaMA-Factory
        "modules_to_save",
    ],
    "lora_r": [
        "lora_rank",  # LLaMA-Factory
        "lora_dim",
    ],
    "lora_target_modules": [
        "lora_target",  # LLaMA-Factory
        "lora_target_linear",  # axolotl
        "target_modules",
        "target_all_linear",
    ],
    "lr_scheduler_type": [
        "lr_scheduler",  # axolotl
        "scheduler",
        "scheduler_type",
        "lr_schedule",
    ],
    "max_grad_norm": [
        "gradient_clipping",  # axolotl
        "clip_grad",
        "grad_clip",
        "gradient_clip_val",
    ],
    "max_length": [
        "cutoff_len",  # LLaMA-Factory
        "sequence_len",  # axolotl
        "max_seq_length",  # unsloth
        "model_max_length",  # LLaVA
        "truncation_strategy",  # ms-swift
        "max_seq_len",
        "seq_len",
    ],
    "max_steps": [
        "max_train_steps",
        "train_iters",
        "total_steps",
    ],
    "model_name_or_path": [
        "base_model",
        "model",
        "model_path",
        "model_id",
        "model_id_or_path",
        "model_name",
    ],
    "neftune_noise_alpha": [
        "neftune_alpha",
        "neft_alpha",
    ],
    "num_train_epochs": [
        "num_epochs",
        "epochs",
        "max_epochs",
        "n_epochs",
    ],
    "optim": [
        "optimizer",
        "optimizer_name",
    ],
    "output_dir": [
        "overwrite_output_dir",  # LLaMA-Factory
        "output_path",
        "save_dir",
        "work_dir",
        "output",
        "save_path",
    ],
    "packing": [
        "neat_packing",  # LLaMA-Factory
        "sample_packing",
    ],
    "per_device_eval_batch_size": [
        "eval_batch_size",
    ],
    "per_device_train_batch_size": [
        "micro_batch_size",  # axolotl
        "train_batch_size",
        "mbs",
    ],
    "projector_learning_rate": [
        "aligner_lr",  # ms-swift
        "mm_projector_lr",  # LLaVA
        "projector_lr",
        "merger_lr",
    ],
    "report_to": [
        "use_wandb",  # axolotl
        "wandb_project",  # axolotl
        "use_swanlab",
        "use_tensorboard",
        "swanlab_project",
    ],
    "resume_from_checkpoint": [
        "resume",
        "auto_resume_from_checkpoints",
        "resume_from",
    ],
    "save_steps": [
        "saves_per_epoch",  # axolotl
        "save_interval",
        "save_every",
    ],
    "seed": [
        "random_seed",
        "random_state",
    ],
    "shuffle_buffer_size": [
        "buffer_size",
        "shuffle_buffer",
        "streaming_shuffle_buffer_size",
    ],
    "test_split_size": [
        "val_size",  # LLaMA-Factory
        "split_dataset_ratio",  # ms-swift
        "val_set_size",
        "validation_split_percentage",
    ],
    "use_bnb_nested_quant": [
        "double_quantization",
        "bnb_4bit_use_double_quant",
        "double_quant",
    ],
    "use_dora": [
        "peft_use_dora",
        "use_dora_adapter",
    ],
    "use_peft": [
        "finetuning_type",  # LLaMA-Factory
        "train_type",  # ms-swift
        "lora_enable",  # LLaVA
        "adapter",
        "tuner_type",
        "sft_type",
    ],
    "use_rslora": [
        "peft_use_rslora",
    ],
    "vision_learning_rate": [
        "freeze_vision_tower",  # LLaMA-Factory
        "vit_lr",  # ms-swift
        "freeze_vit",  # ms-swift
        "finetune_vision_layers",  # unsloth
        "mm_vision_tower_lr",  # LLaVA
        "vision_tower_lr",
        "freeze_vision_model",
        "unfreeze_mm_vision_tower",
        "vision_lr",
        "unfreeze_vision",
    ],
    "warmup_steps": [
        "warmup_ratio",  # LLaVA
        "warmup",
        "num_warmup_steps",
        "lr_warmup_fraction",
        "warmup_iters",
    ],
}
"""Options of this package, and the names that other tools document for the same."""


def cases_of_theirs() -> list[tuple[str, str]]:
    cases = []
    for option_name, names in THEIRS.items():
        cases += [(name, option_name) for name in names]
    return cases


@pytest.mark.parametrize("theirs, ours", cases_of_theirs())
def test_a_name_of_another_tool_stands_for_what_it_does_there(theirs, ours):
    options_here, _ = ELSEWHERE[theirs]
    assert options_here == (ours,)
    assert f"`{theirs}` is called `{ours}` here" in answer_for(theirs)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("freeze_aligner", ("projector_learning_rate", "norm_learning_rate")),
        ("freeze_multi_modal_projector", ("projector_learning_rate", "norm_learning_rate")),
        ("tune_mm_mlp_adapter", ("projector_learning_rate", "norm_learning_rate")),
        ("quantization_bit", ("load_in_4bit", "load_in_8bit")),
        ("quant_bits", ("load_in_4bit", "load_in_8bit")),
        ("bits", ("load_in_4bit", "load_in_8bit")),
    ],
)
def test_a_name_may_stand_for_two_options(name, expected):
    options_here, _ = ELSEWHERE[name]
    assert options_here == expected


def test_a_name_that_stands_for_two_options_is_answered_with_both():
    answer = answer_for("freeze_aligner")
    expected = "are called `projector_learning_rate` and `norm_learning_rate` here: 0 freezes"
    assert expected in answer


@pytest.mark.parametrize(
    "name",
    [
        "plot_loss",
        "model_type",
        "overwrite_cache",
        "image_max_pixels",
        "image_resolution",
        "image_min_pixels",
        "max_pixels",
        "min_pixels",
        "image_size",
        "image_aspect_ratio",
        "image_resize_algorithm",
        "chat_template",
        "conversation",
        "prompt_template",
        "num_samples",
        "template",
        "max_samples",
    ],
)
def test_a_name_may_stand_for_no_option(name):
    options_here, _ = ELSEWHERE[name]
    assert options_here == ()
    assert answer_for(name).startswith(f"There is no `{name}` here: ")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_another_tool_is_answered_with_ours(tmp_path, name):
    options_here, remark = ELSEWHERE[name]
    name_with_dashes = name.replace("_", "-")
    for text, words in (
        (f"{DATA}{name}: 5\n", []),
        (DATA, [f"--{name}", "5"]),
        (DATA, [f"--{name_with_dashes}=5"]),
    ):
        with pytest.raises(ValueError) as error:
            read(tmp_path, text, *words)
        message = str(error.value)
        for option_name in options_here:
            assert f"`{option_name}`" in message
        assert remark in message


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_another_tool_is_answered_before_a_checkpoint_is_asked_for(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        check_command([f"--{name}", "5"], {})


@pytest.mark.parametrize("words", [["--learning_speed", "3"], ["--learning_speed=3"]])
def test_only_the_name_of_an_unknown_option_is_named(tmp_path, words):
    with pytest.raises(ValueError) as error:
        read(tmp_path, DATA, *words)
    message = str(error.value)
    assert "--learning_speed." in message
    assert "3" not in message


@pytest.mark.parametrize(
    "recipe, words, message",
    [
        pytest.param(
            "learning_speed: 1\n",
            ["--epoch_count=3"],
            "--learning_speed, --epoch_count",
            id="of the recipe and of the command line",
        ),
        pytest.param(
            "",
            ["--learing-rate", "1"],
            "Did you mean --learning_rate",
            id="misspelled",
        ),
        pytest.param(
            "",
            ["--max_len", "64"],
            "no option --max_len\\.",
            id="a part of a name",
        ),
        pytest.param(
            "",
            ["--seed", "3", "stray"],
            "'stray' belongs to no option",
            id="a word",
        ),
    ],
)
def test_unknown_options_are_named(tmp_path, recipe, words, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, f"{DATA}{recipe}", *words)


def test_a_command_says_what_a_name_is_called_here_without_importing_trl(tmp_path):
    recipe_path = tmp_path / "recipe.yaml"
    recipe_path.write_text("base_model: x\nmicro_batch_size: 2\n")
    words, recipe = read_command([str(recipe_path), "--cutoff-len", "512"])
    with pytest.raises(ValueError, match=r"`max_length`.*`model_name_or_path`.*`per_device_train"):
        check_command(words, recipe)


def test_a_recipe_is_the_first_word(home):
    (home / "my.yaml").write_text("seed: 3\n")
    words, recipe = read_command(["~/my.yaml", "--seed", "4"])
    assert words == ["--seed", "4"]
    assert recipe == {"seed": "3"}


def test_a_recipe_is_the_file_of_config(home):
    (home / "my.yaml").write_text("seed: 3\n")
    words, recipe = read_command(["--max_steps", "5", "--config", "~/my.yaml", "--seed", "4"])
    assert words == ["--max_steps", "5", "--seed", "4"]
    assert recipe == {"seed": "3"}


@pytest.mark.parametrize(
    "words",
    [
        ["--max_steps", "5", "--seed", "4"],
        ["--seed", "--config"],
        [],
    ],
)
def test_a_command_may_have_no_recipe(words):
    assert read_command(words) == (words, {})


def test_a_recipe_of_the_package_has_a_name():
    words, recipe = read_command(["lora", "--seed", "4"])
    assert words == ["--seed", "4"]
    assert recipe["lora_r"] == "128"


def test_a_path_may_end_with_the_name_of_a_recipe_of_the_package(tmp_path):
    recipe_path = tmp_path / "lora.yaml"
    recipe_path.write_text("seed: 1\n")
    _, recipe = read_command([str(recipe_path)])
    assert recipe == {"seed": "1"}


def test_a_file_comes_before_the_recipe_of_its_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "lora"
    own.mkdir()
    assert recipe_file("lora") == RECIPES / "lora.yaml"
    own.rmdir()
    own.write_text("seed: 1\n")
    assert recipe_file("lora") == Path("lora")


def test_a_folder_is_no_recipe(tmp_path):
    with pytest.raises(ValueError, match="is not valid YAML"):
        read_command(["--config", str(tmp_path)])


def test_recipes_are_named_in_order_if_there_is_none_of_a_name(tmp_path):
    for file_name in ("d.yaml", "b.yaml", "c.yaml", "a.yaml"):
        (tmp_path / file_name).touch()
    with pytest.raises(ValueError, match="a, b, c, d"):
        recipe_file("none", tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"- a\n- b\n", "is no mapping .* --dataset_name .*my.yaml"),
        (b"", "is no mapping"),
        (b"a: [1", "is not valid YAML"),
        (b"a: \xff", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, message):
    recipe_path = tmp_path / "my.yaml"
    recipe_path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{recipe_path} {message}"):
        read_command([str(recipe_path)])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("q_proj", ["q_proj"]),
        (" q_proj,v_proj , layers.0.k_proj ", ["q_proj", "v_proj", "layers.0.k_proj"]),
        ("q_proj v_proj", ["q_proj", "v_proj"]),
        (r".*\.(q|v)_proj", []),
        ("q_proj, v.*", []),
    ],
)
def test_names_are_told_from_patterns(text, expected):
    assert names_in(text) == expected


@pytest.fixture
def without_packages(monkeypatch):
    """Neither bitsandbytes nor DeepSpeed is installed."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "deepspeed", None)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(
    "recipe, words, package",
    [
        ({"load_in_4bit": "yes"}, [], "bitsandbytes"),
        ({}, ["--load-in-8bit"], "bitsandbytes"),
        ({}, ["--deepspeed", "zero.json"], "deepspeed"),
    ],
)
def test_a_package_is_asked_for_by_what_the_recipe_and_the_words_say(recipe, words, package):
    with pytest.raises(ImportError, match=f" needs {package}, "):
        check_command(words, {"model_name_or_path": "a", **recipe})


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(
    "recipe, words",
    [
        ({"load_in_4bit": "yes"}, ["--load_in_4bit=false"]),
        ({"load_in_8bit": "No"}, []),
        ({"load_in_4bit": None}, []),
    ],
)
def test_no_package_is_asked_for_without_need(recipe, words):
    check_command(words, {"model_name_or_path": "a", **recipe})


@pytest.mark.parametrize("words", [["--hub_token", "hf_x"], ["--hub-token=hf_x"]])
def test_a_token_on_the_command_line_is_refused(words):
    with pytest.raises(ValueError, match="Set HF_TOKEN instead"):
        check_command([*words, "--model_name_or_path", "a"], {})


def test_a_checkpoint_may_be_named_in_the_words():
    check_command(["--model-name-or-path=a"], {})


def test_a_checkpoint_may_be_named_in_the_recipe():
    check_command([], {"model_name_or_path": "a", "hub_token": "hf_x"})


@pytest.mark.parametrize(
    "words, recipe",
    [
        pytest.param([], {}, id="nowhere"),
        pytest.param(
            ["--model_name_or_path", ""],
            {"model_name_or_path": "a"},
            id="taken away",
        ),
    ],
)
def test_a_command_without_a_checkpoint_is_refused(words, recipe):
    with pytest.raises(ValueError, match="--model_name_or_path"):
        check_command(words, recipe)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_zero_needs_deepspeed_before_processes_are_started(name):
    with pytest.raises(ImportError, match="needs deepspeed"):
        launch(name, None, [])


@pytest.mark.usefixtures("without_packages")
def test_a_file_with_zero_needs_deepspeed_before_processes_are_started(tmp_path):
    own_file = tmp_path / "own.yaml"
    own_file.write_text("distributed_type: DEEPSPEED\n")
    with pytest.raises(ImportError, match="needs deepspeed"):
        launch(str(own_file), None, [])


@pytest.mark.usefixtures("without_packages")
def test_an_unknown_file_of_accelerate_is_refused():
    with pytest.raises(ValueError, match="no file zero4, .*ddp, fsdp2, zero2, zero3"):
        launch("zero4", None, [])


def replace_launcher(monkeypatch, launch_command):
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch_command)


@pytest.fixture
def failing_launcher(monkeypatch):
    """Makes the end of `accelerate launch` an error."""

    def fail_with(error):
        def launch_command(arguments):
            raise error

        replace_launcher(monkeypatch, launch_command)

    return fail_with


@pytest.fixture
def launches(monkeypatch):
    """What `accelerate launch` is asked for; it does nothing."""
    asked = []
    replace_launcher(monkeypatch, asked.append)
    return asked


def assert_launched(arguments, config_name, processes):
    assert arguments.config_file.endswith(config_name)
    assert arguments.num_processes == processes
    assert arguments.quiet
    assert arguments.module
    assert arguments.training_script == "normalign_llava.train"
    assert arguments.training_script_args == ["recipe.yaml", "--seed", "3"]


@pytest.mark.parametrize("processes", [None, 2])
def test_a_launch_with_a_file_of_the_package_has_the_processes_that_are_asked_for(
    launches, processes
):
    launch("ddp", processes, ["recipe.yaml", "--seed", "3"])
    assert len(launches) == 1
    assert_launched(launches[0], "ddp.yaml", processes)


@pytest.mark.parametrize("processes", [None, 2])
def test_a_launch_has_the_processes_of_the_file_unless_others_are_asked_for(
    launches, tmp_path, processes
):
    own_file = tmp_path / "own.yaml"
    own_file.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    launch(str(own_file), processes, ["recipe.yaml", "--seed", "3"])
    assert len(launches) == 1
    assert_launched(launches[0], "own.yaml", processes)


@pytest.mark.parametrize(
    "number, expected_error",
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, Terminated),
    ],
)
def test_a_launcher_that_is_stopped_stops_the_command(failing_launcher, number, expected_error):
    failing_launcher(SignalException("stopped", number))
    with pytest.raises(expected_error):
        launch("ddp", 2, [])


def process_failure(rank, exitcode, seconds):
    failure = ProcessFailure(rank, 99, exitcode, "none.json")
    failure.timestamp = seconds
    return failure


def failed(exitcode):
    """The error of torch's launcher where the second process ended first."""
    failures = {
        0: process_failure(0, 1, seconds=20),
        1: process_failure(1, exitcode, seconds=10),
    }
    return ChildFailedError("train", failures)


def test_a_process_that_failed_has_said_why(failing_launcher):
    failing_launcher(failed(3))
    with pytest.raises(SystemExit) as ended:
        launch("ddp", 2, [])
    assert ended.value.code == 3


def test_a_process_that_was_killed_is_named(failing_launcher):
    failing_launcher(failed(-signal.SIGKILL))
    with pytest.raises(ChildProcessError, match="Process 1 was ended by SIGKILL"):
        launch("ddp", 2, [])


DEPENDENT = {
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 1e-7},
    "use_peft": "yes",
    "lora_r": "8",
    "eval_strategy": "steps",
    "eval_steps": "5",
}


def test_a_value_that_is_the_recipe_s_own_takes_nothing_along():
    words = [
        "--lr_scheduler_type",
        "cosine_with_min_lr",
        "--use_peft",
        "--eval_strategy=epoch",
    ]
    assert without_overruled(DEPENDENT, words) == DEPENDENT


def test_another_value_takes_along_what_depends_on_it():
    words = ["--lr-scheduler-type=linear", "--use-peft", "NO"]
    assert without_overruled(DEPENDENT, words) == {
        "lr_scheduler_type": "cosine_with_min_lr",
        "use_peft": "yes",
        "eval_strategy": "steps",
        "eval_steps": "5",
    }


BEST_STEP_OPTIONS = [
    "metric_for_best_model",
    "greater_is_better",
    "early_stopping_patience",
    "early_stopping_threshold",
]
DEPENDENT_ON = {
    ("--use_peft", "no"): [
        "lora_r",
        "lora_alpha",
        "lora_target_modules",
        "use_dora",
        "use_rslora",
    ],
    ("--load_in_4bit", "off"): [
        "bnb_4bit_quant_type",
        "bnb_4bit_quant_storage",
        "use_bnb_nested_quant",
    ],
    ("--eval_strategy", "no"): [
        "test_split_size",
        "eval_dataset_name",
        "eval_steps",
        "load_best_model_at_end",
        *BEST_STEP_OPTIONS,
    ],
    ("--load_best_model_at_end", "0"): BEST_STEP_OPTIONS,
    ("--dry_run", "false"): ["device_memory"],
    ("--dataset_name", "b"): ["datasets"],
    ("--lr_scheduler_type", "constant"): ["lr_scheduler_kwargs", "warmup_steps"],
    ("--global_batch_size", "8"): ["gradient_accumulation_steps"],
}


@pytest.mark.parametrize("words, dependent", DEPENDENT_ON.items(), ids=str)
def test_the_options_that_depend_on_one_go_with_it(words, dependent):
    recipe = {
        **dict.fromkeys(chain(*DEPENDENT_ON.values()), "3"),
        "seed": "3",
        "global_batch_size": 4,
        "eval_delay": "1",
    }
    expected = {name: value for name, value in recipe.items() if name not in dependent}
    assert without_overruled(recipe, words) == expected


def test_an_equal_number_in_python_takes_nothing_along():
    recipe = {"global_batch_size": 8, "gradient_accumulation_steps": 4}
    assert without_overruled(recipe, ["--global_batch_size", "8"]) == recipe


NEEDING_THE_BEST_STEP = {
    "eval_strategy": "epoch",
    "seed": "3",
    "load_best_model_at_end": "yes",
    "early_stopping_patience": "2",
    "early_stopping_threshold": "0.1",
    "metric_for_best_model": "eval_loss",
    "greater_is_better": "no",
}


def test_without_the_best_step_nothing_that_needs_it_is_left():
    words = ["--load_best_model_at_end", "false"]
    assert without_overruled(NEEDING_THE_BEST_STEP, words) == {
        "eval_strategy": "epoch",
        "seed": "3",
        "load_best_model_at_end": "yes",
    }


def test_without_an_evaluation_no_best_step_is_left():
    words = ["--eval_strategy", "no"]
    assert without_overruled(NEEDING_THE_BEST_STEP, words) == {
        "eval_strategy": "epoch",
        "seed": "3",
    }


@pytest.mark.parametrize(
    "text, expected",
    [
        ("7", 7),
        ("-7", -7),
        ("1_000", 1000),
        ("0", 0),
        ("007", "007"),
        ("08", "08"),
        (".5", 0.5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("1.5e3", 1500.0),
        (".5e1", 5.0),
        ("5e-1", 0.5),
        ("1E3", 1000.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("+7", 7),
        ("+.5", 0.5),
        ("1e+3", 1000.0),
        ("-1e-3", -0.001),
        ("1.5E+3", 1500.0),
        ("1_0.5", 10.5),
        ("1_0e3", 10000.0),
        ("+.inf", math.inf),
        (".Inf", math.inf),
        ("no", False),
        ("On", True),
        ("null", None),
        ("~", None),
        ("1.2.3", "1.2.3"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("0x1F", "0x1F"),
        ("e5", "e5"),
    ],
)
@pytest.mark.parametrize("read_file", [read_recipe, read_options])
def test_scalars_in_a_mapping_are_numbers_and_booleans_where_they_look_like_some(
    tmp_path, text, expected, read_file
):
    recipe_path = tmp_path / "a.yaml"
    recipe_path.write_text(f"a: {{b: {text}}}\n")
    value = read_file(recipe_path)["a"]["b"]
    assert value == expected
    assert type(value) is type(expected)


def test_a_mapping_may_have_no_number_and_be_taken_from_an_anchor(tmp_path):
    recipe_path = tmp_path / "a.yaml"
    recipe_path.write_text(
        "a: &shared {b: .NaN}\n"
        "lr_scheduler_kwargs: {<<: *shared, c: no}\n"
        "columns: {image: no, text: 1e3}\n"
        "<<: {seed: 3}\n"
    )
    recipe = read_options(recipe_path)
    scheduler_options = recipe["lr_scheduler_kwargs"]
    assert math.isnan(scheduler_options.pop("b"))
    assert scheduler_options == {"c": False}
    assert recipe["columns"] == {"image": "no", "text": "1e3"}  # names, whatever they look like
    assert recipe["seed"] == "3"


NAME_ELSEWHERE = next(iter(ELSEWHERE))


def test_a_name_of_another_tool_is_told_once():
    with pytest.raises(ValueError) as error:
        check_names([f"--{NAME_ELSEWHERE}=3", "--seed", "1"], {NAME_ELSEWHERE: 3})
    assert str(error.value).count(f"`{NAME_ELSEWHERE}`") == 1


@pytest.mark.parametrize(
    "words, recipe",
    [
        pytest.param([f"--{NAME_ELSEWHERE}", "3"], {}, id="words"),
        pytest.param([], {NAME_ELSEWHERE: 3}, id="recipe"),
    ],
)
def test_a_name_of_another_tool_is_found_in_the_words_and_in_the_recipe(words, recipe):
    with pytest.raises(ValueError, match=f"`{NAME_ELSEWHERE}`"):
        check_names(words, recipe)


def test_a_value_is_no_name_of_another_tool():
    check_names(["--seed", NAME_ELSEWHERE], {"seed": NAME_ELSEWHERE})


RAISES = """
from normalign_llava.errors import errors_for_people
with errors_for_people():
    raise ValueError('what went wrong')
"""


def test_the_size_of_a_run_without_a_rank_does_not_hide_an_error():
    environment = {**os.environ, "WORLD_SIZE": "2"}
    environment.pop("RANK", None)
    finished = subprocess.run(
        [sys.executable, "-c", RAISES],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert "what went wrong" in finished.stderr
    assert "KeyError" not in finished.stderr


ACCELERATE_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
"""
"""Without a version: accelerate takes the first one."""


def set_environment(monkeypatch, accelerate_path):
    """Sets what `accelerate launch` sets for a configuration file, for one process of two."""
    words = [
        "--main_process_port=0",
        "--config_file",
        str(accelerate_path),
        "--num_processes=2",
        "script.py",
    ]
    parsed = launch_command_parser().parse_args(words)
    arguments = _validate_launch_command(parsed)[0]
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith(("ACCELERATE_USE_FSDP", "FSDP_")):
            monkeypatch.setenv(name, value)


def test_the_first_version_of_fsdp_is_refused_with_the_line_that_mends_a_file(
    tmp_path, monkeypatch
):
    accelerate_path = tmp_path / "accelerate.yaml"
    accelerate_path.write_text(ACCELERATE_FILE)
    set_environment(monkeypatch, accelerate_path)
    with pytest.raises(ValueError, match="FSDP version 1 .* in bfloat16") as error:
        check_options(config(tmp_path), "model")
    line, place = re.search("Write `(.+?)` under `(.+?)`", str(error.value)).groups()
    mended_file = ACCELERATE_FILE.replace(place, f"{place}\n  {line}")
    accelerate_path.write_text(mended_file)
    set_environment(monkeypatch, accelerate_path)
    check_options(config(tmp_path), "model")


@pytest.mark.parametrize("version", ["1", None])
def test_the_first_version_of_fsdp_in_the_environment_is_refused(tmp_path, monkeypatch, version):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "1")
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    if version:
        monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(ValueError, match="FSDP_VERSION=2"):
        check_options(config(tmp_path), "model")


def test_the_second_version_of_fsdp_in_the_environment_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "1")
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_options(config(tmp_path), "model")


@pytest.mark.parametrize("fsdp_config", [{"version": 1}, {"fsdp_version": 1}])
def test_the_first_version_of_fsdp_in_the_options_is_refused(tmp_path, fsdp_config):
    settings = config(tmp_path, fsdp=True, fsdp_config=fsdp_config)
    with pytest.raises(ValueError, match="Write `version: 2` into fsdp_config"):
        check_options(settings, "model")


def test_the_second_version_of_fsdp_in_the_options_is_taken(tmp_path):
    settings = config(tmp_path, fsdp=True, fsdp_config={"version": 2})
    check_options(settings, "model")


@pytest.fixture
def settings_with_plugin(tmp_path):
    """Makes options of several processes with GPUs, which have a plugin of a version of FSDP."""
    AcceleratorState._reset_state(reset_partial_state=True)

    def make(version) -> RunConfig:
        Accelerator(cpu=True)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        return config(tmp_path, accelerator_config={"use_configured_state": True})

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_plugin_of_the_first_version_of_fsdp_is_refused(settings_with_plugin):
    settings = settings_with_plugin(version=1)
    with pytest.raises(ValueError, match="fsdp_version=2"):
        check_options(settings, "model")


def test_a_plugin_of_the_second_version_of_fsdp_is_taken(settings_with_plugin):
    check_options(settings_with_plugin(version=2), "model")
