# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The memory of a training step, before it is taken: the trainer's own step, on tensors that have shapes alone."""

import copy
import math
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback, TrainingArguments

from ..html_tables import html_paragraph, html_table
from .modules.model import base_model, module_of
from .options.arguments import parse_bytes


if TYPE_CHECKING:
    from .trainer import NormAlignTrainer

WEIGHTS, ADAPTERS, VISION, GRADIENTS, OPTIMIZER = "weights", "adapters", "vision tower", "gradients", "optimizer"
ACTIVATIONS, LOGITS = "activations", "logits and loss"
PARTS = (WEIGHTS, ADAPTERS, VISION, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS)
"""What takes memory. The vision tower's part has its weights and its activations; `weights` are all the others."""

CONTEXT = 2**30
"""Bytes of a GPU that are kept free in the verdict: CUDA's context, and blocks that torch cannot fill."""

_TRL = "trl.kernels.chunked_logprob"


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a training step where it is highest, on each device.

    Attributes:
        parts: Bytes of each of `PARTS` at that moment.
        rows, tokens, images: Of the largest forward pass, with padding.
        device: What it was compared with.
        available: Its bytes; None if they are not known.
        reserved: Bytes of it that are kept free.
    """

    parts: dict[str, int]
    rows: int
    tokens: int
    images: int
    device: str
    available: int | None
    reserved: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether the device has room for it; None if its memory is not known."""
        return None if self.available is None else self.total <= self.available - self.reserved

    @property
    def verdict(self) -> str:
        """One sentence: whether it fits."""
        if self.available is None:
            return f"{gib(self.total)}; the memory of {self.device} is not known: give --device_memory."
        kept = f" ({gib(self.reserved)} are kept free)" if self.reserved else ""
        begin = "Fits" if self.fits else "Does not fit"
        return f"{begin}: {gib(self.total)} of the {gib(self.available)} of {self.device}{kept}."

    def to_dict(self) -> dict[str, Any]:
        """Its parts with their total, the pass, and the device, as JSON."""
        return {**self.parts, "total": self.total, "rows": self.rows, "tokens": self.tokens, "device": self.device}

    def table(self) -> Table:
        """The parts, for `rich.console.Console.print`."""
        table = Table(title="Memory", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column(f"{self.rows:,} row(s), {self.tokens:,} tokens, {self.images:,} image(s)")
        table.add_column("at the peak of a step", justify="right")
        for name, size in self.parts.items():
            table.add_row(name, gib(size))
        table.add_section()
        table.add_row("all", gib(self.total))
        return table

    def _repr_html_(self) -> str:
        return html_table(self.table()) + html_paragraph(self.verdict)


def estimate_memory(trainer: "NormAlignTrainer", batch: dict[str, Any]) -> MemoryEstimate:
    """The memory of a step on a batch that the trainer's collator made; no weight is read or changed.

    A forward and a backward pass of the trainer are run with a shape in place of each weight. What they
    allocate is followed storage by storage, so attention, precision, checkpointing and adapters need no formula.
    Optimizer states are there from the start, as after the first step, and gradients if steps are accumulated.
    Kernels and autocast are the CPU's, also if a GPU is asked about. What a kernel allocates inside is not seen.

    One process is counted. Under DDP gradients count twice, for the buckets. Under FSDP and ZeRO, what is divided
    among processes is divided; a layer that is gathered for its turn does not count.

    Raises:
        ValueError: The step cannot be followed.
    """
    args = trainer.args
    static = static_bytes(trainer.model, args)
    try:
        parts, pixels = _peak(trainer, batch), batch.get("pixel_values")
    except Exception as error:  # of any layer of any language model, or of torch's kernels on meta
        raise ValueError(f"The memory of a step cannot be estimated for this model: {error}") from error
    parts[GRADIENTS] = int(parts[GRADIENTS] * _shares(args)[GRADIENTS])
    for name, size in static.items():
        parts[name] += size if name != GRADIENTS else 0
    device, available, reserved = device_memory(args)
    shape = batch["input_ids"].shape
    rows = len(batch["row_lengths"]) if "row_lengths" in batch else shape[0]
    images = 0 if pixels is None else len(pixels)
    counted = {name: parts[name] for name in PARTS if parts[name]}
    return MemoryEstimate(counted, rows, shape.numel(), images, device, available, reserved)


def device_memory(args: Any) -> tuple[str, int | None, int]:
    """Name, bytes, and bytes to keep free, of the device in `args.device_memory`, or else of the one that trains."""
    if args.device_memory is not None:
        return "device_memory", parse_bytes(args.device_memory), CONTEXT
    if args.device.type == "cuda":
        return torch.cuda.get_device_name(args.device), torch.cuda.mem_get_info(args.device)[1], CONTEXT
    if args.device.type == "cpu":
        return "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    return str(args.device), None, 0


def gib(size: int) -> str:
    """Bytes, to be read."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"


def static_bytes(model: nn.Module, args: TrainingArguments) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states on each device, by part.

    They are counted tensor by tensor: parameters with the constants of 4-bit and 8-bit quantization, and buffers; a
    gradient in the dtype of each trained parameter; AdamW's two states in that dtype, or in bitsandbytes' 32 or 8
    bits. FSDP divides all by the number of processes, ZeRO-1 the states, ZeRO-2 gradients and states, ZeRO-3 all; DDP
    keeps a copy of the gradients in buckets. ZeRO-1 and ZeRO-2 keep the trained weights in float32 once more, with
    the states. States of paged optimizers count although they may lie in the CPU's memory.
    """
    found = dict.fromkeys((WEIGHTS, ADAPTERS, VISION, GRADIENTS, OPTIMIZER), 0)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        part = ADAPTERS if ".lora_" in name else VISION if module_of(name) == "vision" else WEIGHTS
        found[part] += (size := _bytes(tensor))
        if tensor.requires_grad:
            found[GRADIENTS] += size
            found[OPTIMIZER] += _optimizer_bytes(args.optim.value, tensor, tensor in embeddings)
            found[OPTIMIZER] += 4 * parameter_count(tensor) if _zero_stage() in (1, 2) else 0
    return {name: int(size * _shares(args)[name]) for name, size in found.items()}


def parameter_count(parameter: Tensor) -> int:
    """The parameters that a tensor stands for, packed or divided as it may be."""
    if type(parameter).__name__ == "Params4bit":
        return math.prod(parameter.quant_state.shape)
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty tensor behind


class PeakMemory(TrainerCallback):
    """Measures the first two steps on a GPU: the second is the first with optimizer states.

    Args:
        memory: The estimate, as [`MemoryEstimate.to_dict`] gives it; the measured bytes are put there.
        show: Prints a line with both.
    """

    def __init__(self, memory: dict[str, Any], show: Callable[[str], None]):
        self.memory, self.show, self._last = memory, show, 0

    def on_train_begin(self, args, state, control, **kwargs):
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
            self._last = min(state.global_step + 2, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        if self._last and state.global_step == self._last:
            self.memory["measured"] = torch.cuda.max_memory_allocated(args.device)
            self.show(f"Memory: {gib(self.memory['measured'])} measured, {gib(self.memory['total'])} estimated.")


def _zero_stage() -> int:
    state = AcceleratorState()
    return state.deepspeed_plugin.zero_stage if state.distributed_type == DistributedType.DEEPSPEED else 0


def _shares(args: TrainingArguments) -> dict[str, float]:
    """How much of each part a process has."""
    kind, stage = AcceleratorState().distributed_type, _zero_stage()
    least = {WEIGHTS: 3, ADAPTERS: 3, VISION: 3, GRADIENTS: 2, OPTIMIZER: 1}  # stage of ZeRO that divides it
    sharded = kind == DistributedType.FSDP
    found = {name: 1 / args.world_size if sharded or stage >= least[name] else 1.0 for name in least}
    if kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        found[GRADIENTS] = 2.0
    return found


def _bytes(tensor: Tensor) -> int:
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


def _peak(trainer: "NormAlignTrainer", batch: dict[str, Any]) -> Counter[str]:
    """Bytes by part, besides the static ones, where their sum is highest in a step of the trainer."""
    args, model = trainer.args, trainer.model
    ledger, half = _Ledger(), torch.float16 if args.fp16 else torch.bfloat16
    batch = {name: value.clone() for name, value in batch.items()}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(_as_trained(trainer))
        stack.enter_context(_shapes_for_weights(model, ledger))
        stack.enter_context(_parts_by_module(model, ledger))
        stack.enter_context(ledger)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda each: ledger.move(each.grad, GRADIENTS))
                if args.gradient_accumulation_steps > 1:
                    parameter.grad = torch.zeros_like(parameter)
                    ledger.move(parameter.grad, GRADIENTS)
        if "pixel_values" in batch:
            batch["pixel_values"] = torch.empty(batch["pixel_values"].shape, dtype=batch["pixel_values"].dtype)
        with torch.autocast("cpu", half, enabled=args.bf16 or args.fp16):
            loss = trainer.compute_loss(model, batch)
        loss.backward()
    return ledger.parts


@contextmanager
def _as_trained(trainer: "NormAlignTrainer") -> Iterator[None]:
    """The trainer as it takes a step, on a GPU if one is asked about. What a step changes is put back afterwards."""
    args, model, state = trainer.args, trainer.model, trainer.state
    on_gpu = args.device.type != "cpu" or args.device_memory is not None
    if args.gradient_checkpointing:
        given = dict(args.gradient_checkpointing_kwargs or {})
        own = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given or None, **own)
    seen, training = state.num_input_tokens_seen, model.training
    model.train()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(patch.object(trainer, "_metrics", copy.deepcopy(trainer._metrics)))
        stack.enter_context(patch.object(trainer.accelerator, "gather_for_metrics", lambda value: value))
        if on_gpu:
            stack.enter_context(patch.object(trainer, "only_answers", False))
            # TRL's fused head: Triton writes into the tiles of its products, where torch would allocate.
            stack.enter_context(patch("trl.trainer.utils._use_triton", lambda device: True))
            stack.enter_context(patch(f"{_TRL}._use_triton", lambda device: False))
            for kernel in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
                stack.enter_context(patch(f"{_TRL}.{kernel}", lambda *args, **kwargs: None))
        try:
            yield
        finally:
            model.train(training)
            state.num_input_tokens_seen = seen


@contextmanager
def _shapes_for_weights(model: nn.Module, ledger: "_Ledger") -> Iterator[None]:
    """Puts a shape in the place of each parameter and buffer, and these back afterwards."""
    stores = [each for module in model.modules() for each in (module._parameters, module._buffers)]
    places = [(store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None]
    shapes = {id(tensor): tensor for _, _, tensor in places}
    shapes = {key: ledger.weight(tensor) for key, tensor in shapes.items()}
    for store, name, tensor in places:
        store[name] = shapes[id(tensor)]
    try:
        yield
    finally:
        for store, name, tensor in places:
            store[name] = tensor


@contextmanager
def _parts_by_module(model: nn.Module, ledger: "_Ledger") -> Iterator[None]:
    """Has the ledger enter what is allocated under the part that is computed, forward and backward."""
    inner = base_model(model).model

    def enters(part: str, after: str | None = None):
        def hook(*values):
            ledger.part = part
            if after and values[-1][0].requires_grad:  # the module's output; backward begins with its gradient
                values[-1][0].register_hook(lambda gradient: setattr(ledger, "part", after))

        return hook

    hooks = [
        inner.vision_tower.register_forward_pre_hook(enters(VISION)),
        inner.vision_tower.register_forward_hook(enters(ACTIVATIONS, after=VISION)),
        inner.language_model.register_forward_hook(enters(LOGITS, after=ACTIVATIONS)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Shape(Tensor):
    """A tensor of the CPU, for autograd and autocast, whose operations are run on one on meta."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor):
        layout = {"strides": meta.stride(), "storage_offset": meta.storage_offset(), "dtype": meta.dtype}
        made = Tensor._make_wrapper_subclass(cls, meta.shape, **layout)
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside the estimate.")


class _Ledger(TorchDispatchMode):
    """Runs operations on shapes, and counts the bytes of the storages that live, by part.

    Tensors that depend on the ids, labels, masks and positions of the batch alone are real, on the CPU: the control
    flow of models reads them, and as indices they decide shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part, self.parts = ACTIVATIONS, Counter[str]()
        self._live, self._highest = Counter[str](), -1
        self._storages: dict[int, tuple[weakref.ref, str, int]] = {}
        self._weights: dict[int, Tensor] = {}

    def weight(self, tensor: Tensor) -> Tensor:
        """The shape of a parameter or buffer, which is counted elsewhere."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._weights[meta.untyped_storage()._cdata] = meta
        made: Tensor = _Shape(meta)
        if isinstance(tensor, nn.Parameter):
            with self:
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.__dict__.update(tensor.__dict__)  # where bitsandbytes keeps its constants
        return made

    def move(self, tensor: Tensor, part: str) -> None:
        """Enters what a tensor takes under another part."""
        storage = _plain(tensor).untyped_storage()
        if entry := self._storages.get(storage._cdata):
            reference, before, size = entry
            self._storages[storage._cdata] = (reference, part, size)
            self._live[before] -= size
            self._live[part] += size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        on_meta = any(each.is_meta or isinstance(each, _Shape) for each in tensors)
        if func is aten._local_scalar_dense.default and on_meta:
            return 1.0 if args[0].is_floating_point() else 1  # for the log
        makes = not tensors and any(argument.name == "device" for argument in func._schema.arguments)
        if makes or "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        real = not on_meta and not (makes and (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point)
        if real:
            result = func(*args, **kwargs)
            made = list(_tensors((result,)))
        else:
            if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
                args = (args[0], _positions(args[1]), *args[2:])
            shapes = {id(each.meta): each for each in tensors if isinstance(each, _Shape)}
            kwargs = {name: _map(_on_meta, value) for name, value in kwargs.items()}
            if "device" in kwargs:
                kwargs["device"] = torch.device("meta")
            result = func(*_map(_on_meta, args), **kwargs)
            made = list(_tensors((result,)))
            # What is changed in place stays the same tensor.
            result = _map(lambda each: shapes[id(each)] if id(each) in shapes else _Shape(each), result)
        copied = func is aten._to_copy.default and _plain(args[0]).untyped_storage()._cdata in self._weights
        for each in made:
            self._count(each.untyped_storage(), WEIGHTS if copied else self.part)  # autocast's copies
        self._mark(_inside(func, args))
        return result

    def _count(self, storage: torch.UntypedStorage, part: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages and key not in self._weights:
            self._storages[key] = (weakref.ref(storage, lambda _: self._free(key)), part, size)
            self._live[part] += size

    def _free(self, key: int) -> None:
        _, part, size = self._storages.pop(key)
        self._live[part] -= size

    def _mark(self, inside: int) -> None:
        total = sum(self._live.values()) + inside
        if total > self._highest:
            self._highest, self.parts = total, Counter(self._live)
            self.parts[self.part] += inside


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with the tensors in it, and in its lists and tuples, replaced."""
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(_map(function, each) for each in value) if isinstance(value, list | tuple) else value


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, _Shape) else tensor


def _on_meta(tensor: Tensor) -> Tensor:
    plain = _plain(tensor)
    return (
        plain if plain.is_meta else torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device="meta")
    )


def _positions(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices, each mask in the form of positions, whose number is known."""
    found: list[Tensor | None] = []
    for each in indices:
        is_mask = each is not None and each.dtype == torch.bool and not isinstance(each, _Shape)
        found += each.nonzero(as_tuple=True) if is_mask else [each]  # type: ignore[union-attr]
    return found


def _inside(func: Any, args: Any) -> int:
    """Bytes that an operation allocates inside: bitsandbytes' product with 4-bit weights dequantizes them."""
    if func.name() == "bitsandbytes::gemm_4bit":
        return args[0].element_size() * math.prod(args[2])
    return 0
