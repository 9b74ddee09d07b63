# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Options of TRL and the Trainer that would do nothing here, or harm. `docs/options.md` has the others."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from trl import SFTConfig


_PACKING = "packing here divides the rows of each step and cuts none; evaluation has no padding with it"
_PRECISION = "it would round the gain, which is float32; evaluation has the precision of training"
_LIGER = "Liger has no kernels for this architecture"

REFUSED: dict[str, str] = {
    "assistant_only_loss": "it must be true, or labels would hold image tokens",
    "auto_find_batch_size": "it would change the global batch; lower per_device_train_batch_size",
    "bf16_full_eval": _PRECISION,
    "chat_template_path": "the checkpoint has a template, which `normalign build --chat-template` sets",
    "completion_only_loss": "the loss is on all answers, or of rows with prompt and completion on the completion's",
    "dataset_kwargs": "it is for TRL's preparation of data, which is not used",
    "dataset_num_proc": "rows are checked by one process, once; images by all processes of the run",
    "dataset_text_field": "rows are conversations, whose form is known by their columns",
    "do_predict": "training predicts nothing; each evaluation answers sample_count held-out examples",
    "eval_packing": _PACKING,
    "fp16_full_eval": _PRECISION,
    "include_num_input_tokens_seen": "num_tokens is logged without it",
    "label_names": "the labels are always called labels",
    "length_column_name": "lengths are counted here, in tokens, image tokens included",
    "liger_kernel_config": _LIGER,
    "packing_strategy": _PACKING,
    "pad_token": "the checkpoint's tokenizer has one",
    "parallelism_config": "the global batch counts rows for each process; shard a model with FSDP2 or ZeRO-3",
    "remove_unused_columns": "the collator needs every column",
    "router_aux_loss_coef": "LLaVA's outputs have no router logits",
    "shuffle_dataset": "rows are drawn at random without it, those of a stream through shuffle_buffer_size",
    "truncation_mode": "nothing is truncated; rows longer than max_length are dropped and counted",
    "trust_remote_code": "this package's code is run, never a checkpoint's own",
    "use_liger_kernel": _LIGER,
}
"""Why an option cannot be used, and what to use instead."""


def check_flags(given: dict[str, Any]) -> None:
    """[`check_refused`] for the flags on a command line, without importing TRL."""
    for name, value in given.items():
        if name in REFUSED and str(value).lower() == "true":
            raise ValueError(_sentence(name))


def _sentence(name: str) -> str:
    return f"{name} cannot be used here: {REFUSED[name]}. Leave it out."


def check_refused(args: "SFTConfig") -> None:
    """Raises ValueError with the reason if one of `REFUSED` is neither None nor its default."""
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name in REFUSED and value is not None and value != field.default:
            raise ValueError(_sentence(field.name))


def check_trackers(names: list[str]) -> None:
    """Raises ValueError if one of `report_to` is unknown or not installed. The Trainer checks only after loading."""
    from transformers.integrations import get_reporting_integration_callbacks

    for name in names:
        for callback in get_reporting_integration_callbacks([name]):
            try:
                callback()
            except (RuntimeError, ImportError, ValueError) as error:
                raise ValueError(f"report_to names {name}, which cannot be used: {error}") from error
