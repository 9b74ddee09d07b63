# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's two training stages: the package's recipes, run as `normalign train` would."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..checkpoint.files import finished_folder
from ..train.checkpoints import checkpoints_in
from ..train.command import read_recipe, recipe_file
from ..train.options import parse
from ..train.run import train


def stage(recipe: str, **changes: Any) -> dict[str, Any]:
    """The options that one of the package's recipes sets, with changes, as in `normalign train RECIPE --option value`.

    Args:
        recipe: Name of the recipe.
        **changes: Options that override the recipe's.
    """
    return {**read_recipe(recipe_file(recipe)), **changes}


def rows_of(options: dict[str, Any]) -> int:
    """Conversations in one pass of a stage."""
    return options["max_steps"] * options["global_batch_size"]


def train_stage(
    options: dict[str, Any],
    checkpoint: Path,
    data: Path,
    output: Path,
    *,
    bf16: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Trains `checkpoint` and writes the trained checkpoint, or the adapter, to `output`.

    Until it is finished the run is in a folder beside `output`, from which a stopped run is resumed.

    Args:
        options: A recipe's options, from [`stage`].
        checkpoint: Folder of model and processor.
        data: Folder of a saved data set.
        output: Folder of the result.
        bf16: Whether to multiply in bfloat16; trained parameters stay float32.
        callbacks: Callbacks of the trainer.
    """
    run = output.with_name(output.name + "-trainer")
    if not output.exists():
        given = {"model_name_or_path": checkpoint, "dataset_name": data, "output_dir": run, "bf16": bf16}
        if checkpoints_in(run):
            given["resume_from_checkpoint"] = "last"
        train(*parse(words({**options, **given})), callbacks)
        with finished_folder(output) as folder:
            for file in run.iterdir():
                if file.is_file():  # folders are the trainer's checkpoints
                    file.rename(folder / file.name)
    shutil.rmtree(run, ignore_errors=True)


def words(options: dict[str, Any]) -> list[str]:
    """Options as a command line."""
    found = []
    for name, value in options.items():
        found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


def bfloat16_pays() -> bool:
    """Whether this machine multiplies bfloat16 matrices at least twice as fast as float32 ones.

    Processors with AVX512-BF16 or AMX do, three times and more; others emulate it and are slower.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return best_seconds(torch.float32) > 2 * best_seconds(torch.bfloat16)


def best_seconds(dtype: torch.dtype, repeats: int = 10) -> float:
    """Shortest time of a matrix product of a size that is common in training."""
    x, weight = torch.randn(1024, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
