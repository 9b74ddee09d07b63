# SPDX-License-Identifier: Apache-2.0
"""The tensors of an adapter merged into its base, one layer at a time, none of them lost."""

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.lora.layer import ParamWrapper, _ConvNd
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..checkpoint.untrusted import refuse_unreadable
from ..checkpoint.weights import module_of_tensor
from ..modeling_normalign_llava import stored_tensors
from .adapter import ADAPTER_WEIGHTS, LORA_SETTINGS, Adapter, on_meta, put_on_meta
from .base_tensors import BaseTensors


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

_MERGED_KINDS = (
    lora.Linear,
    lora.Embedding,
    _ConvNd,
    ParamWrapper,
    ModulesToSaveWrapper,
    TrainableTokensWrapper,
)
_HEAD = "lm_head"


class MergedLayer:
    """A layer after PEFT merged its adapter, in float32.

    Args:
        path: The layer's path in the base.
        module: PEFT's module that wraps the layer. Only the adapter's weights are not on meta.
        read: Reads a tensor of the base by its name.

    Attributes:
        values: The layer's tensors, by their names in it.
        error: How much merging changed the layer's outputs, as [`difference`] measures it.
    """

    def __init__(self, path: str, module: nn.Module, read: Callable[[str], Tensor]):
        self._inputs: Tensor | None = None
        if isinstance(module, ModulesToSaveWrapper):  # trained in full, so nothing is merged
            self._layer = module.modules_to_save["default"]
            self.values = self._layer.state_dict()
            self._expected = dict(self.values)
            self.error = 0.0
            return
        adapter = module
        if isinstance(module, TrainableTokensWrapper):
            adapter = module.token_adapter
        self._layer = adapter.get_base_layer()
        values = {name: read(f"{path}.{name}").float() for name in self._layer.state_dict()}
        self._layer.load_state_dict(values, assign=True)
        del values  # experts are large, and merging makes other tensors
        for name, buffer in self._layer.named_buffers():
            if buffer.is_meta:  # computed from the configuration, such as Gemma's scale
                setattr(self._layer, name, torch.ones_like(buffer, device="cpu"))
        module.float().eval()
        self._inputs = _random_inputs(self._layer)
        if adapter is not module and isinstance(self._layer, nn.Embedding):
            trained_tokens = torch.tensor(adapter.token_indices["default"])
            self._inputs = torch.cat([trained_tokens, self._inputs])
        with torch.no_grad():
            if self._inputs is None:
                self._expected = _with_adapters(module)
            else:
                self._expected = {"outputs": module(self._inputs)}
            if isinstance(module, ParamWrapper | TrainableTokensWrapper):
                module.unload_and_optionally_merge_module(True, safe_merge=True, adapter_names=None)
            else:
                module.merge(safe_merge=True)
        self.values = self._layer.state_dict()
        self.error = self.difference(self.values)

    def difference(self, values: Mapping[str, Tensor]) -> float:
        """Returns the largest change of outputs if the layer has these values and no adapter.

        The change is a share of the largest output for random inputs. For layers that take several
        inputs (experts), and for layers that were trained in full, it is measured on their tensors.
        """
        if self._inputs is None:
            return relative_change(values, self._expected)
        in_float32 = {name: value.float() for name, value in values.items()}
        self._layer.load_state_dict(in_float32, strict=False, assign=True)
        with torch.no_grad():
            outputs = self._layer(self._inputs)
        return relative_change({"outputs": outputs}, self._expected)


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
        changed: The modules that have files of their own and a tensor that the adapter or
            quantization changes.
        difference: The largest change by rounding so far, see [`MergeReport`].

    Raises:
        ValueError: If the adapter has something that cannot be merged, by the constructor. If
            merging fails or a number becomes infinite, while one iterates.
    """

    def __init__(self, adapter: Adapter, base: BaseTensors, dtype: torch.dtype):
        adapter = replace(adapter, config=base.config)
        remedy = "Use it with PEFT, or train one that PEFT can merge."
        with refuse_unreadable(f"The adapter {adapter.folder}", remedy=remedy):
            # PEFT tries on meta whether it can merge each layer.
            put_on_meta(on_meta(adapter.config), adapter.peft_config).merge_and_unload()
        self._folder = adapter.folder
        self._base = base
        self.model = on_meta(adapter.config)
        embeddings_weight = self.model._tied_weights_keys[f"{_HEAD}.weight"]
        self._embeddings = embeddings_weight.removesuffix(".weight")
        adapted, places = adapter.load_on_meta()
        self._wrapped = self._require_mergeable(adapted.get_base_model())
        # Tensors of the file that replace one of the base, by their names in the base.
        self._replacements: dict[str, Tensor] = {}
        # Names in the file that are not written yet, by the path of a layer with an adapter or the
        # name of a replaced tensor.
        self._unused: dict[str, list[str]] = {}
        values = adapted.state_dict()
        for name_in_file, place in places.items():
            target = place.removeprefix("base_model.model.")
            path = next((path for path in self._wrapped if target.startswith(f"{path}.")), None)
            if path is None:
                self._replacements[target] = values[place]
            else:
                name_in_layer = target.removeprefix(f"{path}.").removeprefix("token_adapter.")
                if name_in_layer.startswith("base_layer."):  # perhaps several times
                    _, _, name_in_base = name_in_layer.rpartition("base_layer.")
                    self._replacements[f"{path}.{name_in_base}"] = values[place]
                target = path
            self._unused.setdefault(target, []).append(name_in_file)
        self._merged_pair: dict[str, MergedLayer] = {}
        if self.model.lm_head.weight is self.model.get_input_embeddings().weight:
            self._merge_tied_pair()
        changed_names = [*self._wrapped, *self._replacements, *base.quantized_layers]
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
        unused = list(chain.from_iterable(self._unused.values()))
        if unused:
            raise ValueError(
                f"{len(unused)} tensors of {self._folder / ADAPTER_WEIGHTS} would be lost, among "
                f"them {min(unused)}. Nothing was written."
            )
        if self._missing_names:
            raise ValueError(
                f"{len(self._missing_names)} tensors have no value, among them "
                f"{min(self._missing_names)}. Nothing was written."
            )

    def _require_mergeable(self, adapted: nn.Module) -> dict[str, nn.Module]:
        """Returns the outermost modules that PEFT put on the base, by their paths.

        Raises ValueError for a layer of a kind that is not merged, or that the base lacks.
        """
        base_paths = {path for path, _ in self.model.named_modules()}
        wrapped: dict[str, nn.Module] = {}
        for path, module in adapted.named_modules():
            is_inside = any(path.startswith(f"{outer}.") for outer in wrapped)
            if is_inside or not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                continue
            if not isinstance(module, _MERGED_KINDS) or path not in base_paths:
                raise ValueError(
                    f"{self._folder} adapts {path}, a {type(module).__name__} of PEFT. It cannot "
                    "be merged: use the adapter with PEFT."
                )
            wrapped[path] = module
        return wrapped

    def _trained_tensor(self, name: str) -> Tensor:
        """Reads a tensor as training had it, without what the adapter's layers add to it."""
        if name in self._replacements:
            return self._replacements[name]
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
        """Merges tied embeddings and head, and makes them two tensors if they differ then.

        Raises ValueError if the adapter's file has two values for them.
        """
        embeddings_name = f"{self._embeddings}.weight"
        head_name = f"{_HEAD}.weight"
        tied_names = (embeddings_name, head_name)
        values = [self._replacements[name] for name in tied_names if name in self._replacements]
        if len(values) == 2 and not torch.equal(*values):
            raise ValueError(
                f"{self._folder} has other values for {embeddings_name} than for {head_name}. They "
                "are one tensor in its base: save the adapter with its model."
            )
        if values:  # what the file has for one of them replaces both
            self._replacements |= dict.fromkeys(tied_names, values[0])
            names_of_head = self._unused.pop(head_name, [])
            self._unused.setdefault(embeddings_name, []).extend(names_of_head)
        for path in (self._embeddings, _HEAD):
            if path in self._wrapped:
                self._merged_pair[path] = self._merge_and_check(path)
        if self._merged_pair:
            embeddings = self._weight_of_pair(self._embeddings).float()
            head = self._weight_of_pair(_HEAD).float()
            # PEFT computes the same adapter's product for both, in another order.
            if not (embeddings - head).abs().max() <= 1e-6 * embeddings.abs().max():  # or it is NaN
                separate_head = torch.empty_like(self.model.lm_head.weight)
                self.model.lm_head.weight = nn.Parameter(separate_head)

    def _weight_of_pair(self, path: str) -> Tensor:
        """Returns the weight of embeddings or head, merged if an adapter changes it."""
        if path in self._merged_pair:
            return self._merged_pair[path].values["weight"]
        return self._trained_tensor(f"{path}.weight")

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
        self._unused.pop(layer_path, None)

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
        self._unused.pop(name, None)

    def _free(self, path: str) -> None:
        """Frees the memory of a layer that was written."""
        self._wrapped[path].to("meta")
        if sys.platform == "linux":  # glibc would keep more than a gigabyte of small tensors
            with suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL("libc.so.6").malloc_trim(0)


def check_settings(adapter: Path, config: LoraConfig) -> None:
    """Raises ValueError for a setting of an adapter whose effect merging would lose."""
    defaults = vars(type(config)())
    for setting, value in sorted(vars(config).items()):
        if setting not in MERGED and value != defaults.get(setting):
            raise ValueError(
                f"{adapter} was trained with {setting} {value!r}. It would be lost in merging: use "
                "the adapter with PEFT, or train one without it."
            )


def relative_change(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest change of a number, as a share of the largest number of its tensor.

    Tensors of whole numbers, empty tensors and zeros do not count. If a change is NaN, so is the
    result.
    """
    largest_change = 0.0
    for name, before in expected.items():
        if not before.is_floating_point() or before.numel() == 0 or values[name] is before:
            continue
        after = values[name]
        largest = before.abs().max().item()
        is_same = after.dtype == before.dtype and torch.equal(after, before)
        if largest == 0 or is_same:
            continue
        change = (after.to(before.dtype) - before).abs().max().item() / largest
        if math.isnan(change):
            return change  # `max` would drop it
        largest_change = max(largest_change, change)
    return largest_change


def _random_inputs(layer: nn.Module) -> Tensor | None:
    """Returns inputs for a layer that takes one tensor, and None for other layers."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Embedding):
        return torch.randint(layer.num_embeddings, (16,), generator=generator)
    if isinstance(layer, nn.Linear):
        return torch.randn(4, layer.in_features, generator=generator)
    if isinstance(layer, Conv1D):
        return torch.randn(4, layer.nx, generator=generator)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return torch.randn(4, layer.in_channels, *layer.kernel_size, generator=generator)
    return None


def _with_adapters(module: ParamWrapper) -> dict[str, Tensor]:
    """Returns the parameters of a layer that its adapters change, with their changes."""
    expected = {}
    wrapper: nn.Module = module
    while isinstance(wrapper, ParamWrapper):
        parameter_name = wrapper.parameter_name
        expected[parameter_name] = wrapper.get_param() + wrapper.get_delta_weight("default")
        wrapper = wrapper.base_layer
    return expected
