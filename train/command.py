# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What `normalign train` does before TRL is imported: its help, the recipe, and checks of the command line."""

import argparse
import difflib
import os
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from ..checkpoint.find import find_checkpoint
from ..data.sources.arguments import DataArguments, DataSource
from ..errors import check_installed
from .refused import REFUSED, check_flags


RECIPES = files(__package__) / "recipes"
USAGE = "normalign train RECIPE [--option value ...]"
DATA = ("dataset_name", "eval_dataset_name", "image_folder")
NO_MODEL = "Make it with `normalign build` or the stage before, or name another with --model_name_or_path."

CHOICES = {
    "stage": ("align", "tune"),
    "arm": ("none", "unit", "aligned", "gwc"),
    "bad_rows": ("stop", "skip"),
    "bad_steps": ("stop", "skip"),
}
"""Choices of our own options, checked before TRL is imported."""

PACKAGES = {
    "load_in_4bit": ("bitsandbytes", "qlora"),
    "load_in_8bit": ("bitsandbytes", "qlora"),
    "deepspeed": ("deepspeed", "deepspeed"),
}
"""Options that need a package, and the extra that has it."""

OPTIONS = {
    "Checkpoint": {
        "model_name_or_path": "Checkpoint to train: a folder that `normalign build` made, or a Hub id.",
        "output_dir": "Folder of the result.",
        "stage": "align (projector and norm) or tune (everything). Sets the defaults of other options.",
        "arm": "Arm of the paper, if it is not the checkpoint's: none, unit, aligned or gwc.",
    },
    "Data": {
        "dataset_name": "Hub id, folder or file of the rows to train on.",
        "image_folder": "Folder that image paths start from. Default: the data file's.",
        "eval_dataset_name": "Held-out data. Default: the test split.",
        "test_split_size": "Share of the rows to hold out in place of a test split.",
        "max_length": "Rows with more tokens are dropped and counted. Default: 2048.",
        "bad_rows": "At a row that cannot be trained on: stop (default) or skip it.",
    },
    "Learning": {
        "learning_rate": "Learning rate of modules that have none of their own.",
        "vision_learning_rate": "Learning rate of the vision tower; 0 freezes it.",
        "language_learning_rate": "Learning rate of the language model or its adapters; 0 freezes it.",
        "num_train_epochs": "Passes over the data. Default: 1 with a stage.",
        "max_steps": "Steps, in place of epochs.",
        "global_batch_size": "Rows in a step, on any number of processes.",
        "per_device_train_batch_size": "Rows in a forward pass: lower it if memory is short.",
        "packing": "No padding, and forward passes of nearly equal numbers of tokens; steps keep their rows.",
        "tokens_per_device": "With packing, in place of per_device_train_batch_size: most tokens in a forward pass.",
    },
    "Adapters": {
        "use_peft": "Train LoRA adapters in place of the language model.",
        "lora_r": "Their rank.",
        "load_in_4bit": "Quantize the frozen layers under them (QLoRA).",
    },
    "While training": {
        "eval_strategy": "When held-out rows are evaluated: no (default), steps or epoch.",
        "eval_suite": "Benchmarks to evaluate every eval_steps: suites or tasks of `normalign evaluate`.",
        "report_to": "Trackers such as tensorboard or wandb. Default: none.",
        "resume_from_checkpoint": "Resume from the newest complete checkpoint, or from the one named.",
    },
    "Several processes": {
        "accelerate_config": "ddp, fsdp2, zero2, zero3, or a file that accelerate reads.",
        "num_processes": "How many, one for each GPU. Default: what the file says.",
    },
}
"""What `--help` shows: the options that most runs need. `--help-all` lists all."""


def show_help() -> None:
    """Prints the usage, the package's recipes and `OPTIONS`."""
    console = Console(highlight=False)
    console.print(f"\nUsage: {USAGE}\n", markup=False)
    console.print(
        "Train a checkpoint. RECIPE is a YAML file of options, or the name of one that comes with the package: "
        f"{', '.join(sorted(own_recipes()))}. It may be left out. Options override it.\n"
    )
    for group, options in OPTIONS.items():
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True)
        for name, text in options.items():
            table.add_row(f"--{name}", text)
        console.print(Panel(table, title=group, title_align="left", border_style="dim"))
    console.print("`normalign train --help-all` lists every option, those of TRL's SFTConfig included.")


def next_command(checkpoint: str | os.PathLike, stage: str | None, adapters: bool) -> str:
    """The command to run next on a checkpoint.

    Args:
        checkpoint: Its folder.
        stage: What created it: `"build"`, a stage of training, or None for training without one.
        adapters: Whether it is an adapter.
    """
    folder = shlex.quote(str(checkpoint))
    if adapters:
        return f"normalign merge {folder} --output {shlex.quote(f'{checkpoint}-merged')}"
    if follows := {"build": "align", "align": "tune"}.get(stage or ""):
        output = shlex.quote(f"{checkpoint}-{follows}")
        options = f"--model_name_or_path {folder} --dataset_name DATA --output_dir {output}"
        return f"normalign train --stage {follows} {options}"
    return f"normalign diagnose {folder}"


def check_words(words: Sequence[str]) -> None:
    """Checks what can be checked of a command line without importing TRL.

    Raises:
        ValueError: The recipe, the checkpoint or the data is not given or does not exist, an option is out of range
            or refused, or a token is given.
        ImportError: An option needs a package that is not installed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", "model_name_or_path", "model_revision", "hub_token", *DATA):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?")
    flags = [name for name in REFUSED if name != "assistant_only_loss"]
    for name in (*CHOICES, *PACKAGES, *flags):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const="true")
    given, _ = parser.parse_known_args(with_recipe_file(words))
    if given.hub_token:
        raise ValueError(
            "Everybody on this machine can read a command line, so --hub_token cannot be given there. Log in with "
            "`hf auth login`, or set HF_TOKEN."
        )
    options = read_recipe(given.config) if given.config else {}
    options |= {name: value for name, value in vars(given).items() if value is not None}
    for name, values in CHOICES.items():
        if (value := options.get(name)) is not None and value not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {value!r}.")
    for name, (package, extra) in PACKAGES.items():
        if str(options.get(name)).lower() not in ("none", "false"):
            check_installed(package, extra, name)
    check_flags({name: options.get(name) for name in flags})
    for name in ("model_name_or_path", *DATA):
        if not options.get(name) and (close := difflib.get_close_matches(name, options.keys() - vars(given), 1, 0.9)):
            raise ValueError(f"There is no option {close[0]}. Did you mean {name}?")
    if not (model := options.get("model_name_or_path")):
        raise ValueError("Give the checkpoint to train: --model_name_or_path FOLDER, created by `normalign build`.")
    find_checkpoint(str(model), options.get("model_revision"), remedy=NO_MODEL)
    named: dict[str, Any] = {name: options.get(name) for name in DATA}
    data = DataArguments(**named, datasets=options.get("datasets") or [])
    held_out = [DataSource.named(data.eval_dataset_name)] if data.eval_dataset_name else []
    for source in [*data.sources, *held_out]:
        source.check_paths()


def with_recipe_file(words: Sequence[str]) -> list[str]:
    """A command line as TRL reads it: the recipe, if it begins with one, as `--config FILE`.

    Raises:
        ValueError: The recipe does not exist, or is not a mapping.
    """
    if not words or words[0].startswith("-"):
        return list(words)
    file = recipe_file(words[0])
    read_recipe(file)
    return ["--config", str(file), *words[1:]]


def recipe_file(recipe: str | os.PathLike) -> Path:
    """The file of a recipe: the path itself, or the package's recipe of that name.

    Raises:
        ValueError: Neither exists, or the file holds data.
    """
    if Path(recipe).is_file():
        if Path(recipe).suffix in (".csv", ".jsonl", ".parquet"):
            raise ValueError(f"{recipe} is data, not a recipe. Give it with --dataset_name {recipe}.")
        return Path(recipe)
    own = own_recipes()
    if str(recipe) not in own:
        raise ValueError(f"There is no file {recipe}, and no recipe of that name. Recipes: {', '.join(sorted(own))}.")
    return own[str(recipe)]


def own_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {Path(entry.name).stem: Path(str(entry)) for entry in RECIPES.iterdir()}


def read_recipe(file: str | os.PathLike) -> dict[str, Any]:
    """The options that a recipe sets. Raises ValueError if it is not YAML, or not a mapping."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        hint = f" Give data with --dataset_name {file}." if isinstance(content, list) else ""
        raise ValueError(f"{file} is not a recipe: a recipe is a YAML mapping of options to values.{hint}")
    return content
