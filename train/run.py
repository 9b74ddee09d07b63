# SPDX-License-Identifier: Apache-2.0
"""A training run from options to checkpoint: check, print the summary, train, save."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import TrainerCallback
from trl import get_peft_config

from ..console import Console
from ..data.rows.parse import BadRow, DroppedRows
from ..data.sources.arguments import DataArguments
from ..signals import Terminated
from .command import next_command
from .keeping.checkpoints import (
    after_stop,
    is_first_process,
    only_run,
    resolve_resume,
    writing_result,
)
from .keeping.summary import gib, read_dropped
from .modules.model import base_model
from .options import ModelArguments, NormAlignConfig, parse
from .prepare import DROPPED_ROWS
from .settings import complete
from .trainer import NormAlignTrainer


def main(words: Sequence[str], recipe: dict[str, Any] | None = None) -> Path | None:
    """Runs `normalign train`. Returns the folder of the result, or None after a dry run.

    Args:
        words: The command line, without its recipe if `recipe` is given.
        recipe: What [`read_command`] has read.

    Raises:
        ValueError: An option, the model or the data is wrong.
        OSError: A file cannot be read, written or fetched.
        FloatingPointError: Weights or a step are not finite.
        SystemExit: A step of a dry run does not fit.
        KeyboardInterrupt, Terminated: The run was stopped. A note says how to resume it.
    """
    data, args, model = parse(words, recipe)
    if args.dry_run:
        if not dry_run(words, recipe):
            raise SystemExit(1)
        return None
    output = train(data, args, model)
    if is_first_process():
        command = next_command(output, args.stage, model.use_peft)
        Console().print(f"Written to {output}.\nNext: {command}", soft_wrap=True)
    return output


def train(
    data: DataArguments,
    args: NormAlignConfig,
    model: ModelArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:
    """Trains, with further callbacks, and writes the result. Raises what [`main`] raises."""
    output = Path(args.output_dir)
    complete(args)  # opens the process group: one process locks the folder for all
    with only_run(output):
        trainer, resume = make_trainer(data, args, model, callbacks)
        console = Console(quiet=not trainer.is_world_process_zero())
        console.print(trainer.summary())
        dropped_rows = DroppedRows(output / DROPPED_ROWS)
        dropped_before = read_dropped(dropped_rows)
        console.print(*dropped_before, sep="\n")
        try:
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            with writing_result(output):
                trainer.save_state()
                trainer.save_model(_internal_call=True)
        except (BadRow, KeyboardInterrupt, Terminated) as error:
            advice = after_stop(output, trainer.args.world_size, trainer.state.global_step)
            if isinstance(error, BadRow):
                raise BadRow(f"{error} {advice}") from error
            error.add_note(advice)
            raise
        dropped_now = read_dropped(dropped_rows)
        if dropped_now != dropped_before:  # training met bad images
            console.print(*dropped_now, sep="\n")
        if args.push_to_hub:
            published = trainer.publish()
            if published:  # in the first process
                repository = published.repository
                console.print(f"Published: {repository.url}, commit {published.commit.oid}.")
        trainer.end()  # ends trackers, and the process group
    return output


def make_trainer(
    data: DataArguments,
    args: NormAlignConfig,
    model: ModelArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[NormAlignTrainer, Path | None]:
    """Returns the trainer of a run, and the checkpoint that it resumes.

    Removes the list of rows that an earlier run dropped, unless it is resumed. Raises what
    [`resolve_resume`], [`NormAlignTrainer`] and its `check_resumed` raise.
    """
    output = Path(args.output_dir)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    resume = resolve_resume(args.resume_from_checkpoint, output, processes)
    if resume is None and is_first_process() and not args.dry_run:
        (output / DROPPED_ROWS).unlink(missing_ok=True)
    trainer = NormAlignTrainer(
        str(model.model_name_or_path),
        args,
        train_dataset=data,
        callbacks=list(callbacks),
        quantization_config=model.quantization,
        peft_config=get_peft_config(model),
        options=(data, model),
    )
    if resume:
        trainer.check_resumed(resume)
    return trainer, resume


def dry_run(words: Sequence[str], recipe: dict[str, Any] | None = None) -> bool:
    """Checks what training checks. Prints the summary and the memory of a step.

    Returns whether it fits. Raises what [`main`] raises.
    """

    def make(further_words: Sequence[str] = ()) -> NormAlignTrainer:
        return make_trainer(*parse([*words, *further_words], recipe))[0]

    trainer = make()
    estimate = trainer.estimate_memory()
    console = Console(quiet=not trainer.is_world_process_zero())
    console.print(trainer.summary(), estimate)
    checkpointing = not trainer.args.gradient_checkpointing
    total = gib(trainer.estimate_memory(checkpointing).total)
    with_or_without = "With" if checkpointing else "Without"
    console.print(f"{with_or_without} gradient checkpointing: {total}.", soft_wrap=True)
    if not estimate.fits:
        console.print(remedy(trainer, make), soft_wrap=True)
    return estimate.fits


def remedy(trainer: NormAlignTrainer, make: Callable[[list[str]], NormAlignTrainer]) -> str:
    """Returns a sentence with the smallest change that makes a step fit, or says that none does.

    The changes are fewer rows in a pass (halved each time), gradient checkpointing, adapters (or
    bfloat16 if the language model is frozen), 4 bits, and all of that. Each is tried with the rows
    as they are, and with one row in a pass.

    Args:
        trainer: The trainer whose step does not fit.
        make: Makes a trainer with further words on the command line.
    """
    tried = ""
    for options in possible_changes(trainer):
        with suppress(ValueError, ImportError):  # options that do not go together
            estimate = make(options.split()).estimate_memory()
            if estimate.fits:
                return f"Would fit: {options}. {estimate.verdict}"
        tried = f", not even {options}"
    return f"Nothing that was tried fits{tried}. Fewer tokens may fit: lower --max_length."


def possible_changes(trainer: NormAlignTrainer) -> list[str]:
    """Returns options that make a step take less memory, from small changes to large ones."""
    args = trainer.args
    changes = []
    rows_in_pass = args.per_device_train_batch_size // 2
    while rows_in_pass:
        changes.append(f"--per_device_train_batch_size {rows_in_pass}")
        rows_in_pass //= 2
    one_row = changes[-1] if changes else ""

    checkpointing = "--gradient_checkpointing true"
    if args.gradient_checkpointing:
        checkpointing = ""
    adapters = "--use_peft true"
    if isinstance(trainer.model, PeftModel) or not trainer.learning_rates["language"]:
        adapters = ""
    half_precision = "--dtype bfloat16"
    if args.model_init_kwargs["dtype"] != "float32":
        half_precision = ""
    in_4_bits = f"{adapters} --load_in_4bit true {half_precision}"
    is_in_4_bits = getattr(base_model(trainer.model), "is_loaded_in_4bit", False)
    if is_in_4_bits or find_spec("bitsandbytes") is None:
        in_4_bits = ""
    smaller_model = adapters or half_precision
    everything = f"{checkpointing} {in_4_bits or smaller_model}"

    for change in (checkpointing, smaller_model, in_4_bits, everything):
        for words in (change.split(), f"{change} {one_row}".split()):
            options = " ".join(words)
            if change.strip() and options not in changes:
                changes.append(options)
    return changes
