# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""LoRA on the language model alone, with the projector trained in full and in its own precision."""

import copy
import re

import torch
from accelerate.logging import get_logger
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .model import module_of


logger = get_logger(__name__)  # which speaks for all processes once


def language_adapter(
    config: PeftConfig,
    model: NormAlignLlavaForConditionalGeneration,
    rates: dict[str, float],
    commit: str | None = None,
) -> LoraConfig:
    """A copy of a LoRA configuration, kept to the language model, with what is trained in full in `modules_to_save`.

    PEFT's "all-linear" and bare names such as "q_proj" would reach into the vision tower, so all outside the language
    model is excluded. The projector, with its norm, is saved with the adapter, and so is a trained vision tower.

    Args:
        config: `target_modules` are names of linear layers, or a regular expression; by default all of the decoder's.
        model: The model, without adapters.
        rates: Learning rate of each module.
        commit: Of the model, if it is of the Hub.

    Raises:
        ValueError: it is no LoRA, a target names no linear layer of the language model, or that is frozen.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"peft_config is a {type(config).__name__}. Give a LoraConfig: no other can be merged here.")
    if rates["language"] == 0:
        raise ValueError("Adapters are put on the language model, but its learning rate is 0. Drop one of them.")
    config = copy.deepcopy(config)
    config.target_modules = _targets(config, model)
    own = config.exclude_modules or ()
    excluded = [own] if isinstance(own, str) else [rf"(.*\.)?{re.escape(name)}" for name in sorted(own)]
    config.exclude_modules = "|".join([r"(?!.*\.language_model\.).*", *excluded])
    config.modules_to_save = _whole(config, model, rates)
    # Or an adapter would say what its base is called, and not which it was.
    config.revision = commit
    return config


def _targets(config: LoraConfig, model: nn.Module) -> list[str] | str:
    """Names of linear layers, or the user's regular expression."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    inside = [name for name in linears if ".language_model." in name]
    if not inside:
        raise ValueError("The language model has no linear layer that an adapter could be put on. Leave out use_peft.")
    known = sorted({name.rpartition(".")[2] for name in inside})
    targets = config.target_modules
    if targets is None:
        return known
    everything = targets == "all-linear"
    beyond = [name for name in linears if everything or check_target_module_exists(config, name)]
    if count := sum(module_of(name) != "language" for name in beyond):
        logger.warning(
            f"target_modules also names {count} linear layers of the vision tower and the projector. They get no "
            "adapters: those modules are trained in full where they have a learning rate."
        )
    if everything:
        return known
    if isinstance(targets, str) and targets not in known:  # a regular expression
        unknown = [] if any(re.fullmatch(targets, name) for name in inside) else [targets]
    else:
        targets = [targets] if isinstance(targets, str) else sorted(targets)
        unknown = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in inside)]
    if unknown:
        raise ValueError(
            f"target_modules names {', '.join(unknown)}, but the language model's linear layers are "
            f"{', '.join(known)}."
        )
    return targets


def _whole(config: LoraConfig, model: nn.Module, rates: dict[str, float]) -> list[str] | None:
    """Modules that are trained in full, and saved with the adapter."""
    ours = {"vision_tower": rates["vision"], "multi_modal_projector": max(rates["projector"], rates["norm"])}
    asked = sorted(set(config.modules_to_save or ()) - set(ours))
    for name in asked:
        places = [path for path, _ in model.named_modules() if path.split(".")[-1] == name]
        if not places or any(f"{part}." in path for path in places for part in ours):
            where = (
                "in the vision tower or the projector, which have learning rates of their own"
                if places
                else "no module"
            )
            raise ValueError(f"modules_to_save names {name}: {where}. Name modules of the language model.")
    return [*asked, *(name for name, rate in ours.items() if rate > 0)] or None


def restore_projector(model: PeftModel, values: dict[str, torch.Tensor], wide: bool) -> None:
    """Gives the adapter's copy of the projector the values that it was made from, which casting has rounded.

    Args:
        model: The model with its adapter; one whose projector is frozen has no copy.
        values: The projector's state before.
        wide: Whether linear layers become float32 as well, which takes autocast to multiply: at small learning rates
            bfloat16 weights hardly move. The norm is float32 in any case.
    """
    for name, parameter in model.named_parameters():
        _, copied, name = name.partition("multi_modal_projector.modules_to_save.default.")
        if copied:
            dtype = torch.float32 if wide or name.startswith("norm.") else values[name].dtype
            parameter.data = values[name].to(dtype)
