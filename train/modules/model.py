# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model to train: its parts by name, which are frozen, and in which precision and mode they run."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from ...checkpoint.weights import module_of_file
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


MODULES = ("language", "projector", "norm", "vision")
"""The parts with a learning rate of their own. The Trainer logs that of the first one that is trained."""


PLACES = {
    "language": ["language_model", "lm_head"],
    "projector": ["multi_modal_projector"],
    "norm": ["multi_modal_projector.norm"],
    "vision": ["vision_tower"],
}
"""What is in the names of their parameters, and of no others'."""


def module_of(parameter: str) -> str:
    """Which of `MODULES` a parameter belongs to, by its name. Adapters and the head belong to `"language"`."""
    if "vision_tower." in parameter:
        return "vision"
    if "multi_modal_projector." in parameter:
        return "norm" if ".norm." in parameter else "projector"
    return "language"


def projector_norm(model: nn.Module) -> nn.Module:
    """The norm after the projector; with adapters, the trained copy."""
    return base_model(model).model.multi_modal_projector.norm


def base_model(model: nn.Module) -> NormAlignLlavaForConditionalGeneration:
    """The model itself, without PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


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


def train_in_float32(model: nn.Module) -> None:
    """Makes what is trained float32, in which small updates do not vanish, beside frozen modules of half precision.

    Where nothing autocasts, a projector takes features in its own precision, and so do further modules that are saved
    with an adapter; what these give has the precision of the layers around them.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and not is_deepspeed_zero3_enabled():  # where all is float32
            parameter.data = parameter.data.float()
    base_model(model).model.multi_modal_projector.register_forward_pre_hook(
        lambda module, inputs: _cast(inputs, module.linear_1)
    )
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and module_of(f"{name}.") == "language":
            module.register_forward_pre_hook(
                lambda module, *inputs: _cast(inputs, module.modules_to_save), with_kwargs=True
            )
            module.register_forward_hook(lambda module, inputs, output: _cast(output, module.original_module))


def _cast(values: Any, like: nn.Module) -> Any:
    """Floating point tensors in the precision of a module, unless autocast casts them where they are used."""
    dtype = next(like.parameters()).dtype

    def cast(value: Tensor) -> Tensor:
        kept = torch.is_autocast_enabled(value.device.type) or not value.is_floating_point()
        return value if kept else value.to(dtype)

    return tree_map_only(Tensor, cast, values)


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


@contextmanager
def evaluating(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Evaluation mode without gradients, in the precision of training.

    Afterwards each module is in the mode it was in, and random numbers continue as if none had been drawn.
    """
    devices = [torch.cuda.current_device()] if args.device.type == "cuda" else []
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    autocast = torch.autocast(args.device.type, dtype=dtype, enabled=args.bf16 or args.fp16)
    python, numpy = random.getstate(), np.random.get_state()
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices), autocast, torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of an object other values for a time."""
    before = {name: value for name, value in vars(owner).items() if name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)
