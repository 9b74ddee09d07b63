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

from ..checkpoint import weights
from ..checkpoint.files import (
    BUILD_RECORD,
    CARD,
    DYNAMICS,
    RECORDS,
    check_not_in_run,
    finished_folder,
    json_or_none,
)
from ..checkpoint.notices import checkpoint_notices, write_notices
from ..checkpoint.precision import quantization_name
from ..checkpoint.prompts import stop_as_trained
from ..checkpoint.untrusted import files_of, loading
from ..errors import Printed
from .adapter import open_adapter, read_peft_config
from .base_tensors import BaseTensors
from .build import torch_dtype
from .merged_tensors import MergedTensors, check_settings


@dataclass(frozen=True)
class MergeReport(Printed):
    """The report that `normalign merge` prints.

    Attributes:
        quantization: How the base was quantized in training, in words.
        dtype: The dtype of all weights but the norm's, which are float32.
        difference: Largest difference between what was trained, in float32, and what was written,
            as rounded to its dtype. Of a layer with an adapter it is that of its outputs for random
            inputs, as a share of the largest output; of any other tensor, that of its numbers, as
            a share of the largest number. In bfloat16 it is some 0.002, in float32 below 1e-5.
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
    the adapter changes one of them alone, since they were two in training.

    An adapter of a quantized base (QLoRA) was trained on the quantized weights. So the base is
    quantized as the adapter's `training.json` says and dequantized in float32 before merging. The
    result is the model that was trained, rounded to `dtype`; the report says how much that changes.
    Tensors are read, merged by PEFT and written one at a time: this takes a few times the memory
    of the largest tensor with an adapter in float32.

    Args:
        adapter: Folder that training wrote, or a trainer's `checkpoint-N`.
        output: Folder to create, or an empty one. It is written as a whole or not at all. It may
            not be among a training run's `checkpoint-N`, which the run deletes.
        base: Checkpoint folder or Hub id, if the one that the adapter names is gone.
        base_quantization: The base's quantization in training, one of `BASE_QUANTIZATIONS`, in
            place of what `training.json` says, which TRL alone does not write. The base's weights
            are quantized in their own dtype.
        dtype: The dtype of the written weights; `"auto"` is the base's. The norm is always float32.

    Raises ValueError, with nothing written, if there is no LoRA adapter, or no base that it fits,
    if the base's quantization in training is not known, if the adapter has something that cannot be
    merged, or if a tensor of its file would be lost.
    """
    adapter, dtype = Path(adapter), torch_dtype(dtype)
    check_not_in_run(Path(output))
    with finished_folder(output) as folder:
        check_settings(adapter, read_peft_config(adapter))
        opened = open_adapter(adapter, base, base_quantization)
        base, revision = opened.base.name, opened.base.revision
        if opened.base.stored.get("quantization_config"):
            remedy = "Give what it was made from, and --base-quantization."
            raise ValueError(f"{base} is stored quantized. {remedy}")
        tensors = BaseTensors(opened)
        if dtype == "auto":
            dtype = opened.config.dtype or tensors.dtype
        merged = MergedTensors(opened, tensors, dtype)
        layout = merged.layout
        weights.check_space(Path(output), weights.size_of(layout), "Make room, or write elsewhere.")
        frozen = set()
        if dtype == tensors.dtype and tensors.has_as_stored("model.vision_tower."):
            frozen = {"vision_tower"} - merged.changed
        linked = weights.unchanged_files(layout, frozen, weights.index_folder(base, revision))
        with suppress(OSError), loading(f"The generation configuration of {base}"):
            settings = GenerationConfig.from_pretrained(base, revision=revision)
            merged.model.generation_config = settings
        for processor in opened.processors:
            stop_as_trained(merged.model, processor)
        shown = track(merged, "Merging", len(layout), console=Console(stderr=True), transient=True)
        weights.save_model(merged.model, folder, layout, values=shown, linked=linked)
        merged.check_complete()
        opened.processor.save_pretrained(folder)
        for name in (CARD, *RECORDS):
            if (file := adapter / name).is_file():
                text = file.read_text("utf-8", "replace") if name == CARD else ""
                by_peft = "# Model Card for Model ID" in text  # and has local paths
                files = [] if by_peft else [file]
            else:  # the base's DYNAMICS are those of its own run
                files = files_of(base, [name], revision) if name != DYNAMICS else []
            for file in files:
                shutil.copyfile(file, folder / name)
        build = json_or_none(folder / BUILD_RECORD)
        notices = checkpoint_notices(build, base, revision)
        write_notices(folder, notices | checkpoint_notices(build, str(adapter)))
    return MergeReport(
        output=str(output),
        adapter=str(adapter),
        base=base,
        quantization=quantization_name(opened.quantization),
        dtype=str(dtype).removeprefix("torch."),
        difference=merged.difference,
    )
