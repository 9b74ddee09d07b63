# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign train RECIPE --dry_run`: whether a step fits in memory, and what to change if it does not."""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from datasets import IterableDataset
from peft import PeftModel

from .batches.collator import ConversationCollator
from .memory import estimate_memory
from .modules.model import base_model


if TYPE_CHECKING:
    from .trainer import NormAlignTrainer


def remedy(trainer: "NormAlignTrainer", make: Callable[[list[str]], "NormAlignTrainer"]) -> str:
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


def largest_batch(trainer: "NormAlignTrainer", limit: int | None = None) -> dict[str, Any]:
    """The forward pass of the longest rows, as the trainer's collator makes it.

    With packing it is the one of most tokens. Of a stream, whose lengths are not known, the first row is repeated and
    filled with tokens that are learned, up to `max_length`.

    Rows longer than `limit` do not count, as with `max_length`.
    """
    args, data, collator = trainer.args, trainer.train_dataset, trainer.data_collator
    rows = args.per_device_train_batch_size
    if isinstance(collator, ConversationCollator):
        collator = replace(collator, bad_rows="skip", dropped_rows=None)
    if isinstance(data, IterableDataset) or "length" not in data.column_names:
        batch = collator(list(islice(data, 1)) * rows)
        limit = limit or args.max_length
        return _filled(batch, limit * (rows if args.padding_free else 1)) if limit else batch
    lengths = data.with_format(None)["length"][:]
    order = sorted((row for row in range(len(lengths)) if not limit or lengths[row] <= limit), key=lengths.__getitem__)
    longest = (order[::-1] * rows)[:rows]
    if args.tokens_per_device:
        longest, tokens = [], 0
        for row in cycle(order[::-1]):
            if (tokens := tokens + lengths[row]) > args.tokens_per_device:
                break
            longest.append(row)
    elif args.packing and not limit:
        longest = max(trainer._get_train_sampler(data), key=lambda chosen: sum(lengths[row] for row in chosen))
    return collator([data[row] for row in longest])


def _batch_that_fits(trainer: "NormAlignTrainer") -> str:
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
        with patch.multiple(args, **{name: value, "gradient_accumulation_steps": steps[value]}):
            return trainer.estimate_memory().fits

    most = _largest([*steps], fits)
    return f"--{name} {most}" if most else ""


def _max_length(trainer: "NormAlignTrainer") -> str:
    """The option with the greatest `max_length` with which a step fits, and how many rows it would drop."""
    data, longest = trainer.train_dataset, trainer.args.max_length or 0
    streamed = isinstance(data, IterableDataset) or "length" not in data.column_names
    lengths = range(64, longest + 1, 64) if streamed else data.with_format(None)["length"][:]
    values = sorted({*lengths})[:-1]
    limit = _largest(values, lambda value: estimate_memory(trainer, largest_batch(trainer, value)).fits)
    if not limit:
        return ""
    dropped = "" if streamed else f" (drops {sum(length > limit for length in lengths):,} of {len(lengths):,} rows)"
    return f"--max_length {limit}{dropped}"


def _largest(values: list[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of some values in rising order for which a step fits."""
    count = bisect_left(values, True, key=lambda value: not fits(value))
    return values[count - 1] if count else None


def _filled(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """A batch whose sequences have `length` tokens, the last of which are learned."""
    missing = length - batch["input_ids"].shape[1]
    if missing <= 0:
        return batch
    names = batch.keys() & {"input_ids", "attention_mask"}
    more: dict[str, Any] = {name: batch[name][:, -1:].expand(-1, missing) for name in names}
    more["labels"] = more["input_ids"]
    if "position_ids" in batch:
        more["position_ids"] = batch["position_ids"][:, -1:] + torch.arange(1, missing + 1)
    return {**batch, **{name: torch.cat([batch[name], more[name]], 1) for name in more}}
