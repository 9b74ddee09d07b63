# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, gradients and optimizer states."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from .model import trained_parameters
from .sharding import zero_stage


PARAMETERS = "weights"
ADAPTERS = "adapters"
COPIES = "half-precision copies of weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
BATCHES = "batches"
ACTIVATIONS = "activations"
MEMORY_PARTS = (PARAMETERS, ADAPTERS, COPIES, GRADIENTS, OPTIMIZER, BATCHES, ACTIVATIONS)
"""What takes memory in a step. Copies are autocast's that live at its peak."""

STATES = {"lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 1, "lars": 1, "ademamix": 3}
"""States of a parameter in bitsandbytes' optimizers, by a part of their names. Others have two."""

OptimizerClass: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, Any]]


def static_bytes(
    model: nn.Module, args: TrainingArguments, optimizer: OptimizerClass | None = None
) -> dict[str, int]:
    """Returns the bytes of weights, gradients and optimizer states on each device, by part.

    FSDP and ZeRO-3 divide all by the number of processes, ZeRO-2 gradients and states, ZeRO-1 the
    states. DDP keeps a copy of the gradients in buckets. ZeRO-1 and ZeRO-2 keep the trained weights
    in float32 once more. Paged optimizers' states count, although they may be in the CPU's memory.

    Args:
        model: The model to train.
        args: The options of the run.
        optimizer: A class and its arguments, in place of `args.optim`.
    """
    bytes_by_part = dict.fromkeys((PARAMETERS, ADAPTERS, GRADIENTS, OPTIMIZER), 0)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        part = ADAPTERS if ".lora_" in tensor_name else PARAMETERS
        bytes_by_part[part] += tensor_bytes(tensor)
    trained = list(trained_parameters(model).values())
    for parameter in trained:
        bytes_by_part[GRADIENTS] += tensor_bytes(parameter)
        if zero_stage() in (1, 2):
            bytes_by_part[OPTIMIZER] += 4 * parameter_count(parameter)
    bytes_by_part[OPTIMIZER] += optimizer_bytes(trained, args, optimizer, embeddings)
    shares = memory_shares(args)
    return {part: int(size * shares[part]) for part, size in bytes_by_part.items()}


def memory_shares(args: TrainingArguments) -> dict[str, float]:
    """Returns the share of each part that a process has."""
    first_stages = {PARAMETERS: 3, ADAPTERS: 3, GRADIENTS: 2, OPTIMIZER: 1}
    shares = dict.fromkeys(first_stages, 1.0)
    for part, stage in first_stages.items():
        if zero_stage() >= stage:
            shares[part] = 1 / args.world_size
    distribution = AcceleratorState().distributed_type
    if distribution in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        shares[GRADIENTS] = 2.0
    return shares


def optimizer_bytes(
    trained: Sequence[Tensor],
    args: TrainingArguments,
    optimizer: OptimizerClass | None,
    embeddings: Collection[Tensor],
) -> int:
    """Returns the bytes of the states that an optimizer keeps of the parameters `trained`.

    bitsandbytes' are counted by its rules. Any other optimizer takes a step on tensors without
    values. If it cannot, it counts as AdamW, with two states of each parameter's size.
    """
    optimizer_name = args.optim.value
    if optimizer is not None:
        optimizer_name = optimizer[0].__name__.lower()
    if "8bit" in optimizer_name or "32bit" in optimizer_name:
        return sum(
            _bitsandbytes_state(optimizer_name, tensor, tensor in embeddings) for tensor in trained
        )
    state_bytes = None
    with suppress(Exception):  # an optimizer may need a model, values, or a GPU
        cls, arguments = optimizer or Trainer.get_optimizer_cls_and_kwargs(args)
        state_bytes = _states_of_step(cls, arguments, trained)
    if state_bytes is None:
        return sum(2 * parameter_count(tensor) * tensor.element_size() for tensor in trained)
    return state_bytes


def _states_of_step(
    cls: type[torch.optim.Optimizer], arguments: dict[str, Any], trained: Sequence[Tensor]
) -> int | None:
    """Returns the bytes of states after a step on meta, without numbers such as counts of steps.

    One parameter takes the step for all that have its shape and type. A model has hundreds of them,
    and the state of each is as large. Optimizers that read values fail in the step. Then the states
    that exist so far are counted, or None is returned if a parameter has none.
    """
    counts_of_kinds = Counter(
        (getattr(tensor, "ds_shape", tensor.shape), tensor.dtype) for tensor in trained
    )
    parameters = []
    for shape, dtype in counts_of_kinds:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        parameters.append(parameter)
    on_meta = {name: value for name, value in arguments.items() if name not in ("fused", "foreach")}
    optimizer = cls(parameters, **on_meta)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        if len(optimizer.state) < len(parameters):
            return None
    state_bytes = 0
    for parameter, count in zip(parameters, counts_of_kinds.values(), strict=True):
        for state in optimizer.state[parameter].values():
            if isinstance(state, Tensor) and state.dim():
                state_bytes += count * state.nbytes
    return state_bytes


def _bitsandbytes_state(name: str, parameter: Tensor, embedding: bool) -> int:
    """Returns the bytes of the states that an optimizer of bitsandbytes keeps of a parameter."""
    parameters = parameter_count(parameter)
    states = 2
    for optimizer_kind, number in STATES.items():
        if optimizer_kind in name:
            states = number
            break
    if "8bit" in name and parameters >= 4096 and not embedding:  # small tensors stay in 32 bits
        return states * (parameters + 4 * math.ceil(parameters / 256))
    return states * 4 * parameters


def parameter_count(parameter: Tensor) -> int:
    """Returns how many parameters a tensor stands for. It may be packed or divided."""
    if type(parameter).__name__ == "Params4bit":
        return math.prod(parameter.quant_state.shape)
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty tensor behind


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor and of its quantization, undivided if ZeRO-3 divides it."""
    whole_bytes = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
    if type(tensor).__name__ == "Params4bit":
        constants = tensor.quant_state.as_dict().values()
        whole_bytes += sum(value.nbytes for value in constants if isinstance(value, Tensor))
    elif type(tensor).__name__ == "Int8Params":
        whole_bytes += tensor.SCB.nbytes
    return whole_bytes
