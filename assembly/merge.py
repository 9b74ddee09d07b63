# SPDX-License-Identifier: Apache-2.0
"""Merges an adapter and its base into one checkpoint, tensor by tensor: no model is loaded."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from transformers import GenerationConfig

from ..checkpoint.files import (
    BUILD_RECORD,
    CARD,
    DYNAMICS,
    RECORDS,
    check_not_in_run,
    finished_folder,
    json_or_none,
)
from ..checkpoint.notices import fetch_notices, write_notices
from ..checkpoint.precision import quantization_name, torch_dtype
from ..checkpoint.prompts import stop_as_trained
from ..checkpoint.untrusted import fetch_files, refuse_unreadable
from ..checkpoint.weights import (
    check_space,
    fetch_index_folder,
    reusable_files,
    save_model,
    size_of,
)
from ..console import Printed
from .adapter import Adapter, open_adapter, read_peft_config
from .base_tensors import BaseTensors
from .merged_tensors import MergedTensors, check_settings


_PEFT_CARD = "# Model Card for Model ID"


@dataclass(frozen=True)
class MergeReport(Printed):
    """The report that `normalign merge` prints.

    Attributes:
        quantization: How the base was quantized in training, in words.
        dtype: The dtype of all weights except the norm's. The norm is float32.
        difference: Largest difference between what was trained, in float32, and what was written,
            as rounded to its dtype. For a layer with an adapter, it is measured on outputs for
            random inputs, as a share of the largest output. For any other tensor, it is measured on
            its numbers, as a share of the largest. In bfloat16 it is some 0.002, in float32 below
            1e-5.
    """

    labels = {
        "quantization": "base quantized in training",
        "difference": "largest difference by rounding, relative",
    }

    output: str
    adapter: str
    base: str
    quantization: str
    dtype: str
    difference: float


def merge_adapter(
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    *,
    base: str | None = None,
    base_quantization: str | None = None,
    dtype: str | torch.dtype = "auto",
) -> MergeReport:
    """Merges an adapter into its base, in float32, and writes a checkpoint that needs no PEFT.

    Each tensor of the adapter's file is used: LoRA of any layer, biases, token vectors and modules
    that were trained in full. Embeddings and head that are one tensor in the base become two if
    the adapter changes only one of them, since they were two in training.

    An adapter of a quantized base (QLoRA) was trained on the quantized weights. So the base is
    quantized as the adapter's `training.json` says and dequantized in float32 before merging. The
    result is the model that was trained, rounded to `dtype`. The report says how much that changes.
    Tensors are read, merged by PEFT and written one at a time. This takes a few times the memory of
    the largest tensor with an adapter, in float32.

    Args:
        adapter: Folder that training wrote, or a trainer's `checkpoint-N`.
        output: Folder to create, or an empty one. It is written as a whole or not at all. It may
            not be among a training run's `checkpoint-N`, since the run deletes them.
        base: Checkpoint folder or Hub id, if the one that the adapter names is gone.
        base_quantization: The base's quantization in training, one of `BASE_QUANTIZATIONS`, in
            place of what `training.json` says. TRL by itself does not write that file. The base's
            weights are quantized in their own dtype.
        dtype: The dtype of the written weights. `"auto"` is the base's. The norm is always float32.

    Raises:
        ValueError: If the folder holds no LoRA adapter, its base is missing or does not fit, the
            base's quantization in training is not known, the adapter has something that cannot be
            merged, or a tensor of its file would be lost. Nothing is written then.
        ImportError: If bitsandbytes is missing.
        OSError: If the base cannot be fetched, or the checkpoint cannot be written.
    """
    adapter = Path(os.path.expanduser(adapter))
    output = Path(os.path.expanduser(output))
    dtype = torch_dtype(dtype)
    check_not_in_run(output)
    with finished_folder(output) as folder:
        check_settings(adapter, read_peft_config(adapter))
        opened_adapter = open_adapter(adapter, base, base_quantization)
        opened_base = opened_adapter.base
        if opened_base.stored.get("quantization_config"):
            raise ValueError(
                f"{opened_base.name} is stored quantized. Give what it was made from, and "
                "--base-quantization."
            )
        base_tensors = BaseTensors(opened_adapter)
        if dtype == "auto":
            dtype = opened_adapter.config.dtype or base_tensors.dtype
        merged_tensors = MergedTensors(opened_adapter, base_tensors, dtype)
        layout = merged_tensors.layout
        check_space(output, size_of(layout), "Make room, or write elsewhere.")
        linked_files = {}
        if "vision_tower" not in merged_tensors.changed and dtype == base_tensors.dtype:
            index_folders = fetch_index_folder(opened_base.name, opened_base.revision)
            linked_files = reusable_files(layout, ["vision_tower"], index_folders)
        model = merged_tensors.model
        reading = f"The generation configuration of {opened_base.name}"
        with suppress(OSError), refuse_unreadable(reading):
            model.generation_config = GenerationConfig.from_pretrained(
                opened_base.name, revision=opened_base.revision
            )
        for processor in opened_adapter.processors:
            stop_as_trained(model, processor)
        console = Console(stderr=True)
        values = track(merged_tensors, "Merging", len(layout), console=console, transient=True)
        save_model(model, folder, layout, values=values, linked=linked_files)
        merged_tensors.check_complete()
        opened_adapter.processor.save_pretrained(folder)
        _copy_records(opened_adapter, folder)
    return MergeReport(
        output=str(output),
        adapter=str(adapter),
        base=opened_base.name,
        quantization=quantization_name(opened_adapter.quantization),
        dtype=str(dtype).removeprefix("torch."),
        difference=merged_tensors.difference,
    )


def _copy_records(adapter: Adapter, folder: Path) -> None:
    """Copies the model card and records of the adapter, or of the base if the adapter has none.

    The notices that the copied `build.json` names are copied too.
    """
    for file_name in (CARD, *RECORDS):
        adapter_file = adapter.folder / file_name
        if adapter_file.is_file():
            # PEFT's card would show local paths.
            if file_name == CARD and _PEFT_CARD in adapter_file.read_text("utf-8", "replace"):
                continue
            shutil.copyfile(adapter_file, folder / file_name)
        elif file_name != DYNAMICS:  # the base's dynamics belong to its own run
            for base_file in fetch_files(adapter.base.name, [file_name], adapter.base.revision):
                shutil.copyfile(base_file, folder / file_name)
    build_record = json_or_none(folder / BUILD_RECORD)
    notices = fetch_notices(build_record, adapter.base.name, adapter.base.revision)
    notices |= fetch_notices(build_record, str(adapter.folder))
    write_notices(folder, notices)
