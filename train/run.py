# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A training run from options to checkpoint: check, show, train, save."""

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from transformers import AutoProcessor

from .arguments import DataArguments, ModelArguments, TrainArguments
from .checkpoints import read_json
from .collator import ConversationCollator
from .dataset import load_data
from .model import RECORD, check_checkpoint, load_model, lora_config
from .pictures import picture_problem
from .probe import CosineProbe
from .record import check_same_run, render_options, training_record
from .resume import finish_from, resolve_resume
from .rows import DroppedRows
from .samples import SampleCallback
from .stages import accumulation_steps, check_stream, optimizer_steps, parse
from .summary import render, render_dropped, summary
from .trainer import NormAlignTrainer


def main(arguments: Sequence[str] | None = None) -> Path:
    """`normalign train RECIPE.yaml --option value ...`.

    Args:
        arguments: The words of the command line; by default the process's own.

    Returns:
        The folder of the trained checkpoint, or of the adapter.

    Raises:
        ValueError: An option, the checkpoint or the data does not fit; nothing was trained.
        OSError: A checkpoint could not be written; the last complete one remains.
    """
    output = train(*parse(arguments))
    if os.environ.get("RANK", "0") == "0":
        Console().print(f"Written to {output}.", highlight=False, markup=False)
    return output


def train(data_args: DataArguments, args: TrainArguments, model_args: ModelArguments) -> Path:
    """Trains as the options say, and leaves the result in `args.output_dir`; raises what [`main`] raises."""
    output = Path(args.output_dir)
    resume = resolve_resume(args.resume_from_checkpoint, output, args.world_size)
    args.gradient_accumulation_steps = accumulation_steps(args)
    check_stream(data_args, args)
    config = check_checkpoint(model_args, args)
    processor = AutoProcessor.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    dropped = DroppedRows(output / "dropped_rows.jsonl")
    if resume is None and args.process_index == 0:
        dropped.path.unlink(missing_ok=True)
    collator = ConversationCollator(
        processor,
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
        dropped_rows=dropped,
    )
    steps = optimizer_steps(args, data.train)
    if resume and finish_from(resume, output, steps):
        return output
    model = load_model(model_args, args, config)
    record = training_record(data_args, args, model_args, model, data.report)
    if resume:
        check_same_run(record, resume)
        record["seconds"] = (read_json(resume / RECORD) or {}).get("seconds", 0.0)
    trainer = NormAlignTrainer(
        model,
        args,
        data.train,
        processor,
        peft_config=lora_config(model_args, model, args.rates(model_args.use_peft)),
        eval_dataset=data.eval,
        data_collator=collator,
        record=record,
    )
    if data.eval is not None and args.sample_count:
        readable = (
            row
            for row in data.eval
            if data_args.bad_rows == "stop" or not picture_problem(row["images"], None, data_args.max_image_pixels)
        )
        examples = list(islice(readable, args.sample_count))
        trackers = trainer.callback_handler.callbacks
        trainer.add_callback(
            SampleCallback(examples, args.sample_max_new_tokens, data_args.max_image_pixels, trackers)
        )
    if args.probe_steps:
        trainer.add_callback(CosineProbe(args.probe_steps, collator(list(islice(data.train, args.probe_rows)))))
    console = Console(quiet=not trainer.is_world_process_zero())
    facts = summary(
        trainer.model,
        args,
        trainer.rates,
        data.report,
        steps=steps,
        tokens_per_image=model.config.image_seq_length,
    )
    trainer.record["run"] = {name: value for name, value in facts.items() if name != "data"}
    console.print(render_options(trainer.record), render(facts))
    console.print(*render_dropped(dropped), sep="\n", highlight=False, markup=False)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.save_state()
    if args.push_to_hub:
        pushed = trainer.push_to_hub()  # which saves first
        console.print(f"Pushed to {pushed.url}, commit {pushed.commit}." if pushed else "", highlight=False)
    else:
        trainer.save_model()
    console.print(*render_dropped(dropped), sep="\n", highlight=False, markup=False)
    trainer.end()  # trackers, and the process group
    return output
