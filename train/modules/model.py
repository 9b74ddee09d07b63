# SPDX-License-Identifier: Apache-2.0
"""The model to train: its modules by name, and which of their parameters are trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ...checkpoint.weights import module_of_tensor
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


PLACES = {
    "language": ["language_model", "lm_head"],
    "projector": ["multi_modal_projector"],
    "norm": ["multi_modal_projector.norm"],
    "vision": ["vision_tower"],
}
"""Modules with their own learning rates, and parts of the names of their parameters.

The norm is within the projector. The Trainer logs the rate of the first one that is trained.
"""


def module_of(parameter: str) -> str:
    """Returns which of `PLACES` a parameter is in, by its name.

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
    return modules - {module_of_tensor(name) for name in trained_parameters(model)}


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
