# SPDX-License-Identifier: Apache-2.0
"""The disk that a run takes."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import PeftModel
from torch import nn

from ...checkpoint import weights as stored
from ..modules.model import frozen_modules, trained_parameters
from ..modules.sizes import OPTIMIZER, OptimizerClass, static_bytes, tensor_bytes
from ..settings import RunConfig
from .checkpoints import checkpoints_in


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
    trained_bytes = sum(tensor_bytes(tensor) for tensor in trained_parameters(model).values())
    has_adapters = isinstance(model, PeftModel)
    weight_bytes = trained_bytes
    bytes_written_once = 0
    if not has_adapters:
        weight_bytes, bytes_written_once = _weights_bytes(model, weights_in)
    checkpoint_bytes = weight_bytes
    if not args.save_only_model:
        distribution = AcceleratorState().distributed_type
        state_bytes = static_bytes(model, args, optimizer_class)[OPTIMIZER]
        if distribution in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            state_bytes *= args.world_size
            if has_adapters or distribution == DistributedType.DEEPSPEED:
                state_bytes += trained_bytes  # these states contain trained weights too
        checkpoint_bytes += state_bytes
    kept_count = _checkpoints_kept(args, steps)
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


def _checkpoints_kept(args: RunConfig, steps: int) -> int:
    """Returns how many checkpoints of a run are on the disk at a time, at most."""
    strategy = args.save_strategy.value
    if strategy == "no":
        return 0
    if strategy == "epoch":
        saves = ceil(args.num_train_epochs)
    else:
        save_steps = args.save_steps
        if save_steps < 1:
            save_steps = ceil(save_steps * steps)
        saves = ceil(steps / save_steps)
    # The oldest is removed when the newest is written, and the best one stays.
    limit = (args.save_total_limit or saves) + 1
    if args.load_best_model_at_end and args.save_total_limit == 1:
        limit += 1
    return min(saves, limit)


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
