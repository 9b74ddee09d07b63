# SPDX-License-Identifier: Apache-2.0
"""How a model is divided among processes, by FSDP2 or DeepSpeed."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import distributed as dist, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...checkpoint.files import INDEX
from .model import projector_norm, replaced


def prepare_sharding(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Has FSDP2 wrap the layers, or the configured classes, one by one, and the norm apart."""
    # accelerate's own list fails on classes that the model lacks. Its one policy would use gain and
    # bias, and reduce their gradients, in bfloat16, so the norm is a unit with its own policy.
    plugin = accelerator.state.fsdp_plugin
    plugin.set_state_dict_type("FULL_STATE_DICT")  # with another one, the Trainer saves no model
    norm_class = type(projector_norm(model))
    class_names = plugin.transformer_cls_names_to_wrap
    if not class_names:
        class_names = [
            type(module).__name__
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)
        ]
    plugin.transformer_cls_names_to_wrap = sorted({*class_names, norm_class.__name__})
    prepare = accelerator.prepare
    fully_shard = fsdp.fully_shard

    def shard(module: nn.Module, **kwargs: Any) -> fsdp.FSDPModule:
        if type(module) is norm_class:
            kwargs["mp_policy"] = fsdp.MixedPrecisionPolicy()
        return fully_shard(module, **kwargs)

    def prepare_with_norm(*args: Any, **kwargs: Any) -> Any:
        with replaced(fsdp, fully_shard=shard):
            return prepare(*args, **kwargs)

    accelerator.prepare = prepare_with_norm


def load_sharded(model: fsdp.FSDPModule, folder: Path) -> None:
    """Loads weights under FSDP2, file by file. The first process reads, and all get their part."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    for file_name in sorted({*index["weight_map"].values()}):
        state = {}
        if dist.get_rank() == 0:
            state = load_file(folder / file_name)
        set_model_state_dict(model, state, options=options)


def fill_missing_gradients(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Gives zero gradients to trained parameters that have none, unless none has a gradient.

    It is registered under FSDP2, and runs before each step of the optimizer.
    """
    # Features come from an earlier layer, so the vision tower's last layers get no gradient. The
    # optimizer would save no state for them, and on resuming torch cannot load states of only some
    # parameters.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def sharding() -> str:
    """Returns how the model is divided among processes. It decides how states are saved."""
    names = {DistributedType.FSDP: "FSDP", DistributedType.DEEPSPEED: "DeepSpeed"}
    return names.get(AcceleratorState().distributed_type, "none")


def sharding_stage() -> int:
    """Returns the stage of ZeRO that divides as much as this run does."""
    if sharding() == "DeepSpeed":
        return AcceleratorState().deepspeed_plugin.zero_stage
    return 3 if sharding() == "FSDP" else 0
