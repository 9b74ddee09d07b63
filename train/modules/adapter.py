# SPDX-License-Identifier: Apache-2.0
"""LoRA on the language model alone, with the projector trained in full; all of it in float32."""

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...assembly.adapter import put_on_meta
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..options.fields import names_in


ELSEWHERE = r"(?!model\.language_model\.|lm_head$).*"
"""Modules that get no adapters. The head is none of them, so that whoever names it is told."""

OPTIONS = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "fan_in_fan_out", "task_type"),
    *("layers_to_transform", "target_modules", "exclude_modules", "modules_to_save"),
    *("trainable_token_indices", "ensure_weight_tying", "init_lora_weights", "peft_version"),
    *("base_model_name_or_path", "revision", "runtime_config"),
}
"""What may be set in a `LoraConfig`: what is trained as it says, and can be merged."""

TIED = "The embeddings of this model are its head too (tie_word_embeddings)"
IN_FULL = "train them in full: modules_to_save with embed_tokens"


def language_adapter(
    config: PeftConfig, model_config: NormAlignLlavaConfig, learning_rates: dict[str, float]
) -> LoraConfig:
    """A copy of a LoRA configuration, limited to the language model: PEFT's names match in the vision tower too.

    The projector, with its norm, is trained in full and saved with the adapter, and so is a trained vision tower.
    `target_modules` are names of linear layers or a regular expression; by default all of the decoder's.

    PEFT passes over names that match nothing, so they are looked for here, and the adapter is put on a model without
    weights and merged.

    Raises:
        ValueError: Something that was named would not be trained, or the result could not be merged.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"peft_config is a {type(config).__name__}. Give a LoraConfig: others cannot be merged here.")
    if learning_rates["language"] == 0:
        raise ValueError("Adapters are put on the language model, but its learning rate is 0. Leave out one of them.")
    _check_options(config)
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(model_config)
    targets, excluded = config.target_modules, config.exclude_modules or ()
    names = {excluded: excluded} if isinstance(excluded, str) else {name: _ending(name) for name in sorted(excluded)}
    config.exclude_modules = "|".join([ELSEWHERE, *names.values()])
    all_layers = targets in (None, "all-linear")
    if all_layers or (isinstance(targets, str) and names_in(targets)):  # TRL makes text of a list of one name
        config.target_modules = set(_linear_layers(model) if all_layers else names_in(targets))
    config.modules_to_save = _modules_to_save(config, model, learning_rates)
    if not all_layers:
        _check_targets(config, model)
    _check_layers(config, model, names)
    _check_tokens(config, model)
    _check_merged(config, model)
    return config


def _check_options(config: LoraConfig) -> None:
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"init_lora_weights is {config.init_lora_weights!r}. Use True, False or 'gaussian': others are computed "
            "from the base's weights or from data, and may change the base, which the adapter would then not fit."
        )
    if not config.lora_alpha:
        raise ValueError("lora_alpha 0 multiplies each adapter by 0, so none would be trained. Give another.")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(f"task_type is {config.task_type!r}. Answers are trained with 'CAUSAL_LM'.")
    for pattern in (config.target_modules, config.exclude_modules):
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except re.error as error:
            raise ValueError(f"{pattern!r} in peft_config is no regular expression: {error}.") from error
    changed = {name for name, value in vars(LoraConfig()).items() if getattr(config, name) != value} - OPTIONS
    if changed:
        raise ValueError(
            f"peft_config sets {', '.join(sorted(changed))}, with which adapters would not be trained here, or could "
            "not be merged. Leave it out."
        )


def _modules_to_save(config: LoraConfig, model: nn.Module, learning_rates: dict[str, float]) -> list[str] | None:
    """Modules that are trained in full and saved with the adapter."""
    projector = max(learning_rates["projector"], learning_rates["norm"])
    in_full = {"vision_tower": learning_rates["vision"], "multi_modal_projector": projector}
    requested = []
    for name in config.modules_to_save or ():
        paths = [path for path in _modules(model) if path.endswith(name)]  # as PEFT does
        if not paths:
            raise ValueError(f"modules_to_save names {name}, and the model has no module of that name.")
        part = next((part for part in in_full if f"model.{part}" in paths), None)
        if part and not in_full[part]:
            raise ValueError(f"modules_to_save names {name}, but its learning rate is 0. Leave out one of them.")
        if not part and any(re.match(r"model$|model\.(vision_tower|multi_modal_projector)", path) for path in paths):
            raise ValueError(
                f"modules_to_save names {name}, which is in the vision tower or the projector too. "
                "They have learning rates of their own. Name modules of the language model."
            )
        requested += [] if part else [name]
    return [*requested, *(name for name, learning_rate in in_full.items() if learning_rate > 0)] or None


def _check_targets(config: LoraConfig, model: nn.Module) -> None:
    """Raises ValueError if a named target gets no adapter; of a pattern, the names of layers in it count."""
    names, targets = _modules(model), config.target_modules
    adapted = {_last(name) for name in _adapted(config, names)}
    if isinstance(targets, str):
        left_out = {_last(name) for name in names if re.fullmatch(targets, name)} - adapted
        left_out = {name for name in left_out if name in targets}
        if "(?" not in targets:  # words of an alternation that are in no path
            words = re.findall(r"[A-Za-z]\w{2,}", re.sub(r"\\[A-Za-z]|\[[^]]*\]", " ", targets))
            left_out |= {word for word in words if not any(word in name for name in names)}
    else:
        left_out = {name for name in targets if not _adapted(config, names, target_modules={name})}
    for name in sorted(left_out):
        paths = [path for path in names if re.fullmatch(_ending(name), path)]
        why = "exclude_modules, modules_to_save or layers_to_transform leaves it out"
        if not paths:
            why = f"there is no such module. Layers of the language model: {', '.join(_linear_layers(model))}"
        elif all(re.fullmatch(ELSEWHERE, path) for path in paths):
            why = "it is not in the language model. The other parts are trained in full, if they have a learning rate"
        raise ValueError(f"target_modules names {name}, which would get no adapter: {why}.")


def _check_layers(config: LoraConfig, model: nn.Module, excluded: dict[str, str]) -> None:
    """Raises ValueError if a layer has no adapter, or an exclusion excludes none."""
    names, layers = _modules(model), config.layers_to_transform
    for layer in [layers] if isinstance(layers, int) else layers or ():
        if not _adapted(config, names, layers_to_transform=[layer]):
            last = model.config.text_config.num_hidden_layers - 1
            raise ValueError(f"layers_to_transform names {layer}, where no adapter would be. Layers are 0 to {last}.")
    adapted = _adapted(config, names)
    for name, pattern in excluded.items():
        paths = [path for path in names if re.fullmatch(pattern, path)]
        if not paths or any(place.startswith(f"{path}.") for path in paths for place in adapted):
            raise ValueError(
                f"exclude_modules has {name}, which excludes no adapter. A module does not stand for the layers in "
                "it: name those, or give a regular expression."
            )


def _check_tokens(config: LoraConfig, model: NormAlignLlavaForConditionalGeneration) -> None:
    """Raises ValueError unless each of `trainable_token_indices` is a row of the input embeddings that is read."""
    embeddings, tokens = model.get_input_embeddings(), config.trainable_token_indices
    if tokens is None:
        return
    if model.lm_head.weight is embeddings.weight:
        raise ValueError(f"{TIED}, so trainable_token_indices cannot be merged. Leave it out, or {IN_FULL}.")
    path = next(name for name, module in model.named_modules() if module is embeddings)
    for name, indices in (tokens if isinstance(tokens, dict) else {_last(path): tokens}).items():
        if [module for module in _modules(model) if module.endswith(name)] != [path]:
            raise ValueError(f"trainable_token_indices names {name}. Only the input embeddings can be: {_last(path)}.")
        for index in indices:
            if not 0 <= index < embeddings.num_embeddings or index == model.config.image_token_id:
                raise ValueError(
                    f"trainable_token_indices has {index}. The vocabulary has {embeddings.num_embeddings} tokens, and "
                    f"{model.config.image_token_id}, the image's, is never looked up."
                )


def _check_merged(config: LoraConfig, model: NormAlignLlavaForConditionalGeneration) -> None:
    """Raises ValueError if PEFT cannot put the adapter on the model or merge it, or TRL's loss passes it by."""
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    try:
        adapted = put_on_meta(model, config)
    except Exception as error:  # PEFT's own are of many kinds
        raise ValueError(f"PEFT cannot put these adapters on the model: {_reason(error)}") from error
    if tied and isinstance(model.get_input_embeddings(), BaseTunerLayer):
        raise ValueError(f"{TIED}, so an adapter on them could not be merged. Leave it out, or {IN_FULL}.")
    if isinstance(model.lm_head, BaseTunerLayer):
        raise ValueError(
            "target_modules names lm_head, whose adapter would not be trained: the loss is computed from its weight "
            "alone. Leave it out, or train it in full: modules_to_save with lm_head."
        )
    try:
        adapted.merge_and_unload()
    except Exception as error:
        raise ValueError(f"These adapters could not be merged after training: {_reason(error)}") from error


def _adapted(config: LoraConfig, names: Sequence[str], **changes: Any) -> list[str]:
    """The modules on which PEFT puts adapters, by a configuration with `changes`."""
    config = copy.copy(config)
    vars(config).update(changes)
    return [name for name in names if check_target_module_exists(config, name)]


def _modules(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the language model's linear layers, without their paths."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    return sorted({_last(name) for name in linears if name.startswith("model.language_model.")})


def _ending(name: str) -> str:
    """The pattern of paths that end in a name, as PEFT reads one."""
    return rf"(.*\.)?{re.escape(name)}"


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def restore_copies(model: PeftModel) -> None:
    """Gives PEFT's copies of modules the base's values again, in float32: TRL rounds them on a quantized base."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            copied = module.modules_to_save["default"]
            for parameter, value in zip(copied.parameters(), module.original_module.parameters(), strict=True):
                parameter.data = value.to(parameter.device, torch.float32, copy=True)
