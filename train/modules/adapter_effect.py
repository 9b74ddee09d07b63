# SPDX-License-Identifier: Apache-2.0
"""The check that everything that a LoRA configuration names has an effect, and can be merged."""

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers.pytorch_utils import Conv1D


def check_effect(
    config: LoraConfig, model: nn.Module, targets: str | list[str], excluded: dict[str, str]
) -> None:
    """Raises ValueError if something named has no effect, or is not trained or cannot be merged.

    Args:
        config: The configuration of the adapters, limited to the language model.
        model: The model without adapters, on meta.
        targets: A pattern of the layers that get adapters, or their names, as they were given.
        excluded: Patterns of the modules that get none, by the names that were given.
    """
    paths = [path for path, _ in model.named_modules()]
    embeddings_path = _path_of(model.get_input_embeddings(), model)
    without_effect = [
        *_idle_targets(config, paths, targets),
        *_idle_layers(config, paths),
        *_idle_exclusions(model, excluded),
        *_idle_modules_to_save(config, paths),
        *_idle_tokens(config, model, paths, embeddings_path),
    ]
    if without_effect:
        last = model.config.text_config.num_hidden_layers - 1
        raise ValueError(
            f"peft_config names {', '.join(without_effect)}, which would have no effect. Adapters "
            f"are put on {', '.join(linear_layers(model))} in layers 0 to {last}."
        )
    adapted = _adapted(config, paths)
    if "lm_head" in adapted:
        raise ValueError("An adapter on lm_head is not trained. Put lm_head into modules_to_save.")
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    if is_tied and (config.trainable_token_indices or embeddings_path in adapted):
        raise ValueError(
            "The embeddings of this model are its head too: an adapter would change one of them. "
            "Put embed_tokens into modules_to_save."
        )


def linear_layers(model: nn.Module) -> list[str]:
    """Returns the names of the language model's linear layers, without their paths."""
    names = set()
    for path, module in model.model.language_model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            names.add(path.rpartition(".")[2])
    return sorted(names)


def _path_of(wanted: nn.Module, model: nn.Module) -> str:
    """Returns the path of a module in the model."""
    return next(path for path, module in model.named_modules() if module is wanted)


def _adapted(config: LoraConfig, paths: Sequence[str], **changes: Any) -> list[str]:
    """Returns the paths of the modules that get adapters, if `changes` are made to `config`."""
    changed = copy.copy(config)
    vars(changed).update(changes)
    return [path for path in paths if check_target_module_exists(changed, path)]


def _idle_targets(
    config: LoraConfig, paths: Sequence[str], targets: str | list[str]
) -> Iterator[str]:
    """Yields the names in `target_modules`, or the words of its pattern, without an adapter."""
    if isinstance(targets, str):
        adapted = _adapted(config, paths)
        for word in _words_of_pattern(targets):
            if not any(word in path for path in adapted):
                yield word
    else:
        for name in sorted(targets):
            if not _adapted(config, paths, target_modules={name}):
                yield name


def _words_of_pattern(pattern: str) -> list[str]:
    """Returns the words in a pattern; none of one that looks ahead, as they may be left out."""
    if "(?" in pattern:
        return []
    without_classes = re.sub(r"\\[A-Za-z]|\[[^]]*\]", " ", pattern)
    return re.findall(r"[A-Za-z]\w{2,}", without_classes)


def _idle_layers(config: LoraConfig, paths: Sequence[str]) -> Iterator[str]:
    """Yields the layers in `layers_to_transform` without an adapter."""
    layers = config.layers_to_transform
    if isinstance(layers, int):
        layers = [layers]
    for layer in layers or ():
        if not _adapted(config, paths, layers_to_transform=[layer]):
            yield f"layer {layer}"


def _idle_exclusions(model: nn.Module, excluded: dict[str, str]) -> Iterator[str]:
    """Yields the names in `exclude_modules` that match no module without children."""
    leaves = [path for path, module in model.named_modules() if not list(module.children())]
    for name, pattern in excluded.items():
        if not any(re.fullmatch(pattern, leaf) for leaf in leaves):
            yield name


def _idle_modules_to_save(config: LoraConfig, paths: Sequence[str]) -> Iterator[str]:
    """Yields the names in `modules_to_save` at which no module's path ends."""
    for name in config.modules_to_save or ():
        if not any(path.endswith(name) for path in paths):
            yield name


def _idle_tokens(
    config: LoraConfig, model: nn.Module, paths: Sequence[str], embeddings_path: str
) -> Iterator[str]:
    """Yields what `trainable_token_indices` names, but the embeddings do not look up."""
    indices_of_modules = config.trainable_token_indices or {}
    if not isinstance(indices_of_modules, dict):
        module_name = embeddings_path.rpartition(".")[2]
        indices_of_modules = {module_name: indices_of_modules}
    looked_up = set(range(model.get_input_embeddings().num_embeddings))
    looked_up.discard(model.config.image_token_id)
    for module_name, indices in indices_of_modules.items():
        if [path for path in paths if path.endswith(module_name)] != [embeddings_path]:
            yield module_name
        for index in indices:
            if index not in looked_up:
                yield f"token {index}"
