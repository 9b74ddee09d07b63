# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The paper's stages, and how a run's options are found: a stage is a set of defaults.

The recipe file overrides the stage, and the command line overrides the recipe file.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence, Sized
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from trl import TrlParser

from .arguments import DataArguments, ModelArguments, TrainArguments


RECIPES = files(__package__) / "recipes"

STAGES: dict[str, dict[str, Any]] = {
    "align": {
        "learning_rate": 1e-3,
        "vision_learning_rate": 0.0,
        "language_learning_rate": 0.0,
        "global_batch_size": 256,
        "per_device_train_batch_size": 2,
    },
    "tune": {
        "learning_rate": 1e-5,
        "vision_learning_rate": 2e-6,
        "global_batch_size": 128,
        "per_device_train_batch_size": 1,
    },
}
"""The paper's two stages (appendix E) as defaults."""

BOTH_STAGES: dict[str, Any] = {
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,  # a ratio, since it is below 1
    "weight_decay": 0.0,
    "seed": 42,
    "max_length": 2048,
}
"""What the stages share. The paper names no limit on length; 2048 is LLaVA-1.5's, in whose framework it trains."""


def parse(arguments: Sequence[str] | None = None) -> tuple[DataArguments, TrainArguments, ModelArguments]:
    """Reads `RECIPE.yaml --option value ...`; the recipe is a file, or the name of one that the package brings.

    Raises:
        ValueError: the recipe does not exist or has an unknown key, or a value is out of range.
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    parser = TrlParser([DataArguments, TrainArguments, ModelArguments], prog="normalign train", allow_abbrev=False)
    if rest and not rest[0].startswith("-"):
        rest = ["--config", str(recipe_file(rest[0])), *rest[1:]]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    early.add_argument("--stage")
    early.add_argument("--use_peft", nargs="?", const=True)
    given, _ = early.parse_known_args(rest)
    recipe = yaml.safe_load(Path(given.config).read_text(encoding="utf-8")) or {} if given.config else {}
    stage = given.stage or recipe.get("stage", "tune")
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(map(repr, STAGES))}, got {stage!r}.")
    defaults = {**BOTH_STAGES, **STAGES[stage]}
    if str(given.use_peft or recipe.get("use_peft", False)).lower() == "true":
        del defaults["vision_learning_rate"]
    # Where there is no accelerator, bf16, which TRL turns on, needs to be told so.
    parser.set_defaults_with_config(**defaults, use_cpu=not torch.accelerator.is_available())
    data, training, model = parser.parse_args_and_config(rest)
    if not model.model_name_or_path:
        raise ValueError("Give the checkpoint to train: --model_name_or_path FOLDER, made by `normalign build`.")
    return data, training, model


def recipe_file(recipe: str | os.PathLike) -> Path:
    """The file of a recipe: the path itself, or the package's recipe of that name.

    Raises:
        ValueError: neither exists; the recipes that the package brings are named.
    """
    if Path(recipe).is_file():
        return Path(recipe)
    own = {Path(entry.name).stem: Path(str(entry)) for entry in RECIPES.iterdir()}
    if str(recipe) not in own:
        raise ValueError(f"There is no file {recipe}, and no recipe of that name. Recipes: {', '.join(sorted(own))}.")
    return own[str(recipe)]


def accumulation_steps(args: TrainArguments, world_size: int | None = None) -> int:
    """Forward passes per optimizer step, so that the global batch is what was asked for on any number of processes.

    Raises:
        ValueError: it does not divide, or contradicts `gradient_accumulation_steps`.
    """
    if args.global_batch_size is None:
        return args.gradient_accumulation_steps
    world_size = world_size or args.world_size
    together = args.per_device_train_batch_size * world_size
    steps, rest = divmod(args.global_batch_size, together)
    product = f"per_device_train_batch_size {args.per_device_train_batch_size} x {world_size} process(es)"
    if rest or not steps:
        raise ValueError(
            f"global_batch_size {args.global_batch_size} is not a multiple of {product} = {together}. Change one."
        )
    if args.gradient_accumulation_steps not in (1, steps):
        raise ValueError(
            f"{product} x gradient_accumulation_steps {args.gradient_accumulation_steps} is not global_batch_size "
            f"{args.global_batch_size}. Leave gradient_accumulation_steps out: it is derived, and would be {steps}."
        )
    return steps


def optimizer_steps(args: TrainArguments, rows: Sized) -> int:
    """Steps of the whole run, as the Trainer counts them."""
    if args.max_steps > 0:
        return args.max_steps
    batches = math.ceil(len(rows) / (args.per_device_train_batch_size * args.world_size))
    return math.ceil(args.num_train_epochs * max(1, math.ceil(batches / args.gradient_accumulation_steps)))
