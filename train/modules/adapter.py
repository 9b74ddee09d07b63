# SPDX-License-Identifier: Apache-2.0
"""LoRA on the language model only, and the check that all that it names has an effect."""

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from ...assembly.adapter import LORA_SETTINGS, on_meta, put_on_meta
from ...checkpoint.untrusted import refuse_unreadable
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ..command import names_in


ELSEWHERE = r"(?!model\.language_model\.|lm_head$).*"
"""Modules that get no adapters. The head does not match, so that an error can name it."""

VALUES = {"init_lora_weights": (True, False, "gaussian"), "task_type": (None, "CAUSAL_LM")}
"""The values that two of these fields may have.

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
            expression. By default they are all linear layers of the decoder.
        model_config: The configuration of the model.
        learning_rates: The peak learning rate of each module, 0 if it is frozen.

    Raises:
        ValueError: Something in the configuration would not be trained, or could not be merged.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"peft_config is a {type(config).__name__}. Give a LoraConfig.")
    if learning_rates["language"] == 0:
        raise ValueError("LoRA trains the language model, but its learning rate is 0. Set another.")
    _check_supported(config)
    limited = copy.deepcopy(config)
    model = on_meta(model_config)
    targets = config.target_modules
    if targets in (None, "all-linear"):
        targets = []
    elif isinstance(targets, str):  # TRL makes text of a list of one name
        targets = names_in(targets) or targets
    if isinstance(targets, str):
        limited.target_modules = targets
    else:
        limited.target_modules = set(targets or linear_layers(model))
    excluded_names = config.exclude_modules or ()
    if isinstance(excluded_names, str):
        excluded = {excluded_names: excluded_names}
    else:  # PEFT matches a name at the end of a path
        excluded = {name: rf"(.*\.)?{re.escape(name)}" for name in sorted(excluded_names)}
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
    for field_name, default in sorted(vars(LoraConfig()).items()):
        field_value = getattr(config, field_name)
        if field_name in VALUES:
            is_supported = field_value in VALUES[field_name]
        elif field_name == "lora_alpha":  # 0 would make adapters without effect
            is_supported = bool(field_value)
        else:
            is_supported = field_name in LORA_SETTINGS or field_value == default
        if not is_supported:
            refused.append(f"{field_name} {field_value!r}")
    if refused:
        raise ValueError(
            f"peft_config sets {', '.join(refused)}, but this is not supported here. Leave it out."
        )


def _modules_to_save(
    config: LoraConfig, model: nn.Module, learning_rates: dict[str, float]
) -> list[str]:
    """Returns the modules to train in full: requested ones, the projector, the vision tower.

    Raises:
        ValueError: A requested module has its own learning rate.
    """
    modules = []
    if learning_rates["vision"] > 0:
        modules.append("vision_tower")
    if learning_rates["projector"] > 0 or learning_rates["norm"] > 0:
        modules.append("multi_modal_projector")
    requested = [name for name in config.modules_to_save or () if name not in modules]
    with_own_rate = re.compile(r"model$|model\.(vision_tower|multi_modal_projector)")
    for path, _ in model.named_modules():
        for name in requested:
            if with_own_rate.match(path) and path.endswith(name):  # as PEFT does
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
    saved_modules = tuple(adapters.modules_to_save)
    for module_path, module in on_meta(config).named_modules():
        is_saved = module_path.startswith("model.language_model") and module_path.endswith(
            saved_modules
        )
        if is_saved and any(isinstance(layer, nn.Linear) for layer in module.modules()):
            raise ValueError(
                f"modules_to_save names {module_path}. It would be quantized. Use target_modules."
            )


def check_effect(
    config: LoraConfig, model: nn.Module, targets: str | list[str], excluded: dict[str, str]
) -> None:
    """Raises ValueError if a named module or layer has no effect, or if it cannot be merged.

    Args:
        config: The configuration of the adapters, limited to the language model.
        model: The model without adapters, on meta.
        targets: A pattern of the layers that get adapters, or their names, as they were given.
        excluded: Patterns of the modules that get none, by the names that were given.
    """
    path_of_module = {module: path for path, module in model.named_modules()}
    paths = list(path_of_module.values())
    embeddings = model.get_input_embeddings()
    without_effect = [
        *_idle_targets(config, paths, targets),
        *_idle_modules(config, path_of_module, excluded),
        *_idle_tokens(config, model, paths, path_of_module[embeddings]),
    ]
    if without_effect:
        last_layer = model.config.text_config.num_hidden_layers - 1
        raise ValueError(
            f"peft_config names {', '.join(without_effect)}, but this would have no effect. "
            f"Adapters are put on {', '.join(linear_layers(model))} in layers 0 to {last_layer}."
        )
    adapted = _adapted(config, paths)
    if "lm_head" in adapted:
        raise ValueError("An adapter on lm_head is not trained. Put lm_head into modules_to_save.")
    is_tied = model.lm_head.weight is embeddings.weight
    if is_tied and (config.trainable_token_indices or path_of_module[embeddings] in adapted):
        raise ValueError(
            "The embeddings of this model are its head too: an adapter would change one of them. "
            "Put embed_tokens into modules_to_save."
        )


def linear_layers(model: nn.Module) -> list[str]:
    """Returns the names of the language model's linear layers, without their paths."""
    return sorted(
        {
            path.rpartition(".")[2]
            for path, module in model.model.language_model.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
        }
    )


def _adapted(config: LoraConfig, paths: Sequence[str], **changes: Any) -> list[str]:
    """Returns the paths of the modules that get adapters, if `changes` are made to `config`."""
    changed = copy.copy(config)
    vars(changed).update(changes)
    return [path for path in paths if check_target_module_exists(changed, path)]


def _idle_targets(
    config: LoraConfig, paths: Sequence[str], targets: str | list[str]
) -> Iterator[str]:
    """Yields the names in `target_modules`, or the words of its pattern, without an adapter.

    Yields the layers in `layers_to_transform` without an adapter too.
    """
    if not isinstance(targets, str):
        for name in sorted(targets):
            if not _adapted(config, paths, target_modules={name}):
                yield name
    elif "(?" not in targets:  # a pattern that looks ahead may leave its words out
        adapted = _adapted(config, paths)
        without_classes = re.sub(r"\\[A-Za-z]|\[[^]]*\]", " ", targets)
        for word in re.findall(r"[A-Za-z]\w{2,}", without_classes):
            if not any(word in path for path in adapted):
                yield word
    layers = config.layers_to_transform
    if isinstance(layers, int):
        layers = [layers]
    for layer in layers or ():
        if not _adapted(config, paths, layers_to_transform=[layer]):
            yield f"layer {layer}"


def _idle_modules(
    config: LoraConfig, path_of_module: dict[nn.Module, str], excluded: dict[str, str]
) -> Iterator[str]:
    """Yields the names in `exclude_modules` and `modules_to_save` that match no module."""
    paths = path_of_module.values()
    leaves = [path for module, path in path_of_module.items() if not list(module.children())]
    for module_name, pattern in excluded.items():
        if not any(re.fullmatch(pattern, leaf) for leaf in leaves):
            yield module_name
    for module_name in config.modules_to_save or ():
        if not any(path.endswith(module_name) for path in paths):
            yield module_name


def _idle_tokens(
    config: LoraConfig, model: nn.Module, paths: Sequence[str], embeddings_path: str
) -> Iterator[str]:
    """Yields the modules and tokens in `trainable_token_indices` that cannot be trained."""
    # The option is a list of tokens of the embeddings, or lists of tokens by name of module.
    indices_by_module = config.trainable_token_indices or {}
    if not isinstance(indices_by_module, dict):
        indices_by_module = {embeddings_path.rpartition(".")[2]: indices_by_module}
    # Features of the image stand in for the image token, so its embedding gets no gradient.
    trainable_tokens = {*range(model.get_input_embeddings().num_embeddings)} - {
        model.config.image_token_id
    }
    for module_name, indices in indices_by_module.items():
        # Only the embeddings can be trained so.
        if [path for path in paths if path.endswith(module_name)] != [embeddings_path]:
            yield module_name
        for index in indices:
            if index not in trainable_tokens:
                yield f"token {index}"
