# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Parsing of options: the command line overrides the recipe, which overrides the stage. And checks across options."""

import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from trl import TrlParser

from ...data.sources.arguments import DataArguments
from ..command import USAGE, with_recipe_file
from .arguments import ModelArguments, NormAlignConfig


def parse(arguments: Sequence[str] | None = None) -> tuple[DataArguments, NormAlignConfig, ModelArguments]:
    """Parses `RECIPE --option value ...`; the recipe is a file, or the name of one that comes with the package."""
    words = with_recipe_file(sys.argv[1:] if arguments is None else arguments)
    parser = option_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    data, training, model, unknown = parser.parse_args_and_config(words, return_remaining_strings=True)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        close = difflib.get_close_matches(unknown[0], options)
        best = max(close, key=lambda option: len(os.path.commonprefix([option, unknown[0]])), default=None)
        hint = f" Did you mean {best}?" if best else " `normalign train --help-all` lists the options."
        raise ValueError(f"There is no option {' '.join(unknown)}.{hint}")
    for name in ("test_split_size", "eval_dataset_name"):
        if getattr(data, name) and training.eval_strategy == "no":
            raise ValueError(f"{name} needs eval_strategy steps or epoch. Set that, or leave {name} out.")
    return data, training, model


def _refuse(message: str) -> NoReturn:
    """In place of argparse's, which each process of a run would print."""
    raise ValueError(f"{message[:1].upper()}{message[1:]}. `normalign train --help-all` lists the options.")


def option_parser() -> TrlParser:
    """The parser of all options, TRL's included."""
    return TrlParser([DataArguments, NormAlignConfig, ModelArguments], usage=USAGE, allow_abbrev=False)


def accumulation_steps(args: NormAlignConfig, world_size: int | None = None) -> int:
    """Forward passes per optimizer step that give the global batch on any number of processes."""
    own = args.accelerator_config
    if own.split_batches or own.dispatch_batches or "num_steps" in (own.gradient_accumulation_kwargs or {}):
        raise ValueError(
            "accelerator_config's split_batches, dispatch_batches and num_steps would change the rows in an optimizer "
            "step. Leave them out, and set global_batch_size."
        )
    if args.global_batch_size is None:
        return args.gradient_accumulation_steps
    world_size = world_size or args.world_size
    if args.tokens_per_device:
        if args.gradient_accumulation_steps != 1:
            raise ValueError("gradient_accumulation_steps are derived from tokens_per_device. Leave them out.")
        if args.global_batch_size % world_size:
            raise ValueError(
                f"global_batch_size {args.global_batch_size} is not a multiple of {world_size} processes. Change it."
            )
        return 1  # until the lengths of the rows are known
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
