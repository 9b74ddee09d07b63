# SPDX-License-Identifier: Apache-2.0
"""Checks before publishing: would the checkpoint load elsewhere?"""

import json
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.opening import check_processor, open_checkpoint
from ...checkpoint.untrusted import loading
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .source import CODE, PACKAGE, read_config, read_norm, weight_files


_SAVE_AGAIN = "Load the checkpoint with this package and save it to another folder"


def check_checkpoint(folder: Path) -> None:
    """Refuses a checkpoint that would not load elsewhere, or whose norm is not finite or not float32.

    Of weights only headers and norm are read. Loading it in a clean process finds what else is wrong.
    """
    with loading(f"The configuration of {folder}"):
        stored, config = read_config(folder)
    faults = _model_faults(folder, stored.get("auto_map"), config) if config else []
    if faults := [*faults, *_weight_faults(folder, config, stored.get("tie_word_embeddings", False))]:
        raise ValueError("\n".join([f"{folder} cannot be published:", *(f"- {fault}" for fault in faults)]))


def _model_faults(folder: Path, auto_map: Any, config: NormAlignLlavaConfig) -> list[str]:
    faults = []
    for name in CODE:
        file, package_file = folder / name, PACKAGE / name
        if not file.is_file() or file.read_bytes() != package_file.read_bytes():
            state = "is not this package's" if file.exists() else "is missing, so nobody else can load the model"
            faults.append(f"{name} {state}. Copy {package_file} to it, or publish with the version that wrote it.")
    if auto_map != (expected := NormAlignLlavaConfig.auto_map_entries):
        faults.append(f"config.json: auto_map is {json.dumps(auto_map)}, not {json.dumps(expected)}. {_SAVE_AGAIN}.")
    try:
        with torch.device("meta"):
            model = NormAlignLlavaForConditionalGeneration(config)
        processor = open_checkpoint(str(folder)).processor
        check_processor(processor, model)
    except Exception as error:  # each part checks its configuration in its own way
        return [*faults, f"model and processor: {error} Save there those that training started from."]
    if processor.tokenizer.padding_side != "left":
        faults.append('tokenizer_config.json: it pads on the right. Write "padding_side": "left" into it.')
    return faults


def _weight_faults(folder: Path, config: NormAlignLlavaConfig | None, tied: bool) -> list[str]:
    faults = []
    try:
        norm, names = read_norm(weight_files(folder))
    except ValueError as error:
        return [f"weights: {error}"]
    head = any(name.endswith("lm_head.weight") for name in names)
    if config is not None and {tied, inner := getattr(config.text_config, "tie_word_embeddings", False)} != {not head}:
        faults.append(
            f"config.json: tie_word_embeddings is {tied}, and in text_config {inner}, but the weights have "
            f"{'a' if head else 'no'} head of their own. {_SAVE_AGAIN}."
        )
    for name, tensor in norm.items():
        if tensor.dtype != torch.float32:
            faults.append(f"{name} is {tensor.dtype}, in which small updates are lost, not float32. {_SAVE_AGAIN}.")
        if bad := int((~tensor.isfinite()).sum()):
            faults.append(f"{name} has {bad} values that are NaN or infinite. Train from an earlier checkpoint.")
    return faults
