# SPDX-License-Identifier: Apache-2.0
"""The tensors of an adapter merged into its base, one layer at a time, none of them lost."""

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.lora.layer import ParamWrapper, _ConvNd
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from ..checkpoint.untrusted import refuse_unreadable
from ..checkpoint.weights import module_of_tensor
from ..modeling_normalign_llava import stored_tensors
from .adapter import ADAPTER_WEIGHTS, LORA_SETTINGS, Adapter, on_meta, put_on_meta
from .base_tensors import BaseTensors
from .merged_layer import MergedLayer, relative_change


MERGED = LORA_SETTINGS | {
    "bias",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "velora_config",
    "use_bdlora",
    "layers_pattern",
    "target_parameters",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "inference_mode",
    "auto_mapping",
    "peft_type",
    # PEFT derives these itself.
    "modules_to_tie",
    "target_modules_to_tie",
    "megatron_core",
}
"""The settings of a `LoraConfig` whose effect is in the tensors, so that merging keeps it."""

_PREFIX = "base_model.model."  # of the base's modules in a PeftModel
_MERGED_KINDS = (
    lora.Linear,
    lora.Embedding,
    _ConvNd,
    ParamWrapper,
    ModulesToSaveWrapper,
    TrainableTokensWrapper,
)
_HEAD = "lm_head"


class MergedTensors:
    """The tensors of a base with an adapter merged into it, computed while one iterates.

    Iterating gives names and values, each in the dtype that is written. Embeddings and head that
    are one tensor in the base stay one if the adapter treats both alike. Otherwise the result has
    both, and its configuration says so.

    Args:
        adapter: An adapter that [`open_adapter`] opened.
        base: Its base's tensors.
        dtype: The dtype to write. The norm is always float32.

    Attributes:
        model: The result without weights, on meta, in the dtypes that are written.
        layout: Its tensors, on meta, by the names that are written.
        changed: The modules that have files of their own and a tensor that the adapter changes.
        difference: The largest change by rounding so far, see [`MergeReport`].

    Raises:
        ValueError: If the adapter has something that cannot be merged, by the constructor. If
            merging fails or a number becomes infinite, while one iterates.
    """

    def __init__(self, adapter: Adapter, base: BaseTensors, dtype: torch.dtype):
        _check_layers(adapter)
        self._folder = adapter.folder
        self._base = base
        self.model = on_meta(adapter.config)
        embeddings_weight = self.model._tied_weights_keys[f"{_HEAD}.weight"]
        self._embeddings = embeddings_weight.removesuffix(".weight")
        adapted, places = adapter.load_on_meta()
        self._wrapped = _wrapped_modules(adapted.get_base_model())
        self._check_wrapped()
        self._uses = _uses_of_file(places, adapted.state_dict(), self._wrapped)
        self._merged_pair: dict[str, MergedLayer] = {}
        if self.model.lm_head.weight is self.model.get_input_embeddings().weight:
            tied_names = [embeddings_weight, f"{_HEAD}.weight"]
            self._uses = _require_one_value(self._uses, tied_names, self._folder)
            self._merge_tied_pair()
        changed_names = [*self._wrapped, *self._uses.replacements]
        self.changed = {module_of_tensor(f"{name}.") for name in changed_names}
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.layout = stored_tensors(self.model)
        self._missing_names = set(self.layout)
        self.difference = 0.0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        paths_of_pair = list(self._merged_pair)
        for layer_path in paths_of_pair:
            yield from self._write_layer(layer_path, self._merged_pair[layer_path])
        self._merged_pair.clear()
        for layer_path in paths_of_pair:  # only now: tied adapters share their tensors
            self._free(layer_path)
        for layer_path in self._wrapped:
            if layer_path in paths_of_pair:
                continue
            layer = self._merge_and_check(layer_path)
            yield from self._write_layer(layer_path, layer)
            del layer
            self._free(layer_path)
        for tensor_name in self.layout:
            if tensor_name not in self._missing_names:
                continue
            trained = self._trained_tensor(tensor_name)
            written = self._require_finite(tensor_name, trained)
            change = relative_change({tensor_name: written}, {tensor_name: trained})
            self.difference = max(self.difference, change)
            self._count_as_written(tensor_name)
            yield tensor_name, written

    def check_complete(self) -> None:
        """Raises ValueError if a tensor of the adapter's file or of the result was left out."""
        unused = list(chain.from_iterable(self._uses.names.values()))
        if unused:
            raise ValueError(
                f"{len(unused)} tensors of {self._folder / ADAPTER_WEIGHTS} would be lost, among "
                f"them {min(unused)}. Nothing was written."
            )
        missing = self._missing_names
        if missing:
            raise ValueError(
                f"{len(missing)} tensors have no value, among them {min(missing)}. Nothing was "
                "written."
            )

    def _check_wrapped(self) -> None:
        """Raises ValueError for a layer of a kind that is not merged, or that the base lacks."""
        paths = {path for path, _ in self.model.named_modules()}
        for path, module in self._wrapped.items():
            if not isinstance(module, _MERGED_KINDS) or path not in paths:
                raise ValueError(
                    f"{self._folder} adapts {path}, a {type(module).__name__} of PEFT. It cannot "
                    "be merged: use the adapter with PEFT."
                )

    def _trained_tensor(self, name: str) -> Tensor:
        """Reads a tensor as training had it, without what the adapter's layers add to it."""
        if name in self._uses.replacements:
            return self._uses.replacements[name]
        return self._base[name]

    def _merge_and_check(self, path: str) -> MergedLayer:
        """Merges a layer. Raises ValueError if PEFT fails or the layer's outputs change."""
        with refuse_unreadable(f"The adapter {self._folder}"):
            layer = MergedLayer(path, self._wrapped[path], self._trained_tensor)
        if not layer.error <= 1e-3:  # or it is NaN
            raise ValueError(
                f"Merging changed outputs of {path} by {layer.error:.3g} of the largest. Nothing "
                "was written."
            )
        return layer

    def _merge_tied_pair(self) -> None:
        """Merges tied embeddings and head, and makes them two tensors if they differ then."""
        for path in (self._embeddings, _HEAD):
            if path in self._wrapped:
                self._merged_pair[path] = self._merge_and_check(path)
        if self._merged_pair and not self._are_alike():
            separate_head = torch.empty_like(self.model.lm_head.weight)
            self.model.lm_head.weight = nn.Parameter(separate_head)

    def _weight_of_pair(self, path: str) -> Tensor:
        """Returns the weight of embeddings or head, merged if an adapter changes it."""
        if path in self._merged_pair:
            return self._merged_pair[path].values["weight"]
        return self._trained_tensor(f"{path}.weight")

    def _are_alike(self) -> bool:
        """Whether embeddings and head stay one tensor though an adapter changes one or both."""
        embeddings = self._weight_of_pair(self._embeddings).float()
        head = self._weight_of_pair(_HEAD).float()
        # PEFT computes the same adapter's product for both, in another order.
        change = (embeddings - head).abs().max()
        return bool(change <= 1e-6 * embeddings.abs().max())

    def _write_layer(self, layer_path: str, layer: MergedLayer) -> Iterator[tuple[str, Tensor]]:
        written = {}
        for name_in_layer, value in layer.values.items():
            stored_name = f"{layer_path}.{name_in_layer}"
            if stored_name not in self.layout:  # the head, if it stays one with the embeddings
                stored_name = f"{self._embeddings}.{name_in_layer}"
                value = self._weight_of_pair(self._embeddings)
            written[name_in_layer] = self._require_finite(stored_name, value)
        self.difference = max(self.difference, layer.difference(written))
        for name_in_layer, value in written.items():
            stored_name = f"{layer_path}.{name_in_layer}"
            if stored_name in self.layout:
                self._count_as_written(stored_name)
                yield stored_name, value
        self._uses.names.pop(layer_path, None)

    def _require_finite(self, name: str, value: Tensor) -> Tensor:
        """Returns a value in the dtype to write. Raises ValueError if it is not finite there."""
        cast = value.to(self.layout[name].dtype)
        if cast.is_floating_point() and not cast.isfinite().all():
            raise ValueError(
                f"{name} would be NaN or infinite in {cast.dtype} after merging. Nothing was "
                "written."
            )
        return cast

    def _count_as_written(self, name: str) -> None:
        self._missing_names.remove(name)
        self._uses.names.pop(name, None)

    def _free(self, path: str) -> None:
        """Frees the memory of a layer that was written."""
        self._wrapped[path].to("meta")
        if sys.platform == "linux":  # glibc would keep more than a gigabyte of small tensors
            with suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True)
class _UsesOfFile:
    """What each tensor of an adapter's file is for.

    Attributes:
        replacements: Tensors that replace a tensor of the base, by their names in the base.
        names: Names in the file, by the path of a layer with an adapter or the name of a replaced
            tensor. Those that are written are taken out.
    """

    replacements: dict[str, Tensor]
    names: dict[str, list[str]]


def _uses_of_file(
    places: Mapping[str, str], values: Mapping[str, Tensor], wrapped: Mapping[str, nn.Module]
) -> _UsesOfFile:
    """Finds out what each tensor of the adapter's file is for, by its place in the model.

    Args:
        places: Names in the adapted model, by names in the file.
        values: The adapted model's tensors, by names in that model.
        wrapped: The modules that PEFT put on the base, by their paths.
    """
    uses = _UsesOfFile({}, {})
    for name_in_file, place in places.items():
        base_name = place.removeprefix(_PREFIX)
        path = next((path for path in wrapped if base_name.startswith(f"{path}.")), None)
        target = base_name if path is None else path
        uses.names.setdefault(target, []).append(name_in_file)
        if path is None:
            uses.replacements[base_name] = values[place]
            continue
        name_in_layer = base_name.removeprefix(f"{path}.").removeprefix("token_adapter.")
        if name_in_layer.startswith("base_layer."):  # perhaps several times
            _, _, name_in_base = name_in_layer.rpartition("base_layer.")
            uses.replacements[f"{path}.{name_in_base}"] = values[place]
    return uses


def _require_one_value(uses: _UsesOfFile, tied_names: list[str], folder: Path) -> _UsesOfFile:
    """Returns the uses of the file with one value for two tensors that are one in the base.

    What the file has for one of them replaces both. Raises ValueError if it has two values.
    """
    values = [uses.replacements[name] for name in tied_names if name in uses.replacements]
    if not values:
        return uses
    if len(values) == 2 and not torch.equal(*values):
        raise ValueError(
            f"{folder} has other values for {tied_names[0]} than for {tied_names[1]}. They are one "
            "tensor in its base: save the adapter with its model."
        )
    names = dict(uses.names)
    names[tied_names[0]] = names.pop(tied_names[0], []) + names.pop(tied_names[1], [])
    return _UsesOfFile(uses.replacements | dict.fromkeys(tied_names, values[0]), names)


def check_settings(adapter: Path, config: LoraConfig) -> None:
    """Raises ValueError for a setting of an adapter whose effect merging would lose."""
    defaults = vars(type(config)())
    for setting, value in sorted(vars(config).items()):
        if setting not in MERGED and value != defaults.get(setting):
            raise ValueError(
                f"{adapter} was trained with {setting} {value!r}. It would be lost in merging: use "
                "the adapter with PEFT, or train one without it."
            )


def _check_layers(adapter: Adapter) -> None:
    """Raises ValueError if PEFT cannot merge a layer. It is tried on meta."""
    remedy = "Use it with PEFT, or train one that PEFT can merge."
    with refuse_unreadable(f"The adapter {adapter.folder}", remedy=remedy):
        adapted = put_on_meta(on_meta(adapter.config), adapter.peft_config)
        adapted.merge_and_unload()


def _wrapped_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost modules that PEFT put on a model, by their paths."""
    wrapped: dict[str, nn.Module] = {}
    for module_path, module in model.named_modules():
        is_inside = any(module_path.startswith(f"{outer}.") for outer in wrapped)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not is_inside:
            wrapped[module_path] = module
    return wrapped
