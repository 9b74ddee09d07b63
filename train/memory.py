# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step before it is taken: the trainer's own, on shapes alone."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import psutil
import torch
from accelerate.utils import convert_file_size_to_int
from datasets import Dataset, IterableDataset
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
        device: Name of the device with `available` bytes, of which `reserved` are kept free.
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
        """A sentence that says whether it fits."""
        sizes = f"{gib(self.total)} of the {gib(self.available)} of {self.device}"
        if self.reserved:
            sizes += f" ({gib(self.reserved)} are kept free)"
        return f"{'Fits' if self.fits else 'Does not fit'}: {sizes}."

    def renderable(self) -> Group:
        """What `rich` and a notebook show."""
        sizes = {**self.parts, "all": self.total}
        rows = [[name, gib(size)] for name, size in sizes.items()]
        table = titled_table("Memory", [self.batch, "at the peak of a step"], rows)
        return Group(table, self.verdict)


def largest_batch(args: RunConfig, rows: Rows, collator: DataCollator) -> dict[str, Any]:
    """Returns the collated forward pass of the longest rows; with packing, that of most tokens.

    The lengths of a stream are not known: its first row is repeated, and filled with learned tokens
    up to `max_length`.
    """
    if isinstance(collator, ConversationCollator):
        collator = replace(collator, bad_rows="skip", dropped_rows=None)
    if not isinstance(rows, IterableDataset) and "length" in rows.column_names:
        return collator([rows[number] for number in longest_pass(args, rows)])
    count = args.per_device_train_batch_size
    batch = dict(collator(list(islice(rows, 1)) * count))
    length = args.max_length or 0
    if args.padding_free:  # all rows are in one sequence
        length *= count
    return lengthened(batch, length)


def longest_pass(args: RunConfig, rows: Dataset) -> list[int]:
    """Returns the numbers of the rows in the forward pass of the most tokens."""
    lengths = rows.with_format(None)["length"][:]
    if not args.packing:
        count = args.per_device_train_batch_size
        longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        return (longest_first * count)[:count]
    passes: Any = train_sampler(args, rows)
    return max(passes, key=lambda numbers: sum(lengths[number] for number in numbers))


def lengthened(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Returns a batch whose rows are filled with learned tokens up to a length."""
    missing = length - batch["input_ids"].shape[1]
    if missing <= 0:
        return batch
    filling: dict[str, Tensor] = {}
    for name in ("input_ids", "attention_mask"):
        if name in batch:
            filling[name] = batch[name][:, -1:].expand(-1, missing)
    filling["labels"] = filling["input_ids"]
    if "position_ids" in batch:
        filling["position_ids"] = batch["position_ids"][:, -1:] + torch.arange(1, missing + 1)
    longer = {name: torch.cat([batch[name], tokens], 1) for name, tokens in filling.items()}
    return batch | longer


def estimate_memory(
    trainer: SFTTrainer, gradient_checkpointing: bool | None = None
) -> MemoryEstimate:
    """The memory of a step on the longest rows, without weights; ValueError if it is not known.

    A forward and a backward pass run with a shape in place of each weight, and what they allocate
    is followed storage by storage. Optimizer states are there from the start, and so are the step's
    batches, and gradients if steps are accumulated. Kernels and autocast are the CPU's, also if a
    GPU is asked about. What a kernel allocates inside is not seen.

    One process is counted. Under DDP gradients count twice, for the buckets. Under FSDP and ZeRO,
    what is divided among processes is divided; a layer gathered for its turn does not count.
    """
    args = trainer.args
    passes = trainer.args.gradient_accumulation_steps
    batch = largest_batch(args, trainer.train_dataset, trainer.data_collator)
    try:
        parts = peak_bytes(trainer, batch, gradient_checkpointing, accumulates=passes > 1)
    except Exception as error:  # of any layer of any language model, or of torch's kernels on meta
        raise ValueError(f"A step's memory cannot be estimated for this model: {error}") from error
    static = static_bytes(trainer.model, args, trainer.optimizer_cls_and_kwargs)
    parts += Counter(static | {GRADIENTS: 0})  # gradients are those at the peak
    parts[GRADIENTS] = int(parts[GRADIENTS] * memory_shares(args)[GRADIENTS])
    # The Trainer moves all of a step's batches to the device before its first forward pass.
    parts[BATCHES] = passes * sum(value.nbytes for value in batch.values())
    ids = batch["input_ids"]
    positions = batch.get("position_ids")
    rows = len(ids) if positions is None else int((positions == 0).sum())
    images = len(batch.get("pixel_values", ()))
    shape = f"{rows:,} row(s), {ids.numel():,} tokens, {images:,} image(s)"
    filled = {part: parts[part] for part in MEMORY_PARTS if parts[part]}
    return MemoryEstimate(filled, shape, *_device(args))


def _device(args: RunConfig) -> tuple[str, int, int]:
    """Name, bytes, and bytes to keep free."""
    if args.device_memory is not None:
        return "device_memory", convert_file_size_to_int(args.device_memory), CONTEXT
    if args.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(args.device)
        return torch.cuda.get_device_name(args.device), total, CONTEXT
    machine = psutil.virtual_memory().total
    allowed = memory_limit()
    name = "this machine"
    if allowed < machine:
        name = "this container"
    return name, allowed, 0
