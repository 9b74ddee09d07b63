# SPDX-License-Identifier: Apache-2.0
"""Bytes that a run takes: weights, gradients and optimizer states, and checkpoints on the disk."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import PeftModel
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from ...checkpoint import weights as stored
from ..keeping.checkpoints import checkpoints_in
from ..settings import RunConfig
from .model import frozen_modules, trained_parameters
from .sharding import sharding, sharding_stage


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

OptimizerClass = tuple[type[torch.optim.Optimizer], dict[str, Any]]


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
    factors = memory_factors(args)
    bytes_by_part = dict.fromkeys(factors, 0)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        part = ADAPTERS if ".lora_" in tensor_name else PARAMETERS
        bytes_by_part[part] += tensor_bytes(tensor)
    trained = list(trained_parameters(model).values())
    for parameter in trained:
        bytes_by_part[GRADIENTS] += tensor_bytes(parameter)
        if sharding_stage() in (1, 2):
            bytes_by_part[OPTIMIZER] += 4 * parameter_count(parameter)
    bytes_by_part[OPTIMIZER] += optimizer_bytes(trained, args, optimizer, embeddings)
    return {part: int(size * factors[part]) for part, size in bytes_by_part.items()}


def memory_factors(args: TrainingArguments) -> dict[str, float]:
    """Returns the share of each part that a process has."""
    first_stages = {PARAMETERS: 3, ADAPTERS: 3, GRADIENTS: 2, OPTIMIZER: 1}
    factors = dict.fromkeys(first_stages, 1.0)
    for part, stage in first_stages.items():
        if sharding_stage() >= stage:
            factors[part] = 1 / args.world_size
    if AcceleratorState().distributed_type.startswith("MULTI_"):
        factors[GRADIENTS] = 2.0  # DDP has a copy of them in buckets
    return factors


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
        states = next((number for kind, number in STATES.items() if kind in optimizer_name), 2)
        state_bytes = 0
        for tensor in trained:
            count = parameter_count(tensor)
            if "8bit" in optimizer_name and count >= 4096 and tensor not in embeddings:
                state_bytes += states * (count + 4 * math.ceil(count / 256))
            else:  # small tensors stay in 32 bits
                state_bytes += states * 4 * count
        return state_bytes
    with suppress(Exception):  # an optimizer may need a model, values, or a GPU
        cls, arguments = optimizer or Trainer.get_optimizer_cls_and_kwargs(args)
        return _states_of_step(cls, arguments, trained)
    return sum(2 * parameter_count(tensor) * tensor.element_size() for tensor in trained)


def _states_of_step(
    cls: type[torch.optim.Optimizer], arguments: dict[str, Any], trained: Sequence[Tensor]
) -> int:
    """Returns the bytes of states after a step on meta, without numbers such as counts of steps.

    One parameter takes the step for all that have its shape and type. A model has hundreds of them,
    and the state of each is as large. Optimizers that read values fail in the step. Then the states
    that exist so far are counted, or the error is raised if a parameter has none.
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
            raise
    state_bytes = 0
    for parameter, count in zip(parameters, counts_of_kinds.values(), strict=True):
        for state in optimizer.state[parameter].values():
            if isinstance(state, Tensor) and state.dim():
                state_bytes += count * state.nbytes
    return state_bytes


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


def disk_use(
    model: nn.Module,
    args: RunConfig,
    steps: int,
    weights_in: Sequence[Path],
    optimizer_class: OptimizerClass | None = None,
) -> dict[str, int]:
    """Returns the bytes of a checkpoint, how many are kept at a time, and the run's bytes in all.

    Args:
        model: The model to train.
        args: The options of the run.
        steps: Its optimizer steps.
        weights_in: Folders with files of frozen modules. These files are linked, not written.
        optimizer_class: The optimizer's class and arguments, in place of `args.optim`.
    """
    trained_bytes = sum(map(tensor_bytes, trained_parameters(model).values()))
    has_adapters = isinstance(model, PeftModel)
    weight_bytes = trained_bytes
    bytes_written_once = 0
    if not has_adapters:
        weight_bytes, bytes_written_once = _weights_bytes(model, weights_in)
    checkpoint_bytes = weight_bytes
    if not args.save_only_model:
        state_bytes = static_bytes(model, args, optimizer_class)[OPTIMIZER]
        if sharding() != "none":
            state_bytes *= args.world_size
            if has_adapters or sharding() == "DeepSpeed":
                state_bytes += trained_bytes  # these states contain trained weights too
        checkpoint_bytes += state_bytes
    strategy = args.save_strategy
    if strategy == "no":
        saves = 0
    elif strategy == "epoch":
        saves = math.ceil(args.num_train_epochs)
    else:
        save_steps = args.save_steps
        if save_steps < 1:
            save_steps = math.ceil(save_steps * steps)
        saves = math.ceil(steps / save_steps)
    # The oldest is removed when the newest is written, and the best one stays.
    limit = (args.save_total_limit or saves) + 1
    if args.load_best_model_at_end and args.save_total_limit == 1:
        limit += 1
    kept_count = min(saves, limit)
    total_bytes = bytes_written_once + kept_count * checkpoint_bytes + weight_bytes
    return {"checkpoint": checkpoint_bytes, "checkpoints": kept_count, "total": total_bytes}


def _weights_bytes(model: nn.Module, weights_in: Sequence[Path]) -> tuple[int, int]:
    """Returns two numbers of bytes: weights that each checkpoint writes, and weights written once.

    Files of frozen modules are written once, or not at all if the folders `weights_in` hold them.
    """
    whole_tensors = {}  # ZeRO-3 leaves empty tensors behind. They know their shapes.
    for tensor_name, tensor in model.state_dict(keep_vars=True).items():
        shape = getattr(tensor, "ds_shape", tensor.shape)
        whole_tensors[tensor_name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    layout = stored.stored_tensors(model, whole_tensors)
    frozen = frozen_modules(model)
    linked = stored.reusable_files(layout, frozen, weights_in)
    in_each_checkpoint = 0
    written_once = 0
    for file, tensor_names in stored.shards_of(layout).items():
        if file in linked:
            continue
        file_bytes = sum(layout[tensor_name].nbytes for tensor_name in tensor_names)
        if stored.module_of_tensor(tensor_names[0]) in frozen:
            written_once += file_bytes
        else:
            in_each_checkpoint += file_bytes
    return in_each_checkpoint, written_once


def check_disk(output_dir: Path, size: int) -> None:
    """Raises ValueError if a run needs more than what is free and its earlier checkpoints take."""
    for folder in checkpoints_in(output_dir):
        for path in folder.rglob("*"):
            file_status = path.stat()
            if file_status.st_nlink == 1:
                size -= file_status.st_size
    remedy = (
        "Make room, keep fewer checkpoints (--save_total_limit 1), write elsewhere (--output_dir), "
        "or, if the run need not be resumed, save no optimizer states (--save_only_model)."
    )
    stored.check_space(output_dir, size, remedy)
