# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's two training stages: recipes of the training room, run as `normalign train` would."""

import shutil
import time
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import finished_folder
from ..train.command import read_recipe, recipe_file
from ..train.options import parse
from ..train.run import train


def stage(recipe: str, **changes: Any) -> dict[str, Any]:
    """The options that a recipe of the package sets, with changes: what `normalign train RECIPE --option value` does.

    Args:
        recipe: Name of the recipe.
        **changes: Options in place of the recipe's.
    """
    return {**read_recipe(recipe_file(recipe)), **changes}


def rows_of(options: dict[str, Any]) -> int:
    """Conversations that make one pass of a stage."""
    return options["max_steps"] * options["global_batch_size"]


def train_stage(options: dict[str, Any], checkpoint: Path, data: Path, output: Path, *, bf16: bool = False) -> None:
    """Trains `checkpoint` and leaves the trained checkpoint, or the adapter, in `output`.

    `output` appears whole or not at all. Until then the run lies beside it, and is resumed where it was stopped.

    Args:
        options: A recipe's options, from [`stage`].
        checkpoint: Folder of model and processor.
        data: Folder of a saved data set.
        output: Folder of the result.
        bf16: Multiply in bfloat16; trained parameters, gain and bias among them, stay float32.
    """
    run = output.with_name(output.name + "-trainer")
    if not output.exists():
        given = {"model_name_or_path": checkpoint, "dataset_name": data, "output_dir": run, "bf16": bf16}
        if run.exists():
            given["resume_from_checkpoint"] = "last"
        train(*parse(words({**options, **given})))
        with finished_folder(output) as folder:
            for file in run.iterdir():
                if file.is_file():  # folders are the trainer's checkpoints
                    file.rename(folder / file.name)
    shutil.rmtree(run, ignore_errors=True)


def words(options: dict[str, Any]) -> list[str]:
    """Options as they stand on a command line."""
    found = []
    for name, value in options.items():
        found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


def bfloat16_pays() -> bool:
    """Whether this machine multiplies bfloat16 matrices at least twice as fast as float32 ones.

    Processors with AVX512-BF16 or AMX do, by a factor of three and more; others emulate it and lose.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return best_seconds(torch.float32) > 2 * best_seconds(torch.bfloat16)


def best_seconds(dtype: torch.dtype, repeats: int = 10) -> float:
    """Shortest time of a product of the size that training is made of."""
    x, weight = torch.randn(1024, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
