# SPDX-License-Identifier: Apache-2.0
"""LoRA on the language model only, with the projector trained in full; both in float32."""

import copy
import re

from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import BitsAndBytesConfig

from ...assembly.adapter import LORA_SETTINGS, on_meta, put_on_meta
from ...checkpoint.untrusted import refuse_unreadable
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ..command import names_in
from .adapter_effect import check_effect, linear_layers


ELSEWHERE = r"(?!model\.language_model\.|lm_head$).*"
"""Modules that get no adapters. The head does not match, so that an error can name it."""

VALUES = {"init_lora_weights": (True, False, "gaussian"), "task_type": (None, "CAUSAL_LM")}
"""The values that two settings may have.

Other values compute adapters from weights or data, or have another loss.
"""


def language_adapter(
    config: PeftConfig, model_config: NormAlignLlavaConfig, learning_rates: dict[str, float]
) -> LoraConfig:
    """Returns a copy of a LoRA configuration that is limited to the language model.

    PEFT's names would match in the vision tower too. The projector with its norm, and a trained
    vision tower, are trained in full and saved with the adapter.

    Args:
        config: The configuration. Its `target_modules` are names of linear layers or a regular
            expression; by default all the decoder's.
        model_config: The configuration of the model.
        learning_rates: The peak learning rate of each module; 0 if it is frozen.

    Raises:
        ValueError: Something that is named would not be trained, or could not be merged.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"peft_config is a {type(config).__name__}. Give a LoraConfig.")
    if learning_rates["language"] == 0:
        raise ValueError("LoRA trains the language model, but its learning rate is 0. Set another.")
    _check_supported(config)
    limited = copy.deepcopy(config)
    model = on_meta(model_config)
    targets = _named_targets(config)
    if isinstance(targets, str):
        limited.target_modules = targets
    else:
        limited.target_modules = set(targets or linear_layers(model))
    excluded = _excluded_patterns(config)
    limited.exclude_modules = "|".join([ELSEWHERE, *excluded.values()])
    with refuse_unreadable(
        "The adapter of peft_config", remedy="Give one that PEFT can apply and merge."
    ):
        limited.modules_to_save = _modules_to_save(config, model, learning_rates) or None
        check_effect(limited, model, targets, excluded)
        put_on_meta(model, limited).merge_and_unload()
    return limited


def _check_supported(config: LoraConfig) -> None:
    """Raises ValueError if a field is set that is not supported, or to a value that is not."""
    refused = []
    for field, default in sorted(vars(LoraConfig()).items()):
        value = getattr(config, field)
        if field in VALUES:
            is_supported = value in VALUES[field]
        elif field == "lora_alpha":  # 0 would make adapters without effect
            is_supported = bool(value)
        else:
            is_supported = field in LORA_SETTINGS or value == default
        if not is_supported:
            refused.append(f"{field} {value!r}")
    if refused:
        settings = ", ".join(refused)
        raise ValueError(f"peft_config sets {settings}, which is not supported here. Leave it out.")


def _named_targets(config: LoraConfig) -> str | list[str]:
    """Returns `target_modules` as a pattern or names; no names, if all linear layers are meant."""
    targets = config.target_modules
    if targets is None or targets == "all-linear":
        return []
    if isinstance(targets, str):
        return names_in(targets) or targets  # TRL makes text of a list of one name
    return list(targets)


def _excluded_patterns(config: LoraConfig) -> dict[str, str]:
    """Returns the patterns of `exclude_modules`, by what is written there."""
    excluded = config.exclude_modules or ()
    if isinstance(excluded, str):
        return {excluded: excluded}
    return {name: rf"(.*\.)?{re.escape(name)}" for name in sorted(excluded)}  # as PEFT reads names


def _modules_to_save(
    config: LoraConfig, model: nn.Module, learning_rates: dict[str, float]
) -> list[str]:
    """Returns the modules to train in full: those that are named, the projector, the tower."""
    modules = []
    if learning_rates["vision"] > 0:
        modules.append("vision_tower")
    if learning_rates["projector"] > 0 or learning_rates["norm"] > 0:
        modules.append("multi_modal_projector")
    requested = [name for name in config.modules_to_save or () if name not in modules]
    for path, _ in model.named_modules():
        if not re.match(r"model$|model\.(vision_tower|multi_modal_projector)", path):
            continue
        for name in requested:
            if path.endswith(name):  # as PEFT does
                raise ValueError(
                    f"modules_to_save names {name}: {path} has its own learning rate. Leave it out."
                )
    return requested + modules


def check_quantized(
    config: NormAlignLlavaConfig,
    quantization: BitsAndBytesConfig,
    language_rate: float,
    adapters: LoraConfig | None,
) -> None:
    """Raises ValueError if a layer that is quantized would be trained in full.

    Args:
        config: The configuration of the model.
        quantization: How the model will be quantized.
        language_rate: The learning rate of the language model without adapters.
        adapters: The adapters to train, if there are any.
    """
    if quantization.llm_int8_skip_modules is not None:
        raise ValueError("llm_int8_skip_modules is set here, to all but the decoder. Leave it out.")
    if language_rate and adapters is None:
        raise ValueError(
            f"language_learning_rate {language_rate:g} would train quantized weights. Set 0, or "
            "--use_peft."
        )
    if adapters is None or not adapters.modules_to_save:
        return
    saved = tuple(adapters.modules_to_save)
    for path, module in on_meta(config).named_modules():
        is_saved = path.startswith("model.language_model") and path.endswith(saved)
        if is_saved and any(isinstance(layer, nn.Linear) for layer in module.modules()):
            raise ValueError(
                f"modules_to_save names {path}, which would be quantized. Use target_modules."
            )
