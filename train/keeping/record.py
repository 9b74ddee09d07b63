# SPDX-License-Identifier: Apache-2.0
"""What a run records of itself: `training.json`."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from enum import Enum
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers.trainer_pt_utils import AcceleratorConfig

from ... import __version__
from ...assembly.processing import ARM_FIELDS, arm_of
from ...checkpoint.files import TRAINING_RECORD
from ...checkpoint.opening import read_record
from ...data.rows.checks import DataReport
from ..options import BOTH_STAGES, STAGES
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
