# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step, from the trainer's own step on tensors without values."""

import copy
import math
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from accelerate.utils import convert_file_size_to_int
from datasets import Dataset, IterableDataset
from rich.console import Group
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import DataCollator
from trl import SFTTrainer
from trl.kernels import chunked_logprob
from trl.trainer import utils

from ..checkpoint.precision import memory_limit
from ..console import Printed
from .collator import ConversationCollator
from .keeping.summary import gib, titled_table
from .modules.model import base_model, replaced, trained_parameters
from .modules.sizes import (
    ACTIVATIONS,
    BATCHES,
    COPIES,
    GRADIENTS,
    MEMORY_PARTS,
    memory_factors,
    static_bytes,
)
from .samplers import train_sampler
from .settings import RunConfig


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


def largest_batch(
    args: RunConfig, rows: Dataset | IterableDataset, collator: DataCollator
) -> dict[str, Any]:
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
        missing = length - batch["input_ids"].shape[1]
        if missing <= 0:
            return batch
        filling = {}
        for name in batch.keys() & {"input_ids", "attention_mask"}:
            filling[name] = batch[name][:, -1:].expand(-1, missing)
        filling["labels"] = filling["input_ids"]
        if "position_ids" in batch:
            filling["position_ids"] = batch["position_ids"][:, -1:] + torch.arange(1, missing + 1)
        return batch | {name: torch.cat([batch[name], filling[name]], 1) for name in filling}
    lengths = rows.with_format(None)["length"][:]
    if args.packing:
        passes: Any = train_sampler(args, rows)
        numbers = max(passes, key=lambda numbers: sum(lengths[number] for number in numbers))
    else:
        longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        numbers = (longest_first * row_count)[:row_count]
    return collator([rows[number] for number in numbers])


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
    bytes_by_part[GRADIENTS] = int(bytes_by_part[GRADIENTS] * memory_factors(settings)[GRADIENTS])
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


aten = torch.ops.aten


def peak_bytes(
    trainer: SFTTrainer, batch: dict[str, Any], checkpointing: bool | None, accumulates: bool
) -> Counter[str]:
    """Returns the bytes by part at the peak of a step, without weights and optimizer states.

    Args:
        trainer: Takes the step. It is restored afterwards.
        batch: The batch of the step.
        checkpointing: Whether gradients are checkpointed, by default as in the run.
        accumulates: Whether gradients of an earlier pass exist.
    """
    settings = trainer.args
    model = trainer.model
    ledger = _Ledger()
    half_precision = torch.float16 if settings.fp16 else torch.bfloat16
    batch = {name: tensor.clone() for name, tensor in batch.items()}
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: ledger.weight(tensor) for name, tensor in named_tensors}
    with warnings.catch_warnings(action="ignore"), ExitStack() as stack:
        _take_as_trained(trainer, checkpointing, stack)
        stack.enter_context(_reparametrize_module(model, shapes, tie_weights=True))
        stack.enter_context(ledger)
        for parameter in trained_parameters(model).values():
            add_hook = parameter.register_post_accumulate_grad_hook
            add_hook(lambda trained: ledger.move(trained.grad, GRADIENTS))
            if accumulates:
                parameter.grad = torch.zeros_like(parameter)
                ledger.move(parameter.grad, GRADIENTS)
        if "pixel_values" in batch:
            images = batch["pixel_values"]
            batch["pixel_values"] = torch.empty(images.shape, dtype=images.dtype)
            ledger.move(batch["pixel_values"], BATCHES)
        with torch.autocast("cpu", half_precision, enabled=settings.bf16 or settings.fp16):
            loss = trainer.compute_loss(model, batch)
        loss.backward()
    return ledger.parts


def _take_as_trained(trainer: SFTTrainer, checkpointing: bool | None, stack: ExitStack) -> None:
    """Has the trainer take steps as in training, on the device in question, until `stack` ends."""
    args = trainer.args
    model = trainer.model
    base = base_model(model)
    for embeddings in base.embeddings_of_parts():
        # Disabling checkpointing leaves hooks there. With them, an input has a gradient.
        stack.enter_context(replaced(embeddings, _forward_hooks=OrderedDict()))
    if checkpointing is None:
        checkpointing = args.gradient_checkpointing
    if checkpointing:
        stack.callback(model.gradient_checkpointing_disable)  # training enables it
        options = dict(args.gradient_checkpointing_kwargs or {})
        arguments = {}
        for argument in options.keys() & {"every_n_layers", "offload"}:
            arguments[argument] = options.pop(argument)
        arguments["gradient_checkpointing_kwargs"] = options or None
        model.gradient_checkpointing_enable(**arguments)
    stack.callback(model.train, model.training)
    model.train()
    # Random numbers and counts are restored.
    stack.enter_context(torch.random.fork_rng(devices=[]))
    tokens_seen = trainer.state.num_input_tokens_seen
    stack.enter_context(replaced(trainer.state, num_input_tokens_seen=tokens_seen))
    stack.enter_context(replaced(trainer, _metrics=copy.deepcopy(trainer._metrics)))
    stack.enter_context(replaced(trainer.accelerator, gather_for_metrics=lambda value: value))
    if args.device.type != "cpu" or args.device_memory is not None:
        stack.enter_context(replaced(base, only_answers=False))
        # TRL's fused head allocates as with Triton. Its kernels write into tiles of products.
        stack.enter_context(replaced(utils, _use_triton=lambda device: True))
        kernels = ("_forward_tile", "_backward_tile", "_addmm_fp32")
        tiles = dict.fromkeys(kernels, lambda *args, **kwargs: None)
        stack.enter_context(replaced(chunked_logprob, _use_triton=lambda device: False, **tiles))


class _Shape(Tensor):
    """A tensor on the CPU for autograd and autocast. Its operations run on its `meta` tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor):
        layout = {"strides": meta.stride(), "storage_offset": meta.storage_offset()}
        shape = Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, **layout)
        shape.meta = meta
        return shape

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside the estimate.")


class _Ledger(TorchDispatchMode):
    """Runs operations on shapes, and counts the bytes of the storages that live, by part.

    Tensors that depend only on the batch's ids, labels, masks and positions have values, on the
    CPU. The control flow of models reads them, and as indices they decide shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts = Counter[str]()
        self._live = Counter[str]()
        self._peak = -1
        self._storages: dict[int, SimpleNamespace] = {}
        self._weights: dict[int, Tensor] = {}

    def weight(self, tensor: Tensor) -> Tensor:
        """Returns the shape of a parameter or buffer. Its own bytes are counted elsewhere."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._weights[meta.untyped_storage()._cdata] = meta
        shape: Tensor = _Shape(meta)
        if isinstance(tensor, nn.Parameter):
            with self:
                shape = nn.Parameter(shape, requires_grad=tensor.requires_grad)
            shape.__dict__.update(tensor.__dict__)  # where bitsandbytes keeps its constants
        return shape

    def move(self, tensor: Tensor, part: str) -> None:
        """Counts the bytes of a tensor's storage under another part."""
        entry = self._storages.get(_storage_of(tensor)._cdata)
        if entry is not None:
            self._live[entry.part] -= entry.size
            self._live[part] += entry.size
            entry.part = part

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        has_shape = any(tensor.is_meta or isinstance(tensor, _Shape) for tensor in tensors)
        if func is aten._local_scalar_dense.default and has_shape:
            return 1.0 if args[0].is_floating_point() else 1  # for the log
        creates = not tensors and "device" in {value.name for value in func._schema.arguments}
        if creates or "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if has_shape or (creates and dtype.is_floating_point):
            result = _on_meta(func, args, kwargs, tensors)
        else:
            result = func(*args, **kwargs)
        memory_part = ACTIVATIONS
        if func is aten._to_copy.default and _storage_of(args[0])._cdata in self._weights:
            memory_part = COPIES  # autocast's, of a weight
        self._count(result, memory_part)
        kernel_bytes = 0
        if func.name() == "bitsandbytes::gemm_4bit":  # it dequantizes the weights inside
            kernel_bytes = args[0].element_size() * math.prod(args[2])
        total_bytes = sum(self._live.values()) + kernel_bytes
        if total_bytes > self._peak:
            self._peak = total_bytes
            self.parts = self._live + Counter({ACTIVATIONS: kernel_bytes})
        return result

    def _count(self, result: Any, part: str) -> None:
        """Counts the storages of an operation's results until they are freed."""

        def free(key: int, _: weakref.ref) -> None:
            entry = self._storages.pop(key)
            self._live[entry.part] -= entry.size

        for value in tree_leaves(result):
            if not isinstance(value, Tensor):
                continue
            storage = _storage_of(value)
            key = storage._cdata
            if key not in self._storages and key not in self._weights:
                reference = weakref.ref(storage, partial(free, key))
                storage_bytes = storage.nbytes()
                self._storages[key] = SimpleNamespace(
                    part=part, size=storage_bytes, reference=reference
                )
                self._live[part] += storage_bytes


def _on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Returns the shapes that an operation gives for shapes."""
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        args = (args[0], _positions(args[1]), *args[2:])
    shapes = {id(tensor.meta): tensor for tensor in tensors if isinstance(tensor, _Shape)}
    args, kwargs = tree_map_only(Tensor, lambda tensor: _plain(tensor).to("meta"), (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    result = func(*args, **kwargs)
    # What is changed in place stays the same tensor.
    return tree_map_only(Tensor, lambda meta: shapes.get(id(meta), _Shape(meta)), result)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, _Shape) else tensor


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return _plain(tensor).untyped_storage()


def _positions(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns indices with positions in place of masks, because their number is known."""
    positions = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, _Shape):
            positions.append(index)
        else:
            positions += index.nonzero(as_tuple=True)
    return positions
