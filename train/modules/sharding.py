# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What FSDP2 needs for this model: its units, its name on disk, its gradients."""

import torch
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GradientCheckpointingLayer

from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .model import projector_norm


def name_fsdp_units(plugin, model: NormAlignLlavaForConditionalGeneration) -> None:
    """Names the layers that FSDP2 wraps one by one, unless the user's configuration does.

    accelerate's own list has classes of every family the model could be built from, and fails on those it lacks. The
    norm is a unit of its own because FSDP2 needs one dtype in a unit, and the gain is float32.
    """
    if plugin.transformer_cls_names_to_wrap is None:
        layers = {type(m).__name__ for m in model.modules() if isinstance(m, GradientCheckpointingLayer)}
        plugin.transformer_cls_names_to_wrap = sorted(layers | {type(projector_norm(model)).__name__})


def name_as_unsharded(model: FSDPModule) -> None:
    """Gives the class that FSDP2 derives from the model's class the name and module of that class.

    Saving writes them into the checkpoint's `auto_map` and copies that module's files.
    """
    sharded, own = type(model), type(model).__bases__[-1]
    sharded.__name__, sharded.__qualname__, sharded.__module__ = own.__name__, own.__qualname__, own.__module__


def fill_gradients(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Before a step under FSDP2, gives zero gradients to trained parameters that have none.

    Those are the vision tower's layers after the one that is read. Without a state for every trained parameter, torch
    refuses to load the optimizer's states. If none has a gradient, the step is one that is skipped.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
