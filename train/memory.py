# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step, from the trainer's own step on tensors without values."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import psutil
import torch
from accelerate.utils import convert_file_size_to_int
from datasets import IterableDataset
from rich.console import Group
from torch import Tensor
from transformers import DataCollator
from trl import SFTTrainer

from ..checkpoint.precision import memory_limit
from ..console import Printed
from .collator import ConversationCollator
from .keeping.summary import gib, titled_table
from .modules.sizes import BATCHES, GRADIENTS, MEMORY_PARTS, memory_shares, static_bytes
from .prepare import Rows
from .samplers import train_sampler
from .settings import RunConfig
from .shapes import peak_bytes


CONTEXT = 2**30
"""Bytes of a GPU that the verdict keeps free: CUDA's context, and blocks that torch cannot fill."""


@dataclass(frozen=True)
class MemoryEstimate(Printed):
    """The memory of a training step where it is highest, on each device.

    Attributes:
        parts: Bytes of each of `MEMORY_PARTS` at that moment.
        batch: The largest forward pass in words: its rows, tokens with padding, images.
        device: The name of the device.
        available: The bytes of the device.
        reserved: How many of these bytes are kept free.
    """

    parts: dict[str, int]
    batch: str
    device: str
    available: int
    reserved: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.available - self.reserved

    @property
    def verdict(self) -> str:
        """A sentence that says whether the step fits."""
        size_in_words = f"{gib(self.total)} of the {gib(self.available)} of {self.device}"
        if self.reserved:
            size_in_words += f" ({gib(self.reserved)} are kept free)"
        return f"{'Fits' if self.fits else 'Does not fit'}: {size_in_words}."

    def renderable(self) -> Group:
        """Returns the table for `rich` and notebooks, and the verdict."""
        bytes_by_part = {**self.parts, "all": self.total}
        table_rows = [[part, gib(size)] for part, size in bytes_by_part.items()]
        table = titled_table("Memory", [self.batch, "at the peak of a step"], table_rows)
        return Group(table, self.verdict)


def largest_batch(args: RunConfig, rows: Rows, collator: DataCollator) -> dict[str, Any]:
    """Returns the collated forward pass of the longest rows, or with packing of the most tokens.

    The lengths of a stream are not known: its first row is repeated, and filled with learned tokens
    up to `max_length`.
    """
    if isinstance(collator, ConversationCollator):
        collator = replace(collator, bad_rows="skip", dropped_rows=None)
    row_count = args.per_device_train_batch_size
    if isinstance(rows, IterableDataset) or "length" not in rows.column_names:
        batch = dict(collator(list(islice(rows, 1)) * row_count))
        length = args.max_length or 0
        if args.padding_free:  # all rows are in one sequence
            length *= row_count
        return lengthened(batch, length)
    lengths = rows.with_format(None)["length"][:]
    if args.packing:
        passes: Any = train_sampler(args, rows)
        numbers = max(passes, key=lambda numbers: sum(lengths[number] for number in numbers))
    else:
        longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        numbers = (longest_first * row_count)[:row_count]
    return collator([rows[number] for number in numbers])


def lengthened(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Returns a batch whose rows are filled with learned tokens up to a length."""
    missing = length - batch["input_ids"].shape[1]
    if missing <= 0:
        return batch
    filling = {}
    for name in batch.keys() & {"input_ids", "attention_mask"}:
        filling[name] = batch[name][:, -1:].expand(-1, missing)
    filling["labels"] = filling["input_ids"]
    if "position_ids" in batch:
        filling["position_ids"] = batch["position_ids"][:, -1:] + torch.arange(1, missing + 1)
    longer = {name: torch.cat([batch[name], tokens], 1) for name, tokens in filling.items()}
    return batch | longer


def estimate_memory(
    trainer: SFTTrainer, gradient_checkpointing: bool | None = None
) -> MemoryEstimate:
    """Returns the memory of a step on the longest rows, without loading weights.

    A forward and a backward pass run with a shape in place of each weight. Every storage that they
    allocate is counted. Optimizer states exist from the start, and so do the step's batches, and
    gradients if steps are accumulated. Kernels and autocast are the CPU's, also for another GPU's
    memory. What a kernel allocates inside is not seen.

    One process is counted. Under DDP gradients count twice, for the buckets. Under FSDP and ZeRO,
    only this process's share counts. A layer that is gathered for its turn does not count.

    Raises:
        ValueError: The model cannot take such a step.
    """
    settings = trainer.args
    passes = settings.gradient_accumulation_steps
    batch = largest_batch(settings, trainer.train_dataset, trainer.data_collator)
    try:
        bytes_by_part = peak_bytes(trainer, batch, gradient_checkpointing, accumulates=passes > 1)
    except Exception as error:  # of any layer of any language model, or of torch's kernels on meta
        raise ValueError(f"A step's memory cannot be estimated for this model: {error}") from error
    static = static_bytes(trainer.model, settings, trainer.optimizer_cls_and_kwargs)
    bytes_by_part += Counter(static | {GRADIENTS: 0})  # gradients at the peak are already counted
    bytes_by_part[GRADIENTS] = int(bytes_by_part[GRADIENTS] * memory_shares(settings)[GRADIENTS])
    # The Trainer moves all of a step's batches to the device before its first forward pass.
    bytes_by_part[BATCHES] = passes * sum(value.nbytes for value in batch.values())
    input_ids = batch["input_ids"]
    positions = batch.get("position_ids")
    row_count = len(input_ids) if positions is None else int((positions == 0).sum())
    image_count = len(batch.get("pixel_values", ()))
    batch_in_words = f"{row_count:,} row(s), {input_ids.numel():,} tokens, {image_count:,} image(s)"
    filled = {part: bytes_by_part[part] for part in MEMORY_PARTS if bytes_by_part[part]}
    return MemoryEstimate(filled, batch_in_words, *_device(settings))


def _device(args: RunConfig) -> tuple[str, int, int]:
    """Returns the device's name, its bytes, and the bytes to keep free."""
    if args.device_memory is not None:
        return "device_memory", convert_file_size_to_int(args.device_memory), CONTEXT
    if args.device.type == "cuda":
        _, device_bytes = torch.cuda.mem_get_info(args.device)
        return torch.cuda.get_device_name(args.device), device_bytes, CONTEXT
    machine_name = "this machine"
    if memory_limit() < psutil.virtual_memory().total:
        machine_name = "this container"
    return machine_name, memory_limit(), 0
