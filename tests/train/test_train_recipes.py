# SPDX-License-Identifier: Apache-2.0
"""Recipes and the command line: how they are read, and which of the two takes precedence."""

import json
import math
import os
import re
import sys
from argparse import ArgumentTypeError
from itertools import chain
from pathlib import Path

import pytest
import yaml
from run_options import (
    BASE,
    DATA,
    config,
    from_recipe,
    needs_deepspeed,
    option_names,
    read,
    value_of,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from normalign_llava.train.command import (
    OVERRULED,
    RECIPES,
    REPLACED,
    check_command,
    names_in,
    read_command,
    read_options,
    read_recipe,
    recipe_file,
    without_overruled,
)
from normalign_llava.train.options import number, parse, truth, whole_number
from normalign_llava.train.prepare import accumulation_steps


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


def test_a_word_is_not_a_number():
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
def test_what_is_not_a_whole_number(text):
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


@pytest.mark.parametrize("name, prefixes", {**OVERRULED, **REPLACED}.items())
def test_what_is_taken_along_are_options(name, prefixes):
    names = option_names()
    assert name in names
    for prefix in prefixes:
        assert any(option_name.startswith(prefix) for option_name in names), prefix


@pytest.mark.parametrize("words", [["--learning_speed", "3"], ["--learning_speed=3"]])
def test_only_the_name_of_an_unknown_option_is_named(tmp_path, words):
    with pytest.raises(ValueError) as error:
        read(tmp_path, DATA, *words)
    message = str(error.value)
    assert "--learning_speed does not exist." in message
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
            "option --max_len does not",
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


def test_a_folder_is_not_a_recipe(tmp_path):
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
        (b"- a\n- b\n", "has no options.* --dataset_name .*my.yaml"),
        (b"", "has no options"),
        (b"a: [1", "is not valid YAML"),
        (b"a: \xff", "is not valid YAML"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_named(tmp_path, content, message):
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
