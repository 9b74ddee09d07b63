# SPDX-License-Identifier: Apache-2.0
"""The quickstart's two training stages: recipes, run as `normalign train` would, and data."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..checkpoint.files import finished_folder
from ..fetched.easy_vqa import training_data
from ..train.command import read_recipe, recipe_file
from ..train.keeping.checkpoints import checkpoints_in
from ..train.parsing import parse
from ..train.run import train


def stage(recipe: str, **changes: Any) -> dict[str, Any]:
    """The options that one of the package's recipes sets, with changes."""
    return {**read_recipe(recipe_file(recipe)), **changes}


def rows_of(options: dict[str, Any]) -> int:
    """Conversations in one pass of a stage."""
    return options["max_steps"] * options["global_batch_size"]


def write_data(output: Path, first: int, second: int, seed: int) -> None:
    """Writes so many conversations for each of both stages, which have none in common."""
    if not output.exists():
        rows = training_data(first + second, seed=seed)
        with finished_folder(output) as folder:
            rows.select(range(first)).save_to_disk(folder / "stage1")
            rows.select(range(first, first + second)).save_to_disk(folder / "stage2")


def train_stage(
    options: dict[str, Any],
    checkpoint: Path,
    data: Path,
    output: Path,
    *,
    bf16: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Trains `checkpoint` by the options of [`stage`], writing the result or adapter to `output`.

    Until it is finished the run is in the folder `OUTPUT-trainer`, from which a stopped run is
    resumed. With `bf16` matrices are multiplied in bfloat16; trained parameters stay float32.
    """
    run = output.with_name(output.name + "-trainer")
    if not output.exists():
        paths = {"model_name_or_path": checkpoint, "dataset_name": data, "output_dir": run}
        resume = {"resume_from_checkpoint": "last"} if checkpoints_in(run) else {}
        train(*parse(words({**options, **paths, **resume, "bf16": bf16})), callbacks)
        with finished_folder(output) as folder:
            for file in run.iterdir():
                if file.is_file():  # folders are the trainer's checkpoints
                    file.rename(folder / file.name)
    shutil.rmtree(run, ignore_errors=True)


def words(options: dict[str, Any]) -> list[str]:
    """Options as a command line."""
    words = []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
