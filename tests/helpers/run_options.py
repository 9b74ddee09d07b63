# SPDX-License-Identifier: Apache-2.0
"""Options of a run, given in Python, in a recipe or on the command line."""

import dataclasses
import importlib.util

import pytest
import yaml

from normalign_llava.train.command import REFUSED, TrainingOptions
from normalign_llava.train.options import NormAlignConfig, option_parser, parse
from normalign_llava.train.settings import RunConfig, complete


BASE = ["--model_name_or_path", "model", "--dataset_name", "data", "--bf16", "false"]
DATA = "dataset_name: data\n"
REFUSALS = {}
"""Options that are refused, with their defaults."""

for _option in dataclasses.fields(TrainingOptions):
    if _option.metadata["help"].startswith(REFUSED):
        REFUSALS[_option.name] = _option.default

has_deepspeed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not has_deepspeed, reason="needs deepspeed")


def from_recipe(tmp_path, *words, **recipe) -> RunConfig:
    """The options of a run with this recipe file and these words on the command line."""
    recipe_path = tmp_path / "recipe.yaml"
    recipe = {"output_dir": str(tmp_path / "out"), **recipe}
    recipe_path.write_text(yaml.safe_dump(recipe))
    _, train_options, _ = parse([str(recipe_path), *BASE, *words])
    return completed(train_options)


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
    return completed(as_given(folder, **options))


def completed(train_options: NormAlignConfig) -> RunConfig:
    run_config, _ = complete(train_options)
    return run_config


def value_of(parsed, name):
    """The value of an option in whichever part has it: data, training or model."""
    owners = [part for part in parsed if name in vars(part)]
    assert len(owners) == 1
    return getattr(owners[0], name)


def read(tmp_path, text: str, *words: str):
    """Data, training and model of a recipe's text. It must name data if `words` do not."""
    recipe_path = tmp_path / "recipe.yaml"
    recipe_path.write_text(text)
    arguments = [
        str(recipe_path),
        "--model_name_or_path",
        "model",
        "--bf16",
        "false",
        "--output_dir",
        str(tmp_path),
        *words,
    ]
    data_options, train_options, model_options = parse(arguments)
    return data_options, completed(train_options), model_options


def option_names() -> set[str]:
    return {action.dest for action in option_parser()._actions}
