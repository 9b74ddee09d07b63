# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""LoRA on the language model alone, with the projector trained in full; all of it in float32."""

import copy
import re

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration


def language_adapter(
    config: PeftConfig,
    model: NormAlignLlavaForConditionalGeneration,
    learning_rates: dict[str, float],
    commit: str | None = None,
) -> LoraConfig:
    """A copy of a LoRA configuration, limited to the language model; what is trained in full is in `modules_to_save`.

    PEFT's "all-linear" and plain names such as "q_proj" also match layers of the vision tower, so everything outside
    the language model is excluded. The projector, with its norm, is saved with the adapter, and so is a trained
    vision tower.
    `target_modules` are names of linear layers or a regular expression; by default all of the decoder's. `commit` is
    the model's, if it is from the Hub.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"peft_config is a {type(config).__name__}. Give a LoraConfig: others cannot be merged here.")
    if learning_rates["language"] == 0:
        raise ValueError("Adapters are put on the language model, but its learning rate is 0. Leave out one of them.")
    config = copy.deepcopy(config)
    if config.target_modules in (None, "all-linear"):
        linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
        config.target_modules = {name.rpartition(".")[2] for name in linears if ".language_model." in name}
    own = config.exclude_modules or ()
    excluded = [own] if isinstance(own, str) else [rf"(.*\.)?{re.escape(name)}" for name in sorted(own)]
    config.exclude_modules = "|".join([r"(?!.*\.language_model\.).*", *excluded])
    config.modules_to_save = _modules_to_save(config, model, learning_rates)
    config.revision = commit  # PEFT stores the base's name alone
    return config


def _modules_to_save(config: LoraConfig, model: nn.Module, learning_rates: dict[str, float]) -> list[str] | None:
    """Modules that are trained in full and saved with the adapter."""
    projector = max(learning_rates["projector"], learning_rates["norm"])
    in_full = {"vision_tower": learning_rates["vision"], "multi_modal_projector": projector}
    requested = sorted(set(config.modules_to_save or ()) - set(in_full))
    for path, _ in model.named_modules():
        if path.split(".")[-1] in requested and any(f"{part}." in path for part in in_full):
            raise ValueError(
                f"modules_to_save names {path.split('.')[-1]}, which is in the vision tower or the projector too. "
                "They have learning rates of their own. Name modules of the language model."
            )
    return [*requested, *(name for name, learning_rate in in_full.items() if learning_rate > 0)] or None


def train_in_float32(model: PeftModel, autocast: bool) -> None:
    """Makes the adapter's matrices float32, and its copies of projector and vision tower, with the base's values.

    At small learning rates bfloat16 weights hardly move, and TRL rounds all that is trained on a quantized base to it.
    Further `modules_to_save` keep their precision.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    inner = model.get_base_model().model
    for module in (inner.multi_modal_projector, inner.vision_tower):
        if isinstance(module, ModulesToSaveWrapper):  # it is trained
            copied = module.modules_to_save["default"]
            for parameter, value in zip(copied.parameters(), module.original_module.parameters(), strict=True):
                parameter.data = value.to(parameter.device, torch.float32, copy=True)
            if not autocast:
                copied.register_forward_pre_hook(lambda module, inputs: tuple(each.float() for each in inputs))
