# SPDX-License-Identifier: Apache-2.0
"""A training run from options to checkpoint: check, print the summary, train, save."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from peft import PeftModel
from transformers import TrainerCallback
from trl import get_peft_config

from ..console import Console
from ..data.rows.parse import BadRow, DroppedRows
from ..data.sources.arguments import DataArguments
from ..signals import Terminated
from .command import next_command
from .keeping.checkpoints import after_stop, only_run, resolve_resume, writing_result
from .keeping.summary import gib, render_dropped
from .modules.model import base_model
from .options import ModelArguments, NormAlignConfig
from .parsing import parse
from .prepare import DROPPED_ROWS
from .settings import complete
from .trainer import NormAlignTrainer


Callbacks: TypeAlias = Sequence[TrainerCallback]


def main(words: Sequence[str], recipe: dict[str, Any] | None = None) -> Path | None:
    """`normalign train`: the folder of the result, or None after a dry run.

    `words` are the command line, without its recipe if [`read_command`] has read that. If a run is
    stopped, a note says how to resume it. A dry run exits with 1 if a step does not fit.
    """
    data, args, model = parse(words, recipe)
    if args.dry_run:
        if not dry_run(words, recipe):
            raise SystemExit(1)
        return None
    output = train(data, args, model)
    if os.environ.get("RANK", "0") == "0":
        command = next_command(output, args.stage, model.use_peft)
        Console().print(f"Written to {output}.\nNext: {command}", soft_wrap=True)
    return output


def train(
    data: DataArguments, args: NormAlignConfig, model: ModelArguments, callbacks: Callbacks = ()
) -> Path:
    """Trains, with further callbacks, and writes the result; raises what [`main`] raises."""
    output = Path(args.output_dir)
    complete(args)  # opens the process group: one process locks the folder for all
    with only_run(output):
        trainer, resume = make_trainer(data, args, model, callbacks)
        console = Console(quiet=not trainer.is_world_process_zero())
        console.print(trainer.summary())
        dropped = DroppedRows(output / DROPPED_ROWS)
        console.print(*(before := render_dropped(dropped)), sep="\n")
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
        if (lines := render_dropped(dropped)) != before:  # rows whose images training met
            console.print(*lines, sep="\n")
        if args.push_to_hub and (published := trainer.publish()):
            console.print(f"Published: {published.repository.url}, commit {published.commit.oid}.")
        trainer.end()  # trackers, and the process group
    return output


def make_trainer(
    data: DataArguments, args: NormAlignConfig, model: ModelArguments, callbacks: Callbacks = ()
) -> tuple[NormAlignTrainer, Path | None]:
    """The trainer of a run, and the checkpoint that it resumes, whose options must be the same."""
    output = Path(args.output_dir)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    resume = resolve_resume(args.resume_from_checkpoint, output, processes)
    if resume is None and os.environ.get("RANK", "0") == "0" and not args.dry_run:
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
    """Checks what training checks, prints summary and memory of a step; returns whether it fits."""

    def make(further_words: Sequence[str] = ()) -> NormAlignTrainer:
        parsed = parse([*words, *further_words], recipe)
        trainer, _ = make_trainer(*parsed)
        return trainer

    trainer = make()
    estimate = trainer.estimate_memory()
    console = Console(quiet=not trainer.is_world_process_zero())
    console.print(trainer.summary(), estimate)
    checkpointing = not trainer.args.gradient_checkpointing
    other = trainer.estimate_memory(checkpointing)
    with_or_without = "With" if checkpointing else "Without"
    console.print(f"{with_or_without} gradient checkpointing: {gib(other.total)}.", soft_wrap=True)
    if not estimate.fits:
        console.print(remedy(trainer, make), soft_wrap=True)
    return estimate.fits


def remedy(trainer: NormAlignTrainer, make: Callable[[list[str]], NormAlignTrainer]) -> str:
    """The first of some changes, from small to large, with which a step fits that does not.

    They are fewer rows in a pass, halved each time; gradient checkpointing; adapters, or bfloat16
    if the language model is frozen; 4 bits; all of that: each with the rows as they are, and with
    one row in a pass. `make` takes further words.
    """
    changes = possible_changes(trainer)
    for words in changes:
        with suppress(ValueError, ImportError):  # options that do not go together
            estimate = make(words).estimate_memory()
            if estimate.fits:
                return f"Would fit: {' '.join(words)}. {estimate.verdict}"
    tried = ""
    if changes:
        tried = f", not even {' '.join(changes[-1])}"
    return f"Nothing that was tried fits{tried}. Fewer tokens may: lower --max_length."


def possible_changes(trainer: NormAlignTrainer) -> list[list[str]]:
    """Returns words that make a step take less memory, from small changes to large ones."""
    args = trainer.args
    smaller_batches = []
    rows = args.per_device_train_batch_size // 2
    while rows:
        smaller_batches.append(["--per_device_train_batch_size", str(rows)])
        rows //= 2
    one_row = smaller_batches[-1] if smaller_batches else []

    checkpointing: list[str] = []
    if not args.gradient_checkpointing:
        checkpointing = ["--gradient_checkpointing", "true"]
    half: list[str] = []
    if args.model_init_kwargs["dtype"] == "float32":
        half = ["--dtype", "bfloat16"]
    has_adapters = isinstance(trainer.model, PeftModel)
    adapters: list[str] = []
    if trainer.learning_rates["language"] > 0 and not has_adapters:
        adapters = ["--use_peft", "true"]
    in_4_bits: list[str] = []
    is_in_4_bits = getattr(base_model(trainer.model), "is_loaded_in_4bit", False)
    if not is_in_4_bits and find_spec("bitsandbytes") is not None:
        in_4_bits = [*adapters, "--load_in_4bit", "true", *half]
    smaller_model = adapters or half
    everything = [*checkpointing, *(in_4_bits or smaller_model)]

    changes = list(smaller_batches)
    for change in (checkpointing, smaller_model, in_4_bits, everything):
        for words in (change, [*change, *one_row]):
            if change and words not in changes:
                changes.append(words)
    return changes
