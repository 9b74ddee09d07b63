# SPDX-License-Identifier: Apache-2.0
"""A training step on tensors that have shapes alone, and the bytes of those that live in it."""

import copy
import math
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from trl import SFTTrainer
from trl.kernels import chunked_logprob
from trl.trainer import utils

from .modules.model import base_model, replaced
from .modules.sizes import ACTIVATIONS, BATCHES, COPIES, GRADIENTS


aten = torch.ops.aten


def peak_bytes(
    trainer: SFTTrainer, batch: dict[str, Any], checkpointing: bool | None, accumulates: bool
) -> Counter[str]:
    """Bytes by part at the peak of a trainer's step, besides its weights and optimizer states."""
    args = trainer.args
    model = trainer.model
    ledger = _Ledger()
    half = torch.float16 if args.fp16 else torch.bfloat16
    batch = {name: value.clone() for name, value in batch.items()}
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {name: ledger.weight(tensor) for name, tensor in named}
    with warnings.catch_warnings(action="ignore"), ExitStack() as stack:
        _take_as_trained(trainer, checkpointing, stack)
        stack.enter_context(_reparametrize_module(model, tensors, tie_weights=True))
        stack.enter_context(ledger)
        for parameter in model.parameters():
            if parameter.requires_grad:
                add_hook = parameter.register_post_accumulate_grad_hook
                add_hook(lambda trained: ledger.move(trained.grad, GRADIENTS))
                if accumulates:
                    parameter.grad = torch.zeros_like(parameter)
                    ledger.move(parameter.grad, GRADIENTS)
        if (images := batch.get("pixel_values")) is not None:
            batch["pixel_values"] = torch.empty(images.shape, dtype=images.dtype)
            ledger.move(batch["pixel_values"], BATCHES)
        with torch.autocast("cpu", half, enabled=args.bf16 or args.fp16):
            loss = trainer.compute_loss(model, batch)
        loss.backward()
    return ledger.parts


def _take_as_trained(trainer: SFTTrainer, checkpointing: bool | None, stack: ExitStack) -> None:
    """Has the trainer take steps as in training, on the device in question, until `stack` ends."""
    args = trainer.args
    base = base_model(trainer.model)
    if checkpointing is None:
        checkpointing = args.gradient_checkpointing
    for embeddings in base.embeddings_of_parts():
        # Disabling checkpointing leaves its hooks there, with which an input has a gradient.
        stack.enter_context(replaced(embeddings, _forward_hooks=OrderedDict()))
    if checkpointing:
        _enable_checkpointing(trainer, stack)
    stack.callback(trainer.model.train, trainer.model.training)
    trainer.model.train()
    _keep_state(trainer, stack)
    if args.device.type != "cpu" or args.device_memory is not None:
        stack.enter_context(replaced(base, only_answers=False))
        _use_kernels_of_gpus(stack)


def _enable_checkpointing(trainer: SFTTrainer, stack: ExitStack) -> None:
    """Enables gradient checkpointing with the run's options, until `stack` ends."""
    model = trainer.model
    stack.callback(model.gradient_checkpointing_disable)  # training enables it
    options = dict(trainer.args.gradient_checkpointing_kwargs or {})
    arguments = {}
    for name in ("every_n_layers", "offload"):
        if name in options:
            arguments[name] = options.pop(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **arguments)


def _keep_state(trainer: SFTTrainer, stack: ExitStack) -> None:
    """Restores random numbers and counts when `stack` ends."""
    stack.enter_context(torch.random.fork_rng(devices=[]))
    seen = trainer.state.num_input_tokens_seen
    stack.enter_context(replaced(trainer.state, num_input_tokens_seen=seen))
    stack.enter_context(replaced(trainer, _metrics=copy.deepcopy(trainer._metrics)))
    stack.enter_context(replaced(trainer.accelerator, gather_for_metrics=lambda value: value))


def _use_kernels_of_gpus(stack: ExitStack) -> None:
    """Has TRL's fused head allocate as with Triton, which writes into tiles of its products."""
    stack.enter_context(replaced(utils, _use_triton=lambda device: True))
    kernels = ("_forward_tile", "_backward_tile", "_addmm_fp32")
    tiles = dict.fromkeys(kernels, lambda *args, **kwargs: None)
    stack.enter_context(replaced(chunked_logprob, _use_triton=lambda device: False, **tiles))


class _Shape(Tensor):
    """A tensor of the CPU, for autograd and autocast, whose operations are run on one on meta."""

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

    Tensors that depend on the ids, labels, masks and positions of the batch alone are real, on the
    CPU: the control flow of models reads them, and as indices they decide shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts = Counter[str]()
        self._live = Counter[str]()
        self._highest = -1
        self._storages: dict[int, SimpleNamespace] = {}
        self._weights: dict[int, Tensor] = {}

    def weight(self, tensor: Tensor) -> Tensor:
        """The shape of a parameter or buffer, which is counted elsewhere."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._weights[meta.untyped_storage()._cdata] = meta
        shape: Tensor = _Shape(meta)
        if isinstance(tensor, nn.Parameter):
            with self:
                shape = nn.Parameter(shape, requires_grad=tensor.requires_grad)
            shape.__dict__.update(tensor.__dict__)  # where bitsandbytes keeps its constants
        return shape

    def move(self, tensor: Tensor, part: str) -> None:
        """Enters what a tensor takes under another part."""
        if entry := self._storages.get(_plain(tensor).untyped_storage()._cdata):
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
        self._count_results(result, COPIES if self._copies_weight(func, args) else ACTIVATIONS)
        self._measure(_bytes_inside(func, args))
        return result

    def _copies_weight(self, func: Any, args: Sequence[Any]) -> bool:
        """Returns whether an operation is autocast's copy of a weight."""
        if func is not aten._to_copy.default:
            return False
        return _plain(args[0]).untyped_storage()._cdata in self._weights

    def _count_results(self, result: Any, part: str) -> None:
        """Counts the storages of an operation's results."""
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(_plain(value).untyped_storage(), part)

    def _measure(self, inside: int) -> None:
        """Keeps the bytes by part if they are the most so far, `inside` a kernel included."""
        total = sum(self._live.values()) + inside
        if total > self._highest:
            self._highest = total
            self.parts = self._live + Counter({ACTIVATIONS: inside})

    def _count(self, storage: torch.UntypedStorage, part: str) -> None:
        def free(_: weakref.ref) -> None:
            entry = self._storages.pop(key)
            self._live[entry.part] -= entry.size

        key = storage._cdata
        size = storage.nbytes()
        if key not in self._storages and key not in self._weights:
            reference = weakref.ref(storage, free)
            self._storages[key] = SimpleNamespace(part=part, size=size, reference=reference)
            self._live[part] += size


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


def _bytes_inside(func: Any, args: Sequence[Any]) -> int:
    """Returns the bytes that a kernel takes inside: 4-bit products dequantize the weights there."""
    if func.name() != "bitsandbytes::gemm_4bit":
        return 0
    return args[0].element_size() * math.prod(args[2])


def _plain(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, _Shape) else tensor


def _positions(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices, with masks in the form of positions, whose number is known."""
    places: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool and not isinstance(index, _Shape)
        places += index.nonzero(as_tuple=True) if is_mask else [index]  # type: ignore[union-attr]
    return places
