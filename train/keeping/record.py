# SPDX-License-Identifier: Apache-2.0
"""The record of a run, `training.json`, and whether a resumed run is the same one."""

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

from ... import __version__
from ...assembly.arms import ARM_FIELDS, arm_of
from ...checkpoint.files import BUILD_RECORD, TRAINING_RECORD, json_or_none
from ...checkpoint.opening import read_record
from ...data.rows.checks import DataReport
from ..options import BOTH_STAGES, STAGES


if TYPE_CHECKING:  # both import this file
    from ..modules.load import LoadedModel
    from ..prepare import Plan


_NEITHER_RECORDED_NOR_COMPARED = {
    # Places, secrets, and what is derived or recorded under another key, as the machine is.
    "output_dir",
    "run_name",
    "resume_from_checkpoint",
    "hub_token",
    "do_eval",
    "disable_tqdm",
    "logging_nan_inf_filter",
    "dataloader_pin_memory",
    "use_cpu",
    "learning_rate",
    "activation_checkpointing",  # since transformers 5.24
}

LEFT_OUT = _NEITHER_RECORDED_NOR_COMPARED | {
    "logging_dir",
    "push_to_hub_token",
    "revision",
    # Since transformers 5.24.
    "activation_checkpointing_kwargs",
    # Of `accelerator_config`: refused, or set here, or of no effect on rows and steps.
    "split_batches",
    "dispatch_batches",
    "non_blocking",
    "use_configured_state",
    # Of adapters.
    "base_model_name_or_path",
    "peft_type",
    "peft_version",
    "runtime_config",
}
"""Options that are never recorded."""

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
    model_options = {"model_name_or_path": model.name_or_path or None}
    model_options |= args.model_init_kwargs or {}
    options = {
        option: value
        for option, value in _plain(model_options).items()
        if value is not None and option not in LEFT_OUT
    }
    for further_options in more_options:
        options |= _changed(further_options)
    options |= _changed(args, ALWAYS_RECORDED)
    accelerator_config = _changed(args.accelerator_config)
    if accelerator_config:
        options["accelerator_config"] = accelerator_config
    optimizer = None
    if plan.optimizer is not None:
        cls, arguments = plan.optimizer
        optimizer = {"class": f"{cls.__module__}.{cls.__qualname__}", **_plain(arguments)}
    versions = {library: version(library) for library in LIBRARIES}
    versions["normalign_llava"] = __version__
    quantization = getattr(model.config, "quantization_config", None)
    return {
        "stage": args.stage,
        "arm": arm_of(model.config),
        "config_changes": {field: getattr(model.config, field) for field in ARM_FIELDS},
        "learning_rates": plan.learning_rates,
        "options": options,
        "processes": args.world_size,
        "quantization": quantization and json.loads(quantization.to_json_string()),
        "text_embedding_norm": model.config.text_embedding_norm,
        "model_revision": loaded.commit,
        "data": data_record(plan.data.report),
        "optimizer": optimizer,
        "adapters": plan.model.adapters and _changed(plan.model.adapters),
        "hardware": hardware(args.device),
        "versions": versions,
        "commit": code_commit(),
        # The record of the training before, if the model was trained.
        "before": read_record(model.name_or_path, TRAINING_RECORD, loaded.commit),
        "seconds": 0.0,
    }


def data_record(report: DataReport) -> list[dict[str, Any]]:
    """Returns what was read of each source as JSON, with dropped rows by number."""
    sources = []
    for source in report.sources:
        sources.append({**vars(source), "dropped": [row.row for row in source.dropped]})
    return _plain(sources)


def digest_of_lengths(rows: Dataset | IterableDataset | None) -> str | None:
    """Returns a hash of the rows' lengths in order, or None if they are not known."""
    if not isinstance(rows, Dataset) or "length" not in rows.column_names:
        return None
    lengths = np.asarray(rows.with_format(None)["length"][:], dtype="<i8")
    return sha256(lengths.tobytes()).hexdigest()[:16]


def _changed(options: Any, always: Container[str] = ()) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their default, and the fields `always`.

    The fields `LEFT_OUT` are not returned, nor is one that is empty, unless it was set to None and
    has another default.
    """
    changed = {}
    for field in fields(options):
        if not field.init or field.name in LEFT_OUT:
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


def _plain(value: Any) -> Any:
    """Returns a value as JSON. An object that JSON does not have becomes None."""
    if isinstance(value, set):
        return sorted(map(_plain, value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
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


FREE = _NEITHER_RECORDED_NOR_COMPARED | {
    # How long the run is. Users extend it. The schedule follows from it.
    "max_steps",
    "num_train_epochs",
    # Where things are, and how they are called.
    "project",
    "local_rank",
    # Data are compared by their reports, models by their records, learning rates by module.
    "dataset_name",
    "image_folder",
    "model_name_or_path",
    "model_revision",
    "vision_learning_rate",
    "projector_learning_rate",
    "norm_learning_rate",
    "language_learning_rate",
    # What is logged, and where.
    "logging_strategy",
    "logging_steps",
    "logging_first_step",
    "log_on_each_node",
    "log_level",
    "log_level_replica",
    "report_to",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    "debug",
    "skip_memory_metrics",
    "probe_steps",
    "probe_rows",
    # Held-out rows. They train nothing.
    "do_train",
    "eval_strategy",
    "eval_steps",
    "eval_delay",
    "eval_on_start",
    "per_device_eval_batch_size",
    "prediction_loss_only",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "eval_accumulation_steps",
    "include_for_metrics",
    "batch_eval_metrics",
    "eval_dataset_name",
    "dataset_test_split",
    "early_stopping_patience",
    "early_stopping_threshold",
    "sample_count",
    "sample_max_new_tokens",
    "show_first_batch",
    # What is saved, and published.
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "save_only_model",
    "save_on_each_node",
    "enable_jit_checkpoint",
    "push_to_hub",
    "hub_private_repo",
    "hub_model_id",
    "hub_revision",
    # Who reads batches. The order of rows and the random states do not depend on it.
    "dataset_num_proc",
    "dataloader_num_workers",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
    # Time and memory. What is computed again has the same random states.
    "gradient_checkpointing",
    "activation_offloading",
    "torch_empty_cache_steps",
    "ddp_timeout",
    "ddp_find_unused_parameters",
    "dry_run",
    "device_memory",
    # What ended a run, and is changed so that it goes on.
    "bad_steps",
    "bad_rows",
    "check_images",
}
"""Options that may change when a run is resumed. They change no step that comes after it."""

COUNTS = ("used", "images", "shortest", "median", "longest")
"""Reports of a source of rows are compared by these counts."""

LATER = ("sharding", "optimizer", "adapters", "row_lengths")
"""Keys that records of earlier versions may lack. They are compared if both records have them."""


def check_resumed(record: dict[str, Any], build: Any, checkpoint: Path) -> float:
    """Checks that the run that resumes is the run that wrote the checkpoint.

    Args:
        record: The `training.json` of the run that resumes.
        build: Its `build.json`, or None.
        checkpoint: The folder of the checkpoint.

    Returns:
        The seconds that the run took until it wrote the checkpoint.

    Raises:
        ValueError: Another run wrote the checkpoint, or its record does not say which run did.
    """
    before = json_or_none(checkpoint / TRAINING_RECORD)
    if not isinstance(before, dict) or not isinstance(before.get("options"), dict):
        raise ValueError(
            f"{checkpoint / TRAINING_RECORD} is missing or damaged, so it is unknown whether the "
            "run is the same. Resume from another checkpoint, or start anew in another "
            "--output_dir."
        )
    before["build"] = json_or_none(checkpoint / BUILD_RECORD)
    later_keys = [key for key in LATER if key in before and key in record]
    old_values = _compared(before, later_keys)
    new_values = _compared({**record, "build": build}, later_keys)
    changes = []
    for option in sorted(old_values.keys() | new_values.keys()):
        old_value = old_values.get(option, "the default")
        new_value = new_values.get(option, "the default")
        if old_value != new_value:
            changes.append(f"{option} (was {old_value}, is {new_value})")
    if changes:
        raise ValueError(
            f"{checkpoint} belongs to another run: it differs in {'; '.join(changes)}. Undo "
            "that, or start anew without --resume_from_checkpoint, in another --output_dir."
        )
    return before.get("seconds", 0.0)


def _compared(record: dict[str, Any], later_keys: Sequence[str]) -> dict[str, Any]:
    """Returns what must be equal in two records of one run, by names that users know."""
    compared = {name: value for name, value in record["options"].items() if name not in FREE}
    if compared.get("packing"):  # more epochs may need more passes, for the same steps
        compared.pop("gradient_accumulation_steps", None)
    for key in ("stage", "arm", "quantization", *later_keys):
        compared[key] = record.get(key)
    learning_rates = record.get("learning_rates") or {}
    for module, rate in learning_rates.items():
        compared[f"the learning rate of {module}"] = rate
    # How the model was built and trained before the run.
    model_records = json.dumps([record.get("build"), record.get("before")], sort_keys=True)
    model_hash = sha256(model_records.encode()).hexdigest()[:8]
    compared["the hash of the records of the model to train"] = model_hash
    sources = []
    for source in record["data"]:
        if source["split"] == "train":
            counts = [source.get(count) for count in COUNTS]
            sources.append(f"{source['source']} {counts}")
    compared[f"the data ({', '.join(COUNTS)})"] = ", ".join(sources)
    return compared
