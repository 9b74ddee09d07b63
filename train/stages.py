# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How a run's options are found, and what follows from them: the command line overrides the recipe, that the stage."""

import difflib
import math
import os
import sys
from collections.abc import Sequence, Sized
from importlib.resources import files
from pathlib import Path

import torch
import yaml
from trl import TrlParser

from .arguments import DataArguments, ModelArguments, TrainArguments


RECIPES = files(__package__) / "recipes"


def parse(arguments: Sequence[str] | None = None) -> tuple[DataArguments, TrainArguments, ModelArguments]:
    """Reads `RECIPE.yaml --option value ...`; the recipe is a file, or the name of one that the package brings.

    Raises:
        ValueError: the recipe does not exist or has an unknown key, or a value is out of range.
    """
    rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    parser = TrlParser(
        [DataArguments, TrainArguments, ModelArguments],
        usage="normalign train RECIPE [--option value ...] [--accelerate_config NAME --num_processes N]",
        description="RECIPE is a YAML file of options, or one that comes with the package: "
        f"{', '.join(sorted(own_recipes()))}. NAME is ddp, fsdp2, zero2, zero3 or a file of accelerate's. What is not "
        "given follows from the stage.",
        allow_abbrev=False,
    )
    if rest and not rest[0].startswith("-"):
        rest = ["--config", str(recipe_file(rest[0])), *rest[1:]]
    # Where there is no accelerator, bf16, which TRL turns on, needs to be told so.
    parser.set_defaults_with_config(use_cpu=not torch.accelerator.is_available())
    try:
        data, training, model, *unknown = parser.parse_args_and_config(
            rest, return_remaining_strings=True, separate_remaining_strings="--config" in rest
        )
    except yaml.YAMLError as error:
        raise ValueError(f"{rest[1]} is not valid YAML: {error}") from error
    for words in unknown:
        if words:
            options = [option for action in parser._actions for option in action.option_strings]
            close = difflib.get_close_matches(words[0], options, n=1)
            hint = f" Did you mean {close[0]}?" if close else " `normalign train --help` lists the options."
            raise ValueError(f"There is no option {' '.join(words)}.{hint}")
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
    own = own_recipes()
    if str(recipe) not in own:
        raise ValueError(f"There is no file {recipe}, and no recipe of that name. Recipes: {', '.join(sorted(own))}.")
    return own[str(recipe)]


def own_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {Path(entry.name).stem: Path(str(entry)) for entry in RECIPES.iterdir()}


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


def check_stream(data: DataArguments, args: TrainArguments) -> None:
    """Raises ValueError where a streamed data set is asked for what takes its length, or lengths."""
    if data.dataset_streaming and args.max_steps <= 0:
        raise ValueError("A streamed data set has no length. Say how long to train with --max_steps.")
    if data.dataset_streaming and args.train_sampling_strategy == "group_by_length":
        raise ValueError("train_sampling_strategy group_by_length needs data in memory. Leave out dataset_streaming.")


def optimizer_steps(args: TrainArguments, rows: Sized) -> int:
    """Steps of the whole run, as the Trainer counts them."""
    if args.max_steps > 0:
        return args.max_steps
    whole = math.floor if args.dataloader_drop_last else math.ceil
    batches = whole(len(rows) / (args.per_device_train_batch_size * args.world_size))
    return math.ceil(args.num_train_epochs * max(1, math.ceil(batches / args.gradient_accumulation_steps)))
