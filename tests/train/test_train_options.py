# SPDX-License-Identifier: Apache-2.0
"""Options: what they stand for, what is refused and why, their copies, and their page."""

import copy
import dataclasses
import os
import pickle
import re

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_multi_gpu_env
from documented import PAGE, page_from_fields
from run_options import BASE, REFUSALS, as_given, config, from_recipe, needs_deepspeed
from transformers import BitsAndBytesConfig
from transformers.integrations.deepspeed import deepspeed_config, unset_hf_deepspeed_config
from trl import SFTConfig

from normalign_llava import NormAlignLlavaConfig
from normalign_llava.checkpoint import precision
from normalign_llava.train.modules.load import frozen_dtype
from normalign_llava.train.options import WITHOUT_WARMUP, ModelArguments, NormAlignConfig, parse
from normalign_llava.train.prepare import GivenModel, accumulation_steps, check_options, open_model
from normalign_llava.train.settings import RunConfig, best_metric, complete


UNSEEDED = {"use_seedable_sampler": False}
HELD_OUT = {"eval_strategy": "steps", "eval_steps": 100}
BEST = {
    **HELD_OUT,
    "load_best_model_at_end": True,
    "early_stopping_patience": 2,
}


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
def test_without_a_stage_defaults_equal_trl_s(tmp_path, name):
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
    settings.set_derived(gradient_accumulation_steps=4)  # which follows
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
    settings.set_derived(gradient_accumulation_steps=4)
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
def test_a_given_learning_rate_is_for_every_module_that_the_stage_trains(
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
    tmp_path, monkeypatch, total, rows, processes, accumulation, expected
):
    train_options = options_of_batch(tmp_path, total, rows, accumulation)
    assert train_options.world_size == 1
    monkeypatch.setattr(RunConfig, "world_size", processes)
    assert accumulation_steps(train_options) == expected


def test_a_global_batch_that_does_not_divide_is_refused(tmp_path, monkeypatch):
    train_options = options_of_batch(tmp_path, total=16, rows=2, accumulation=4)
    monkeypatch.setattr(RunConfig, "world_size", 3)
    with pytest.raises(ValueError, match=r"16 is not a multiple of .* 2 x 3 process\(es\)"):
        accumulation_steps(train_options)


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
        ({"do_eval": True}, "do_eval evaluates nothing without eval_strategy"),
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
        (
            {"learing_rate": 1},
            "option --learing_rate does not exist. Did you mean --learning_rate?",
        ),
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


def test_defaults_of_refused_options_equal_trl_s():
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
    """Makes options with a plugin of a version of FSDP, as several processes with GPUs have."""
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
