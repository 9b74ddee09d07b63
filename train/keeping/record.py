# SPDX-License-Identifier: Apache-2.0
"""What a run leaves with its weights: `training.json`, the model card, the result on the Hub."""

import json
import logging
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from enum import Enum
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from ... import __version__
from ...assembly.arms import ARM_FIELDS, arm_of
from ...checkpoint.names import ADAPTER_CONFIG, TRAINING_RECORD
from ...checkpoint.provenance import read_record
from ...data.rows.reports import DataReport
from ..options.arguments import BOTH_STAGES, STAGES, NormAlignConfig


logger = logging.getLogger(__name__)

MAY_CHANGE = (
    *("save_", "logging_", "log_", "eval_", "report_to", "sample_", "probe_", "max_steps", "num_train_epochs", "hub_"),
    *("push_to_hub", "dataloader_", "test_split", "dataset_test", "model_name", "dataset_name", "image_folder"),
    *("learning_rate", "bad_steps", "bad_rows", "check_images", "dataset_num_proc"),
    *("dry_run", "device_memory"),
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
    """The resolved recipe as JSON: options that differ from their default, and all that the stages set.

    Local paths are cut to their last part. Dropped rows are listed by number; `dropped_rows.jsonl` has the reasons.
    `before` is the record of the training before this one, and `commit` that of this package's code. All processes
    must call this at the same time. The trainer adds `run` (the facts of [`summary`]), and at every save `steps_done`,
    the optimizer steps so far, and their `seconds`.
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
        "data": [
            {**_plain(vars(source)), "dropped": [row.row for row in source.dropped]} for source in report.sources
        ],
        "hardware": hardware(args.device),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft", "accelerate")}
        | {"normalign_llava": __version__},
        "commit": code_commit(),
        "before": read_record(model.name_or_path, TRAINING_RECORD, commit),
        "seconds": 0.0,
    }


def code_commit() -> str | None:
    """The git commit of this package's code, with "-dirty" if tracked files are changed.

    It is known if the code is in its own git checkout, or pip installed it from one.
    """
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
    """The hardware of all processes: names of the `devices`, their `count`, and the `machine` in words.

    A machine's CPU counts once. All processes must call this at the same time, each with its own device.
    """
    accelerator, name = device.type in ("cuda", "xpu"), platform.machine()
    with suppress(OSError, StopIteration):  # as on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    if accelerator:
        name = torch.get_device_module(device).get_device_name(device)
    seen = gather_object([(platform.node(), device.index if accelerator else None, name)])
    machine = f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores"
    return {"devices": sorted({name for *_, name in seen}), "count": len(set(seen)), "machine": machine}


def check_same_run(record: dict[str, Any], checkpoint: Path) -> None:
    """Checks that a run is the one that wrote `checkpoint`, whose optimizer and schedule it would take over."""
    file = checkpoint / TRAINING_RECORD
    if not file.exists():
        return
    old, new = _fixed(json.loads(file.read_text(encoding="utf-8"))), _fixed(record)
    differing = [
        f"{name} (was {old.get(name)}, is {new.get(name)})"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if differing:
        raise ValueError(
            f"{checkpoint} was written by a run that differs in {'; '.join(differing)}. Resume with the same, or "
            "start a new run in another --output_dir."
        )


def _fixed(record: dict[str, Any]) -> dict[str, Any]:
    """What may not change when a run is resumed."""
    fixed = {name: value for name, value in record["options"].items() if not name.startswith(MAY_CHANGE)}
    fixed |= {name: record.get(name) for name in ("stage", "arm", "learning_rates", "quantization")}
    used = [(source["source"], source["used"]) for source in record["data"] if source["split"] == "train"]
    return {**fixed, "data": used}


def write_card_of(folder: Path, repo_id: str | None) -> None:
    """Writes the model card of a result, if there is one; text written by hand is kept.

    TRL's card would call it a text-generation model fine-tuned from None. A card that somebody else wrote, or a
    damaged record, is only a warning: training is done, and the steps that follow must not fail because of it.
    """
    if not any((folder / name).exists() for name in (CONFIG_NAME, ADAPTER_CONFIG)):
        return
    from ...hub_cards.card.write import write_card

    try:
        write_card(folder, repo_id=repo_id)
    except ValueError as error:
        logger.warning(f"The card of {folder} was not written: {error}")


def check_publishable(repo_id: str, revision: str, token: str | None) -> None:
    """Raises ValueError if [`publish_result`] would refuse a repository that exists: before training, not after it."""
    from ...hub_cards.card.metadata import check_replaceable
    from ...hub_cards.push.repository import find_repository, log_in

    check_replaceable(find_repository(log_in(repo_id, token), repo_id, branch=revision).card, repo_id)


def publish_result(folder: str, repo_id: str, revision: str, token: str | None) -> Any:
    """Publishes a result as [`normalign_llava.publish`] does, whose result it returns.

    An adapter is sent as one if its base is on the Hub; otherwise it is merged.

    Raises:
        ValueError, OSError: It was not published. The message names the command that does it.
    """
    from ...hub_cards.push.checks import recorded_base
    from ...hub_cards.push.publish import publish

    as_adapter = recorded_base(Path(folder)) is not None
    try:
        return publish(folder, repo_id, revision=revision, as_adapter=as_adapter, token=token)
    except (ValueError, OSError) as error:
        words = ["normalign", "publish", folder, "--repo-id", repo_id, "--revision", revision]
        words += ["--adapter"] if as_adapter else []
        raise (ValueError if isinstance(error, ValueError) else OSError)(
            f"{error}\nThe trained model is complete in {folder}. Once that is fixed, publish it with "
            f"`{shlex.join(words)}`; it need not be trained again."
        ) from error


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
