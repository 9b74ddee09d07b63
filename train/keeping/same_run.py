# SPDX-License-Identifier: Apache-2.0
"""The check that a resumed run is the run that wrote the checkpoint."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...checkpoint.files import BUILD_RECORD, TRAINING_RECORD, json_or_none


FREE = frozenset(
    {
        # How long the run is, which users extend. The schedule follows from it.
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
        # Held-out rows, which train nothing.
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
        # The machine, which the record names.
        "use_cpu",
        # What ended a run, and is changed so that it goes on.
        "bad_steps",
        "bad_rows",
        "check_images",
    }
)
"""Options that may change when a run is resumed: they change no step that is still to be taken."""

COMPARED = frozenset(
    {
        # The rows of a step, and their order.
        "per_device_train_batch_size",
        "global_batch_size",
        "gradient_accumulation_steps",
        "seed",
        "data_seed",
        "full_determinism",
        "train_sampling_strategy",
        "dataloader_drop_last",
        "dataloader_in_order",
        "accelerator_config",
        "dataset_config",
        "dataset_train_split",
        "dataset_streaming",
        "datasets",
        "columns",
        "filters",
        "test_split_size",
        "shuffle_buffer_size",
        "dataset_kwargs",
        "max_length",
        "packing",
        "padding_free",
        "pad_to_multiple_of",
        "eos_token",
        # The loss.
        "stage",
        "arm",
        "loss_type",
        "label_smoothing_factor",
        "neftune_noise_alpha",
        "average_tokens_across_devices",
        # The step.
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "optim",
        "optim_args",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "optim_target_modules",
        "max_grad_norm",
        # Rounding.
        "bf16",
        "fp16",
        "tf32",
        "dtype",
        "attn_implementation",
        "model_init_kwargs",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "use_cache",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
        # How the model is divided, and what is sent.
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        # What is trained.
        "use_peft",
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_target_parameters",
        "lora_modules_to_save",
        "lora_task_type",
        "use_rslora",
        "use_dora",
        "load_in_8bit",
        "load_in_4bit",
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
        # Which checkpoint is the result, by figures that the checkpoint's state holds.
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "restore_callback_states_from_checkpoint",
    }
)
"""Options that change steps or the result. An option in neither set may do so: it is compared."""

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
"""The counts by which reports of a source of rows are compared."""

LATER = ("sharding", "optimizer", "adapters", "row_lengths")
"""Keys that records of earlier versions may lack. They are compared if both records have them."""


def check_resumed(record: dict[str, Any], build: Any, checkpoint: Path) -> float:
    """Checks that a checkpoint is of the run that resumes from it.

    Args:
        record: The `training.json` of the run that resumes.
        build: Its `build.json`, or None.
        checkpoint: The folder of the checkpoint.

    Returns:
        The seconds that the run took until it wrote the checkpoint.

    Raises:
        ValueError: The checkpoint is another run's, whose optimizer would be taken over; or it does
            not say which run it belongs to.
    """
    before = json_or_none(checkpoint / TRAINING_RECORD)
    if not isinstance(before, dict) or not isinstance(before.get("options"), dict):
        raise ValueError(
            f"{checkpoint / TRAINING_RECORD} is missing or damaged, so nothing tells whether the "
            "run is the same. Resume from another checkpoint, or start anew in another "
            "--output_dir."
        )
    before["build"] = json_or_none(checkpoint / BUILD_RECORD)
    changes = _changes(before, {**record, "build": build})
    if changes:
        raise ValueError(
            f"{checkpoint} is of a run that differs in {'; '.join(changes)}. Undo that; or start "
            "anew without --resume_from_checkpoint, in another --output_dir."
        )
    return before.get("seconds", 0.0)


def _changes(before: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """Returns what differs in two records, with the values of both."""
    old = _compared(before)
    new = _compared(record)
    for key in LATER:
        if key not in before or key not in record:
            del old[key]
            del new[key]
    changes = []
    for name in sorted(old.keys() | new.keys()):
        old_value = old.get(name, "the default")
        new_value = new.get(name, "the default")
        if old_value != new_value:
            changes.append(f"{name} (was {old_value}, is {new_value})")
    return changes


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
    compared["the hash of the records of the model to train"] = _hash_of_model(record)
    counts = ", ".join(COUNTS)
    compared[f"the data ({counts})"] = _training_data(record)
    return compared


def _hash_of_model(record: dict[str, Any]) -> str:
    """Returns a hash of how the model was built and trained before the run."""
    records = [record.get("build"), record.get("before")]
    content = json.dumps(records, sort_keys=True)
    return sha256(content.encode()).hexdigest()[:8]


def _training_data(record: dict[str, Any]) -> str:
    """Returns the sources of training rows, each with its `COUNTS`."""
    sources = []
    for source in record["data"]:
        if source["split"] == "train":
            counts = [source.get(name) for name in COUNTS]
            sources.append(f"{source['source']} {counts}")
    return ", ".join(sources)
