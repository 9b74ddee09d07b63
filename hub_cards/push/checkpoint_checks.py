# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Checks before publishing: would the checkpoint load elsewhere, and is its norm aligned or trained?"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ...assembly.gain import embedding_statistics
from ...assembly.processing import PADS_RIGHT
from ...checkpoint.names import ADAPTER_WEIGHTS, INDEX, TRAINING_RECORD, WEIGHTS
from ...checkpoint.opening import check_processor, open_checkpoint
from ...checkpoint.untrusted import check_files
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration, initial_gain
from .source import CODE, PACKAGE, shards_of


TOLERANCE = 1e-3
"""How far from N_text / sqrt(d), as a share of it, every element of an aligned gain may be."""

_NORM = "model.multi_modal_projector.norm."
_SAVE_AGAIN = "Load the checkpoint with this package and save it to another folder"


def check_checkpoint(folder: Path) -> None:
    """Refuses a checkpoint that would not load elsewhere, or whose norm is neither aligned nor trained.

    Of weights only headers, embeddings and norm are read; of an adapter all, for values that are not finite.
    """
    config = check_files(folder)
    faults = _model_faults(folder, config) if config else _adapter_faults(folder)
    if faults:
        raise ValueError("\n".join([f"{folder} cannot be published:", *(f"- {fault}" for fault in faults)]))


def _model_faults(folder: Path, config: dict[str, Any]) -> list[str]:
    if (kind := config.get("model_type")) != NormAlignLlavaConfig.model_type:
        return [f"it is a {kind!r} model. Only NormAlign-LLaVA checkpoints can be published."]
    faults = []
    for name in CODE:
        file, package_file = folder / name, PACKAGE / name
        if not file.is_file() or file.read_bytes() != package_file.read_bytes():
            state = "is not this package's" if file.exists() else "is missing, so nobody else can load the model"
            faults.append(f"{name} {state}. Copy {package_file} to it, or publish with the version that wrote it.")
    expected = {
        "architectures": [NormAlignLlavaForConditionalGeneration.__name__],
        "auto_map": NormAlignLlavaConfig.auto_map_entries,
    }
    faults += [
        f"config.json: {name} is {json.dumps(config.get(name))}, not {json.dumps(value)}. {_SAVE_AGAIN}."
        for name, value in expected.items()
        if config.get(name) != value
    ]
    try:
        with torch.device("meta"):
            model = NormAlignLlavaForConditionalGeneration(NormAlignLlavaConfig.from_dict(config))
    except Exception as error:  # each part checks its configuration in its own way
        return [*faults, f"config.json: no model can be made from it ({error})."]
    return faults + _weight_faults(folder, model) + _processor_faults(folder, model)


def _weight_faults(folder: Path, model: PreTrainedModel) -> list[str]:
    single = (folder / WEIGHTS).exists() or not (folder / INDEX).exists()
    found: dict[str, list[int]] = {}
    norm: dict[str, Tensor] = {}
    try:
        for name in [WEIGHTS] if single else shards_of(folder):
            with safe_open(folder / name, "pt") as file:
                found |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
                norm |= {key: file.get_tensor(key) for key in file.keys() if key.startswith(_NORM)}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        return [f"weights: {error}. Copy them there whole, or save the model again."]

    expected = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    tied = set(model._tied_weights_keys) if model.config.get_text_config().tie_word_embeddings else set()
    faults = []
    if missing := sorted(expected.keys() - found.keys() - tied):
        faults.append(f"weights: {_first(missing)} missing. {_SAVE_AGAIN}.")
    if getattr(model.config, "quantization_config", None) is None:  # quantized weights have shapes of their own
        if lost := sorted(found.keys() - expected.keys()):
            faults.append(
                f"weights: {_first(lost)} would be dropped silently: the model of config.json has no such tensor."
            )
        both = sorted(found.keys() & expected.keys())
        if other := [f"{key} {found[key]} instead of {expected[key]}" for key in both if found[key] != expected[key]]:
            faults.append(f"weights: their shapes do not match config.json: {_first(other)}. Is it another model's?")
    return faults + _norm_faults(folder, model, norm)


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def _norm_faults(folder: Path, model: PreTrainedModel, norm: dict[str, Tensor]) -> list[str]:
    faults = []
    for name, tensor in norm.items():
        if tensor.dtype != torch.float32:
            faults.append(f"{name} is {tensor.dtype}, in which small updates are lost, not float32. {_SAVE_AGAIN}.")
        if bad := int((~tensor.isfinite()).sum()):
            faults.append(f"{name} has {bad} values that are NaN or infinite. Train from an earlier checkpoint.")
    gain, config = norm.get(f"{_NORM}weight"), model.config
    if faults or gain is None:
        return faults
    try:
        aligned = 1.0 if config.projector_gain_init == "one" else embedding_statistics(str(folder), top=0).gain
    except ValueError as error:
        return [f"the embeddings cannot be measured: {error}"]
    starts = [aligned]
    if config.text_embedding_norm and (folder / TRAINING_RECORD).exists():
        # Training may have changed the embeddings but not the norm.
        starts.append(initial_gain(config, config.text_embedding_norm))
    # The first step of training moves the elements of a gain apart.
    if len(gain.unique()) > 1 or any(bool(((gain - start).abs() <= TOLERANCE * start).all()) for start in starts):
        return []
    should = "1" if config.projector_gain_init == "one" else f"N_text / sqrt(d) of the embeddings, {aligned:.6g}"
    return [
        f"{_NORM}weight: the gain, {gain.double().mean().item():.6g} on average, is not aligned: {should}. Nor was it "
        "trained: all its elements are the same. Load the model, call align_projector_norm() and save it."
    ]


def _processor_faults(folder: Path, model: PreTrainedModel) -> list[str]:
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in the image?"}]}]
    try:
        processor = open_checkpoint(str(folder)).processor
        check_processor(processor, model)
        written = processor.apply_chat_template(asked, add_generation_prompt=True).count(processor.image_token)
    except Exception as error:  # one fails in many ways, its chat template in any
        return [f"processor: {error} Save there the processor of the model that training started from."]
    faults = [] if processor.tokenizer.padding_side == "left" else [f"tokenizer_config.json: {PADS_RIGHT}"]
    if written != 1:
        faults.append(f"chat template: it writes {written} image tokens for one image. Build the checkpoint again.")
    return faults


def _adapter_faults(folder: Path) -> list[str]:
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            bad = [name for name in file.keys() if not file.get_tensor(name).isfinite().all()]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        return [f"{ADAPTER_WEIGHTS}: missing or unreadable ({error}). Save the adapter again."]
    return [f"{ADAPTER_WEIGHTS}: NaN or infinite values in {_first(bad)}. Train again."] if bad else []
