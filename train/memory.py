# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step, before it is taken: the trainer's own step, on tensors that have shapes alone."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import psutil
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, convert_file_size_to_int
from datasets import Dataset, IterableDataset
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from transformers import DataCollator, TrainingArguments
from trl import SFTTrainer

from ..errors import Printed
from .collator import ConversationCollator
from .options.arguments import NormAlignConfig
from .packing import train_sampler
from .shapes import ADAPTERS, BATCHES, GRADIENTS, OPTIMIZER, PARTS, WEIGHTS, peak_bytes


CONTEXT = 2**30
"""Bytes of a GPU that are kept free in the verdict: CUDA's context, and blocks that torch cannot fill."""


@dataclass(frozen=True)
class MemoryEstimate(Printed):
    """The memory of a training step where it is highest, on each device.

    Attributes:
        parts: Bytes of each of `PARTS` at that moment.
        batch: The largest forward pass in words: its rows, tokens with padding, images.
        device: What it was compared with, which has `available` bytes, and `reserved` of them kept free.
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
        """One sentence: whether it fits."""
        kept = f" ({gib(self.reserved)} are kept free)" if self.reserved else ""
        begin = "Fits" if self.fits else "Does not fit"
        return f"{begin}: {gib(self.total)} of the {gib(self.available)} of {self.device}{kept}."

    def renderable(self) -> Group:
        sizes = [[name, gib(size)] for name, size in {**self.parts, "all": self.total}.items()]
        return Group(titled_table("Memory", [self.batch, "at the peak of a step"], sizes), self.verdict)


def titled_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for `rich.console.Console.print`, whose first column is of words and the others of numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def largest_batch(args: NormAlignConfig, rows: Dataset | IterableDataset, collator: DataCollator) -> dict[str, Any]:
    """The forward pass of the longest rows, as collated; with packing, the one of most tokens.

    Of a stream, whose lengths are not known, the first row is repeated and filled with tokens that are
    learned, up to `max_length`.
    """
    count = args.per_device_train_batch_size
    if isinstance(collator, ConversationCollator):
        collator = replace(collator, bad_rows="skip", dropped_rows=None)
    if not isinstance(rows, IterableDataset) and "length" in rows.column_names:
        lengths = rows.with_format(None)["length"][:]
        longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        passes: Any = train_sampler(args, rows) if args.packing else [(longest * count)[:count]]
        return collator([rows[row] for row in max(passes, key=lambda batch: sum(lengths[row] for row in batch))])
    batch = collator(list(islice(rows, 1)) * count)
    missing = (args.max_length or 0) * (count if args.padding_free else 1) - batch["input_ids"].shape[1]
    if missing > 0:
        more = {name: batch[name][:, -1:].expand(-1, missing) for name in {*batch} & {"input_ids", "attention_mask"}}
        more["labels"] = more["input_ids"]
        if "position_ids" in batch:
            more["position_ids"] = batch["position_ids"][:, -1:] + torch.arange(1, missing + 1)
        batch = {**batch, **{name: torch.cat([batch[name], filling], 1) for name, filling in more.items()}}
    return batch


def estimate_memory(trainer: SFTTrainer, gradient_checkpointing: bool | None = None) -> MemoryEstimate:
    """The memory of a step on the longest rows, without weights; ValueError if it cannot be followed.

    A forward and a backward pass are run with a shape in place of each weight, and what they allocate is
    followed storage by storage. Optimizer states are there from the start, and gradients if steps are
    accumulated; so are the batches of the step. Kernels and autocast are the CPU's, also if a GPU is asked
    about. What a kernel allocates inside is not seen.

    One process is counted. Under DDP gradients count twice, for the buckets. Under FSDP and ZeRO, what is
    divided among processes is divided; a layer that is gathered for its turn does not count.
    """
    args, passes = trainer.args, trainer.args.gradient_accumulation_steps
    batch = largest_batch(args, trainer.train_dataset, trainer.data_collator)
    try:
        parts = peak_bytes(trainer, batch, gradient_checkpointing, accumulates=passes > 1)
    except Exception as error:  # of any layer of any language model, or of torch's kernels on meta
        raise ValueError(f"The memory of a step cannot be estimated for this model: {error}") from error
    parts += Counter(static_bytes(trainer.model, args) | {GRADIENTS: 0})  # gradients are those at the peak
    parts[GRADIENTS] = int(parts[GRADIENTS] * _shares(args)[GRADIENTS])
    # The Trainer moves all of a step's batches to the device before its first forward pass.
    parts[BATCHES] = passes * sum(value.nbytes for value in batch.values())
    ids, positions = batch["input_ids"], batch.get("position_ids")
    rows = len(ids) if positions is None else int((positions == 0).sum())
    shape = f"{rows:,} row(s), {ids.numel():,} tokens, {len(batch.get('pixel_values', ())):,} image(s)"
    return MemoryEstimate({name: parts[name] for name in PARTS if parts[name]}, shape, *_device(args))


def _device(args: NormAlignConfig) -> tuple[str, int, int]:
    """Name, bytes, and bytes to keep free."""
    if args.device_memory is not None:
        return "device_memory", convert_file_size_to_int(args.device_memory), CONTEXT
    if args.device.type == "cuda":
        return torch.cuda.get_device_name(args.device), torch.cuda.mem_get_info(args.device)[1], CONTEXT
    return "this machine", psutil.virtual_memory().total, 0


def gib(size: int) -> str:
    """Bytes, to be read."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"


def static_bytes(model: nn.Module, args: TrainingArguments) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states on each device, by part.

    FSDP divides all by the number of processes, ZeRO-1 the states, ZeRO-2 gradients and states, ZeRO-3
    all; DDP keeps a copy of the gradients in buckets. ZeRO-1 and ZeRO-2 keep the trained weights in
    float32 once more. States of paged optimizers count although they may lie in the CPU's memory.
    """
    sizes = dict.fromkeys((WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER), 0)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        sizes[ADAPTERS if ".lora_" in name else WEIGHTS] += (size := tensor_bytes(tensor))
        if tensor.requires_grad:
            sizes[GRADIENTS] += size
            sizes[OPTIMIZER] += _optimizer_bytes(args.optim.value, tensor, tensor in embeddings)
            sizes[OPTIMIZER] += 4 * parameter_count(tensor) if _zero_stage() in (1, 2) else 0
    shares = _shares(args)
    return {name: int(size * shares[name]) for name, size in sizes.items()}


def parameter_count(parameter: Tensor) -> int:
    """The parameters that a tensor stands for, packed or divided as it may be."""
    if type(parameter).__name__ == "Params4bit":
        return math.prod(parameter.quant_state.shape)
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty tensor behind


def _zero_stage() -> int:
    state = AcceleratorState()
    return state.deepspeed_plugin.zero_stage if state.distributed_type == DistributedType.DEEPSPEED else 0


def _shares(args: TrainingArguments) -> dict[str, float]:
    """How much of each part a process has."""
    kind, least = AcceleratorState().distributed_type, {WEIGHTS: 3, ADAPTERS: 3, GRADIENTS: 2, OPTIMIZER: 1}
    divided = [name for name, stage in least.items() if kind == DistributedType.FSDP or _zero_stage() >= stage]
    shares = {name: 1 / args.world_size if name in divided else 1.0 for name in least}
    return shares | ({GRADIENTS: 2.0} if kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU) else {})


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, whole if ZeRO-3 divides it, with the constants of its quantization."""
    size = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
    if type(tensor).__name__ == "Params4bit":
        size += sum(value.nbytes for value in tensor.quant_state.as_dict().values() if isinstance(value, Tensor))
    elif type(tensor).__name__ == "Int8Params":
        size += tensor.SCB.nbytes
    return size


def _optimizer_bytes(name: str, parameter: Tensor, embedding: bool) -> int:
    count, states = parameter_count(parameter), 1 if "lion" in name else 2
    if name == "sgd":
        return 0
    if name == "adafactor":
        return 4 * (sum(parameter.shape) if parameter.dim() > 1 else count)
    if "8bit" in name and count >= 4096 and not embedding:  # bitsandbytes keeps small tensors in 32 bits
        return states * (count + 4 * math.ceil(count / 256))
    if "8bit" in name or "32bit" in name:
        return states * 4 * count
    return states * count * parameter.element_size()
