# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Checks before publishing: does the checkpoint load elsewhere, and may its files be published?"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ... import configuration_normalign_llava, modeling_normalign_llava
from ...assembly.gain import embedding_statistics
from ...assembly.processing import PADS_RIGHT
from ...checkpoint.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, TRAINING_RECORD, WEIGHTS
from ...checkpoint.opening import Checkpoint, check_processor
from ...checkpoint.untrusted import check_files
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration, initial_gain
from .contents import Contents, shards_of
from .leaks import find_private


TOLERANCE = 1e-3
"""How far from N_text / sqrt(d), as a share of it, every element of an aligned gain may be."""

_NORM = "model.multi_modal_projector.norm."
_SAVE_AGAIN = "Load the checkpoint with this package and save it to another folder"


def check_contents(contents: Contents, token: str | None) -> None:
    """Refuses tokens, paths of this machine and pickles.

    Args:
        contents: The files to send.
        token: The token of the person who publishes.

    Raises:
        ValueError: There are some; the message lists every place. Of a token it shows the first 4 characters.
    """
    _raise(find_private(contents, token), "This must not be published")


def check_checkpoint(checkpoint: str | os.PathLike) -> None:
    """Refuses a checkpoint that would not load elsewhere, or whose norm is neither aligned nor trained.

    Checked of a model: model type, architecture and `auto_map` in `config.json`; both code files, identical to this
    package's; every tensor, by name and shape; gain and bias finite and in float32; the gain N_text / sqrt(d) of the
    stored embeddings (1 with `projector_gain_init="one"`), or trained; a processor that writes as many placeholders
    as there are features; a chat template that takes an image. Of weights only headers, embeddings and norm are
    read. Of an adapter: its configuration, and that its weights are finite.

    Args:
        checkpoint: The folder.

    Raises:
        ValueError: The message lists every fault with its remedy.
    """
    folder = Path(checkpoint)
    adapter = (folder / ADAPTER_CONFIG).exists() or (folder / ADAPTER_WEIGHTS).exists()
    heading = f"The {'adapter' if adapter else 'checkpoint'} {checkpoint} cannot be published"
    try:
        check_files(folder)
    except ValueError as error:
        _raise([str(error)], heading)
    if adapter:
        return _raise(_adapter_faults(folder), heading)
    if not (folder / "config.json").exists() and not list(folder.glob("*.safetensors")):
        inside = ", ".join(sorted(path.name for path in folder.glob("checkpoint-*")))
        hint = f" It has {inside}: name one of them." if inside else ""
        raise ValueError(f"{checkpoint} is not a checkpoint folder: it has neither config.json nor weights.{hint}")
    faults: list[str] = []
    content = _read(folder / "config.json", faults)
    if (kind := content.get("model_type", NormAlignLlavaConfig.model_type)) != NormAlignLlavaConfig.model_type:
        raise ValueError(f"{checkpoint} is a {kind!r} model. Only NormAlign-LLaVA checkpoints can be published.")
    faults = _code_faults(folder) + faults
    faults += _config_faults(content)
    try:
        with torch.device("meta"):
            model = (
                NormAlignLlavaForConditionalGeneration(NormAlignLlavaConfig.from_dict(content)) if content else None
            )
    except Exception as error:  # each part checks its configuration in its own way
        faults.append(f"config.json: no model can be made from it ({error}).")
    else:
        faults += _weight_faults(folder, model) + _processor_faults(folder, model) if model else []
    _raise(faults, heading)


def _raise(faults: list[str], heading: str) -> None:
    if faults:
        count = f"{len(faults)} faults" if faults[1:] else "1 fault"
        raise ValueError(f"{heading}, {count}:\n" + "\n".join(f"- {fault}" for fault in faults))


def _read(file: Path, faults: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
        if isinstance(content, dict):
            return content
        faults.append(f"{file.name}: not a JSON object. {_SAVE_AGAIN}.")
    except (OSError, ValueError, RecursionError) as error:
        faults.append(f"{file.name}: missing or unreadable ({error}). {_SAVE_AGAIN}.")
    return {}


def _code_faults(folder: Path) -> list[str]:
    faults = []
    for module in (configuration_normalign_llava, modeling_normalign_llava):
        ours = Path(str(module.__file__))
        theirs = folder / ours.name
        if not theirs.is_file() or theirs.read_bytes() != ours.read_bytes():
            state = "is not this package's" if theirs.exists() else "is missing, so nobody else can load the model"
            faults.append(f"{ours.name} {state}. Copy {ours} to it, or publish with the version that wrote it.")
    return faults


def _config_faults(content: dict[str, Any]) -> list[str]:
    expected = {
        "architectures": [NormAlignLlavaForConditionalGeneration.__name__],
        "auto_map": NormAlignLlavaConfig.auto_map_entries,
    }
    return [
        f"config.json: {name} is {json.dumps(content.get(name))}, not {json.dumps(value)}. {_SAVE_AGAIN}."
        for name, value in expected.items()
        if content and content.get(name) != value
    ]


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
    starts, trainings = [aligned], _trainings(folder)
    if trainings and config.text_embedding_norm:
        # Training may have changed the embeddings but not the norm.
        starts.append(initial_gain(config, config.text_embedding_norm))
    # The first step of training moves the elements of a gain apart. Not every trainer leaves a record.
    untrained = bool(trainings) and not any(trainings)
    trained = not untrained and len(gain.unique()) > 1
    if trained or any(bool(((gain - start).abs() <= TOLERANCE * start).all()) for start in starts):
        return []
    should = "1" if config.projector_gain_init == "one" else f"N_text / sqrt(d) of the embeddings, {aligned:.6g}"
    why = f"its learning rate in {TRAINING_RECORD} was 0" if untrained else "all its elements are the same"
    return [
        f"{_NORM}weight: the gain, {gain.double().mean().item():.6g} on average, is not aligned: {should}. Nor was it "
        f"trained: {why}. Load the model, call align_projector_norm() and save it."
    ]


def _trainings(folder: Path) -> list[bool]:
    """For each training run of the checkpoint, the last one first: was the norm trained? True if not recorded."""
    trained: list[bool] = []
    record = _read(folder / TRAINING_RECORD, []) if (folder / TRAINING_RECORD).exists() else None
    while isinstance(record, dict):
        rates = record.get("learning_rates")
        rate = rates.get("norm", 0.0) if isinstance(rates, dict) else None
        trained.append(not isinstance(rate, int | float) or rate > 0.0)
        record = record.get("before")
    return trained


def _processor_faults(folder: Path, model: PreTrainedModel) -> list[str]:
    try:
        processor = Checkpoint(str(folder), None, {}).processor
        token, ours = processor.image_token_id, model.config.image_token_id
    except Exception as error:  # one fails to load in many ways
        return [
            f"the processor does not load ({error}). Save there the processor of the model that training started from."
        ]
    if token != ours:
        return [f"image token: config.json says {ours}, the tokenizer {token}. Save the model's own processor there."]
    faults = [] if processor.tokenizer.padding_side == "left" else [f"tokenizer_config.json: {PADS_RIGHT}"]
    try:
        check_processor(processor, model)
    except Exception as error:
        faults.append(f"processor_config.json: {error}")
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in the image?"}]}]
    try:
        places = processor.apply_chat_template(asked, add_generation_prompt=True).count(processor.image_token)
        if places != 1:
            faults.append(f"chat template: it writes {places} image tokens for one image. Build the checkpoint again.")
    except Exception as error:  # any that a template raises
        faults.append(f"chat template: missing, or it takes no image ({error}). Save one with the processor.")
    return faults


def _adapter_faults(folder: Path) -> list[str]:
    faults: list[str] = []
    content = _read(folder / ADAPTER_CONFIG, faults)
    if content and not content.get("peft_type"):
        faults.append(f"{ADAPTER_CONFIG}: it has no peft_type. Save the adapter with PEFT.")
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            names = list(file.keys())
            bad = [name for name in names if not file.get_tensor(name).isfinite().all()]
    except (SafetensorError, OSError) as error:
        return [*faults, f"{ADAPTER_WEIGHTS}: missing or unreadable ({error}). Save the adapter again."]
    if not names:
        faults.append(f"{ADAPTER_WEIGHTS}: it holds no tensor. Save the adapter again.")
    if bad:
        faults.append(f"{ADAPTER_WEIGHTS}: NaN or infinite values in {_first(bad)}. Train again.")
    return faults
