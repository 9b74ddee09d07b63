# SPDX-License-Identifier: Apache-2.0
"""Options and recipes: what they stand for, what is refused and why, and their page."""

import copy
import dataclasses
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import yaml
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_multi_gpu_env
from documented import PAGE, page_from_fields
from trl import SFTConfig

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
    recipe_file,
    without_overruled,
)
from normalign_llava.train.elsewhere import ELSEWHERE
from normalign_llava.train.options import WITHOUT_WARMUP, NormAlignConfig, option_parser, parse
from normalign_llava.train.prepare import accumulation_steps, check_options


BASE = ["--model_name_or_path", "model", "--dataset_name", "data", "--bf16", "false"]
UNSEEDED = {"use_seedable_sampler": False}
FIELDS = dataclasses.fields(TrainingOptions)
REFUSALS = {
    field.name: field.default for field in FIELDS if field.metadata["help"].startswith(REFUSED)
}


def options(tmp_path, *words, **recipe):
    """What a run with this recipe file and these words on the command line is told."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), **recipe}))
    return parse([str(file), *BASE, *words])[1]


def config(folder, **options) -> NormAlignConfig:
    return NormAlignConfig(**{"output_dir": str(folder), "bf16": False, "use_cpu": True, **options})


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
    ours, stock = config(tmp_path), SFTConfig(str(tmp_path), bf16=False, use_cpu=True)
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
        args = NormAlignConfig(str(tmp_path), stage=stage, use_cpu=True, **own)
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
    for copied in (config(tmp_path, **given), COPIES["pickle"](config(tmp_path, **given))):
        replaced = dataclasses.replace(copied, **changes)
        assert plain(replaced) == plain(at_once)
        for adapters in (True, False):
            assert rates(replaced, adapters) == rates(at_once, adapters)


def test_an_option_that_is_set_later_is_a_given_one(tmp_path):
    args = config(tmp_path, stage="tune")
    args.learning_rate = 3e-4
    assert rates(args) == rates(config(tmp_path, stage="tune", learning_rate=3e-4)) == [3e-4] * 4
    assert rates(dataclasses.replace(COPIES["pickle"](args), seed=2), True)[1:] == [3e-4] * 3


def test_precision_that_followed_follows_anew(tmp_path, monkeypatch, processor):
    processor(5.0)
    for name in ("bf16", "fp16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", name)
        args = config(tmp_path, bf16=None)
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
        replaced = dataclasses.replace(args, seed=1)
        assert (replaced.bf16, replaced.fp16) == (False, False)
    given = dataclasses.replace(config(tmp_path, bf16=True), seed=1)
    assert (given.bf16, given.fp16) == (True, False)


def test_a_token_is_not_printed(tmp_path):
    args = config(tmp_path, hub_token="hf_secret", stage="tune")
    for text in (repr(args), str(args), f"{args}"):
        assert "hf_secret" not in text and "stage=tune" in text


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


def test_nobody_is_warned_of_an_option_that_nobody_set(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert config(tmp_path, stage="tune").gradient_checkpointing
        assert not config(tmp_path, gradient_checkpointing=False).gradient_checkpointing


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
        read, default = getattr(parsed[place], key), getattr(stage[place], key)
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
        args = parse([*words, *more])[1]
        return args.bf16, args.fp16, args.mixed_precision

    assert parsed() == (pays, False, "bf16" if pays else "no")
    for bf16 in (True, False):
        assert parsed("--bf16", str(bf16))[0] is config(tmp_path, bf16=bf16).bf16 is bf16
    assert not config(tmp_path, bf16=None, fp16=True).bf16
    for name in ("bf16", "fp16"):  # in a configuration of accelerate
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", name)
        assert parsed() == (name == "bf16", name == "fp16", name)


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
    for cores, processes, expected in ((1, 1, 0), (2, 1, 1), (64, 1, 8), (64, 16, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert config(tmp_path, use_cpu=False).dataloader_num_workers == expected


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
    ],
)
def test_bad_values_in_a_recipe_are_named(tmp_path, recipe, message):
    with pytest.raises(ValueError, match=message):
        options(tmp_path, **recipe)


def test_defaults_of_refused_options_are_those_of_trl():
    theirs = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    changed = {name for name, default in REFUSALS.items() if default != theirs.get(name)}
    ours = {"assistant_only_loss", "remove_unused_columns"}
    assert changed == ours | {"hub_strategy", "router_aux_loss_coef"}


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
        ({}, {"fp16": True}, "fp16 would round the gain under DeepSpeed. Use bf16"),
        ({}, {"bad_steps": "skip"}, "bad_steps cannot be 'skip': DeepSpeed takes the"),
    ],
)
def test_a_deepspeed_configuration_that_undoes_options_is_refused(tmp_path, section, own, error):
    zero = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", **section}
    with pytest.raises(ValueError, match=error):
        config(tmp_path, deepspeed=zero, **own)


def read(tmp_path, text: str, *words: str):
    """Data, training and model of a recipe's text, which names data itself if it is to."""
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    model = ["--model_name_or_path", "model", "--bf16", "false", "--output_dir", str(tmp_path)]
    return parse([str(file), *model, *words])


FALSE, TRUE = ("no", "No", "off", "false", "False", "n"), ("yes", "on", "True", "true", "y")
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
    *(("report_to", word, []) for word in ("none", "no", "off", "false")),
    ("resume_from_checkpoint", "no", None),
    ("max_steps", "1e3", 1000),
    ("max_steps", "1_000", 1000),
    ("max_length", "null", None),
    ("max_length", "none", None),
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
    ("fsdp", "no", False),
    ("deepspeed", "no", None),
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
    with pytest.raises(ValueError, match=f"`{name}`"):  # before a checkpoint is asked for
        check_command([f"--{name}", "5"], {})


def test_only_the_name_of_an_unknown_option_is_named(tmp_path):
    for words in (["--learning_speed", "3"], ["--learning_speed=3"]):
        with pytest.raises(ValueError) as error:
            read(tmp_path, "dataset_name: data\n", *words)
        assert "--learning_speed." in str(error.value) and "3" not in str(error.value)
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


def test_a_value_that_is_the_recipe_s_own_takes_nothing_along():
    own = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}}
    recipe = {**own, "use_peft": "yes", "lora_r": "8", "eval_strategy": "steps", "eval_steps": "5"}
    kept = ["--lr_scheduler_type", "cosine_with_min_lr", "--use_peft", "--eval_strategy=epoch"]
    assert without_overruled(recipe, kept) == recipe
    assert without_overruled(recipe, ["--lr-scheduler-type=linear", "--use-peft", "NO"]) == {
        **{"lr_scheduler_type": "cosine_with_min_lr", "use_peft": "yes"},
        **{"eval_strategy": "steps", "eval_steps": "5"},
    }


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
    code = "from normalign_llava.errors import errors_for_people\n"
    code += "with errors_for_people():\n    raise ValueError('what went wrong')\n"
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
