# SPDX-License-Identifier: Apache-2.0
"""The precision of modules in training and evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ...diagnose.measure.families import in_evaluation_mode
from .model import base_model, module_of, trained_parameters


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
