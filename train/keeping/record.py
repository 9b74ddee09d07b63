# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself: `training.json`, and the summary printed before its first step."""

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from enum import Enum
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution, version
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers.trainer_pt_utils import AcceleratorConfig

from ... import __version__
from ...assembly.processing import ARM_FIELDS, arm_of
from ...checkpoint import weights as stored
from ...checkpoint.files import TRAINING_RECORD
from ...checkpoint.opening import read_record
from ...data.rows.checks import DataReport, by_kind, counted, not_read
from ...data.rows.parse import DroppedRows
from ..modules.model import base_model, frozen_modules, module_of, trained_parameters
from ..modules.sizes import OPTIMIZER, OptimizerClass, parameter_count, static_bytes, tensor_bytes
from ..options import BOTH_STAGES, STAGES
from ..settings import RunConfig, autocast_dtype
from .checkpoints import checkpoints_in
from .same_run import OF_ACCELERATOR


if TYPE_CHECKING:  # both import this file
    from ..loading import LoadedModel
    from ..prepare import Plan


LEFT_OUT = {
    *("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "hub_token", "do_eval"),
    *("push_to_hub_token", "disable_tqdm", "logging_nan_inf_filter", "dataloader_pin_memory"),
    *("use_cpu", "learning_rate", "revision"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),  # since transformers 5.24
}
"""Options that are secret, about output, derived, or recorded under another key."""


def training_record(
    plan: "Plan", loaded: "LoadedModel", others: Sequence[Any] = ()
) -> dict[str, Any]:
    """Returns the resolved recipe as JSON.

    It has the options that differ from their default, and all that stages set. They are the plan's,
    as loading settled them, and those of `others`, further dataclasses of options.

    Local paths are cut to their last part, dropped rows listed by number. All processes must call
    this together. The trainer adds facts of [`summary`] as `run`; at saves `steps_done`, `seconds`.
    """
    model = loaded.model
    args = loaded.settings
    optimizer = plan.optimizer
    adapters = plan.model.adapters
    named = {"model_name_or_path": model.name_or_path or None, **(args.model_init_kwargs or {})}
    options = {name: value for name, value in _plain(named).items() if value is not None}
    for more in others:
        options |= _changed(more, set())
    options |= _changed(args, {*BOTH_STAGES, *STAGES["align"], *STAGES["tune"], "max_length"})
    if of_accelerator := _changes_of_accelerator(args.accelerator_config):
        options["accelerator_config"] = of_accelerator
    quantization = getattr(model.config, "quantization_config", None)
    libraries = ("torch", "transformers", "trl", "peft", "accelerate")
    return {
        "stage": args.stage,
        "arm": arm_of(model.config),
        "config_changes": {name: getattr(model.config, name) for name in ARM_FIELDS},
        "learning_rates": plan.learning_rates,
        "options": {key: value for key, value in options.items() if key not in LEFT_OUT},
        "processes": args.world_size,
        "quantization": None if quantization is None else json.loads(quantization.to_json_string()),
        "text_embedding_norm": model.config.text_embedding_norm,
        "model_revision": loaded.commit,
        "data": data_record(plan.data.report),
        "optimizer": None if optimizer is None else _named(optimizer),
        "adapters": None if adapters is None else _changes_of_adapters(adapters),
        "hardware": hardware(args.device),
        "versions": {name: version(name) for name in libraries} | {"normalign_llava": __version__},
        "commit": code_commit(),
        "before": read_record(
            model.name_or_path, TRAINING_RECORD, loaded.commit
        ),  # an earlier training's
        "seconds": 0.0,
    }


def data_record(report: DataReport) -> list[dict[str, Any]]:
    """What was read of each source as JSON, dropped rows by number."""
    read = [vars(data) | {"dropped": [row.row for row in data.dropped]} for data in report.sources]
    return _plain(read)


def code_commit() -> str | None:
    """The git commit of this package's checkout, "-dirty" if changed, or of what pip installed."""
    root = Path(__file__).resolve().parents[2]
    git = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    words = [*git, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.strip()
    with suppress(PackageNotFoundError, ValueError):  # as pip records it (PEP 610)
        origin = json.loads(distribution("normalign-llava").read_text("direct_url.json") or "{}")
        return origin.get("vcs_info", {}).get("commit_id")
    return None


def hardware(device: torch.device) -> dict[str, Any]:
    """The `devices` of all processes, which must call it together, their `count`, the `machine`."""
    accelerator, name = device.type in ("cuda", "xpu"), platform.machine()
    with suppress(OSError, StopIteration):  # as on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    if accelerator:
        name = torch.get_device_module(device).get_device_name(device)
    seen = {*gather_object([(platform.node(), device.index if accelerator else None, name)])}
    machine = f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores"
    return {"devices": sorted({name for *_, name in seen}), "count": len(seen), "machine": machine}


def _changed(options: Any, always: set[str]) -> dict[str, Any]:
    """Fields that differ from their default, and those of `always`."""
    changed = {}
    for field in fields(options):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        name, value = field.name, _plain(getattr(options, field.name))
        is_emptied = getattr(options, name) is None and default not in (None, [], {}, MISSING)
        is_set = value not in (None, [], {}) and (value != default or name in always)
        if field.init and (is_emptied or is_set):
            changed[name] = value
    return changed


def _changes_of_accelerator(config: AcceleratorConfig) -> dict[str, Any]:
    """What of an `accelerator_config` decides about rows and steps, and is not the default."""
    default = AcceleratorConfig()
    changes = {}
    for name, is_compared in OF_ACCELERATOR.items():
        value = getattr(config, name)
        if is_compared and value != getattr(default, name):
            changes[name] = _plain(value)
    return changes


def digest_of_lengths(rows: Dataset | IterableDataset | None) -> str | None:
    """A hash of the tokens of each row in order, by which other or reordered rows are known."""
    if not isinstance(rows, Dataset) or "length" not in rows.column_names:
        return None
    lengths = np.asarray(rows.with_format(None)["length"][:], dtype="<i8")
    return sha256(lengths.tobytes()).hexdigest()[:16]


def _named(optimizer: tuple[type, dict[str, Any]]) -> dict[str, Any]:
    cls, arguments = optimizer
    return {"class": f"{cls.__module__}.{cls.__qualname__}", **_plain(arguments)}


def _changes_of_adapters(config: LoraConfig) -> dict[str, Any]:
    """What of adapters is not the default, without what names the model and versions."""
    default = LoraConfig()
    named = {"base_model_name_or_path", "revision", "peft_version", "runtime_config"}
    changes = {}
    for name, value in vars(config).items():
        if name not in named and value != getattr(default, name, None):
            changes[name] = _plain(value)
    return changes


def _plain(value: Any) -> Any:
    """As JSON, with None for other objects."""
    if isinstance(value, set):
        return sorted(_plain(entry) for entry in value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        path, colon, split = (value, "", "") if os.path.exists(value) else value.partition(":")
        if os.path.exists(path):
            return Path(path).name + colon + split  # no local path travels with a checkpoint
    return value if isinstance(value, str | int | float) else None


def summary(trainer: Any, report: DataReport, steps: int) -> dict[str, Any]:
    """The facts of a run as JSON: modules, data, batch, steps, precision."""
    args = trainer.args
    return {
        "modules": modules(trainer.model, trainer.learning_rates),
        "data": [{**data, "dropped": len(data["dropped"])} for data in asdict(report)["sources"]],
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
        "precision_because": trainer.precision.because,
    }


def modules(model: nn.Module, learning_rates: dict[str, float]) -> list[dict[str, Any]]:
    """Parameters of each module, how many are trained, their dtypes, and the learning rate."""
    empty: dict[str, Any] = {"parameters": 0, "trained": 0, "learning_rate": 0.0}
    names = {"vision": "vision tower", "language": "language model"}
    rows = {key: {"module": names.get(key, key), **empty} for key in (*learning_rates, "adapters")}
    dtypes = {key: Counter[str]() for key in rows}
    for name, parameter in model.named_parameters():
        if ".original_module." not in name:  # PEFT's untrained copies
            module, count = module_of(name), parameter_count(parameter)
            key = "adapters" if ".lora_" in name else module
            rows[key]["parameters"] += count
            packed = type(parameter).__name__ == "Params4bit"
            dtype = parameter.quant_type if packed else str(parameter.dtype).removeprefix("torch.")
            dtypes[key][dtype] += count
            if parameter.requires_grad:
                rows[key]["trained"] += count
                rows[key]["learning_rate"] = learning_rates[module]
    for key, counter in dtypes.items():
        rows[key]["dtypes"] = [dtype for dtype, _ in counter.most_common()]
    return [row for row in rows.values() if row["parameters"]]


def disk_use(
    model: nn.Module,
    args: RunConfig,
    steps: int,
    weights_in: Sequence[Path],
    optimizer_class: OptimizerClass | None = None,
) -> dict[str, int]:
    """Bytes of a checkpoint, how many are kept at a time, and bytes of these and the result."""
    kind = AcceleratorState().distributed_type
    sharded = kind in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    optimizer = static_bytes(model, args, optimizer_class)[OPTIMIZER]
    optimizer *= args.world_size if sharded else 1
    trained = sum(map(tensor_bytes, trained_parameters(model).values()))
    if kind == DistributedType.DEEPSPEED or (sharded and isinstance(model, PeftModel)):
        optimizer += trained  # which is saved again with these states
    weights, once = trained, 0
    if not isinstance(model, PeftModel):
        whole = {  # ZeRO-3 leaves empty tensors behind, which know their shapes
            name: torch.empty(getattr(own, "ds_shape", own.shape), dtype=own.dtype, device="meta")
            for name, own in model.state_dict(keep_vars=True).items()
        }
        layout, frozen = stored.stored_tensors(model, whole), frozen_modules(model)
        # Files of frozen modules are written once, or not at all if these folders hold them.
        linked = stored.unchanged_files(layout, frozen, weights_in)
        shards = stored.shards_of(layout).items()
        new = {file: names for file, names in shards if file not in linked}
        sizes = {file: sum(layout[name].nbytes for name in names) for file, names in new.items()}
        once = sum(sizes[file] for file in new if stored.module_of_file(new[file][0]) in frozen)
        weights = sum(sizes.values()) - once
    saves = {"no": 0, "epoch": ceil(args.num_train_epochs)}.get(args.save_strategy.value)
    if saves is None:
        every = args.save_steps if args.save_steps >= 1 else ceil(args.save_steps * steps)
        saves = ceil(steps / every)
    # The oldest is removed when the newest is written, and the best one stays.
    limit = (args.save_total_limit or saves) + 1
    limit += args.load_best_model_at_end and args.save_total_limit == 1
    kept, size = min(saves, limit), weights + (0 if args.save_only_model else optimizer)
    return {"checkpoint": size, "checkpoints": kept, "total": once + kept * size + weights}


def check_disk(output_dir: str | os.PathLike, size: int) -> None:
    """Raises ValueError if a run needs more than what is free and its earlier checkpoints take."""
    files = (path.stat() for folder in checkpoints_in(output_dir) for path in folder.rglob("*"))
    size -= sum(file.st_size for file in files if file.st_nlink == 1)
    remedy = (
        "Make room, keep fewer checkpoints (--save_total_limit 1), write elsewhere (--output_dir), "
        "or, if the run need not be resumed, save no optimizer states (--save_only_model)."
    )
    stored.check_space(Path(output_dir), size, remedy)


def render(record: dict[str, Any], facts: dict[str, Any], output_dir: str | os.PathLike) -> Group:
    """Options and the facts of [`summary`] for `rich.console.Console.print`, in 100 columns."""
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
        lines = {"files": counted(files)} if files else {}
        lines |= not_read(source["left_out"], source["changed"])
        left_out += [Text(f"{name}, {title}: {text}") for title, text in lines.items()]
    columns = ["", "", "rows", "bad", "too long", "used", "images", "tokens (median)"]
    return Group(
        "Options",
        _pairs({"stage": record["stage"], "arm": record["arm"], **record["options"]}),
        titled_table("Modules", ["", "parameters", "trained", "dtype", "learning rate"], modules),
        titled_table("Data", columns, data),
        *left_out,
        _pairs(_run(facts, Path(output_dir))),
    )


def _run(facts: dict[str, Any], output_dir: Path) -> dict[str, str]:
    batch, disk = facts["batch"], facts["disk"]
    passes = f"{batch['processes']:,} process(es) x {batch['accumulation']:,} accumulation step(s)"
    divided = "packed into" if batch["packed"] else f"= {batch['per_device']:,} per device x"
    checkpoints = f"{disk['checkpoints']:,} checkpoint(s) of {gib(disk['checkpoint'])} at a time"
    because = f" ({facts['precision_because']})" if facts["precision_because"] else ""
    free = gib(stored.free_space(output_dir))
    return {
        "Tokens per image": f"{facts['tokens_per_image']:,}",
        "Batch": f"{batch['rows']:,} rows {divided} {passes}",
        "Steps": f"{facts['steps']:,}, of which {facts['warmup_steps']:,} of warm-up",
        "Autocast": f"{facts['autocast'] or 'none'}{because}",
        "Disk": f"{gib(disk['total'])} ({checkpoints}); {free} are free",
    }


def _pairs(values: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(name, Text(str(value)))
    return table


def titled_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for `rich.console.Console.print`: a first column of words, the others of numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def gib(size: int) -> str:
    """Bytes, to be read."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"


def render_dropped(dropped: DroppedRows) -> list[str]:
    """How many rows were dropped, and how many for each kind of reason; empty if none was."""
    rows = dropped.read()
    count = "1 row was" if len(rows) == 1 else f"{len(rows):,} rows were"
    return [f"{count} dropped, listed in {dropped.path}:", *by_kind(rows, 10)] if rows else []
