# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model to train: its checks, how it is loaded, and which of its modules are frozen."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.quantizers.auto import AutoHfQuantizer

from ...assembly.build import ARMS
from ...assembly.parts import check_feature_layer
from ...checkpoint.names import PICKLES, TRAINING_RECORD
from ...checkpoint.opening import Checkpoint, open_checkpoint
from ...checkpoint.untrusted import check_weights
from ...checkpoint.weights import module_of_file
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..command import NO_MODEL
from ..options.arguments import NormAlignConfig


MODULES = ("language", "projector", "norm", "vision")
"""The parts with a learning rate of their own. The Trainer logs that of the first one that is trained."""


def module_of(parameter: str) -> str:
    """Which of `MODULES` a parameter belongs to, by its name. Adapters and the head belong to `"language"`."""
    if "vision_tower." in parameter:
        return "vision"
    if "multi_modal_projector." in parameter:
        return "norm" if ".norm." in parameter else "projector"
    return "language"


def check_checkpoint(
    checkpoint: str | os.PathLike, training: NormAlignConfig, revision: str | None = None
) -> tuple[Checkpoint, NormAlignLlavaConfig]:
    """The checkpoint to train, and its configuration with the arm of `training`; no weights are loaded."""
    opened = open_checkpoint(str(checkpoint), revision, remedy=NO_MODEL)
    folder = opened.name
    if Path(folder).exists() and Path(folder).resolve() == Path(str(training.output_dir)).resolve():
        raise ValueError(f"--output_dir is the checkpoint to train, {folder}. Choose another.")
    check_architecture(opened.model_type, folder)
    stored = any(file.suffix in (".safetensors", *PICKLES) for file in Path(folder).glob("*model*"))
    if stored or not training.dry_run:
        check_weights(folder, opened.revision)  # as loading does, but before rows are read
    config = copy.deepcopy(opened.config)
    check_feature_layer(config.vision_feature_layer, config.vision_config)
    current = arm_of(config)
    arm = training.arm or current
    if arm != current:
        if {arm, current} != {"aligned", "gwc"} and (Path(folder) / TRAINING_RECORD).exists():
            raise ValueError(
                f"{folder} was trained as arm {current!r}; arm {arm!r} would discard its gain. Start from an "
                f"untrained checkpoint: `normalign build --arm {arm}`."
            )
        norm = "layer_norm" if config.projector_norm == "none" else config.projector_norm
        neutral = {"projector_norm": norm, "projector_gain_init": "text_norm", "gradient_compensation": "global"}
        for name, value in {**neutral, **ARMS[arm]}.items():
            setattr(config, name, value)
    return opened, config


def check_architecture(model_type: str | None, name: str) -> None:
    """Raises ValueError if a model is not a NormAlign-LLaVA."""
    if model_type != NormAlignLlavaConfig.model_type:
        raise ValueError(
            f"{name} is a {model_type!r} model. Build a NormAlign-LLaVA checkpoint from it with `normalign build` "
            "(--vision and --language, or --from-llava), and train that."
        )


def load_model(
    checkpoint: str | os.PathLike, training: NormAlignConfig, quantization_config: BitsAndBytesConfig | None = None
) -> NormAlignLlavaForConditionalGeneration:
    """Loads a checkpoint, by default in float32, as the arm of `training`; aligns a norm that this adds or resets."""
    kwargs = {"dtype": "float32", **(training.model_init_kwargs or {})}
    if quantization_config is not None:
        kwargs |= {"quantization_config": quantization_config, "device_map": {"": training.device}}
    opened, config = check_checkpoint(checkpoint, training, kwargs.pop("revision", None))
    if training.dry_run:
        return without_weights(checkpoint, config, kwargs)
    model = opened.load(config=config, **kwargs)
    # The name is empty if the configuration differs from the folder's; training.json records the difference.
    model.name_or_path = model.config.name_or_path = str(checkpoint)
    stored, arm = arm_of(opened.config), arm_of(config)
    if {stored, arm} & {"none", "unit"} and arm not in (stored, "none"):
        model.align_projector_norm()
    return model


def without_weights(
    name: str | os.PathLike, config: NormAlignLlavaConfig, kwargs: dict[str, Any]
) -> NormAlignLlavaForConditionalGeneration:
    """The model that `from_pretrained` would load with `kwargs`, on meta: shapes and dtypes alone, also in 4 bits."""
    kwargs = {**kwargs, "dtype": config.dtype or "float32"} if kwargs["dtype"] == "auto" else dict(kwargs)
    dtype = kwargs["dtype"] if isinstance(kwargs["dtype"], torch.dtype) else getattr(torch, kwargs["dtype"])
    quantization, device_map = kwargs.pop("quantization_config", None), kwargs.pop("device_map", None)
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration._from_config(config, **{**kwargs, "dtype": dtype})
    model.name_or_path = model.config.name_or_path = str(name)
    if quantization is None:
        return model
    if quantization.load_in_8bit:
        raise ValueError("dry_run cannot count load_in_8bit. Leave it out, or count with load_in_4bit.")
    quantization = copy.copy(quantization)
    quantization.llm_int8_skip_modules = ["lm_head", "model.vision_tower", "model.multi_modal_projector"]
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=device_map)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    with patch.dict("bitsandbytes.functional.name2qmap"):  # which keeps a table for later models; here it is on meta
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":
                module.to(dtype)  # as they are loaded
                module.weight._quantize("meta")
                if module.weight.quant_state.nested:
                    module.weight.quant_state.offset = torch.zeros(())  # which is read where bytes are counted
    return model


def arm_of(config: NormAlignLlavaConfig) -> str:
    """The paper's arm that a configuration is."""
    if config.projector_norm == "none":
        return "none"
    if config.projector_gain_init == "one" and config.gradient_compensation == "none":
        return "unit"
    return "gwc" if config.gradient_compensation == "global" else "aligned"


def freeze(model: PreTrainedModel, learning_rates: dict[str, float]) -> None:
    """Makes exactly the modules with a learning rate trainable; layers under adapters stay frozen."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue  # packed 4-bit weights
        trained = learning_rates[module_of(name)] > 0
        parameter.requires_grad_(trained and (parameter.requires_grad or not isinstance(model, PeftModel)))


def frozen_modules(model: nn.Module) -> set[str]:
    """The modules without a trained parameter, as their files of weights are called."""
    named = list(model.named_parameters())
    trained = {module_of_file(name) for name, parameter in named if parameter.requires_grad}
    return {module_of_file(name) for name, _ in named} - trained


def eval_frozen(model: NormAlignLlavaForConditionalGeneration) -> None:
    """Puts modules without a trained parameter into evaluation mode, so that they have no dropout.

    A frozen language model still has to carry gradients to the projector. transformers checkpoints decoder layers in
    training mode only, so checkpointed layers stay in that mode, and are computed in evaluation mode.
    """
    for module in (model.model.vision_tower, model.model.language_model, model.model.multi_modal_projector):
        if not any(parameter.requires_grad for parameter in module.parameters()):
            module.eval()
    for layer in model.model.language_model.modules():
        if layer.training or not isinstance(layer, GradientCheckpointingLayer) or not layer.gradient_checkpointing:
            continue
        layer.training, checkpoint = True, layer._gradient_checkpointing_func
        if not isinstance(checkpoint, _FrozenCheckpoint):
            layer._gradient_checkpointing_func = _FrozenCheckpoint(layer, checkpoint)


@dataclass
class _FrozenCheckpoint:
    """Checkpoints a layer in training mode, but computes it, both times, in evaluation mode while it is frozen."""

    layer: GradientCheckpointingLayer
    checkpoint: Callable

    def __call__(self, forward: Callable, *args):
        def frozen_forward(*args):
            training = self.layer.training
            self.layer.training = any(parameter.requires_grad for parameter in self.layer.parameters())
            try:
                return forward(*args)
            finally:
                self.layer.training = training

        return self.checkpoint(frozen_forward, *args)


def projector_norm(model: nn.Module) -> nn.Module:
    """The norm after the projector; with adapters, the trained copy."""
    return base_model(model).model.multi_modal_projector.norm


def base_model(model: nn.Module) -> NormAlignLlavaForConditionalGeneration:
    """The model itself, without PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
