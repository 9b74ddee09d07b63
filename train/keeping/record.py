# SPDX-License-Identifier: Apache-2.0
"""The record of a run, `training.json`: its options, code and machines."""

import json
import os
import platform
import subprocess
from collections.abc import Container, Sequence
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
    "output_dir",
    "logging_dir",
    "run_name",
    "resume_from_checkpoint",
    "hub_token",
    "do_eval",
    "push_to_hub_token",
    "disable_tqdm",
    "logging_nan_inf_filter",
    "dataloader_pin_memory",
    "use_cpu",
    "learning_rate",
    "revision",
    # Since transformers 5.24.
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
}
"""Options that are secret, about output, derived, or recorded under another key."""

ALWAYS_RECORDED = {*BOTH_STAGES, *STAGES["align"], *STAGES["tune"], "max_length"}
"""Options that are recorded although they have their default: all that stages set."""

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")
"""Libraries whose versions are recorded."""

_EMPTY: tuple[Any, ...] = (None, [], {})  # values that say no more than a missing key


def training_record(
    plan: "Plan", loaded: "LoadedModel", more_options: Sequence[Any] = ()
) -> dict[str, Any]:
    """Returns the resolved recipe as JSON.

    Local paths are cut to their last part, and dropped rows are listed by number. All processes
    must call this together. The trainer adds the facts of [`summary`] as `run`, and at saves
    `steps_done` and `seconds`.

    Args:
        plan: The plan of the run.
        loaded: The model, and the options of the plan as loading settled them.
        more_options: Further dataclasses of options.
    """
    model = loaded.model
    args = loaded.settings
    versions = {library: version(library) for library in LIBRARIES}
    versions["normalign_llava"] = __version__
    quantization = getattr(model.config, "quantization_config", None)
    return {
        "stage": args.stage,
        "arm": arm_of(model.config),
        "config_changes": {field: getattr(model.config, field) for field in ARM_FIELDS},
        "learning_rates": plan.learning_rates,
        "options": _recorded_options(loaded, more_options),
        "processes": args.world_size,
        "quantization": quantization and json.loads(quantization.to_json_string()),
        "text_embedding_norm": model.config.text_embedding_norm,
        "model_revision": loaded.commit,
        "data": data_record(plan.data.report),
        "optimizer": _optimizer_record(plan.optimizer),
        "adapters": _changes_of_adapters(plan.model.adapters),
        "hardware": hardware(args.device),
        "versions": versions,
        "commit": code_commit(),
        # The record of the training before, if the model was trained.
        "before": read_record(model.name_or_path, TRAINING_RECORD, loaded.commit),
        "seconds": 0.0,
    }


def _recorded_options(loaded: "LoadedModel", more_options: Sequence[Any]) -> dict[str, Any]:
    """Returns the options that differ from their default, and `ALWAYS_RECORDED`."""
    args = loaded.settings
    options = {"model_name_or_path": _plain(loaded.model.name_or_path or None)}
    options |= _plain(args.model_init_kwargs or {})
    options = {option: value for option, value in options.items() if value is not None}
    for further_options in more_options:
        options |= _changed(further_options)
    options |= _changed(args, ALWAYS_RECORDED)
    accelerator_config = _changes_of_accelerator(args.accelerator_config)
    if accelerator_config:
        options["accelerator_config"] = accelerator_config
    return {option: value for option, value in options.items() if option not in LEFT_OUT}


def data_record(report: DataReport) -> list[dict[str, Any]]:
    """Returns what was read of each source as JSON, with dropped rows by number."""
    sources = []
    for source in report.sources:
        numbers = [row.row for row in source.dropped]
        sources.append({**vars(source), "dropped": numbers})
    return _plain(sources)


def digest_of_lengths(rows: Dataset | IterableDataset | None) -> str | None:
    """Returns a hash of the rows' lengths in order, or None if they are not known."""
    if not isinstance(rows, Dataset) or "length" not in rows.column_names:
        return None
    lengths = np.asarray(rows.with_format(None)["length"][:], dtype="<i8")
    return sha256(lengths.tobytes()).hexdigest()[:16]


def _changed(options: Any, always: Container[str] = ()) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their default, and the fields `always`.

    A field is left out if it is empty, unless it was set to None and has another default.
    """
    changed = {}
    for field in fields(options):
        if not field.init:
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        given_value = getattr(options, field.name)
        recorded_value = _plain(given_value)
        if recorded_value in _EMPTY:
            is_recorded = given_value is None and default is not MISSING and default not in _EMPTY
        else:
            is_recorded = recorded_value != default or field.name in always
        if is_recorded:
            changed[field.name] = recorded_value
    return changed


def _changes_of_accelerator(config: AcceleratorConfig) -> dict[str, Any]:
    """Returns the fields of an `accelerator_config` about rows and steps that are not default."""
    default = AcceleratorConfig()
    changes = {}
    for field_name, is_compared in OF_ACCELERATOR.items():
        field_value = getattr(config, field_name)
        if is_compared and field_value != getattr(default, field_name):
            changes[field_name] = _plain(field_value)
    return changes


def _optimizer_record(optimizer: tuple[type, dict[str, Any]] | None) -> dict[str, Any] | None:
    """Returns the name of an optimizer's class, and its arguments."""
    if optimizer is None:
        return None
    cls, arguments = optimizer
    return {"class": f"{cls.__module__}.{cls.__qualname__}", **_plain(arguments)}


def _changes_of_adapters(config: LoraConfig | None) -> dict[str, Any] | None:
    """Returns the fields that are not default, without names of the model and versions."""
    if config is None:
        return None
    default = LoraConfig()
    ignored_fields = {"base_model_name_or_path", "revision", "peft_version", "runtime_config"}
    changes = {}
    for field_name, field_value in vars(config).items():
        if field_name not in ignored_fields and field_value != getattr(default, field_name, None):
            changes[field_name] = _plain(field_value)
    return changes


def _plain(value: Any) -> Any:
    """Returns a value as JSON. An object that JSON does not have becomes None."""
    if isinstance(value, set):
        return sorted(_plain(list_entry) for list_entry in value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(list_entry) for key, list_entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(list_entry) for list_entry in value]
    if isinstance(value, str):
        return _without_folders(value)
    if isinstance(value, int | float):
        return value
    return None


def _without_folders(text: str) -> str:
    """Returns the last part of a local `path` or `path:split`, and any other text unchanged.

    A checkpoint must contain no local paths.
    """
    if os.path.exists(text):
        return Path(text).name
    path, colon, split = text.partition(":")
    if os.path.exists(path):
        return Path(path).name + colon + split
    return text


def code_commit() -> str | None:
    """Returns the git commit of this package's code, or None if it is not known.

    In a checkout it ends in "-dirty" if a file was changed. Elsewhere it is what pip installed.
    """
    root = Path(__file__).resolve().parents[2]
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    command += ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.strip()
    with suppress(PackageNotFoundError, ValueError):  # as pip records it (PEP 610)
        recorded = distribution("normalign-llava").read_text("direct_url.json")
        if recorded:
            return json.loads(recorded).get("vcs_info", {}).get("commit_id")
    return None


def hardware(device: torch.device) -> dict[str, Any]:
    """Returns the names of the `devices` of all processes, their `count`, and the `machine`.

    All processes must call this together.
    """
    device_index = None
    device_name = platform.machine()
    if device.type in ("cuda", "xpu"):
        device_index = device.index
        device_name = torch.get_device_module(device).get_device_name(device)
    else:
        with suppress(OSError):  # Linux names the processor
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if "model name" in line:
                    device_name = line.partition(":")[2].strip()
                    break
    devices = set(gather_object([(platform.node(), device_index, device_name)]))
    device_names = {device_name for _, _, device_name in devices}
    machine = f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores"
    return {"devices": sorted(device_names), "count": len(devices), "machine": machine}
