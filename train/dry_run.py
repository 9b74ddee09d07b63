# SPDX-License-Identifier: Apache-2.0
"""`normalign train RECIPE --dry_run`: whether a step fits in memory, and what to change if it does not."""

import copy
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress

from datasets import IterableDataset
from peft import PeftModel

from .memory import estimate_memory, largest_batch
from .modules.model import base_model
from .trainer import NormAlignTrainer


def remedy(trainer: NormAlignTrainer, make: Callable[[list[str]], NormAlignTrainer]) -> str:
    """Which options would make a step fit that does not: a smaller batch, or else the smallest change that helps.

    Each is found by estimating the step again: fewer rows in a pass; gradient checkpointing; adapters, or
    bfloat16 if the language model is frozen; 4 bits; each with the batch as it is and with one row; all of that; fewer
    tokens.

    Args:
        trainer: That of the options as they are.
        make: Returns one with further words on the command line.
    """
    args = trainer.args
    if batch := _batch_that_fits(trainer):
        return f"Would fit: {batch}, the largest that does."
    checkpointing = [] if args.gradient_checkpointing else ["--gradient_checkpointing", "true"]
    half = ["--dtype", "bfloat16"] if args.model_init_kwargs["dtype"] == "float32" else []
    in_full = trainer.learning_rates["language"] > 0 and not isinstance(trainer.model, PeftModel)
    adapters, smaller, tried = ["--use_peft", "true"] if in_full else half, [], []
    if not getattr(base_model(trainer.model), "is_loaded_in_4bit", False):
        smaller = [*(adapters if in_full else []), "--load_in_4bit", "true", *half]
    one = ["--per_device_train_batch_size", "1"] if args.per_device_train_batch_size > 1 else []
    every = [*checkpointing, *smaller]
    batches = [[], one] if one else [[]]
    for words in [[*more, *rows] for more in (checkpointing, adapters, smaller, every) if more for rows in batches]:
        with suppress(ValueError, NameError):  # options that do not go together; 4 bits without bitsandbytes
            if (estimate := make(words).estimate_memory()).fits:
                return f"Would fit: {' '.join(words)}. {estimate.verdict}"
            tried = words
    for words in (one, [*every, *one]):
        with suppress(ValueError, NameError):
            if shorter := _max_length(make(words)):
                return f"Would fit: {' '.join([*words, shorter])}."
    return f"Nothing that was tried fits, not even fewer tokens with {' '.join(tried) or 'these options'}."


def _batch_that_fits(trainer: NormAlignTrainer) -> str:
    """The option with the largest forward pass that fits, smaller than now, if the rows of a step stay the same."""
    args, together = trainer.args, trainer.args.global_batch_size
    name = "tokens_per_device" if args.tokens_per_device else "per_device_train_batch_size"
    if args.tokens_per_device:
        values = range(max(trainer.train_dataset.with_format(None)["length"][:]), args.tokens_per_device, 64)
    else:
        values = range(1, args.per_device_train_batch_size)
    steps = {n: args.gradient_accumulation_steps for n in values}
    if together and not args.tokens_per_device:
        steps = {n: together // (n * args.world_size) for n in values if together % (n * args.world_size) == 0}

    def fits(value: int) -> bool:
        changed = copy.copy(args)
        vars(changed).update({name: value, "gradient_accumulation_steps": steps[value]})
        batch = largest_batch(changed, trainer.train_dataset, trainer.data_collator)
        return estimate_memory(trainer, batch, accumulation=steps[value]).fits

    most = _largest([*steps], fits)
    return f"--{name} {most}" if most else ""


def _max_length(trainer: NormAlignTrainer) -> str:
    """The option with the greatest `max_length` with which a step fits, and how many rows it would drop."""
    data, longest = trainer.train_dataset, trainer.args.max_length or 0
    streamed = isinstance(data, IterableDataset) or "length" not in data.column_names
    lengths = range(64, longest + 1, 64) if streamed else data.with_format(None)["length"][:]
    values = sorted({*lengths})[:-1]

    def fits(limit: int) -> bool:
        batch = largest_batch(trainer.args, data, trainer.data_collator, limit)
        return estimate_memory(trainer, batch).fits

    limit = _largest(values, fits)
    if not limit:
        return ""
    dropped = "" if streamed else f" (drops {sum(length > limit for length in lengths):,} of {len(lengths):,} rows)"
    return f"--max_length {limit}{dropped}"


def _largest(values: list[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of some values in rising order for which a step fits."""
    count = bisect_left(values, True, key=lambda value: not fits(value))
    return values[count - 1] if count else None
