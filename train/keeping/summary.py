# SPDX-License-Identifier: Apache-2.0
"""What a run will train and take on disk, printed before its first step and kept in `training.json`."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import PeftModel
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from ...checkpoint.weights import check_space, free_space, module_of_file, shards_of, stored_tensors, unchanged_files
from ...data.rows.parse import DroppedRows
from ...data.rows.reports import DataReport, by_kind, counted, not_read
from ..memory import gib, parameter_count, static_bytes, tensor_bytes, titled_table
from ..modules.model import base_model, frozen_modules, module_of, trained_parameters
from ..options.arguments import NormAlignConfig, autocast_dtype
from ..shapes import OPTIMIZER
from .checkpoints import checkpoints_in


def summary(trainer: Any, report: DataReport, steps: int) -> dict[str, Any]:
    """The facts of a run as JSON: modules, data, batch, steps, precision."""
    args = trainer.args
    return {
        "modules": modules(trainer.model, trainer.learning_rates),
        "data": [{**source, "dropped": len(source["dropped"])} for source in asdict(report)["sources"]],
        "tokens_per_image": base_model(trainer.model).config.image_seq_length,
        "batch": {
            "rows": trainer.get_total_train_batch_size(args),
            "per_device": args.per_device_train_batch_size,
            "processes": args.world_size,
            "accumulation": args.gradient_accumulation_steps,
            "packed": args.packing,
        },
        "steps": steps,
        "warmup_steps": args.get_warmup_steps(steps),
        "autocast": autocast_dtype(args),
        "precision_because": args.precision_because,
    }


def modules(model: nn.Module, learning_rates: dict[str, float]) -> list[dict[str, Any]]:
    """Parameters of each module, how many are trained, their dtypes, and the learning rate.

    A 4-bit weight counts as the parameters that it stands for. PEFT's untrained copies do not count.
    """
    empty: dict[str, Any] = {"parameters": 0, "trained": 0, "learning_rate": 0.0}
    names = {"vision": "vision tower", "language": "language model"}
    rows = {key: {"module": names.get(key, key), **empty} for key in (*learning_rates, "adapters")}
    dtypes = {key: Counter[str]() for key in rows}
    for name, parameter in model.named_parameters():
        if ".original_module." not in name:
            key, count = "adapters" if ".lora_" in name else module_of(name), parameter_count(parameter)
            rows[key]["parameters"] += count
            packed = type(parameter).__name__ == "Params4bit"
            dtypes[key][parameter.quant_type if packed else str(parameter.dtype).removeprefix("torch.")] += count
            if parameter.requires_grad:
                rows[key]["trained"] += count
                rows[key]["learning_rate"] = learning_rates[module_of(name)]
    for key, counter in dtypes.items():
        rows[key]["dtypes"] = [dtype for dtype, _ in counter.most_common()]
    return [row for row in rows.values() if row["parameters"]]


def disk_use(model: nn.Module, args: NormAlignConfig, steps: int, weights_in: Sequence[Path]) -> dict[str, int]:
    """Bytes of a checkpoint, how many there are at a time at most, and the bytes of all of them with the result.

    Files of frozen modules are written once, or not at all if they are in the folders `weights_in`.
    """
    kind = AcceleratorState().distributed_type
    sharded = kind in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    optimizer = static_bytes(model, args)[OPTIMIZER] * (args.world_size if sharded else 1)
    trained = sum(tensor_bytes(parameter) for parameter in trained_parameters(model).values())
    if kind == DistributedType.DEEPSPEED or (sharded and isinstance(model, PeftModel)):
        optimizer += trained  # which is saved again with these states
    weights, once = trained, 0
    if not isinstance(model, PeftModel):
        whole = {  # ZeRO-3 leaves empty tensors behind, which know their shapes
            name: torch.empty(getattr(value, "ds_shape", value.shape), dtype=value.dtype, device="meta")
            for name, value in model.state_dict(keep_vars=True).items()
        }
        layout, frozen = stored_tensors(model, whole), frozen_modules(model)
        linked, files = unchanged_files(layout, frozen, weights_in), shards_of(layout)
        sizes = {file: sum(layout[name].nbytes for name in files[file]) for file in files.keys() - linked.keys()}
        once = sum(size for file, size in sizes.items() if module_of_file(files[file][0]) in frozen)
        weights = sum(sizes.values()) - once
    saves = {"no": 0, "epoch": ceil(args.num_train_epochs)}.get(args.save_strategy.value)
    if saves is None:
        every = args.save_steps if args.save_steps >= 1 else ceil(args.save_steps * steps)
        saves = ceil(steps / every)
    # The oldest is removed when the newest is written, and the best one stays.
    limit = (args.save_total_limit or saves) + 1 + (args.load_best_model_at_end and args.save_total_limit == 1)
    kept, checkpoint = min(saves, limit), weights + (0 if args.save_only_model else optimizer)
    return {"checkpoint": checkpoint, "checkpoints": kept, "total": once + kept * checkpoint + weights}


def check_disk(output_dir: str | os.PathLike, size: int) -> None:
    """Raises ValueError if what a run writes in all does not fit, beside what its earlier checkpoints take already."""
    files = (path.stat() for folder in checkpoints_in(output_dir) for path in folder.rglob("*"))
    size -= sum(file.st_size for file in files if file.st_nlink == 1)
    remedy = (
        "Make room, keep fewer checkpoints (--save_total_limit 1), write to another disk (--output_dir), or, if the "
        "run need not be resumed, save no states of the optimizer (--save_only_model)."
    )
    check_space(Path(output_dir), size, remedy)


def render(record: dict[str, Any], facts: dict[str, Any], output_dir: str | os.PathLike) -> Group:
    """Options, and what [`summary`] found, for `rich.console.Console.print`; 100 columns are enough."""
    options = {"stage": record["stage"], "arm": record["arm"], **record["options"]}
    modules, data, left_out = [], [], []
    for row in facts["modules"]:
        rate = f"{row['learning_rate']:g}" if row["trained"] else "frozen"
        counts = [f"{row['parameters']:,}", f"{row['trained']:,}"]
        modules.append([row["module"], *counts, " + ".join(row["dtypes"]), rate])
    totals = [sum(row[name] for row in facts["modules"]) for name in ("parameters", "trained")]
    modules.append(["all", *(f"{total:,}" for total in totals)])
    for source in facts["data"]:
        name, tokens = Path(source["source"]).name, "streamed"
        numbers = [source[name] for name in ("found", "bad", "too_long", "used", "images")]
        if source["longest"] is not None:
            tokens = f"{source['shortest']:,} to {source['longest']:,} ({source['median']:,.0f})"
        counts = ["" if number is None else f"{number:,}" for number in numbers]
        data.append([name, source["split"], *counts, tokens])
        files = {Path(file).name: rows for file, rows in source["files"].items()}
        lines = ({"files": counted(files)} if files else {}) | not_read(source["left_out"], source["changed"])
        left_out += [Text(f"{name}, {title}: {text}") for title, text in lines.items()]
    return Group(
        "Options",
        _pairs(options),
        titled_table("Modules", ["", "parameters", "trained", "dtype", "learning rate"], modules),
        titled_table("Data", ["", "", "rows", "bad", "too long", "used", "images", "tokens (median)"], data),
        *left_out,
        _pairs(_run(facts, Path(output_dir))),
    )


def render_dropped(dropped: DroppedRows) -> list[str]:
    """Lines with the number of dropped rows, and of each kind of reason; none if none was dropped."""
    rows = dropped.read()
    count = "1 row was" if len(rows) == 1 else f"{len(rows):,} rows were"
    return [f"{count} dropped, listed in {dropped.path}:", *by_kind(rows, 10)] if rows else []


def _run(facts: dict[str, Any], output_dir: Path) -> dict[str, str]:
    batch, disk = facts["batch"], facts["disk"]
    passes = f"{batch['processes']:,} process(es) x {batch['accumulation']:,} accumulation step(s)"
    divided = f"packed into {passes}" if batch["packed"] else f"= {batch['per_device']:,} per device x {passes}"
    checkpoints = f"{disk['checkpoints']:,} checkpoint(s) of {gib(disk['checkpoint'])} at a time"
    because = f" ({facts['precision_because']})" if facts["precision_because"] else ""
    return {
        "Tokens per image": f"{facts['tokens_per_image']:,}",
        "Batch": f"{batch['rows']:,} rows {divided}",
        "Steps": f"{facts['steps']:,}, of which {facts['warmup_steps']:,} of warm-up",
        "Autocast": f"{facts['autocast'] or 'none'}{because}",
        "Disk": f"{gib(disk['total'])} ({checkpoints}); {gib(free_space(output_dir))} are free",
    }


def _pairs(values: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(name, Text(str(value)))
    return table
