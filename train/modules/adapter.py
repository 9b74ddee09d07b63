# SPDX-License-Identifier: Apache-2.0
"""LoRA on the language model alone, with the projector trained in full; all of it in float32."""

import copy
import re
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from ...assembly.adapter import on_meta, put_on_meta
from ...checkpoint.untrusted import loading
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ..command import names_in


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
    """A copy of a LoRA configuration that is limited to the language model.

    PEFT's names would match in the vision tower too. The projector with its norm, and a trained
    vision tower, are trained in full and saved with the adapter. `target_modules` are names of
    linear layers or a regular expression; by default all the decoder's. Raises ValueError if what
    is named would not be trained, or could not be merged.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"peft_config is a {type(config).__name__}. Give a LoraConfig.")
    if learning_rates["language"] == 0:
        raise ValueError("LoRA trains the language model, but its learning rate is 0. Set another.")
    refused = {name for name, value in vars(LoraConfig()).items() if getattr(config, name) != value}
    refused -= OPTIONS
    refused |= {name for name, values in VALUES.items() if getattr(config, name) not in values}
    refused |= set() if config.lora_alpha else {"lora_alpha"}
    if refused:
        named = ", ".join(f"{name} {getattr(config, name)!r}" for name in sorted(refused))
        raise ValueError(f"peft_config sets {named}, which is not supported here. Leave it out.")
    config, model = copy.deepcopy(config), on_meta(model_config)
    targets, excluded = config.target_modules, config.exclude_modules or ()
    targets = () if targets in (None, "all-linear") else targets
    if isinstance(targets, str):
        targets = names_in(targets) or targets  # TRL makes text of a list of one name
    is_pattern = isinstance(targets, str)
    config.target_modules = targets if is_pattern else set(targets or _linear_layers(model))
    ends = {name: rf"(.*\.)?{re.escape(name)}" for name in sorted(excluded)}  # as PEFT reads a name
    patterns = {excluded: excluded} if isinstance(excluded, str) else ends
    config.exclude_modules = "|".join([ELSEWHERE, *patterns.values()])
    with loading("The adapter of peft_config", remedy="Give one that PEFT can apply and merge."):
        config.modules_to_save = _modules_to_save(config, model, learning_rates) or None
        _check_effect(config, model, targets, patterns)
        put_on_meta(model, config).merge_and_unload()
    return config


def _modules_to_save(config: LoraConfig, model: nn.Module, rates: dict[str, float]) -> list[str]:
    parts = ["vision_tower"] if rates["vision"] > 0 else []
    parts += ["multi_modal_projector"] if max(rates["projector"], rates["norm"]) > 0 else []
    requested = [name for name in config.modules_to_save or () if name not in parts]
    for path, _ in model.named_modules():
        named = [name for name in requested if path.endswith(name)]  # as PEFT does
        if named and re.match(r"model$|model\.(vision_tower|multi_modal_projector)", path):
            raise ValueError(
                f"modules_to_save names {named[0]}: {path} has its own learning rate. Leave it out."
            )
    return [*requested, *parts]


def _check_effect(config: LoraConfig, model: nn.Module, targets: Any, excluded: dict) -> None:
    """Raises ValueError if something named has no effect, or is not trained or cannot be merged."""
    modules, embeddings = dict(model.named_modules()), model.get_input_embeddings()

    def adapted(**changes: Any) -> list[str]:
        changed = copy.copy(config)
        vars(changed).update(changes)
        return [path for path in modules if check_target_module_exists(changed, path)]

    adapters, layers = adapted(), config.layers_to_transform
    if isinstance(targets, str):  # the words of a pattern, but of one that looks ahead
        literal = "" if "(?" in targets else re.sub(r"\\[A-Za-z]|\[[^]]*\]", " ", targets)
        words = re.findall(r"[A-Za-z]\w{2,}", literal)
        idle = [word for word in words if not any(word in path for path in adapters)]
    else:
        idle = [name for name in sorted(targets) if not adapted(target_modules={name})]
    layers = [layers] if isinstance(layers, int) else layers or []
    idle += [f"layer {layer}" for layer in layers if not adapted(layers_to_transform=[layer])]
    leaves = [path for path, module in modules.items() if not [*module.children()]]
    for name, pattern in excluded.items():
        idle += [] if any(re.fullmatch(pattern, leaf) for leaf in leaves) else [name]
    for name in config.modules_to_save or ():
        idle += [] if any(path.endswith(name) for path in modules) else [name]
    embedded = next(path for path, module in modules.items() if module is embeddings)
    tokens = config.trainable_token_indices or {}
    tokens = tokens if isinstance(tokens, dict) else {embedded.rpartition(".")[2]: tokens}
    looked_up = {*range(embeddings.num_embeddings)} - {model.config.image_token_id}
    for name, indices in tokens.items():
        idle += [] if [path for path in modules if path.endswith(name)] == [embedded] else [name]
        idle += [f"token {index}" for index in indices if index not in looked_up]
    if idle:
        last = model.config.text_config.num_hidden_layers - 1
        raise ValueError(
            f"peft_config names {', '.join(idle)}, which would have no effect. Adapters are put on "
            f"{', '.join(_linear_layers(model))} in layers 0 to {last}."
        )
    if "lm_head" in adapters:
        raise ValueError("An adapter on lm_head is not trained. Put lm_head into modules_to_save.")
    if model.lm_head.weight is embeddings.weight and (tokens or embedded in adapters):
        raise ValueError(
            "The embeddings of this model are its head too: an adapter would change one of them. "
            "Put embed_tokens into modules_to_save."
        )


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the language model's linear layers, without their paths."""
    modules = model.model.language_model.named_modules()
    linears = [path for path, module in modules if isinstance(module, nn.Linear | Conv1D)]
    return sorted({path.rpartition(".")[2] for path in linears})


def check_quantized(
    config: NormAlignLlavaConfig,
    quantization: BitsAndBytesConfig,
    language_rate: float,
    adapters: LoraConfig | None,
) -> None:
    """Raises ValueError if a layer that is quantized would be trained in full.

    `language_rate` is the learning rate of the language model without adapters.
    """
    if quantization.llm_int8_skip_modules is not None:
        raise ValueError("llm_int8_skip_modules is set here, to all but the decoder. Leave it out.")
    if language_rate and adapters is None:
        raise ValueError(
            f"language_learning_rate {language_rate:g} would train quantized weights. Set 0, or "
            "--use_peft."
        )
    saved = tuple((adapters and adapters.modules_to_save) or ())
    for path, module in on_meta(config).named_modules():
        has_linear = any(isinstance(layer, nn.Linear) for layer in module.modules())
        if path.startswith("model.language_model") and path.endswith(saved) and has_linear:
            raise ValueError(
                f"modules_to_save names {path}, which would be quantized. Use target_modules."
            )
