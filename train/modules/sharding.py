# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What FSDP2 needs for this model: its units, its name on disk, its gradients."""

from functools import wraps
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .model import projector_norm, replaced


def prepare_sharding(accelerator: Accelerator, model: NormAlignLlavaForConditionalGeneration) -> None:
    """Names the layers that FSDP2 wraps one by one, unless the user's configuration does, and the norm.

    accelerate's own list has classes of every family the model could be built from, and fails on those it lacks. It
    also has one policy for all units, with which gain and bias would be used, and their gradients reduced, in
    bfloat16. So the norm is a unit of its own, with a policy of its own.
    """
    plugin, prepare, norm = accelerator.state.fsdp_plugin, accelerator.prepare, type(projector_norm(model))
    layers = {type(m).__name__ for m in model.modules() if isinstance(m, GradientCheckpointingLayer)}
    plugin.transformer_cls_names_to_wrap = sorted({*(plugin.transformer_cls_names_to_wrap or layers), norm.__name__})

    def shard(module: nn.Module, **kwargs: Any) -> FSDPModule:
        return fully_shard(module, **kwargs | ({"mp_policy": MixedPrecisionPolicy()} if type(module) is norm else {}))

    @wraps(prepare)
    def prepare_with_norm(*args: Any, **kwargs: Any) -> Any:
        with replaced(fsdp, fully_shard=shard):
            return prepare(*args, **kwargs)

    accelerator.prepare = prepare_with_norm


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
