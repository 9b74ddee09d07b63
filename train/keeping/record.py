# SPDX-License-Identifier: Apache-2.0
"""What a run leaves with its weights: `training.json`, the model card, the result on the Hub."""

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
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from ... import __version__
from ...assembly.arms import ARM_FIELDS, arm_of
from ...checkpoint.names import TRAINING_RECORD
from ...checkpoint.provenance import read_record
from ...data.rows.reports import DataReport
from ..options.arguments import BOTH_STAGES, STAGES, NormAlignConfig


LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")

MAY_CHANGE = (
    *("save_", "logging_", "log_", "eval_", "report_to", "probe_", "max_steps", "num_train_epochs", "hub_"),
    *("push_to_hub", "dataloader_", "test_split", "dataset_test", "model_name", "dataset_name", "image_folder"),
    *("learning_rate", "bad_steps", "bad_rows", "check_images", "dataset_num_proc", "dry_run", "device_memory"),
)
"""Prefixes of options that may change when a run is resumed. Data are compared by their reports, learning rates by
module."""

LEFT_OUT = {
    *("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "hub_token", "push_to_hub_token"),
    *("disable_tqdm", "do_eval", "logging_nan_inf_filter", "dataloader_pin_memory", "use_cpu", "learning_rate"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),  # since transformers 5.24
}
"""Options that are secret, about output, derived, or recorded under another key."""


def training_record(
    model: PreTrainedModel,
    commit: str | None,
    args: NormAlignConfig,
    learning_rates: dict[str, float],
    report: DataReport,
    others: Sequence[Any] = (),
) -> dict[str, Any]:
    """The resolved recipe as JSON: options that differ from their default, and all that stages set.

    Local paths are cut to their last part. Dropped rows are listed by number. All processes must call
    this together. The trainer adds `run`, the facts of [`summary`], and at saves `steps_done`, `seconds`.
    """
    loaded = {"model_name_or_path": model.name_or_path or None, **(args.model_init_kwargs or {}), "revision": None}
    options = {name: value for name, value in _plain(loaded).items() if value is not None}
    for more in others:
        options |= _changed(more, set())
    options |= _changed(args, {*BOTH_STAGES, *STAGES["align"], *STAGES["tune"], "max_length"})
    quantization = getattr(model.config, "quantization_config", None)
    return {
        "stage": args.stage,
        "arm": arm_of(model.config),
        "config_changes": {name: getattr(model.config, name) for name in ARM_FIELDS},
        "learning_rates": learning_rates,
        "options": {key: value for key, value in options.items() if key not in LEFT_OUT},
        "processes": args.world_size,
        "quantization": None if quantization is None else json.loads(quantization.to_json_string()),
        "text_embedding_norm": model.config.text_embedding_norm,
        "model_revision": commit,
        "data": [_plain(vars(data)) | {"dropped": [row.row for row in data.dropped]} for data in report.sources],
        "hardware": hardware(args.device),
        "versions": {name: version(name) for name in LIBRARIES} | {"normalign_llava": __version__},
        "commit": code_commit(),
        "before": read_record(model.name_or_path, TRAINING_RECORD, commit),  # of the training before this one
        "seconds": 0.0,
    }


def code_commit() -> str | None:
    """The git commit of this package's checkout, "-dirty" if files are changed, or what pip installed."""
    root = Path(__file__).resolve().parents[2]
    git = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    words = [*git, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    with suppress(PackageNotFoundError, ValueError):  # as pip recorded where it installed this package from (PEP 610)
        origin = json.loads(distribution("normalign-llava").read_text("direct_url.json") or "{}")
        return origin.get("vcs_info", {}).get("commit_id")
    return None


def hardware(device: torch.device) -> dict[str, Any]:
    """The `devices` of all processes, which must call this together, their `count`, and the `machine`."""
    accelerator, name = device.type in ("cuda", "xpu"), platform.machine()
    with suppress(OSError, StopIteration):  # as on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    if accelerator:
        name = torch.get_device_module(device).get_device_name(device)
    seen = gather_object([(platform.node(), device.index if accelerator else None, name)])
    machine = f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores"
    return {"devices": sorted({name for *_, name in seen}), "count": len(set(seen)), "machine": machine}


def check_same_run(before: dict[str, Any], record: dict[str, Any], checkpoint: Path) -> None:
    """Raises ValueError unless two records are of one run, whose optimizer would be taken over."""

    def fixed(record: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in record["options"].items() if not name.startswith(MAY_CHANGE)}
        kept |= {name: record.get(name) for name in ("stage", "arm", "learning_rates", "quantization")}
        base = json.dumps([record.get("build"), record.get("before")], sort_keys=True)
        counts = ("source", "used", "images", "shortest", "median", "longest")
        data = [[row.get(name) for name in counts] for row in record["data"] if row["split"] == "train"]
        return kept | {"data": data, "the model to train, by its records": sha256(base.encode()).hexdigest()[:8]}

    old, new = fixed(before), fixed(record)
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if names:
        changes = "; ".join(f"{name} (was {old.get(name)}, is {new.get(name)})" for name in names)
        raise ValueError(
            f"{checkpoint} is of a run that differs in {changes}. Resume with the same, or change --output_dir."
        )


def _changed(options: Any, always: set[str]) -> dict[str, Any]:
    """Fields that differ from their default, and those of `always`."""
    changed = {}
    for field in fields(options):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = _plain(getattr(options, field.name))
        if field.init and value not in (None, [], {}) and (value != default or field.name in always):
            changed[field.name] = value
    return changed


def _plain(value: Any) -> Any:
    """As JSON, with None for other objects."""
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
