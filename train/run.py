# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A training run from options to checkpoint: check, print the summary, train, save."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import get_peft_config

from ..checkpoint.files import json_or_none
from ..checkpoint.names import TRAINING_RECORD
from ..data.rows.parse import BadRow, DroppedRows
from ..data.sources.arguments import DataArguments
from ..data.sources.mixtures import load_data
from ..errors import Console, Terminated
from .batches.collator import ConversationCollator
from .batches.packing import check_longest
from .command import next_command
from .dry_run import remedy
from .keeping.checkpoints import writing_result
from .keeping.lock import only_run
from .keeping.record import check_same_run, render_options
from .keeping.resume import StepCounter, after_stop, resolve_resume
from .keeping.summary import render, render_dropped
from .memory import PeakMemory, gib
from .modules.adapter import language_adapter
from .modules.model import check_checkpoint, check_quantized
from .options.arguments import ModelArguments, NormAlignConfig
from .options.parsing import accumulation_steps, parse
from .prepare import check_one_gpu
from .shapes import ACTIVATIONS
from .trainer import NormAlignTrainer


def main(arguments: Sequence[str] | None = None) -> Path | None:
    """`normalign train RECIPE.yaml --option value ...`.

    Returns:
        The folder of the trained checkpoint, or of the adapter; None with `dry_run`.

    Raises:
        ValueError: An option, the checkpoint or the data is wrong; nothing was trained.
        OSError: A checkpoint could not be written; the last complete one remains.
        FloatingPointError: Loss, gradients or weights are not finite; the last complete checkpoint remains.
        KeyboardInterrupt, Terminated: The run was stopped; a note says what is lost and how to resume.
        SystemExit: With `dry_run`, a step does not fit in memory.
    """
    data, args, model = parse(arguments)
    if args.dry_run:
        if not dry_run(sys.argv[1:] if arguments is None else arguments):
            raise SystemExit(1)
        return None
    counter = StepCounter()
    try:
        output = train(data, args, model, [counter])
    except BadRow as error:
        raise BadRow(f"{error} {after_stop(args.output_dir, args.world_size, counter.step)}") from error
    except (KeyboardInterrupt, Terminated) as error:
        error.add_note(after_stop(args.output_dir, args.world_size, counter.step))
        raise
    if os.environ.get("RANK", "0") == "0":
        command = next_command(output, args.stage, model.use_peft)
        Console().print(f"Written to {output}.\nNext: {command}", soft_wrap=True)
    return output


def train(
    data_args: DataArguments,
    args: NormAlignConfig,
    model_args: ModelArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:
    """Trains, with further callbacks, and writes the result to `args.output_dir`; raises what [`main`] raises."""
    output = Path(args.output_dir)
    with only_run(output):
        resume = resolve_resume(args.resume_from_checkpoint, output, args.world_size)
        dropped = DroppedRows(output / "dropped_rows.jsonl")
        if resume is None and args.process_index == 0:
            dropped.path.unlink(missing_ok=True)
        trainer = make_trainer(data_args, args, model_args, dropped, callbacks)
        if resume:
            check_same_run(trainer.record, resume)
            trainer.record["seconds"] = (json_or_none(resume / TRAINING_RECORD) or {}).get("seconds", 0.0)
        console = Console(quiet=not trainer.is_world_process_zero())
        trainer.add_callback(PeakMemory(trainer.facts["memory"], console.print))
        try:
            if not is_deepspeed_zero3_enabled():  # whose parameters are empty until they are gathered
                trainer.facts["memory"] |= trainer.estimate_memory().to_dict()
        except ValueError as error:  # which is no reason not to train
            console.print(str(error), soft_wrap=True)
        console.print(render_options(trainer.record), render(trainer.facts, output))
        console.print(*render_dropped(dropped), sep="\n")
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        with writing_result(output):
            trainer.save_state()
            trainer.save_model(_internal_call=True)
        console.print(*render_dropped(dropped), sep="\n")
        if args.push_to_hub:
            done = trainer.publish()
            console.print(f"Published as {done.repository.url}, commit {done.commit.oid}." if done else "")
        trainer.end()  # trackers, and the process group
    return output


def dry_run(arguments: Sequence[str]) -> bool:
    """Checks all that training checks, and prints the summary and whether a step fits in memory; writes no output.

    Returns:
        False if it does not fit.
    """
    outputs: list[str] = []
    with TemporaryDirectory() as folder:

        def make(words: Sequence[str]) -> NormAlignTrainer:
            data, args, model = parse([*arguments, *words])
            if is_deepspeed_zero3_enabled():
                raise ValueError("dry_run cannot count ZeRO-3. Count with fsdp2, which divides as much.")
            resume = resolve_resume(args.resume_from_checkpoint, Path(args.output_dir), args.world_size)
            check_checkpoint(str(model.model_name_or_path), args, model.model_revision)
            outputs.append(args.output_dir)
            args.output_dir, args.push_to_hub = folder, False  # the Trainer would create both
            trainer = make_trainer(data, args, model, DroppedRows(Path(folder) / "dropped_rows.jsonl"))
            if resume:
                check_same_run(trainer.record, resume)
            return trainer

        trainer = make([])
        estimate = trainer.estimate_memory()
        del trainer.facts["memory"]  # without activations
        console = Console(quiet=not trainer.is_world_process_zero())
        console.print(render_options(trainer.record), render(trainer.facts, outputs[0]), estimate.table())
        console.print(estimate.verdict, soft_wrap=True)
        other = trainer.estimate_memory(checkpointing := not trainer.args.gradient_checkpointing)
        instead = f"{'With' if checkpointing else 'Without'} gradient checkpointing: {gib(other.total)}"
        console.print(f"{instead}, of which activations {gib(other.parts[ACTIVATIONS])}.", soft_wrap=True)
        if not estimate.fits:
            console.print(remedy(trainer, make), soft_wrap=True)
        return estimate.fits


def make_trainer(
    data_args: DataArguments,
    args: NormAlignConfig,
    model_args: ModelArguments,
    dropped: DroppedRows,
    callbacks: Sequence[TrainerCallback] = (),
) -> NormAlignTrainer:
    """Checks options, checkpoint and data, and makes the trainer; raises what [`main`] raises before training."""
    check_one_gpu(args)
    args.gradient_accumulation_steps = accumulation_steps(args)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and is_deepspeed_zero3_enabled():
        raise ValueError("load_in_4bit and load_in_8bit cannot be used with ZeRO-3. Use ddp or zero2.")
    checkpoint, config = check_checkpoint(str(model_args.model_name_or_path), args, model_args.model_revision)
    peft_config = get_peft_config(model_args)
    quantization = model_args.quantization
    if peft_config is not None:
        language_adapter(peft_config, config, args.learning_rates(use_peft=True))  # before rows are read
    if quantization is not None:
        check_quantized(config, quantization, args, peft_config)
    processor = checkpoint.processor
    collator = ConversationCollator(
        processor,
        pad_to_multiple_of=args.pad_to_multiple_of,
        padding_free=args.padding_free,
        max_image_pixels=data_args.max_image_pixels,
        bad_rows=data_args.bad_rows,
        dropped_rows=dropped,
    )
    data = load_data(
        data_args,
        processor,
        max_length=args.max_length,
        seed=args.seed,
        with_eval=args.eval_strategy != "no",
        need_images=args.stage == "align" or not args.learning_rates(model_args.use_peft)["language"],
        dropped_rows=dropped,
        num_proc=args.dataset_num_proc,
    )
    for source in data.report.sources:
        if args.tokens_per_device and source.split == "train":
            check_longest(source.longest or 0, args.tokens_per_device, source.source)
    args.model_init_kwargs = {
        "revision": checkpoint.revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    return NormAlignTrainer(
        checkpoint.name,
        args,
        collator,
        data.train,
        data.eval,
        processor,
        callbacks=list(callbacks),
        quantization_config=quantization,
        peft_config=peft_config,
        report=data.report,
        options=(data_args, model_args),
    )
