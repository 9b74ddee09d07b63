# SPDX-License-Identifier: Apache-2.0
"""The quickstart's two training stages: data, and recipes run as `normalign train` runs them."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..checkpoint.files import finished_folder
from ..data.rows.values import as_list
from ..fetched.easy_vqa import training_data
from ..train.command import read_recipe, recipe_file
from ..train.keeping.checkpoints import checkpoints_in
from ..train.options import parse
from ..train.run import train


def stage(recipe: str, **changes: Any) -> dict[str, Any]:
    """Reads the options that one of the package's recipes sets, with changes."""
    return {**read_recipe(recipe_file(recipe)), **changes}


def rows_of(options: dict[str, Any]) -> int:
    """Returns how many conversations a stage is trained on."""
    return options["max_steps"] * options["global_batch_size"]


def write_stage_data(output: Path, first: int, second: int, seed: int) -> None:
    """Writes the conversations of both stages, unless the folder exists. None is in both stages.

    Args:
        output: Folder of the two data sets, `stage1` and `stage2`.
        first: How many conversations stage 1 has.
        second: How many conversations stage 2 has.
        seed: What they are drawn with.
    """
    if output.exists():
        return
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
    """Trains one stage, unless its result exists.

    Until the run is finished, it is in the folder `OUTPUT-trainer`. There a stopped run resumes.

    Args:
        options: The options of [`stage`].
        checkpoint: What is trained.
        data: Folder of a data set.
        output: Folder of the result: a checkpoint or an adapter.
        bf16: Whether matrices are multiplied in bfloat16. Trained parameters stay float32.
        callbacks: Callbacks of the trainer.
    """
    run_folder = output.with_name(output.name + "-trainer")
    if not output.exists():
        settings = {
            **options,
            "model_name_or_path": checkpoint,
            "dataset_name": data,
            "output_dir": run_folder,
            "bf16": bf16,
        }
        if checkpoints_in(run_folder):
            settings["resume_from_checkpoint"] = "last"
        train(*parse(words(settings)), callbacks)
        with finished_folder(output) as result_folder:
            for result_file in run_folder.iterdir():
                if result_file.is_file():  # folders are the trainer's checkpoints
                    result_file.rename(result_folder / result_file.name)
    shutil.rmtree(run_folder, ignore_errors=True)


def words(options: dict[str, Any]) -> list[str]:
    """Returns options as the words of a command line."""
    command_line: list[str] = []
    for option_name, option_value in options.items():
        command_line += [f"--{option_name}", *map(str, as_list(option_value))]
    return command_line
