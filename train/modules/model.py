# SPDX-License-Identifier: Apache-2.0
"""The model to train: its modules by name, which of their parameters are trained, and dtypes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ...checkpoint.weights import module_of_tensor
from ...diagnose.measure.families import in_evaluation_mode
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


MODULES = ("language", "projector", "norm", "vision")
"""Modules with their own learning rates. The Trainer logs the first one's that is trained."""

PLACES = {
    "language": ["language_model", "lm_head"],
    "vision": ["vision_tower"],
    "projector": ["multi_modal_projector"],
    "norm": ["multi_modal_projector.norm"],
}
"""Parts of the names of their parameters. The norm is within the projector."""


def module_of(parameter: str) -> str:
    """Returns which of `MODULES` a parameter is in, by its name.

    Adapters and the head belong to the language model.
    """
    if "vision_tower." in parameter:
        return "vision"
    if "multi_modal_projector." not in parameter:
        return "language"
    if ".norm." in parameter:
        return "norm"
    return "projector"


def projector_norm(model: nn.Module) -> nn.Module:
    """Returns the norm after the projector, or its trained copy if there are adapters."""
    return base_model(model).model.multi_modal_projector.norm


def base_model(model: nn.Module) -> NormAlignLlavaForConditionalGeneration:
    """Returns the model itself, without PEFT's wrapper."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


def freeze(model: PreTrainedModel, learning_rates: dict[str, float]) -> None:
    """Makes only the modules with a learning rate trainable. Layers under adapters stay frozen."""
    has_adapters = isinstance(model, PeftModel)
    for parameter_name, parameter in model.named_parameters():
        if not parameter.is_floating_point():  # packed 4-bit weights
            continue
        may_train = parameter.requires_grad or not has_adapters
        parameter.requires_grad_(may_train and learning_rates[module_of(parameter_name)] > 0)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are trained, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def frozen_modules(model: nn.Module) -> set[str]:
    """Returns the modules without a trained parameter, as their files of weights are called."""
    modules = {module_of_tensor(parameter_name) for parameter_name, _ in model.named_parameters()}
    trained = {module_of_tensor(parameter_name) for parameter_name in trained_parameters(model)}
    return modules - trained


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of an object other values for a time."""
    # unittest.mock.patch.multiple would call __setattr__, and modules register what they are given.
    previous_values = {name: vars(owner)[name] for name in values.keys() & vars(owner).keys()}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(previous_values)


def train_in_float32(model: nn.Module) -> None:
    """Makes trained parameters float32, so that small updates do not vanish."""
    is_float32 = is_deepspeed_zero3_enabled()  # ZeRO-3 loads all in float32
    if not is_float32:
        for parameter in trained_parameters(model).values():
            parameter.data = parameter.data.float()
    # Without autocast, hooks cast what goes into the projector, and into and out of saved modules.
    base_model(model).model.multi_modal_projector.register_forward_pre_hook(
        lambda module, inputs: _cast(inputs, module.linear_1)
    )
    for module_name, module in model.named_modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        if not is_float32:  # TRL rounds PEFT's copy on a quantized base
            copied_parameters = module.modules_to_save["default"].parameters()
            original_parameters = module.original_module.parameters()
            for copied, original in zip(copied_parameters, original_parameters, strict=True):
                copied.data = original.to(copied.device, torch.float32, copy=True)
        if module_of(f"{module_name}.") == "language":
            module.register_forward_pre_hook(
                lambda module, *inputs: _cast(inputs, module.modules_to_save), with_kwargs=True
            )
            module.register_forward_hook(
                lambda module, inputs, output: _cast(output, module.original_module)
            )


def _cast(values: Any, like: nn.Module) -> Any:
    """Returns tensors in a module's precision, unless autocast casts them where they are used."""
    parameter = next(like.parameters())
    if torch.is_autocast_enabled(parameter.device.type):
        return values

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(parameter.dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, values)


@contextmanager
def evaluating(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Evaluates without gradients, in training's precision. Restores modes and random state."""
    devices = []
    if args.device.type == "cuda":
        devices.append(torch.cuda.current_device())
    half_precision = torch.bfloat16 if args.bf16 else torch.float16
    autocast = torch.autocast(args.device.type, half_precision, enabled=args.bf16 or args.fp16)
    with in_evaluation_mode(model), torch.random.fork_rng(devices), autocast:
        yield
