# SPDX-License-Identifier: Apache-2.0
"""`normalign train` before TRL is imported: options, help, recipe, checks, several processes.

An option's field has its help, its choices and why it is refused, for --help, checks and docs.
"""

import argparse
import logging
import os
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.table import Table

from ..data.sources.arguments import DataArguments, option
from ..errors import check_installed
from ..signals import Terminated
from .elsewhere import ELSEWHERE


RECIPES = Path(__file__).parent / "recipes"
CONFIGS = Path(__file__).parent / "accelerate_configs"
USAGE = "normalign train RECIPE [--option value ...]"
NO_MODEL = "Check the path, or make it with `normalign build` or the stage before."

PACKAGES = {
    "load_in_4bit": ("bitsandbytes", "qlora"),
    "load_in_8bit": ("bitsandbytes", "qlora"),
    "deepspeed": ("deepspeed", "deepspeed"),
}
"""Options that need a package, and the extra that has it."""

OFF = ("none", "false", "no", "off", "f", "n", "0")
"""Words that switch an option off."""

OVERRULED = {
    "use_peft": ("lora_", "use_dora", "use_rslora"),
    "load_in_4bit": ("bnb_4bit_", "use_bnb_nested_quant"),
    "eval_strategy": (
        "test_split_size",
        "eval_dataset_name",
        "eval_steps",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "early_stopping_",
    ),
    "load_best_model_at_end": ("metric_for_best_model", "greater_is_better", "early_stopping_"),
    "dry_run": ("device_memory",),
}
"""Options that the command line may switch off, and prefixes of those that then have no effect."""

REPLACED = {
    "dataset_name": ("datasets",),
    "lr_scheduler_type": ("lr_scheduler_kwargs", "warmup_steps"),
    "global_batch_size": ("gradient_accumulation_steps",),
}
"""Options whose new value on the command line leaves others of the recipe without their own."""

REFUSED = "Refused: "
"""The help of a refused option begins with it. The reason follows."""


def flag(help: str) -> Any:
    """Returns a field that is true, false, or by default decided later."""
    return option(None, help, nargs="?", const=True)


def refused(default: Any, reason: str) -> Any:
    """Returns a field whose value must be its default."""
    return option(default, f"{REFUSED}{reason}.")


PACKING = "packing divides the rows of a step and cuts none; evaluation has no padding with it"
PRECISION = "it would round the gain, a float32; evaluation has the precision of training"
LIGER = "Liger has no kernels for this architecture"
PUSHES = "the result is published once, at the end; `normalign publish` sends a checkpoint"
BENCHMARKS = "benchmarks are run on a checkpoint, with `normalign evaluate CHECKPOINT`"


@dataclass
class TrainingOptions:
    """Options of `NormAlignConfig`, beside TRL's."""

    output_dir: str = option(None, "Folder of the result, checkpoints and card.")
    stage: Literal["align", "tune"] | None = option(
        None, "Sets defaults: align (projector, norm), tune (everything)."
    )
    arm: Literal["none", "unit", "aligned", "gwc"] | None = option(
        None, "Norm and gradients: none, unit, aligned or gwc. Default: the model's own."
    )
    global_batch_size: int | None = option(None, "Rows in an optimizer step, over all processes.")
    vision_learning_rate: float | None = option(
        None, "Learning rate of the vision tower. Default: the stage's, or 0 with use_peft."
    )
    projector_learning_rate: float | None = option(
        None, "Learning rate of the projector's linear layers. Default: learning_rate."
    )
    norm_learning_rate: float | None = option(
        None, "Learning rate of gain and bias. Default: learning_rate."
    )
    language_learning_rate: float | None = option(
        None, "Learning rate of the language model or its adapters. Default: learning_rate."
    )
    learning_rate: float = option(
        None, "Learning rate of modules that have no other. 0 freezes them. Default: the stage's."
    )
    per_device_train_batch_size: int = option(None, "Rows in a forward pass.")
    max_steps: int = option(-1, "Optimizer steps. They replace num_train_epochs.")
    num_train_epochs: float = option(None, "Passes over the data.")
    lr_scheduler_type: str = option(None, "Schedule of the learning rate.")
    warmup_steps: float = option(None, "Steps of linear warm-up. Below 1, their share of the run.")
    weight_decay: float = option(None, "Weight decay. Gain, biases and norms have none.")
    seed: int = option(None, "Random seed.")
    bf16: bool | None = flag(
        "Multiply in bfloat16. Default: as in the resumed run, otherwise if it is fast."
    )
    fp16: bool | None = flag(
        "Multiply in float16. Default: on a GPU without bfloat16, if hidden states are small."
    )
    max_length: int | None = option(
        2048, "Rows with more tokens, image tokens included, are dropped and counted."
    )
    use_cpu: bool | None = flag("Train on the CPU. Default: only without an accelerator.")
    dataset_num_proc: int | None = option(None, "Processes that check rows. Default: one per core.")
    dataloader_num_workers: int | None = option(
        None, "Processes that read batches. Default: up to 8, or none on a CPU."
    )
    dataloader_persistent_workers: bool | None = flag(
        "Keep the processes that read batches until the run ends. Default: yes."
    )
    padding_free: bool = option(False, "Put the rows of a batch into one sequence without padding.")
    packing: bool = option(
        False, "Put the rows of a step into fewer forward passes, without padding."
    )
    probe_steps: list[int] | None = option(
        None, "Steps that record cosines between layers (figure 5)."
    )
    probe_rows: int = option(4, "Rows that these cosines are measured on.")
    sample_count: int | None = option(
        None, "Held-out rows to answer at each evaluation, in samples.jsonl. Default: 4."
    )
    sample_max_new_tokens: int = option(64, "Tokens in an answer to a held-out row.")
    show_first_batch: bool = option(
        False, "Print the rows of the first forward pass, and mark what is learned."
    )
    bad_steps: Literal["stop", "skip"] = option(
        "stop", "If loss or gradients are not finite: stop, or skip the step."
    )
    resume_from_checkpoint: str | None = option(
        None, "Resume from the newest complete checkpoint, or a named one.", nargs="?", const="last"
    )
    dry_run: bool = option(False, "Check the run, predict the memory of a step, and do not train.")
    device_memory: str | None = option(None, "For dry_run: memory of another GPU, such as 24GiB.")

    save_steps: float = option(None, "Steps between checkpoints. Below 1, their share of the run.")
    save_total_limit: int | None = option(None, "Number of newest checkpoints to keep.")
    eval_strategy: Literal["no", "steps", "epoch"] = option("no", "When to evaluate held-out rows.")
    early_stopping_patience: int | None = option(
        None, "Stop after this many evaluations without a better one. Needs load_best_model_at_end."
    )
    early_stopping_threshold: float = option(
        0.0, "For early stopping: metric_for_best_model must improve by more than this."
    )
    report_to: None | str | list[str] = option("none", "Trackers such as tensorboard or wandb.")

    assistant_only_loss: bool = refused(True, "it must be true, or labels would hold image tokens")
    auto_find_batch_size: bool = refused(False, "lower per_device_train_batch_size instead")
    bf16_full_eval: bool = refused(False, PRECISION)
    chat_template_path: str | None = refused(None, "set it by `normalign build --chat-template`")
    completion_only_loss: bool | None = refused(None, "the loss is on the answers anyway")
    dataset_text_field: str = refused("text", "rows are conversations, known by their columns")
    do_predict: bool = refused(
        False, "use `normalign ask` on a checkpoint, or `normalign evaluate CHECKPOINT --data DATA`"
    )
    eval_packing: bool | None = refused(None, PACKING)
    eval_suite: str | None = refused(None, BENCHMARKS)
    eval_suite_limit: int | None = refused(None, BENCHMARKS)
    eval_suite_path: str | None = refused(None, BENCHMARKS)
    fp16_full_eval: bool = refused(False, PRECISION)
    hub_always_push: bool = refused(False, PUSHES)
    hub_strategy: str = refused("end", PUSHES)
    ignore_data_skip: bool = refused(False, "a resumed run would train on the same rows again")
    include_num_input_tokens_seen: str | bool = refused("no", "num_tokens is logged without it")
    label_names: list[str] | None = refused(None, "the labels are always called labels")
    length_column_name: str = refused("length", "lengths are counted here, with image tokens")
    liger_kernel_config: dict[str, bool] | None = refused(None, LIGER)
    max_image_pixels: int | None = refused(None, "images beyond Pillow's limit are bad rows")
    packing_strategy: str = refused("bfd", PACKING)
    pad_token: str | None = refused(None, "the checkpoint's tokenizer has one")
    parallelism_config: dict[str, Any] | str | None = refused(None, "shard with FSDP2 or ZeRO-3")
    remove_unused_columns: bool = refused(False, "the collator needs every column")
    router_aux_loss_coef: float | None = refused(0.0, "LLaVA's outputs have no router logits")
    shuffle_dataset: bool = refused(False, "rows are shuffled without it")
    truncation_mode: str = refused("keep_start", "rows beyond max_length are dropped, never cut")
    trust_remote_code: bool = refused(False, "this package's code is run, never a checkpoint's own")
    use_liger_kernel: bool = refused(False, LIGER)


@dataclass
class ModelOptions:
    """Options of `ModelArguments`, beside TRL's."""

    model_name_or_path: str | None = option(None, "Folder from `normalign build`, or a Hub id.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        "Dtype of frozen weights. Trained weights are float32. auto is the checkpoint's dtype if "
        "steps autocast to it, otherwise float32.",
    )
    use_peft: bool = option(False, "Train LoRA adapters in place of the language model.")
    lora_r: int = option(16, "Rank of the adapters.")
    load_in_4bit: bool = option(False, "Quantize the language model's frozen layers to 4 bits.")
    load_in_8bit: bool = option(False, "Quantize the language model's layers to 8 bits.")
    use_bnb_nested_quant: bool = option(True, "Quantize the constants of 4-bit quantization too.")
    bnb_4bit_quant_storage: str | None = refused(None, "it is for FSDP, where 4 bits are untested")


def names_in(text: str) -> list[str]:
    """Returns the names in a text such as "q_proj,v_proj", but none for a pattern."""
    names = re.split(r"[,\s]+", text.strip())
    if all(re.fullmatch(r"[\w.]+", name) for name in names):
        return names
    return []


def check_refused(options: Any) -> None:
    """Raises ValueError, with the reason, if a refused option is neither None nor its default."""
    for field in fields(options):
        value = getattr(options, field.name)
        if value is False and field.default == "no":  # TRL takes it for "no"
            value = "no"
        help_text = field.metadata.get("help", "")
        if help_text.startswith(REFUSED) and value not in (None, field.default):
            reason = help_text.removeprefix(REFUSED)
            raise ValueError(f"{field.name} cannot be used here: {reason} Leave it out.")


SHOWN = {
    "Checkpoint": ("model_name_or_path", "output_dir", "stage", "arm"),
    "Data": ("dataset_name", "image_folder", "columns", "bad_rows"),
    "Held-out data": ("eval_dataset_name", "test_split_size", "eval_strategy"),
    "Rows": ("max_length", "global_batch_size", "per_device_train_batch_size", "packing"),
    "Learning": ("learning_rate", "vision_learning_rate", "language_learning_rate"),
    "Adapters": ("use_peft", "lora_r", "load_in_4bit"),
    "Run": ("num_train_epochs", "max_steps", "report_to", "resume_from_checkpoint"),
    "Memory": ("dry_run", "device_memory"),
    "Several processes": ("accelerate_config", "num_processes"),
}
"""What `--help` shows: the options that most runs need. `--help-all` lists all."""


def show_help() -> None:
    """Prints the usage, the package's recipes and `SHOWN`."""
    known_fields = (*fields(DataArguments), *fields(TrainingOptions), *fields(ModelOptions))
    help_texts = {field.name: field.metadata["help"] for field in known_fields}
    help_texts["accelerate_config"] = "ddp, fsdp2, zero2, zero3, or a file that accelerate reads."
    help_texts["num_processes"] = "Number of processes, one for each GPU. Default: the file's."
    console = Console(highlight=False)
    console.print(f"\nUsage: {USAGE}\n", markup=False)
    console.print(
        "Train a checkpoint. RECIPE is a YAML file of options, or the name of a recipe of the "
        f"package: {names_of_files(RECIPES)}. You may leave it out. Options override it.\n"
    )
    table = Table.grid(padding=(0, 2))
    for group, names in SHOWN.items():
        table.add_row(f"[bold]{group}[/]")
        for name in names:
            table.add_row(f"  --{name}", help_texts[name])
    console.print(table, "\n`normalign train --help-all` lists all options, TRL's among them.")


def check_names(words: Sequence[str], recipe: dict[str, Any]) -> None:
    """Raises ValueError if an option has its name in another tool. It says the name here."""
    options = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    answers = []
    for option_name in [*options, *recipe]:
        name = option_name.replace("-", "_")
        if name not in ELSEWHERE:
            continue
        options_here, remark = ELSEWHERE[name]
        quoted = " and ".join(f"`{option_here}`" for option_here in options_here)
        verb = "is" if len(options_here) == 1 else "are"
        answer = f"`{name}` {verb} called {quoted} here"
        if not options_here:
            answer = f"`{name}` does not exist here"
        if remark:
            answer += f": {remark}"
        answers.append(f"{answer}.")
    if answers:
        raise ValueError(" ".join(dict.fromkeys(answers)))


def without_overruled(recipe: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Returns the recipe without options that the command line leaves without effect.

    They are in `OVERRULED` and `REPLACED`.
    """
    prefixes: tuple[str, ...] = ()
    for name, value in values_in(words, [*OVERRULED, *REPLACED]).items():
        if name in OVERRULED and value.lower() in OFF:
            prefixes += OVERRULED[name]
        if name in REPLACED and value != str(recipe.get(name)):
            prefixes += REPLACED[name]
    return {name: recipe[name] for name in recipe if not name.startswith(prefixes)}


def values_in(words: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the values of some options on a command line. One without a value is "true"."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for option_name in names:
        with_hyphens = option_name.replace("_", "-")
        parser.add_argument(f"--{option_name}", f"--{with_hyphens}", nargs="?", const="true")
    return vars(parser.parse_known_args(words)[0])


def read_command(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the options of a command line, and reads the options of its recipe.

    The recipe is the first word, or the file of --config.

    Raises:
        ValueError: The recipe does not exist, or is not a mapping in YAML.
    """
    options = list(words)
    if options and not options[0].startswith("-"):
        recipe = options.pop(0)
        return options, read_options(recipe_file(recipe))
    if "--config" in options[:-1]:
        place = options.index("--config")
        file = Path(options[place + 1]).expanduser()
        del options[place : place + 2]
        return options, read_options(file)
    return options, {}


def recipe_file(recipe: str, folder: Path = RECIPES) -> Path:
    """Returns the file of a recipe: that path, or the file of that name in a `folder`.

    Raises:
        ValueError: Neither exists.
    """
    for file in (Path(recipe).expanduser(), folder / f"{recipe}.yaml"):
        if file.is_file():
            return file
    known = names_of_files(folder)
    raise ValueError(f"The file {recipe} does not exist. The package has {known}.")


def names_of_files(folder: Path) -> str:
    """Returns the names that [`recipe_file`] knows in a folder."""
    return ", ".join(sorted(file.stem for file in folder.iterdir()))


class Texts(yaml.SafeLoader):
    """Reads YAML with every scalar but null as it is written: `no` may be a name or a strategy."""


class Values(yaml.SafeLoader):
    """Reads YAML without dates, and with numbers such as 5e-1. YAML 1.1 takes those for text."""


def _resolvers(*kinds: str) -> dict[str, list]:
    """Returns the resolvers of YAML 1.1 for some kinds of scalars."""
    tags = {f"tag:yaml.org,2002:{kind}" for kind in kinds}
    known_resolvers = yaml.SafeLoader.yaml_implicit_resolvers
    return {
        first: [(tag, pattern) for tag, pattern in patterns if tag in tags]
        for first, patterns in known_resolvers.items()
    }


Texts.yaml_implicit_resolvers = _resolvers("null", "merge")
Values.yaml_implicit_resolvers = _resolvers("null", "merge", "bool")
Values.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][\d_]*)$"), list("-+0123456789")
)
Values.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$
        |[-+]?\d[\d_]*[eE][-+]?\d+$
        |[-+]?\.(inf|Inf|INF)$
        |\.(nan|NaN|NAN)$""",
        re.VERBOSE,
    ),
    list("-+.0123456789"),
)

AS_WRITTEN = ("datasets", "columns", "env")
"""Options with names and paths. Texts in them are never numbers, yes or no."""


def read_recipe(file: Path, loader: type[yaml.SafeLoader] = Values) -> dict[str, Any]:
    """Reads the options that a recipe sets, with numbers and booleans where they look like such.

    Raises:
        ValueError: The file is not YAML, or not a mapping.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), loader)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} has no options. Give data with --dataset_name {file}.")
    return content


def read_options(file: Path) -> dict[str, Any]:
    """Reads the options that a recipe sets, as texts like on the command line.

    The option's type decides what a scalar or a list of scalars means: `no` may be a strategy, a
    name, or false. Mappings of arguments for libraries are read as in [`read_recipe`].

    Raises:
        ValueError: The file is not YAML, or not a mapping.
    """
    options = read_recipe(file, Texts)
    for name, value in read_recipe(file).items():
        if isinstance(value, dict) and name not in AS_WRITTEN:
            options[name] = value
    return options


def check_command(words: Sequence[str], recipe: dict[str, Any]) -> None:
    """Checks the names of options, packages, and that a checkpoint is given, but no secret.

    Does not import TRL.

    Raises:
        ValueError: An option is wrong or missing.
        ImportError: A package is missing.
    """
    check_names(words, recipe)
    given_options = values_in(words, ["model_name_or_path", "hub_token", *PACKAGES])
    if given_options.get("hub_token"):
        raise ValueError("Everybody on this machine can read a command line. Set HF_TOKEN instead.")
    options = recipe | given_options
    for option_name, (package, extra) in PACKAGES.items():
        if str(options.get(option_name)).lower() not in OFF:
            check_installed(package, extra, option_name)
    if not options.get("model_name_or_path"):
        raise ValueError("Give the checkpoint to train: --model_name_or_path FOLDER.")


def launch(config: str, processes: int | None, arguments: Sequence[str]) -> None:
    """Runs `accelerate launch --config_file CONFIG -m normalign_llava.train ARGUMENTS`.

    Raises:
        ValueError: The configuration does not exist, or cannot be read.
        ImportError: DeepSpeed is missing.
        SystemExit: A process failed. It has printed why.
        ChildProcessError: A signal ended a process.
        KeyboardInterrupt, Terminated: The run was stopped.
    """
    config_file = recipe_file(config, CONFIGS)
    if read_recipe(config_file).get("distributed_type") == "DEEPSPEED":
        check_installed("deepspeed", "deepspeed", config)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launch_words = ["--quiet", "--config_file", str(config_file)]
    if processes:
        launch_words.append(f"--num_processes={processes}")
    launch_words += ["-m", "normalign_llava.train", *arguments]
    # This logger would list the processes that are ended.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(launch_words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:  # the process has said why
            raise SystemExit(failure.exitcode) from None
        ended = f"Process {rank} was ended by {failure.signal_name()}."
        raise ChildProcessError(f"{ended} SIGKILL is often for too much memory.") from None
    except SignalException as error:  # the processes have ended
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise Terminated from None


def next_command(checkpoint: str | os.PathLike, stage: str | None, adapters: bool) -> str:
    """Returns the command to run next on a checkpoint."""
    folder = shlex.quote(str(checkpoint))
    if adapters:
        return f"normalign merge {folder} --output {shlex.quote(f'{checkpoint}-merged')}"
    next_stage = {"build": "align", "align": "tune"}.get(stage or "")
    if next_stage is None:
        return f"normalign diagnose {folder}"
    output = shlex.quote(f"{checkpoint}-{next_stage}")
    options = f"--model_name_or_path {folder} --dataset_name DATA --output_dir {output}"
    return f"normalign train --stage {next_stage} {options}"
