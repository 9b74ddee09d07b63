# SPDX-License-Identifier: Apache-2.0
"""The check that a resumed run is the run that wrote the checkpoint."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...checkpoint.files import BUILD_RECORD, TRAINING_RECORD, json_or_none


FREE = frozenset(
    {
        # How long the run is. Users extend it. The schedule follows from it.
        "max_steps",
        "num_train_epochs",
        # Where things are, and how they are called.
        "output_dir",
        "run_name",
        "project",
        "resume_from_checkpoint",
        "local_rank",
        # Data are compared by their reports, models by their records, learning rates by module.
        "dataset_name",
        "image_folder",
        "model_name_or_path",
        "model_revision",
        "learning_rate",
        "vision_learning_rate",
        "projector_learning_rate",
        "norm_learning_rate",
        "language_learning_rate",
        # What is logged, and where.
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
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
        "do_eval",
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
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_revision",
        # Who reads batches. The order of rows and the random states do not depend on it.
        "dataset_num_proc",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        # Time and memory. What is computed again has the same random states.
        "gradient_checkpointing",
        "activation_checkpointing",
        "activation_offloading",
        "torch_empty_cache_steps",
        "ddp_timeout",
        "ddp_find_unused_parameters",
        "dry_run",
        "device_memory",
        # The machine. The record names it.
        "use_cpu",
        # What ended a run, and is changed so that it goes on.
        "bad_steps",
        "bad_rows",
        "check_images",
    }
)
"""Options that may change when a run is resumed. They change no step that comes after it."""

OF_ACCELERATOR = {
    "even_batches": True,
    "use_seedable_sampler": True,
    "gradient_accumulation_kwargs": True,
    "split_batches": False,  # refused
    "dispatch_batches": False,  # refused, and set here
    "non_blocking": False,
    "use_configured_state": False,
}
"""Whether each field of `accelerator_config` is compared."""

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
    old_values = _compared(before)
    new_values = _compared({**record, "build": build})
    for key in LATER:
        if key not in before or key not in record:
            del old_values[key]
            del new_values[key]
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


def _compared(record: dict[str, Any]) -> dict[str, Any]:
    """Returns what must be equal in two records of one run, by names that users know."""
    options = record["options"].items()
    compared = {option: value for option, value in options if option not in FREE}
    if compared.get("packing"):  # more epochs may need more passes, for the same steps
        compared.pop("gradient_accumulation_steps", None)
    for key in ("stage", "arm", "quantization", *LATER):
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
