# SPDX-License-Identifier: Apache-2.0
"""What `normalign train` does before TRL is imported: help, recipe, checks of the command line, several processes."""

import argparse
import logging
import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from ..data.sources.arguments import DataArguments
from ..errors import Terminated, check_installed
from .options.fields import ModelOptions, TrainingOptions


RECIPES, CONFIGS = (Path(__file__).parent / name for name in ("recipes", "accelerate_configs"))
USAGE = "normalign train RECIPE [--option value ...]"
NO_MODEL = "Make it with `normalign build` or the stage before, or name another with --model_name_or_path."

PACKAGES = dict.fromkeys(("load_in_4bit", "load_in_8bit"), ("bitsandbytes", "qlora"))
PACKAGES |= {"deepspeed": ("deepspeed", "deepspeed")}
"""Options that need a package, and the extra that has it."""

SHOWN = {
    "Checkpoint": ("model_name_or_path", "output_dir", "stage", "arm"),
    "Data": ("dataset_name", "image_folder", "columns", "eval_dataset_name", "test_split_size", "bad_rows"),
    "Rows": ("max_length", "global_batch_size", "per_device_train_batch_size", "packing"),
    "Learning": ("learning_rate", "vision_learning_rate", "language_learning_rate", "num_train_epochs", "max_steps"),
    "Adapters": ("use_peft", "lora_r", "load_in_4bit"),
    "While training": ("eval_strategy", "report_to", "resume_from_checkpoint"),
    "Memory": ("dry_run", "device_memory"),
    "Several processes": ("accelerate_config", "num_processes"),
}
"""What `--help` shows: the options that most runs need. `--help-all` lists all."""


def show_help() -> None:
    """Prints the usage, the package's recipes and `SHOWN`."""
    known = (*fields(DataArguments), *fields(TrainingOptions), *fields(ModelOptions))
    texts = {field.name: field.metadata["help"] for field in known}
    texts["accelerate_config"] = "ddp, fsdp2, zero2, zero3, or a file that accelerate reads."
    texts["num_processes"] = "How many, one for each GPU. Default: what the file says."
    console = Console(highlight=False)
    console.print(f"\nUsage: {USAGE}\n", markup=False)
    console.print(
        "Train a checkpoint. RECIPE is a YAML file of options, or the name of one that comes with the package: "
        f"{names_of_files(RECIPES)}. It may be left out. Options override it.\n"
    )
    table = Table.grid(padding=(0, 2))
    for group, names in SHOWN.items():
        table.add_row(f"[bold]{group}[/]")
        for name in names:
            table.add_row(f"  --{name}", texts[name])
    console.print(table, "\n`normalign train --help-all` lists every option, those of TRL's SFTConfig included.")


def next_command(checkpoint: str | os.PathLike, stage: str | None, adapters: bool) -> str:
    """The command to run next on a checkpoint."""
    folder = shlex.quote(str(checkpoint))
    if adapters:
        return f"normalign merge {folder} --output {shlex.quote(f'{checkpoint}-merged')}"
    if follows := {"build": "align", "align": "tune"}.get(stage or ""):
        output = shlex.quote(f"{checkpoint}-{follows}")
        options = f"--model_name_or_path {folder} --dataset_name DATA --output_dir {output}"
        return f"normalign train --stage {follows} {options}"
    return f"normalign diagnose {folder}"


def read_command(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The options of a command line, and those of its recipe: its first word, or the file after --config."""
    words = list(words)
    if words and not words[0].startswith("-"):
        return words[1:], read_recipe(recipe_file(words[0]))
    if "--config" in words[:-1]:
        place = words.index("--config")
        return words[:place] + words[place + 2 :], read_recipe(words[place + 1])
    return words, {}


def check_command(words: Sequence[str], recipe: dict[str, Any]) -> None:
    """Checks, without importing TRL, for a secret, for packages, and for a checkpoint to train."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("model_name_or_path", "hub_token", *PACKAGES):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const="true")
    known, _ = parser.parse_known_args(words)
    if known.hub_token:
        raise ValueError("Everybody on this machine can read a command line. Set HF_TOKEN in place of --hub_token.")
    options = recipe | {name: value for name, value in vars(known).items() if value is not None}
    for name, (package, extra) in PACKAGES.items():
        if str(options.get(name)).lower() not in ("none", "false"):
            check_installed(package, extra, name)
    if not options.get("model_name_or_path"):
        raise ValueError("Give the checkpoint to train: --model_name_or_path FOLDER, created by `normalign build`.")


def recipe_file(recipe: str | os.PathLike, folder: Path = RECIPES) -> Path:
    """The file of a recipe, or of others in a `folder` of the package: the path itself, or the one of that name."""
    for file in (Path(recipe), folder / f"{recipe}.yaml"):
        if file.is_file():
            return file
    raise ValueError(f"There is no file {recipe}, and none of that name in the package: {names_of_files(folder)}.")


def names_of_files(folder: Path) -> str:
    """The names by which [`recipe_file`] finds the files in a folder."""
    return ", ".join(sorted(file.stem for file in folder.iterdir()))


def read_recipe(file: str | os.PathLike) -> dict[str, Any]:
    """The options that a recipe sets. Raises ValueError if it is not YAML, or not a mapping."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no YAML mapping of options to values. Give data with --dataset_name {file}.")
    return content


def launch(config: str, processes: int | None, arguments: Sequence[str]) -> None:
    """Runs `accelerate launch --config_file CONFIG [--num_processes N] -m normalign_llava.train ARGUMENTS`."""
    file = recipe_file(config, CONFIGS)
    if read_recipe(file).get("distributed_type") == "DEEPSPEED":
        check_installed("deepspeed", "deepspeed", config)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = ["--quiet", "--config_file", str(file), *([f"--num_processes={processes}"] if processes else [])]
    words += ["-m", "normalign_llava.train", *arguments]
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # of ended processes
    try:
        launch_command(launch_command_parser().parse_args(words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:  # the process has said why
            raise SystemExit(failure.exitcode) from None
        raise ChildProcessError(
            f"Process {rank} was ended by {failure.signal_name()}. SIGKILL is often for using too much memory."
        ) from None
    except SignalException as error:  # the processes have ended
        raise (KeyboardInterrupt if error.sigval == signal.SIGINT else Terminated) from None
