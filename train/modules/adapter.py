# SPDX-License-Identifier: Apache-2.0
"""LoRA on the language model alone, with the projector trained in full; all of it in float32."""

import copy
import re
from collections.abc import Collection
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from ...assembly.adapter import on_meta, put_on_meta
from ...checkpoint.untrusted import loading
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..command import names_in
from ..options import NormAlignConfig


ELSEWHERE = r"(?!model\.language_model\.|lm_head$).*"
"""Modules that get no adapters. The head is none of them, so that whoever names it is told."""

OPTIONS = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "fan_in_fan_out", "task_type"),
    *("layers_to_transform", "target_modules", "exclude_modules", "modules_to_save"),
    *("trainable_token_indices", "ensure_weight_tying", "init_lora_weights", "peft_version"),
    *("base_model_name_or_path", "revision", "runtime_config"),
}
"""What may be set in a `LoraConfig`: what is trained as it says, and can be merged."""

VALUES = {"init_lora_weights": (True, False, "gaussian"), "task_type": (None, "CAUSAL_LM")}
"""The values of two of them: others compute adapters from weights or data, or have another loss."""


def language_adapter(
    config: PeftConfig, model_config: NormAlignLlavaConfig, learning_rates: dict[str, float]
) -> LoraConfig:
    """A copy of a LoRA configuration, limited to the language model: PEFT's names match in the vision tower too.

    The projector, with its norm, is trained in full and saved with the adapter, and so is a trained vision tower.
    `target_modules` are names of linear layers or a regular expression; by default all of the decoder's. ValueError
    is raised if something that was named would not be trained, or the result could not be merged.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"peft_config is a {type(config).__name__}. Give a LoraConfig: others cannot be merged here.")
    if learning_rates["language"] == 0:
        raise ValueError("Adapters are put on the language model, but its learning rate is 0. Leave out one of them.")
    changed = {name for name, value in vars(LoraConfig()).items() if getattr(config, name) != value}
    refused = changed - OPTIONS | {name for name, values in VALUES.items() if getattr(config, name) not in values}
    refused |= set() if config.lora_alpha else {"lora_alpha"}
    if refused:
        named = ", ".join(f"{name} {getattr(config, name)!r}" for name in sorted(refused))
        raise ValueError(f"peft_config sets {named}: such adapters are not trained here. Leave it out.")
    config, model = copy.deepcopy(config), on_meta(model_config)
    targets, excluded = config.target_modules, config.exclude_modules or ()
    targets = () if targets in (None, "all-linear") else targets
    if isinstance(targets, str):
        targets = names_in(targets) or targets  # TRL makes text of a list of one name
    config.target_modules = targets if isinstance(targets, str) else set(targets or _linear_layers(model))
    ends = {name: rf"(.*\.)?{re.escape(name)}" for name in sorted(excluded)}  # as PEFT reads a name
    patterns = {excluded: excluded} if isinstance(excluded, str) else ends
    config.exclude_modules = "|".join([ELSEWHERE, *patterns.values()])
    with loading("The adapter of peft_config", remedy="Give one that PEFT can put on this model, and merge."):
        config.modules_to_save = _modules_to_save(config, model, learning_rates)
        _check_effect(config, model, targets, patterns)
        put_on_meta(model, config).merge_and_unload()
    return config


def _modules_to_save(config: LoraConfig, model: nn.Module, learning_rates: dict[str, float]) -> list[str] | None:
    """Modules that are trained in full and saved with the adapter."""
    projector = max(learning_rates["projector"], learning_rates["norm"])
    rates = {"vision_tower": learning_rates["vision"], "multi_modal_projector": projector}
    parts = [part for part, learning_rate in rates.items() if learning_rate > 0]
    requested = [name for name in config.modules_to_save or () if name not in parts]
    for path, _ in model.named_modules():
        for name in filter(path.endswith, requested):  # as PEFT does
            if re.match(r"model$|model\.(vision_tower|multi_modal_projector)", path):
                raise ValueError(
                    f"modules_to_save names {name}, so {path}, which has its own learning rate. Leave it out."
                )
    return [*requested, *parts] or None


def _check_effect(
    config: LoraConfig,
    model: NormAlignLlavaForConditionalGeneration,
    targets: str | Collection[str],
    excluded: dict[str, str],
) -> None:
    """Raises ValueError if something named has no effect, or is not trained or cannot be merged."""
    modules, embeddings = dict(model.named_modules()), model.get_input_embeddings()

    def adapted(**changes: Any) -> list[str]:
        changed = copy.copy(config)
        vars(changed).update(changes)
        return [path for path in modules if check_target_module_exists(changed, path)]

    adapters, layers = adapted(), config.layers_to_transform
    if isinstance(targets, str):  # the words of a pattern, but of one that looks ahead
        words = re.findall(r"[A-Za-z]\w{2,}", re.sub(r"\\[A-Za-z]|\[[^]]*\]", " ", targets))
        idle = [word for word in words if "(?" not in targets and not any(word in path for path in adapters)]
    else:
        idle = [name for name in sorted(targets) if not adapted(target_modules={name})]
    layers = [layers] if isinstance(layers, int) else layers or []
    idle += [f"layer {layer}" for layer in layers if not adapted(layers_to_transform=[layer])]
    leaves = [path for path, module in modules.items() if not [*module.children()]]
    idle += [name for name, pattern in excluded.items() if not any(re.fullmatch(pattern, leaf) for leaf in leaves)]
    idle += [name for name in config.modules_to_save or () if not any(path.endswith(name) for path in modules)]
    embedded = next(path for path, module in modules.items() if module is embeddings)
    tokens = config.trainable_token_indices or {}
    tokens = tokens if isinstance(tokens, dict) else {embedded.rpartition(".")[2]: tokens}
    for name, indices in tokens.items():
        idle += [] if [path for path in modules if path.endswith(name)] == [embedded] else [name]
        count, image = embeddings.num_embeddings, model.config.image_token_id  # which is never looked up
        idle += [f"token {index}" for index in indices if not 0 <= index < count or index == image]
    if idle:
        raise ValueError(
            f"peft_config names {', '.join(idle)}, which would have no effect. Adapters are put on "
            f"{', '.join(_linear_layers(model))} in layers 0 to {model.config.text_config.num_hidden_layers - 1}."
        )
    if "lm_head" in adapters:
        raise ValueError("An adapter on lm_head is not trained. Put lm_head into modules_to_save.")
    if model.lm_head.weight is embeddings.weight and (tokens or embedded in adapters):
        raise ValueError(
            "The embeddings of this model are its head too, so adapters on them cannot be merged. Put "
            "embed_tokens into modules_to_save."
        )


def check_quantized(
    config: NormAlignLlavaConfig, quantization: BitsAndBytesConfig, args: NormAlignConfig, adapters: LoraConfig | None
) -> None:
    """Raises ValueError if a layer that is quantized would be trained in full."""
    if quantization.llm_int8_skip_modules is not None:
        raise ValueError("llm_int8_skip_modules is set here, to all but the language model. Leave it out.")
    rate = args.learning_rates(use_peft=False)["language"]
    if rate and adapters is None:
        raise ValueError(
            f"language_learning_rate {rate:g} would train quantized weights. Set it to 0, or add --use_peft."
        )
    for path, module in on_meta(config).named_modules():
        names = [name for name in (adapters and adapters.modules_to_save) or () if path.endswith(name)]  # as in PEFT
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        if names and layers and path.startswith("model.language_model"):
            raise ValueError(
                f"modules_to_save names {path}, which would be quantized. Name its layers in target_modules."
            )


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the language model's linear layers, without their paths."""
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    return sorted({path.rpartition(".")[2] for path in linears if path.startswith("model.language_model.")})
