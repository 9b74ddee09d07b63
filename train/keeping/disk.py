# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a run takes on disk, counted before its first step."""

import os
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import PeftModel
from torch import nn

from ...checkpoint.weights import check_space, module_of_file, shards_of, size_of, stored_tensors, unchanged_files
from ..memory import static_bytes
from ..modules.model import frozen_modules
from ..options.arguments import NormAlignConfig
from ..shapes import OPTIMIZER
from .checkpoints import checkpoints_in


def disk_use(model: nn.Module, args: NormAlignConfig, steps: int, weights_in: Sequence[Path]) -> dict[str, int]:
    """Bytes of a checkpoint, how many there are at a time at most, and the bytes of all of them with the result.

    Files of frozen modules are written once, or not at all if they are in the folders `weights_in`.
    """
    sharded = AcceleratorState().distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    optimizer = static_bytes(model, args)[OPTIMIZER] * (args.world_size if sharded else 1)
    once = 0
    if isinstance(model, PeftModel):
        weights = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    else:
        layout, frozen = stored_tensors(model), frozen_modules(model)
        found, files = unchanged_files(layout, frozen, weights_in), shards_of(layout)
        sizes = {name: sum(layout[each].nbytes for each in files[name]) for name in files.keys() - found.keys()}
        once = sum(size for name, size in sizes.items() if module_of_file(files[name][0]) in frozen)
        weights = sum(sizes.values()) - once
        optimizer += size_of(layout) if sharded else 0  # which is saved again with these states
    every = args.save_steps if args.save_steps >= 1 else ceil(args.save_steps * steps)
    saves = {"no": 0, "epoch": ceil(args.num_train_epochs)}.get(args.save_strategy.value, ceil(steps / every))
    # The oldest is removed when the newest is written, and the best one stays.
    limit = (args.save_total_limit or saves) + 1 + (args.load_best_model_at_end and args.save_total_limit == 1)
    kept, checkpoint = min(saves, limit), weights + (0 if args.save_only_model else optimizer)
    return {"checkpoint": checkpoint, "checkpoints": kept, "total": once + kept * checkpoint + weights}


def check_disk(output_dir: str | os.PathLike, size: int) -> None:
    """Raises ValueError if what a run writes in all does not fit, beside what its earlier checkpoints take already."""
    found = (path.stat() for folder in checkpoints_in(output_dir) for path in folder.rglob("*"))
    size -= sum(each.st_size for each in found if each.st_nlink == 1)
    remedy = (
        "Make room, keep fewer checkpoints (--save_total_limit 1), write to another disk (--output_dir), or, if the "
        "run need not be resumed, save no states of the optimizer (--save_only_model)."
    )
    check_space(Path(output_dir), size, remedy)
