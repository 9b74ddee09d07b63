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
import warnings
from argparse import ArgumentTypeError
from contextlib import nullcontext
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
from normalign_llava.signals import Terminated
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
FIELDS = dataclasses.fields(TrainingOptions)
HELD_OUT = {"eval_strategy": "steps", "eval_steps": 100}
BEST = {**HELD_OUT, "load_best_model_at_end": True, "early_stopping_patience": 2}
REFUSALS = {
    field.name: field.default for field in FIELDS if field.metadata["help"].startswith(REFUSED)
}


def options(tmp_path, *words, **recipe):
    """The options of a run with this recipe file and these words on the command line."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), **recipe}))
    return complete(parse([str(file), *BASE, *words])[1])[0]


def as_given(folder, **options) -> NormAlignConfig:
    return NormAlignConfig(**{"output_dir": str(folder), "bf16": False, "use_cpu": True, **options})


def config(folder, **options) -> RunConfig:
    """Options with their values on this machine."""
    return complete(as_given(folder, **options))[0]


def rates(args, use_peft=False) -> list[float]:
    """The learning rates of vision tower, projector, norm and language model."""
    return [*args.learning_rates(use_peft).values()]


def test_the_stages_are_the_papers(tmp_path):
    align, tune = (options(tmp_path, stage=stage) for stage in ("align", "tune"))
    assert (rates(align), rates(tune)) == ([0.0, 1e-3, 1e-3, 0.0], [2e-6, 1e-5, 1e-5, 1e-5])
    sizes = [(args.global_batch_size, args.per_device_train_batch_size) for args in (align, tune)]
    assert sizes == [(256, 2), (128, 1)]
    assert (align.lr_scheduler_type, align.warmup_steps, align.seed) == ("cosine", 0.03, 42)
    assert (align.weight_decay, align.num_train_epochs, align.max_length) == (0.0, 1.0, 2048)
    assert (align.save_steps, align.save_total_limit) == (0.1, 2)
    best = dict(load_best_model_at_end=True, eval_strategy="steps", eval_steps=100)
    assert config(tmp_path, stage="tune", **best).save_steps == 500  # a multiple of eval_steps
    python = config(tmp_path, stage="align")
    assert (python.global_batch_size, rates(python)) == (256, rates(align))
    ours = config(tmp_path)
    stock = SFTConfig(str(tmp_path), bf16=False, use_cpu=True)
    names = ("per_device_train_batch_size", "lr_scheduler_type", "learning_rate", "warmup_steps")
    assert all(getattr(ours, name) == getattr(stock, name) for name in (*names, "seed"))


@pytest.mark.parametrize("words", [[], ["--stage", "align"]])
def test_a_recipe_overrides_the_stage_and_the_command_line_the_recipe(tmp_path, words):
    recipe = dict(stage="tune", seed=3, vision_learning_rate="3e-6", max_steps=5)
    args = options(tmp_path, "--seed", "7", *words, **recipe)
    assert (args.seed, args.vision_learning_rate, args.max_steps) == (7, 3e-6, 5)
    assert args.learning_rate == (1e-3 if words else 1e-5)


def plain(args) -> dict:
    """All options, with their values as text."""
    return {field.name: str(getattr(args, field.name)) for field in dataclasses.fields(args)}


COPIES = {
    "replace": lambda args: dataclasses.replace(args, output_dir=args.output_dir),
    "pickle": lambda args: pickle.loads(pickle.dumps(args)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "printed": lambda args: (repr(args), str(args), args)[2],
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("stage", ["align", "tune", None])
def test_a_copy_of_the_options_means_the_same(tmp_path, way, stage):
    held_out = dict(eval_strategy="steps", load_best_model_at_end=True)
    for own in ({}, dict(packing=True, learning_rate=3e-4), held_out):
        args = as_given(tmp_path, stage=stage, **own)
        copied = COPIES[way](COPIES[way](args))
        assert plain(copied) == plain(args)
        assert [rates(copied, adapters) for adapters in (True, False)] == [
            rates(args, adapters) for adapters in (True, False)
        ]
        changed = dataclasses.replace(copied, seed=1)
        assert rates(changed, True) == rates(args, True) and changed.seed == 1


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        (dict(stage="tune"), dict(stage="align")),
        (dict(stage="tune"), dict(stage=None)),
        (dict(stage="align", learning_rate=5e-4), dict(stage="tune")),
        (dict(stage="tune"), dict(learning_rate=1e-5)),  # which would follow, and is given now
        (dict(stage="tune"), dict(learning_rate=None, seed=3)),
        (dict(packing=True), dict(packing=False)),
        (dict(eval_strategy="steps"), dict(eval_strategy="no")),
        (dict(eval_strategy="steps"), dict(logging_steps=3)),
        (dict(dataloader_num_workers=2), dict(dataloader_num_workers=0)),
        (dict(bad_steps="skip"), dict(bad_steps="stop")),
        (dict(stage="tune", lr_scheduler_type="constant"), dict(lr_scheduler_type="cosine")),
        (dict(gradient_checkpointing=True), dict(gradient_checkpointing=False)),
        (dict(bf16=None, fp16=True), dict(fp16=False)),
        (
            dict(
                eval_strategy="steps", load_best_model_at_end=True, save_steps=500, eval_steps=500
            ),
            dict(metric_for_best_model="eval_accuracy"),
        ),
    ],
)
def test_options_that_are_replaced_are_as_if_given_at_once(tmp_path, processor, given, changes):
    processor(5.0)
    at_once = config(tmp_path, **{**given, **changes})
    for copied in (as_given(tmp_path, **given), COPIES["pickle"](as_given(tmp_path, **given))):
        replaced = complete(dataclasses.replace(copied, **changes))[0]
        assert plain(replaced) == plain(at_once)
        for adapters in (True, False):
            assert rates(replaced, adapters) == rates(at_once, adapters)


def test_an_option_that_is_set_later_is_a_given_one(tmp_path):
    args = as_given(tmp_path, stage="tune")
    args.learning_rate = 3e-4
    assert rates(args) == rates(config(tmp_path, stage="tune", learning_rate=3e-4)) == [3e-4] * 4
    assert rates(dataclasses.replace(COPIES["pickle"](args), seed=2), True)[1:] == [3e-4] * 3


@pytest.mark.parametrize("copied", [lambda args: args, COPIES["pickle"], COPIES["copy"]])
def test_the_options_of_a_run_may_be_given_to_another_one(tmp_path, copied):
    given = as_given(tmp_path, stage="tune", global_batch_size=8, weight_decay=0.1)
    settings = copied(complete(given)[0])
    settings.settle(gradient_accumulation_steps=4)  # which follows
    assert plain(settings.to_give()) == plain(given)
    changed = dataclasses.replace(settings, seed=7, global_batch_size=16)
    expected = dataclasses.replace(given, seed=7, global_batch_size=16)
    assert plain(changed.to_give()) == plain(expected)
    assert rates(changed, True) == rates(given, True)
    settings.learning_rate = 3e-4  # somebody's own from now on
    assert settings.to_give().learning_rate == 3e-4
    assert rates(settings) == [3e-4] * 4


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        (dict(stage="tune"), dict(gradient_checkpointing=True)),
        (dict(bf16=None), dict(fp16=True)),
        (
            dict(stage="tune"),
            dict(eval_strategy="steps", eval_steps=100, load_best_model_at_end=True),
        ),
        (dict(stage="tune"), dict(lr_scheduler_type="constant")),
        (dict(stage="tune"), dict(stage="align")),
    ],
)
def test_what_follows_in_the_options_of_a_run_follows_anew_in_a_copy(
    tmp_path, processor, given, changes
):
    processor(0.3)  # fast in bfloat16
    settings = config(tmp_path, **given)
    settings.settle(gradient_accumulation_steps=4)
    for copied in (settings, COPIES["pickle"](settings)):
        replaced = dataclasses.replace(copied, **changes)
        assert plain(replaced) == plain(config(tmp_path, **{**given, **changes}))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("stage", "tuna", "stage must be one of 'align'"), ("max_steps", 0, "for all epochs")],
)
def test_an_option_that_is_set_later_is_checked(tmp_path, name, value, said):
    args = as_given(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=said):
        complete(args)


def test_a_path_that_is_set_later_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = as_given(tmp_path)
    args.output_dir = "~/later"
    assert complete(args)[0].output_dir == str(tmp_path / "later")


def test_a_number_that_is_a_text_is_refused(tmp_path):
    with pytest.raises(TypeError, match="learning_rate must be a number, got '1e-3'"):
        NormAlignConfig(str(tmp_path), learning_rate="1e-3")


def test_a_config_is_passive(tmp_path, monkeypatch):
    """It measures nothing, sets nothing in the environment, and opens no process group."""
    monkeypatch.setattr(precision, "_seconds", lambda: pytest.fail("the machine was measured"))
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    environment = dict(os.environ)
    args = NormAlignConfig(str(tmp_path), stage="tune")
    before = dict(vars(args))
    for way in COPIES.values():
        assert vars(way(args)) == vars(args) == before
    complete_again = dataclasses.replace(args, seed=args.seed)
    assert vars(complete_again) == before and PartialState._shared_state == {}
    assert (args.bf16, args.learning_rate, args.dataloader_num_workers) == (None, None, None)
    assert dict(os.environ) == environment


def test_a_token_is_not_printed(tmp_path):
    args = config(tmp_path, hub_token="hf_secret", stage="tune")
    for text in (repr(args), str(args), f"{args}"):
        assert "hf_secret" not in text and "stage=tune" in text


def test_a_token_has_no_white_space_around_it(tmp_path):
    assert config(tmp_path, hub_token=" hf_secret\n").hub_token == "hf_secret"
    assert config(tmp_path, hub_token=" \n").hub_token is None
    replaced = dataclasses.replace(config(tmp_path, hub_token="hf_secret\n"), seed=1)
    assert replaced.hub_token == "hf_secret"  # it was given


def test_a_given_learning_rate_is_that_of_every_module_the_stage_trains(tmp_path):
    assert rates(config(tmp_path, stage="tune", learning_rate=5e-5)) == [5e-5] * 4
    assert rates(config(tmp_path, learning_rate=5e-5)) == [5e-5] * 4
    assert rates(config(tmp_path, stage="align", learning_rate=5e-5)) == [0.0, 5e-5, 5e-5, 0.0]
    assert rates(config(tmp_path, stage="tune", learning_rate=5e-5), True) == [0.0, *[5e-5] * 3]
    own = dict(vision_learning_rate=1e-6, projector_learning_rate=1e-4)
    assert rates(config(tmp_path, stage="tune", learning_rate=5e-5, **own)) == [
        *(1e-6, 1e-4, 5e-5, 5e-5)
    ]
    frozen = config(tmp_path, stage="tune", learning_rate=0.0, norm_learning_rate=1e-4)
    assert rates(frozen) == [0.0, 0.0, 1e-4, 0.0]


@pytest.mark.skipif(not hasattr(SFTConfig, "activation_checkpointing"), reason="a former name")
def test_checkpointing_may_be_given_under_its_newer_name(tmp_path):
    for given in (True, False):
        args = config(tmp_path, activation_checkpointing=given)
        assert args.activation_checkpointing is args.gradient_checkpointing is given


def test_nobody_is_warned_of_an_option_that_nobody_set(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert config(tmp_path, stage="tune").gradient_checkpointing
        assert not config(tmp_path, gradient_checkpointing=False).gradient_checkpointing
        kwargs = {"use_reentrant": False}
        assert config(tmp_path, gradient_checkpointing_kwargs=kwargs).gradient_checkpointing_kwargs


@pytest.mark.skipif(not hasattr(SFTConfig, "activation_checkpointing"), reason="a former name")
def test_how_checkpointing_is_done_may_be_given_under_its_newer_name(tmp_path):
    kwargs = {"use_reentrant": False}
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        args = config(tmp_path, **{name: kwargs})
        assert args.activation_checkpointing_kwargs == args.gradient_checkpointing_kwargs == kwargs


def test_under_tune_adapters_have_learning_rates_of_their_own(tmp_path):
    for own, expected in (
        (dict(stage="tune"), [0.0, 2e-5, 2e-5, 2e-4]),
        (dict(stage="tune", learning_rate=1e-3, norm_learning_rate=1e-4), [0.0, 1e-3, 1e-4, 1e-3]),
        ({}, [0.0, 2e-5, 2e-5, 2e-5]),  # TRL's
    ):
        assert rates(options(tmp_path, use_peft=True, **own), use_peft=True) == expected


@pytest.mark.parametrize("name", sorted(entry.name for entry in RECIPES.iterdir()))
def test_recipes_are_read_and_say_nothing_that_is_the_default(name):
    file = recipe_file(name.removesuffix(".yaml"))
    recipe = yaml.safe_load(file.read_text())
    complete = [] if "model_name_or_path" in recipe else BASE[:4]
    parsed = parse([str(file), *complete, "--bf16", "false"])
    stage = parse(["--stage", recipe["stage"], "--use_peft", str("use_peft" in recipe), *BASE])
    for key, value in recipe.items():
        place = next(place for place, part in enumerate(parsed) if key in vars(part))
        read = getattr(parsed[place], key)
        default = getattr(stage[place], key)
        assert read == pytest.approx(value) if isinstance(value, float) else read == value, key
        assert read != default or key in ("stage", "use_peft"), f"{key} is the default"


def batches(folder, total, rows, accumulation, **options) -> NormAlignConfig:
    options |= dict(per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation)
    return config(folder, global_batch_size=total, **options)


def test_accumulation_keeps_the_global_batch(tmp_path):
    cases = [(256, 2, 64, 1, 2), (128, 1, 32, 1, 4), (256, 2, 1, 1, 128), (16, 8, 1, 2, 2)]
    for total, rows, world, accumulation, expected in [*cases, (None, 8, 2, 3, 3)]:
        args = batches(tmp_path, total, rows, accumulation)
        assert args.world_size == 1 and accumulation_steps(args, world_size=world) == expected


def test_a_global_batch_that_does_not_divide_is_refused(tmp_path):
    args = batches(tmp_path, 16, 2, accumulation=4)
    with pytest.raises(ValueError, match=r"16 is not a multiple of .* 2 x 3 process\(es\)"):
        accumulation_steps(args, world_size=3)
    with pytest.raises(ValueError, match="4 contradicts .* 16. Leave gradient_.* out: 8 would"):
        accumulation_steps(args)
    num_steps = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    for change in ({"split_batches": True}, {"dispatch_batches": True}, num_steps):
        with pytest.raises(ValueError, match="accelerator_config would change the rows in a step"):
            accumulation_steps(batches(tmp_path, 8, 2, 1, accelerator_config=change))


@pytest.mark.parametrize(("ratio", "pays"), [(0.3, True), (5.0, False)])
def test_precision_follows_the_machine_or_an_option(tmp_path, monkeypatch, processor, ratio, pays):
    processor(ratio)
    words = [*BASE[:4], "--output_dir", str(tmp_path), "--use_cpu"]

    def parsed(*more) -> tuple:
        args = complete(parse([*words, *more])[1])[0]
        return args.bf16, args.fp16, args.mixed_precision

    assert parsed() == (pays, False, "bf16" if pays else "no")
    for bf16 in (True, False):
        assert parsed("--bf16", str(bf16))[0] is config(tmp_path, bf16=bf16).bf16 is bf16
    assert not config(tmp_path, bf16=None, fp16=True).bf16
    for name in ("bf16", "fp16"):  # in a configuration of accelerate
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", name)
        assert parsed() == (name == "bf16", name == "fp16", name)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as its launcher does by default
    assert parsed() == (pays, False, "bf16" if pays else "no")


def test_steps_on_a_gpu_that_is_not_here_are_in_bfloat16(tmp_path, processor):
    processor(5.0)  # where this machine is slow in it
    asked = dict(bf16=None, dry_run=True, device_memory="24GiB")
    assert config(tmp_path, **asked).bf16
    assert not config(tmp_path, bf16=None, dry_run=True).bf16
    assert not config(tmp_path, **asked, fp16=True).bf16


def test_a_bad_loss_is_in_the_log_unless_its_step_is_skipped(tmp_path):
    assert not config(tmp_path).logging_nan_inf_filter
    assert config(tmp_path, bad_steps="skip").logging_nan_inf_filter


@pytest.mark.parametrize("schedule", WITHOUT_WARMUP)
def test_a_schedule_without_warm_up_has_none(tmp_path, schedule):
    held_out = dict(eval_strategy="steps", eval_steps=5)  # which some schedules follow
    for name, steps in ((schedule, 0), ("constant_with_warmup", 4)):
        args = config(tmp_path, stage="tune", lr_scheduler_type=name, **held_out)
        assert args.get_warmup_steps(120) == steps
    with pytest.raises(ValueError, match="type has no warm-up. Leave warmup_steps .* out"):
        config(tmp_path, lr_scheduler_type=schedule, warmup_steps=4, **held_out)


def test_batches_are_read_by_all_other_cores_and_by_none_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    for own, expected in (({}, (0, False)), ({"dataloader_num_workers": 2}, (2, True))):
        args = config(tmp_path, **own)
        assert (args.dataloader_num_workers, args.dataloader_persistent_workers) == expected
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"  # threads of their tokenizers
    own = dict(dataloader_num_workers=2, dataloader_persistent_workers=False)
    assert config(tmp_path, **own).dataloader_persistent_workers is False
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # as somebody wants it
    config(tmp_path)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    for cores, processes, expected in ((1, 1, 0), (2, 1, 1), (64, 1, 8), (64, 16, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert config(tmp_path, use_cpu=False).dataloader_num_workers == expected
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert config(tmp_path, use_cpu=False).dataloader_num_workers == 3


def test_the_page_has_the_help_and_the_refusals_of_the_fields():
    assert page_from_fields(PAGE.read_text()) == PAGE.read_text(), "run tests/helpers/documented.py"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (dict(stage="pretrain"), "stage must be one of 'align', 'tune', got 'pretrain'"),
        (dict(stage="align", learning_rate=0), "nothing would be trained"),
        (dict(norm_learning_rate=-1), "norm_learning_rate must be at least 0, got -1"),
        (dict(learning_rate=float("nan")), "learning_rate must be at least 0, got nan"),
        (dict(global_batch_size=0), "global_batch_size must be at least 1, got 0"),
        (dict(probe_rows=0), "probe_rows must be at least 1, got 0"),
        (dict(sample_count=-1), "sample_count must be at least 0, got -1"),
        (dict(sample_max_new_tokens=0), "sample_max_new_tokens must be at least 1, got 0"),
        (dict(save_steps=0), "save_steps 0 saves nothing. Use save_strategy: no"),
        (dict(max_steps=0), "max_steps 0 would train for all epochs. Leave it out"),
        (dict(report_to="nothing"), "report_to 'nothing' is not installed"),
        (dict(test_split_size=2), "between 0 and 1, got 2"),
        (dict(test_split_size=0.1), "test_split_size needs eval_strategy steps or epoch"),
        (dict(do_eval=True), "do_eval alone evaluates nothing. Set eval_strategy"),
        (dict(padding_free=True, neftune_noise_alpha=5.0), "_alpha cannot .* with padding_free"),
        (dict(packing=True, pad_to_multiple_of=8), "pad_to_multiple_of cannot be .* with packing"),
        (dict(packing=True, train_sampling_strategy="batch_rebalance"), "batch_rebalance cannot"),
        (dict(packing=True, average_tokens_across_devices=False), "_across_devices false cannot"),
        (
            dict(packing=True, save_strategy="no", accelerator_config=UNSEEDED),
            "sampler false cannot",
        ),
        (dict(lora_r=4), "lora_r is for adapters. Add --use_peft"),
        (dict(bnb_4bit_quant_type="fp4"), "bnb_4bit_quant_type is for 4 bits. Add --load_in_4bit"),
        (dict(bnb_4bit_quant_storage="uint8"), "_quant_storage cannot be used here: .*FSDP"),
        (dict(learing_rate=1), "no option --learing_rate. Did you mean --learning_rate?"),
        (dict(max_steps=1.5), "max_steps.* must be a whole number, got '1.5'"),
        (dict(use_peft="maybe"), "use_peft.* must be true or false, got 'maybe'"),
        (dict(early_stopping_patience=2), "needs eval_strategy .*, and load_best_model_at_end"),
        (dict(early_stopping_patience=0), "early_stopping_patience must be at least 1, got 0"),
        (dict(early_stopping_threshold=0.1), "_threshold needs early_stopping_patience"),
        (dict(early_stopping_patience=2, **HELD_OUT), "patience needs load_best_model_at_end true"),
        (
            dict(early_stopping_patience=2, load_best_model_at_end=True),
            r"patience needs eval_strategy steps \(with eval_steps\) or epoch\.$",
        ),
        (dict(early_stopping_threshold=-0.1, **BEST), "_threshold must be at least 0, got -0.1"),
        (dict(early_stopping_threshold=".nan", **BEST), "_threshold must be at least 0, got nan"),
        (dict(eval_dataset_name="held"), "eval_dataset_name needs eval_strategy steps or epoch"),
        (dict(max_steps=-2), "max_steps -2 would train for all epochs"),
        (dict(save_steps=-3), "save_steps -3 saves nothing"),
        (dict(device_memory="24GiB"), "device_memory is for a dry run. Add --dry_run"),
        (dict(device_memory=24, dry_run=True), "device_memory must have a unit, .* got 24"),
        (dict(device_memory="24GBs", dry_run=True), "device_memory must have a unit"),
        (dict(padding_free=True, pad_to_multiple_of=8), "_multiple_of cannot .* with padding_free"),
        (dict(packing=True, neftune_noise_alpha=5.0), "_alpha cannot .* with packing"),
        (dict(use_dora=True), "use_dora is for adapters. Add --use_peft"),
        (dict(use_rslora=True), "use_rslora is for adapters. Add --use_peft"),
        (dict(lora_modules_to_save=["lm_head"]), "lora_modules_to_save is for adapters"),
    ],
)
def test_bad_values_in_a_recipe_are_named(tmp_path, recipe, message):
    with pytest.raises(ValueError, match=message):
        options(tmp_path, **recipe)


@pytest.mark.parametrize(
    "own",
    [
        dict(save_strategy="no", save_steps=0),
        dict(padding_free=True, train_sampling_strategy="batch_rebalance"),
        dict(padding_free=True, average_tokens_across_devices=False),
        dict(neftune_noise_alpha=5.0, pad_to_multiple_of=8),
        dict(dry_run=True, device_memory="80gb"),
        dict(dry_run=True, device_memory="1.5GiB"),
        dict(do_eval=True, **HELD_OUT),
        dict(lr_scheduler_type="constant", warmup_steps=0),
        dict(max_steps=1),
        {**BEST, "early_stopping_patience": 1},
        dict(projector_learning_rate=0, norm_learning_rate=0, vision_learning_rate=0),
        # The vision tower is trained, as it would not be with adapters.
        dict(
            stage="tune",
            projector_learning_rate=0,
            norm_learning_rate=0,
            language_learning_rate=0,
        ),
        dict(dry_run=True, device_memory="512MB"),
        dict(dry_run=True, device_memory="65536KiB"),
    ],
    ids=str,
)
def test_values_at_the_edge_of_what_is_refused_are_taken(tmp_path, own):
    args = config(tmp_path, **own)
    assert {name: getattr(args, name) for name in own} == own


def test_an_order_of_rows_that_no_run_finds_again_needs_a_run_without_checkpoints(tmp_path):
    args = config(tmp_path, save_strategy="no", accelerator_config=UNSEEDED)
    assert args.accelerator_config.use_seedable_sampler is False
    with pytest.raises(ValueError, match="use_seedable_sampler false .* set save_strategy: no"):
        config(tmp_path, accelerator_config=UNSEEDED)


LEAST = dict(per_device_train_batch_size=1, global_batch_size=1, learning_rate=0, probe_rows=1)
LEAST |= dict(vision_learning_rate=0, projector_learning_rate=0, norm_learning_rate=0)
LEAST |= dict(language_learning_rate=0, sample_count=0, sample_max_new_tokens=1)


@pytest.mark.parametrize(("name", "least"), LEAST.items())
def test_a_number_may_be_its_least_and_no_less(tmp_path, name, least):
    other = "projector_learning_rate" if name == "norm_learning_rate" else "norm_learning_rate"
    others = {other: 1e-3}
    assert getattr(config(tmp_path, **others, **{name: least}), name) == least
    with pytest.raises(ValueError, match=f"^{name} must be at least {least}, got {least - 1}"):
        config(tmp_path, **others, **{name: least - 1})


def test_defaults_of_refused_options_are_those_of_trl():
    theirs = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    changed = {name for name, default in REFUSALS.items() if default != theirs.get(name)}
    ours = {"assistant_only_loss", "remove_unused_columns"}
    assert changed == ours | {"hub_strategy", "router_aux_loss_coef"}


def test_an_option_that_is_refused_may_be_left_without_a_value(tmp_path):
    config(tmp_path, use_liger_kernel=None, do_predict=None, auto_find_batch_size=None)
    assert config(tmp_path, router_aux_loss_coef=None).router_aux_loss_coef == 0.0


@pytest.mark.parametrize("name", REFUSALS)
def test_an_option_that_does_nothing_or_harm_is_refused(tmp_path, name):
    default = REFUSALS[name]
    others = {"completion_only_loss": (True, False), "include_num_input_tokens_seen": (True, "all")}
    others["hub_strategy"] = ("every_save", "checkpoint", "all_checkpoints")
    for other in others.get(name, ({"a": 1}, "other") if default is None else (not default,)):
        with pytest.raises(ValueError, match=f"^{name} cannot be used here: .*Leave it out"):
            config(tmp_path, **{name: other})


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(
    ("section", "own", "error"),
    [
        ({"optimizer": {"type": "AdamW"}}, {}, "section 'optimizer' would undo optim"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "'scheduler' would undo lr_scheduler_type"),
        ({"torch_autocast": {"enabled": True}}, {}, "'torch_autocast' would undo bf16"),
        ({"bf16": {"enabled": True}}, {}, "bf16 is True in DeepSpeed's configuration. Remove it"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, "bf16 is False in DeepSpeed's"),
        ({"fp16": {"enabled": True}}, {}, "fp16 is True in DeepSpeed's configuration. Remove it"),
        ({}, {"fp16": True}, "fp16 would round the gain under DeepSpeed. Use bf16"),
        ({}, {"bad_steps": "skip"}, "bad_steps cannot be 'skip': DeepSpeed takes the"),
    ],
)
def test_a_deepspeed_configuration_that_undoes_options_is_refused(tmp_path, section, own, error):
    zero = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", **section}
    with pytest.raises(ValueError, match=error):
        config(tmp_path, deepspeed=zero, **own)


@pytest.fixture
def zero(tmp_path):
    """Makes options with a stage of ZeRO, whose configuration ends with the test."""
    made = []

    def make(stage=2, more=None, **own) -> NormAlignConfig:
        file = {"zero_optimization": {"stage": stage}, "train_batch_size": "auto", **(more or {})}
        made.append(config(tmp_path, deepspeed=file, **own))
        return made[-1]

    yield make
    unset_hf_deepspeed_config()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_deepspeed_keeps_weights_in_float32_and_autocasts_where_steps_do(zero):
    autocast = zero(more={"bf16": {"enabled": "auto"}}, bf16=True).deepspeed_plugin.deepspeed_config
    assert "bf16" not in autocast
    assert "bf16" not in deepspeed_config()  # by which ZeRO-3 loads a model
    # An empty list: no weight and no gradient is sent in bfloat16.
    expected = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert autocast["torch_autocast"] == expected
    for section in ({}, {"bf16": {"enabled": False}}):
        plain = zero(more=section).deepspeed_plugin.deepspeed_config
        assert "torch_autocast" not in plain


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_under_zero_3_nothing_is_counted_or_quantized_and_all_is_float32(zero, checkpoint):
    args = zero(stage=3, bf16=True, dry_run=True)
    with pytest.raises(ValueError, match="dry_run cannot count ZeRO-3. Count with fsdp2"):
        check_options(args, str(checkpoint))
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match="do not go with ZeRO-3. Use zero2"):
        open_model(GivenModel(str(checkpoint), quantization=four_bits), args)
    half = NormAlignLlavaConfig(dtype="bfloat16")
    assert frozen_dtype(half, args) == "float32"
    two = zero(stage=2, bf16=True, dry_run=True)
    check_options(two, str(checkpoint))
    assert frozen_dtype(half, two) == "bfloat16"


def read(tmp_path, text: str, *words: str):
    """Data, training and model of a recipe's text, which names data itself if it is to."""
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    model = ["--model_name_or_path", "model", "--bf16", "false", "--output_dir", str(tmp_path)]
    data, training, arguments = parse([str(file), *model, *words])
    return data, complete(training)[0], arguments


FALSE = ("no", "No", "off", "false", "False", "n")
TRUE = ("yes", "on", "True", "true", "y")
MEANT = [
    *(("save_strategy", word, "no") for word in ("no", "off", "false", "'no'", "No")),
    *(("eval_strategy", word, "no") for word in ("no", "off", "False")),
    *(("logging_strategy", word, "no") for word in ("no", "off")),
    *(("gradient_checkpointing", word, False) for word in FALSE),
    *(("gradient_checkpointing", word, True) for word in TRUE),
    *(("use_peft", word, False) for word in FALSE),
    *(("use_peft", word, True) for word in TRUE),
    *(("dataset_streaming", word, True) for word in TRUE),
    *(("disable_tqdm", word, False) for word in FALSE),
    *(("report_to", word, []) for word in ("none", "no", "off", "false", "None", "No")),
    ("resume_from_checkpoint", "no", None),
    ("max_steps", "1e3", 1000),
    ("max_steps", "1_000", 1000),
    ("max_length", "null", None),
    ("max_length", "none", None),
    ("max_length", "None", None),
    ("fsdp", "True", True),
    ("deepspeed", "No", None),
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
    *(("fsdp", word, True) for word in ("yes", "on", "true")),
    *(("fsdp", word, False) for word in ("no", "off", "false")),
    ("max_grad_norm", ".inf", math.inf),
    ("early_stopping_threshold", "0", 0.0),
    *(("include_num_input_tokens_seen", word, "no") for word in ("no", "off", "false")),
    ("deepspeed", "no", None),
    ("gradient_checkpointing_kwargs", "no", None),
]


@pytest.mark.parametrize(("name", "word", "meant"), MEANT)
def test_a_recipe_and_the_command_line_mean_what_people_mean(tmp_path, name, word, meant):
    data = "dataset_name: data\n"
    by_recipe = read(tmp_path, f"{data}{name}: {word}\n")
    is_null = word in ("null", "'no'")  # words of YAML alone
    by_words = by_recipe if is_null else read(tmp_path, data, f"--{name}", word)
    for parsed in (by_recipe, by_words):
        (owner,) = (part for part in parsed if name in vars(part))
        value = getattr(owner, name)
        if name == "resume_from_checkpoint":
            value = None if value in ("no", None) else value
        assert value == meant and (isinstance(value, str) or type(value) is type(meant))


@pytest.mark.parametrize(
    ("words", "meant"), [("true True yes on t y 1", True), ("false False no off f n 0", False)]
)
def test_words_for_true_and_false(words, meant):
    assert {truth(word) for word in words.split()} == {meant}
    for word in ("none", "", "2", "maybe"):
        with pytest.raises(ArgumentTypeError, match=re.escape(repr(word))):
            truth(word)


def test_numbers_as_people_and_yaml_write_them():
    texts = ("0.5", "5e-1", "1_000", ".5", ".inf", "-.Inf", "-2")
    assert [number(text) for text in texts] == [0.5, 0.5, 1000, 0.5, math.inf, -math.inf, -2]
    assert math.isnan(number(".nan"))
    assert [whole_number(text) for text in ("1000", "1e3", "1_000", "-2", 5.0)] == [
        *(1000, 1000, 1000, -2, 5)
    ]
    for text in ("1.5", "5e-1", "many", ".inf"):
        with pytest.raises(ArgumentTypeError, match=re.escape(repr(text))):
            whole_number(text)
    with pytest.raises(ArgumentTypeError, match="'many'"):
        number("many")


def test_options_in_python_are_read_as_in_a_recipe(tmp_path):
    recipe = {"output_dir": str(tmp_path), "save_strategy": False, "probe_steps": ["0", "1e2"]}
    args = parse(BASE, {**recipe, "gradient_checkpointing": False, "env": None})[1]
    assert (args.save_strategy, args.probe_steps) == ("no", [0, 100])
    assert args.gradient_checkpointing is False


def test_a_recipe_in_python_may_have_numbers_for_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMALIGN_TEST_NUMBER", raising=False)
    parse(BASE, {"output_dir": str(tmp_path), "env": {"NORMALIGN_TEST_NUMBER": 3}})
    assert os.environ.pop("NORMALIGN_TEST_NUMBER") == "3"


@pytest.mark.parametrize("word", ["null", "Null", "none"])
def test_the_command_line_may_take_a_default_away(tmp_path, word):
    assert read(tmp_path, "dataset_name: data\n", "--max_length", word)[1].max_length is None


def test_how_a_checkpoint_is_opened_is_told_to_the_trainer(tmp_path):
    how = dict(model_revision="v2", dtype="float32", attn_implementation="eager")
    expected = dict(revision="v2", dtype="float32", attn_implementation="eager")
    assert options(tmp_path, **how).model_init_kwargs == expected
    own = {"dtype": "bfloat16", "use_kernels": False}
    assert options(tmp_path, **how, model_init_kwargs=own).model_init_kwargs == expected | own


def test_names_may_be_in_one_text_or_in_several():
    for given in ("lm_head, embed_tokens", ["lm_head,embed_tokens"], ["lm_head", "embed_tokens"]):
        saved = ModelArguments(use_peft=True, lora_modules_to_save=given).lora_modules_to_save
        assert saved == ["lm_head", "embed_tokens"]
    assert ModelArguments(use_peft=True, lora_modules_to_save=[]).lora_modules_to_save is None
    pattern = r".*\.(lm_head|embed_tokens)"
    assert ModelArguments(use_peft=True, lora_modules_to_save=pattern).lora_modules_to_save == [
        pattern
    ]


def test_how_a_model_is_quantized():
    four = ModelArguments(load_in_4bit=True).quantization
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == ("nf4", True)
    own = dict(bnb_4bit_quant_type="fp4", use_bnb_nested_quant=False)
    other = ModelArguments(load_in_4bit=True, **own).quantization
    assert (other.bnb_4bit_quant_type, other.bnb_4bit_use_double_quant) == ("fp4", False)
    assert four.load_in_4bit and not four.load_in_8bit
    assert four.bnb_4bit_compute_dtype == torch.float32
    eight = ModelArguments(load_in_8bit=True).quantization
    assert eight.load_in_8bit and not eight.load_in_4bit
    assert ModelArguments().quantization is None


@pytest.mark.parametrize("metric", [None, "loss", "eval_loss"])
def test_the_best_step_is_told_by_a_key_of_the_log(tmp_path, metric):
    assert best_metric(config(tmp_path, metric_for_best_model=metric)) == "eval_loss"
    for given in ("accuracy", "eval_accuracy"):
        assert best_metric(config(tmp_path, metric_for_best_model=given)) == "eval_accuracy"
    assert best_metric(config(tmp_path, metric_for_best_model="evals")) == "eval_evals"


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
    _, training, model = read(tmp_path, text)
    assert training.lr_scheduler_kwargs == {"min_lr": 1e-7}
    assert training.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert training.accelerator_config.use_seedable_sampler is False
    assert training.probe_steps == [0, 100]
    assert model.lora_target_modules == ["q_proj", "no"]
    assert os.environ.pop("NORMALIGN_TEST_WORD") == "no"


def test_a_mixture_is_read_as_people_mean(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    text = """
    image_folder: ~/all
    datasets:
      - {path: ~/a.json, fraction: 5e-1, name: no, data_files: [~/x.json, y.json]}
      - {path: owner/b, fraction: 1, split: on, image_folder: ~/own, columns: {image: no}}
    """
    first, second = read(tmp_path, text)[0].sources
    assert (first.path, first.image_folder) == (f"{tmp_path}/a.json", f"{tmp_path}/all")
    assert (first.fraction, first.name) == (0.5, "no")
    assert first.data_files == [f"{tmp_path}/x.json", "y.json"]
    assert (second.path, second.image_folder) == ("owner/b", f"{tmp_path}/own")
    assert (second.fraction, second.split, second.columns) == (1.0, "on", {"image": "no"})


PATHS = ("output_dir", "model_name_or_path", "resume_from_checkpoint", "dataset_name")
PATHS += ("eval_dataset_name", "image_folder")


@pytest.mark.parametrize("name", PATHS)
def test_the_home_folder_stands_for_a_tilde_in_every_path(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    others = "" if name == "dataset_name" else "dataset_name: data\n"
    others += "eval_strategy: steps\n"
    file = tmp_path / "recipe.yaml"
    model = [] if name == "model_name_or_path" else ["--model_name_or_path", "model"]
    for text, words in ((f"{others}{name}: ~/x y\n", []), (others, [f"--{name}=~/x y"])):
        file.write_text(text)
        parsed = parse(["~/recipe.yaml", *model, "--bf16", "false", *words])
        (owner,) = (part for part in parsed if name in vars(part))
        assert getattr(owner, name) == f"{tmp_path}/x y"


@pytest.mark.parametrize("name", ["fsdp_config", "accelerator_config"])
def test_the_home_folder_stands_for_a_tilde_in_the_path_of_a_mapping(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    content = {"version": 2} if name == "fsdp_config" else {"even_batches": False}
    (tmp_path / "mapping.json").write_text(json.dumps(content))
    own = {name: "~/mapping.json", "fsdp": name == "fsdp_config"}
    args = config(tmp_path, **own)
    if name == "fsdp_config":
        assert args.fsdp_plugin_args["fsdp_version"] == 2
    else:
        assert args.accelerator_config.even_batches is False


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_the_home_folder_stands_for_a_tilde_in_the_path_of_deepspeed_s_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    content = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
    (tmp_path / "zero.json").write_text(json.dumps(content))
    try:
        plugin = config(tmp_path, deepspeed="~/zero.json").deepspeed_plugin
        assert plugin.deepspeed_config["zero_optimization"] == {"stage": 2}
    finally:
        unset_hf_deepspeed_config()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("use_peft: true\nlora_r: 8\nlora_dropout: 0.1\nuse_dora: true", ["--use_peft", "false"]),
        ("load_in_4bit: true\nbnb_4bit_quant_type: fp4", ["--load-in-4bit=no"]),
        ("eval_strategy: steps\ntest_split_size: 0.1", ["--eval_strategy", "no"]),
        ("eval_strategy: steps\neval_dataset_name: held", ["--eval_strategy", "no"]),
        (
            "eval_strategy: epoch\nsave_strategy: epoch\nload_best_model_at_end: true\n"
            "early_stopping_patience: 2",
            ["--eval_strategy", "no"],
        ),
        (
            "eval_strategy: epoch\nsave_strategy: epoch\nload_best_model_at_end: true\n"
            "early_stopping_patience: 2\nmetric_for_best_model: eval_loss",
            ["--load_best_model_at_end", "no", "--eval_strategy", "no"],
        ),
        ("use_peft: true\nuse_rslora: true", ["--use_peft", "false"]),
        ("dry_run: true\ndevice_memory: 24GiB", ["--dry_run", "false"]),
        ("lr_scheduler_type: cosine\nwarmup_steps: 5", ["--lr_scheduler_type", "constant"]),
        ("gradient_accumulation_steps: 4\nglobal_batch_size: 32", ["--global_batch_size", "8"]),
    ],
)
def test_what_the_command_line_switches_off_takes_its_own_options_along(tmp_path, recipe, words):
    data, training, model = read(tmp_path, f"dataset_name: data\n{recipe}\n", *words)
    alone = read(tmp_path, "dataset_name: data\n", *words)
    assert model == alone[2] or "load" in recipe
    assert data == alone[0]
    assert training.eval_strategy == "no" and training.early_stopping_patience is None
    accumulation_steps(training)


def test_a_data_set_of_the_command_line_replaces_the_recipes_mixture(tmp_path):
    data, *_ = read(tmp_path, "datasets: [{path: a}]\n", "--dataset_name", "b")
    assert [source.path for source in data.sources] == ["b"]
    with pytest.raises(ValueError, match=r"Give dataset_name .* or datasets .*, not both"):
        read(tmp_path, "datasets: [{path: a}]\ndataset_name: b\n")


def test_what_is_taken_along_are_options():
    names = {field for action in option_parser()._actions for field in [action.dest]}
    for name, prefixes in {**OVERRULED, **REPLACED}.items():
        assert name in names
        for prefix in prefixes:
            assert any(option.startswith(prefix) for option in names), prefix


def test_names_of_other_tools_are_no_options_and_lead_to_some():
    names = {action.dest for action in option_parser()._actions}
    assert not ELSEWHERE.keys() & names
    for name, (called, remark) in ELSEWHERE.items():
        assert set(called) <= names, name
        assert called or remark, name
    refused = {option for called, _ in ELSEWHERE.values() for option in called} & REFUSALS.keys()
    assert not refused


THEIRS = {
    "cutoff_len": "max_length",  # LLaMA-Factory
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "additional_target": "lora_modules_to_save",
    "finetuning_type": "use_peft",
    "quantization_type": "bnb_4bit_quant_type",
    "val_size": "test_split_size",
    "media_dir": "image_folder",
    "flash_attn": "attn_implementation",
    "neat_packing": "packing",
    "freeze_vision_tower": "vision_learning_rate",
    "freeze_language_model": "language_learning_rate",
    "sequence_len": "max_length",  # axolotl
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "evals_per_epoch": "eval_steps",
    "saves_per_epoch": "save_steps",
    "lr_scheduler": "lr_scheduler_type",
    "aligner_lr": "projector_learning_rate",  # ms-swift
    "vit_lr": "vision_learning_rate",
    "freeze_vit": "vision_learning_rate",
    "freeze_llm": "language_learning_rate",
    "train_type": "use_peft",
    "split_dataset_ratio": "test_split_size",
    "max_seq_length": "max_length",  # unsloth
    "finetune_vision_layers": "vision_learning_rate",
    "finetune_language_layers": "language_learning_rate",
    "mm_projector_lr": "projector_learning_rate",  # LLaVA
    "mm_vision_tower_lr": "vision_learning_rate",
    "model_max_length": "max_length",
    "warmup_ratio": "warmup_steps",
    "data_path": "dataset_name",
    "lora_enable": "use_peft",
    "lora_target_linear": "lora_target_modules",  # axolotl
    "sdp_attention": "attn_implementation",
    "use_wandb": "report_to",
    "wandb_project": "report_to",
    "truncation_strategy": "max_length",  # ms-swift
    "dataset_dir": "dataset_name",  # LLaMA-Factory
    "overwrite_output_dir": "output_dir",
    "mix_strategy": "datasets",
    "interleave_probs": "datasets",
}
ALSO = {
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "attn_implementation": (
        "attn_impl xformers_attention eager_attention flash_attention use_flash_attn"
    ),
    "bnb_4bit_quant_type": "bnb_quant_type quant_type",
    "dataloader_num_workers": "num_workers",
    "dataset_name": "dataset train_file dataset_path train_data",
    "dataset_num_proc": "preprocessing_num_workers dataset_processes preprocess_workers",
    "dataset_streaming": "streaming",
    "dtype": "torch_dtype compute_dtype weight_dtype",
    "early_stopping_patience": "early_stop_interval early_stopping_steps",
    "eval_dataset_name": "eval_dataset val_dataset validation_file test_datasets",
    "eval_steps": "eval_interval val_check_interval eval_every",
    "global_batch_size": "effective_batch_size total_batch_size",
    "gradient_accumulation_steps": "grad_accum_steps accumulation_steps",
    "gradient_checkpointing": "use_gradient_checkpointing vit_gradient_checkpointing",
    "hub_model_id": "hub_repo_id hub_model_name",
    "image_folder": "image_dir images_dir image_path",
    "language_learning_rate": "freeze_backbone",
    "learning_rate": "lr base_lr lr_rate",
    "load_in_4bit": "load_in_4_bit",
    "load_in_8bit": "load_in_8_bit",
    "logging_steps": "log_interval log_every",
    "lora_modules_to_save": "modules_to_save",
    "lora_r": "lora_dim",
    "lora_target_modules": "target_modules target_all_linear",
    "lr_scheduler_type": "scheduler scheduler_type lr_schedule",
    "max_grad_norm": "clip_grad grad_clip gradient_clip_val",
    "max_length": "max_seq_len seq_len",
    "max_steps": "max_train_steps train_iters total_steps",
    "model_name_or_path": "base_model model model_path model_id model_id_or_path model_name",
    "neftune_noise_alpha": "neftune_alpha neft_alpha",
    "num_train_epochs": "num_epochs epochs max_epochs n_epochs",
    "optim": "optimizer optimizer_name",
    "output_dir": "output_path save_dir work_dir output save_path",
    "packing": "sample_packing",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "train_batch_size mbs",
    "projector_learning_rate": "projector_lr merger_lr",
    "report_to": "use_swanlab use_tensorboard swanlab_project",
    "resume_from_checkpoint": "resume auto_resume_from_checkpoints resume_from",
    "save_steps": "save_interval save_every",
    "seed": "random_seed random_state",
    "shuffle_buffer_size": "buffer_size shuffle_buffer streaming_shuffle_buffer_size",
    "test_split_size": "val_set_size validation_split_percentage",
    "use_bnb_nested_quant": "double_quantization bnb_4bit_use_double_quant double_quant",
    "use_dora": "peft_use_dora use_dora_adapter",
    "use_peft": "adapter tuner_type sft_type",
    "use_rslora": "peft_use_rslora",
    "vision_learning_rate": (
        "vision_tower_lr freeze_vision_model unfreeze_mm_vision_tower vision_lr unfreeze_vision"
    ),
    "warmup_steps": "warmup num_warmup_steps lr_warmup_fraction warmup_iters",
}
for called, names in ALSO.items():
    THEIRS |= dict.fromkeys(names.split(), called)
"""Options as other tools document them, and the one that does the same here."""


@pytest.mark.parametrize(("theirs", "ours"), THEIRS.items())
def test_a_name_of_another_tool_stands_for_what_it_does_there(theirs, ours):
    assert ELSEWHERE[theirs][0] == (ours,)
    assert f"`{theirs}` is called `{ours}` here" in answer_for(theirs)


def test_a_name_may_stand_for_two_options_or_for_none():
    both = ("projector_learning_rate", "norm_learning_rate")
    for name in ("freeze_aligner", "freeze_multi_modal_projector", "tune_mm_mlp_adapter"):
        assert ELSEWHERE[name][0] == both
    for name in ("quantization_bit", "quant_bits", "bits"):
        assert ELSEWHERE[name][0] == ("load_in_4bit", "load_in_8bit")
    said = answer_for("freeze_aligner")
    assert "are called `projector_learning_rate` and `norm_learning_rate` here: 0 freezes" in said
    none = ("plot_loss", "model_type", "overwrite_cache", "image_max_pixels", "image_resolution")
    none += ("image_min_pixels", "max_pixels", "min_pixels", "image_size", "image_aspect_ratio")
    none += ("image_resize_algorithm",)
    none += ("chat_template", "conversation", "prompt_template", "num_samples")
    for name in (*none, "template", "max_samples"):
        assert ELSEWHERE[name][0] == ()
        assert answer_for(name).startswith(f"There is no `{name}` here: ")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_another_tool_is_answered_with_ours(tmp_path, name):
    for text, words in (
        (f"dataset_name: data\n{name}: 5\n", []),
        ("dataset_name: data\n", [f"--{name}", "5"]),
        ("dataset_name: data\n", [f"--{name.replace('_', '-')}=5"]),
    ):
        with pytest.raises(ValueError) as error:
            read(tmp_path, text, *words)
        for option in ELSEWHERE[name][0]:
            assert f"`{option}`" in str(error.value)
        assert ELSEWHERE[name][1] in str(error.value)
    with pytest.raises(ValueError, match=f"`{name}`"):  # before a checkpoint is asked for
        check_command([f"--{name}", "5"], {})


def test_only_the_name_of_an_unknown_option_is_named(tmp_path):
    for words in (["--learning_speed", "3"], ["--learning_speed=3"]):
        with pytest.raises(ValueError) as error:
            read(tmp_path, "dataset_name: data\n", *words)
        assert "--learning_speed." in str(error.value) and "3" not in str(error.value)
    with pytest.raises(ValueError, match="--learning_speed, --epoch_count"):
        read(tmp_path, "dataset_name: data\nlearning_speed: 1\n", "--epoch_count=3")
    with pytest.raises(ValueError, match="Did you mean --learning_rate"):
        read(tmp_path, "dataset_name: data\n", "--learing-rate", "1")
    with pytest.raises(ValueError, match="no option --max_len\\."):  # a part of a name
        read(tmp_path, "dataset_name: data\n", "--max_len", "64")
    with pytest.raises(ValueError, match="'stray' belongs to no option"):
        read(tmp_path, "dataset_name: data\n", "--seed", "3", "stray")


def test_a_command_says_what_a_name_is_called_here_without_importing_trl(tmp_path):
    (tmp_path / "recipe.yaml").write_text("base_model: x\nmicro_batch_size: 2\n")
    words, recipe = read_command([str(tmp_path / "recipe.yaml"), "--cutoff-len", "512"])
    with pytest.raises(ValueError, match=r"`max_length`.*`model_name_or_path`.*`per_device_train"):
        check_command(words, recipe)


def test_a_recipe_is_the_first_word_or_the_file_of_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.yaml").write_text("seed: 3\n")
    recipe = {"seed": "3"}
    assert read_command(["~/my.yaml", "--seed", "4"]) == (["--seed", "4"], recipe)
    others = ["--max_steps", "5", "--seed", "4"]
    given = [*others[:2], "--config", "~/my.yaml", *others[2:]]
    assert read_command(given) == (others, recipe)
    assert read_command(others) == (others, {})
    assert read_command(["--seed", "--config"]) == (["--seed", "--config"], {})
    assert read_command([]) == ([], {})
    named, in_package = read_command(["lora", "--seed", "4"])
    assert named == ["--seed", "4"] and in_package["lora_r"] == "128"
    (tmp_path / "lora.yaml").write_text("seed: 1\n")
    assert read_command([str(tmp_path / "lora.yaml")])[1] == {"seed": "1"}


def test_a_file_comes_before_the_recipe_of_its_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora").mkdir()
    assert recipe_file("lora") == RECIPES / "lora.yaml"
    (tmp_path / "lora").rmdir()
    (tmp_path / "lora").write_text("seed: 1\n")
    assert recipe_file("lora") == Path("lora")
    with pytest.raises(ValueError, match="is not valid YAML"):
        read_command(["--config", str(tmp_path)])
    for name in ("d.yaml", "b.yaml", "c.yaml", "a.yaml"):
        (tmp_path / "own" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "own" / name).touch()
    with pytest.raises(ValueError, match="a, b, c, d"):
        recipe_file("none", tmp_path / "own")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "is no mapping .* --dataset_name .*my.yaml"),
        (b"", "is no mapping"),
        (b"a: [1", "is not valid YAML"),
        (b"a: \xff", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, message):
    (tmp_path / "my.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/my.yaml {message}"):
        read_command([str(tmp_path / "my.yaml")])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("q_proj", ["q_proj"]),
        (" q_proj,v_proj , layers.0.k_proj ", ["q_proj", "v_proj", "layers.0.k_proj"]),
        ("q_proj v_proj", ["q_proj", "v_proj"]),
        (r".*\.(q|v)_proj", []),
        ("q_proj, v.*", []),
    ],
)
def test_names_are_told_from_patterns(text, names):
    assert names_in(text) == names


@pytest.mark.parametrize(
    ("recipe", "words", "package"),
    [
        ({"load_in_4bit": "yes"}, [], "bitsandbytes"),
        ({}, ["--load-in-8bit"], "bitsandbytes"),
        ({}, ["--deepspeed", "zero.json"], "deepspeed"),
        ({"load_in_4bit": "yes"}, ["--load_in_4bit=false"], None),
        ({"load_in_8bit": "No"}, [], None),
        ({"load_in_4bit": None}, [], None),
    ],
)
def test_a_package_is_asked_for_by_what_the_recipe_and_the_words_say(
    monkeypatch, recipe, words, package
):
    for name in ("bitsandbytes", "deepspeed"):
        monkeypatch.setitem(sys.modules, name, None)
    named = {"model_name_or_path": "a", **recipe}
    needed = pytest.raises(ImportError, match=f" needs {package}, ") if package else nullcontext()
    with needed:
        check_command(words, named)


@pytest.mark.parametrize("words", [["--hub_token", "hf_x"], ["--hub-token=hf_x"]])
def test_a_token_on_the_command_line_is_refused(words):
    with pytest.raises(ValueError, match="Set HF_TOKEN instead"):
        check_command([*words, "--model_name_or_path", "a"], {})


def test_a_checkpoint_may_be_named_in_the_recipe_or_the_words():
    check_command(["--model-name-or-path=a"], {})
    check_command([], {"model_name_or_path": "a", "hub_token": "hf_x"})
    for words, recipe in (([], {}), (["--model_name_or_path", ""], {"model_name_or_path": "a"})):
        with pytest.raises(ValueError, match="--model_name_or_path"):
            check_command(words, recipe)


def test_zero_needs_deepspeed_before_processes_are_started(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (tmp_path / "own.yaml").write_text("distributed_type: DEEPSPEED\n")
    for file in ("zero2", "zero3", str(tmp_path / "own.yaml")):
        with pytest.raises(ImportError, match="needs deepspeed"):
            launch(file, None, [])
    with pytest.raises(ValueError, match="no file zero4, .*ddp, fsdp2, zero2, zero3"):
        launch("zero4", None, [])


@pytest.fixture
def launching(monkeypatch):
    """What `accelerate launch` is asked for, which it does not do; it may raise an error."""
    asked = []

    def launch_command(arguments):
        asked.append(arguments)
        if isinstance(asked[0], Exception):
            raise asked[0]

    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch_command)
    return asked


@pytest.mark.parametrize("processes", [None, 2])
def test_a_launch_has_the_processes_of_the_file_unless_others_are_asked_for(
    launching, tmp_path, processes
):
    (tmp_path / "own.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    for file, found in (("ddp", "ddp.yaml"), (str(tmp_path / "own.yaml"), "own.yaml")):
        launch(file, processes, ["recipe.yaml", "--seed", "3"])
        arguments = launching.pop()
        assert arguments.num_processes == processes
        assert arguments.config_file.endswith(found) and arguments.quiet
        assert arguments.module and arguments.training_script == "normalign_llava.train"
        assert arguments.training_script_args == ["recipe.yaml", "--seed", "3"]


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_launcher_that_is_stopped_stops_the_command(launching, number, kind):
    launching.append(SignalException("stopped", number))
    with pytest.raises(kind):
        launch("ddp", 2, [])


def failed(exitcode):
    """The error of torch's launcher where the second process ended first."""
    failures = {}
    for rank, (code, seconds) in enumerate([(1, 20), (exitcode, 10)]):
        failures[rank] = ProcessFailure(rank, 99, code, "none.json")
        failures[rank].timestamp = seconds
    return ChildFailedError("train", failures)


def test_a_process_that_failed_has_said_why_and_one_that_was_killed_is_named(launching):
    launching.append(failed(3))
    with pytest.raises(SystemExit) as ended:
        launch("ddp", 2, [])
    assert ended.value.code == 3
    launching[:] = [failed(-signal.SIGKILL)]
    with pytest.raises(ChildProcessError, match="Process 1 was ended by SIGKILL"):
        launch("ddp", 2, [])


def test_a_value_that_is_the_recipe_s_own_takes_nothing_along():
    own = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}}
    recipe = {**own, "use_peft": "yes", "lora_r": "8", "eval_strategy": "steps", "eval_steps": "5"}
    kept = ["--lr_scheduler_type", "cosine_with_min_lr", "--use_peft", "--eval_strategy=epoch"]
    assert without_overruled(recipe, kept) == recipe
    assert without_overruled(recipe, ["--lr-scheduler-type=linear", "--use-peft", "NO"]) == {
        **{"lr_scheduler_type": "cosine_with_min_lr", "use_peft": "yes"},
        **{"eval_strategy": "steps", "eval_steps": "5"},
    }


WITHOUT = {
    ("--use_peft", "no"): "lora_r lora_alpha lora_target_modules use_dora use_rslora",
    ("--load_in_4bit", "off"): "bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant",
    ("--eval_strategy", "no"): "test_split_size eval_dataset_name eval_steps "
    "load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience "
    "early_stopping_threshold",
    ("--load_best_model_at_end", "0"): "metric_for_best_model greater_is_better "
    "early_stopping_patience early_stopping_threshold",
    ("--dry_run", "false"): "device_memory",
    ("--dataset_name", "b"): "datasets",
    ("--lr_scheduler_type", "constant"): "lr_scheduler_kwargs warmup_steps",
    ("--global_batch_size", "8"): "gradient_accumulation_steps",
}


@pytest.mark.parametrize(("words", "names"), WITHOUT.items(), ids=str)
def test_the_options_that_depend_on_one_go_with_it(words, names):
    recipe = dict.fromkeys(" ".join(WITHOUT.values()).split(), "3")
    recipe |= {"seed": "3", "global_batch_size": 4, "eval_delay": "1"}
    kept = {name: value for name, value in recipe.items() if name not in names.split()}
    assert without_overruled(recipe, words) == kept
    same = {"global_batch_size": 8, "gradient_accumulation_steps": 4}  # numbers, in Python
    assert without_overruled(same, ["--global_batch_size", "8"]) == same


def test_without_the_best_step_nothing_that_needs_it_is_left():
    needing = {"early_stopping_patience": "2", "early_stopping_threshold": "0.1"}
    needing |= {"metric_for_best_model": "eval_loss", "greater_is_better": "no"}
    recipe = {"eval_strategy": "epoch", "seed": "3", "load_best_model_at_end": "yes", **needing}
    words = ["--load_best_model_at_end", "false"]
    rest = {"eval_strategy": "epoch", "seed": "3", "load_best_model_at_end": "yes"}
    assert without_overruled(recipe, words) == rest
    assert without_overruled(recipe, ["--eval_strategy", "no"]) == {
        **{"eval_strategy": "epoch", "seed": "3"},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("7", 7), ("-7", -7), ("1_000", 1000), ("0", 0), ("007", "007"), ("08", "08")),
        *((".5", 0.5), ("-.5", -0.5), ("1.", 1.0), ("1.5e3", 1500.0), (".5e1", 5.0)),
        *(("5e-1", 0.5), ("1E3", 1000.0), (".inf", math.inf), ("-.INF", -math.inf)),
        *(("+7", 7), ("+.5", 0.5), ("1e+3", 1000.0), ("-1e-3", -0.001), ("1.5E+3", 1500.0)),
        *(("1_0.5", 10.5), ("1_0e3", 10000.0), ("+.inf", math.inf), (".Inf", math.inf)),
        *(("no", False), ("On", True), ("null", None), ("~", None), ("1.2.3", "1.2.3")),
        *(("2024-01-01", "2024-01-01"), ("1:30", "1:30"), ("0x1F", "0x1F"), ("e5", "e5")),
    ],
)
def test_scalars_in_a_mapping_are_numbers_and_booleans_where_they_look_like_some(
    tmp_path, text, value
):
    (tmp_path / "a.yaml").write_text(f"a: {{b: {text}}}\n")
    for options in (read_recipe(tmp_path / "a.yaml"), read_options(tmp_path / "a.yaml")):
        found = options["a"]["b"]
        assert found == value and type(found) is type(value)


def test_a_mapping_may_have_no_number_and_be_taken_from_an_anchor(tmp_path):
    text = "a: &shared {b: .NaN}\nlr_scheduler_kwargs: {<<: *shared, c: no}\n"
    (tmp_path / "a.yaml").write_text(text + "columns: {image: no, text: 1e3}\n<<: {seed: 3}\n")
    options = read_options(tmp_path / "a.yaml")
    kwargs = options["lr_scheduler_kwargs"]
    assert math.isnan(kwargs.pop("b")) and kwargs == {"c": False}
    assert options["columns"] == {"image": "no", "text": "1e3"}  # names, whatever they look like
    assert options["seed"] == "3"


def test_a_name_of_another_tool_is_found_in_the_recipe_and_told_once():
    name = next(iter(ELSEWHERE))
    with pytest.raises(ValueError) as error:
        check_names([f"--{name}=3", "--seed", "1"], {name: 3})
    assert str(error.value).count(f"`{name}`") == 1
    for words, recipe in (([f"--{name}", "3"], {}), ([], {name: 3})):
        with pytest.raises(ValueError, match=f"`{name}`"):
            check_names(words, recipe)
    check_names(["--seed", name], {"seed": name})  # a value is no name


def test_the_size_of_a_run_without_a_rank_does_not_hide_an_error():
    code = "from normalign_llava.errors import exit_on_error\n"
    code += "with exit_on_error():\n    raise ValueError('what went wrong')\n"
    environment = {**os.environ, "WORLD_SIZE": "2"}
    environment.pop("RANK", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "what went wrong" in done.stderr and "KeyError" not in done.stderr


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


def launched(monkeypatch, file):
    """Sets what `accelerate launch` sets for a configuration file, for one process of two."""
    words = ["--main_process_port=0", "--config_file", str(file), "--num_processes=2", "script.py"]
    arguments = _validate_launch_command(launch_command_parser().parse_args(words))[0]
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith(("ACCELERATE_USE_FSDP", "FSDP_")):
            monkeypatch.setenv(name, value)


def test_the_first_version_of_fsdp_is_refused_with_the_line_that_mends_a_file(
    tmp_path, monkeypatch
):
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE_FILE)  # without a version, which is the first one for accelerate
    launched(monkeypatch, file)
    with pytest.raises(ValueError, match="FSDP version 1 .* in bfloat16") as error:
        check_options(config(tmp_path), "model")
    line, place = re.search("Write `(.+?)` under `(.+?)`", str(error.value)).groups()
    file.write_text(ACCELERATE_FILE.replace(place, f"{place}\n  {line}"))
    launched(monkeypatch, file)
    check_options(config(tmp_path), "model")
    for version, is_refused in (("1", True), (None, True), ("2", False)):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "1")
        monkeypatch.delenv("FSDP_VERSION", raising=False)
        if version:
            monkeypatch.setenv("FSDP_VERSION", version)
        with pytest.raises(ValueError, match="FSDP_VERSION=2") if is_refused else nullcontext():
            check_options(config(tmp_path), "model")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    for settings in ({"version": 1}, {"fsdp_version": 1}):
        with pytest.raises(ValueError, match="Write `version: 2` into fsdp_config"):
            check_options(config(tmp_path, fsdp=True, fsdp_config=settings), "model")
    check_options(config(tmp_path, fsdp=True, fsdp_config={"version": 2}), "model")


@pytest.mark.parametrize("version", [1, 2])
def test_a_plugin_of_the_first_version_of_fsdp_is_refused(tmp_path, version):
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        Accelerator(cpu=True)
        # What several processes with GPUs have.
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        args = config(tmp_path, accelerator_config={"use_configured_state": True})
        with pytest.raises(ValueError, match="fsdp_version=2") if version == 1 else nullcontext():
            check_options(args, "model")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
