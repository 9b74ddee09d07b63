# SPDX-License-Identifier: Apache-2.0
"""The tensors of an adapter merged into its base, one layer at a time, each one accounted for."""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.lora.layer import ParamWrapper, _ConvNd
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..checkpoint import weights
from ..checkpoint.untrusted import loading
from .adapter import ADAPTER_WEIGHTS, Adapter, on_meta, put_on_meta
from .base_tensors import BaseTensors


MERGED = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "fan_in_fan_out"),
    *("bias", "lora_bias", "rank_pattern", "alpha_pattern", "velora_config", "use_bdlora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("target_parameters", "modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("task_type", "inference_mode", "auto_mapping", "peft_type", "peft_version"),
    *("base_model_name_or_path", "revision", "runtime_config"),
    *("modules_to_tie", "target_modules_to_tie", "megatron_core"),  # what PEFT derives itself
}
"""The settings of a `LoraConfig` whose effect is in the tensors, so that merging keeps it."""

_PREFIX = "base_model.model."  # of the base's modules in a PeftModel
_LAYERS = (lora.Linear, lora.Embedding, _ConvNd, ParamWrapper)
_KINDS = (*_LAYERS, ModulesToSaveWrapper, TrainableTokensWrapper)
_HEAD = "lm_head"


class MergedTensors:
    """The tensors of a base with an adapter merged into it, computed while one iterates.

    Iterating gives names and values, each in the dtype that is written. Embeddings and head that
    are one tensor in the base stay one if the adapter treats both alike; otherwise, the result has
    both, and its configuration says so.

    Args:
        adapter: An adapter that [`open_adapter`] opened.
        base: Its base's tensors.
        dtype: The dtype to write; the norm is always float32.

    Attributes:
        model: The result without weights, on meta, in the dtypes that are written.
        layout: Its tensors, on meta, by the names that are written.
        changed: The modules that have files of their own and a tensor that the adapter changes.
        difference: The largest change between what was trained, in float32, and what was written,
            of the tensors so far: of a layer with an adapter, of its outputs for random inputs as
            a share of the largest; of any other tensor, of its numbers as a share of the largest.

    Raises ValueError if the adapter has something that cannot be merged.
    """

    def __init__(self, adapter: Adapter, base: BaseTensors, dtype: torch.dtype):
        check_layers(adapter)
        self._folder = adapter.folder
        self._base = base
        self.model = on_meta(adapter.config)
        self._embeddings = self.model._tied_weights_keys[f"{_HEAD}.weight"].removesuffix(".weight")
        is_tied = self.model.lm_head.weight is self.model.get_input_embeddings().weight
        adapted, places = adapter.on_meta()
        self._wrapped = _wrapped_modules(adapted.get_base_model())
        self._unused = set(places)
        self._check_wrapped()
        self._whole: dict[str, Tensor] = {}  # tensors of the base that the adapter's file replaces
        self._used_by: dict[str, list[str]] = {}  # names in the file by layers, or names in _whole
        self._sort(places, adapted.state_dict())
        if is_tied:
            self._tie_whole()
        changed = [*self._wrapped, *self._whole]
        self.changed = {weights.module_of_file(f"{name}.") for name in changed}
        self._pair: dict[str, MergedLayer] = {}
        pair = [path for path in (self._embeddings, _HEAD) if path in self._wrapped]
        if is_tied and pair:
            self._pair = {path: self._merge(path) for path in pair}
            if not self._are_alike():
                head = torch.empty_like(self.model.lm_head.weight)
                self.model.lm_head.weight = nn.Parameter(head)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.layout = weights.stored_tensors(self.model)
        self._missing = set(self.layout)
        self.difference = 0.0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        done = [*self._pair]
        for path in done:
            yield from self._write_layer(path, self._pair[path])
        self._pair.clear()
        for path in done:  # only now: tied adapters share their tensors
            self._free(path)
        for path in [path for path in self._wrapped if path not in done]:
            layer = self._merge(path)
            yield from self._write_layer(path, layer)
            del layer
            self._free(path)
        for name in [name for name in self.layout if name in self._missing]:
            trained = self._read(name)
            written = self._cast(name, trained)
            self._note(relative_change({name: written}, {name: trained}))
            self._count(name, name)
            yield name, written

    def check_complete(self) -> None:
        """Raises ValueError if a tensor of the adapter's file or of the result was left out."""
        if self._unused:
            left = f"{len(self._unused)} tensors of {self._folder / ADAPTER_WEIGHTS} would be lost"
            raise ValueError(f"{left}, among them {min(self._unused)}. Nothing was written.")
        if self._missing:
            left = f"{len(self._missing)} tensors have no value, among them {min(self._missing)}"
            raise ValueError(f"{left}. Nothing was written.")

    def _check_wrapped(self) -> None:
        """Raises ValueError for a layer of a kind that is not merged, or that the base lacks."""
        expected = {name for name, _ in self.model.named_modules()}
        for path, module in self._wrapped.items():
            if not isinstance(module, _KINDS) or path not in expected:
                fault = f"{self._folder} adapts {path}, a {type(module).__name__} of PEFT"
                raise ValueError(f"{fault}, which is not merged. Use the adapter with PEFT.")

    def _sort(self, places: Mapping[str, str], values: Mapping[str, Tensor]) -> None:
        """Finds out what each tensor of the adapter's file is for, by its place in the model."""
        for name, place in places.items():
            place = place.removeprefix(_PREFIX)
            path = next((path for path in self._wrapped if place.startswith(f"{path}.")), None)
            if path is None:
                self._whole[place] = values[_PREFIX + place]
                self._used_by.setdefault(place, []).append(name)
                continue
            inside = place.removeprefix(f"{path}.")
            self._used_by.setdefault(path, []).append(name)
            within = inside.removeprefix("token_adapter.")
            if within.startswith("base_layer."):
                while within.startswith("base_layer."):
                    within = within.removeprefix("base_layer.")
                self._whole[f"{path}.{within}"] = values[_PREFIX + place]

    def _tie_whole(self) -> None:
        """Embeddings and head are one tensor: what the file has for one of them is for both."""
        names = [f"{path}.weight" for path in (self._embeddings, _HEAD)]
        found = [self._whole[name] for name in names if name in self._whole]
        if len(found) == 2 and not torch.equal(*found):
            fault = f"{self._folder} has other values for {names[0]} than for {names[1]}"
            raise ValueError(f"{fault}, which are one tensor in its base. Save it with its model.")
        if found:
            self._whole |= dict.fromkeys(names, found[0])
            used = [name for place in names for name in self._used_by.get(place, ())]
            self._used_by[names[0]] = used

    def _read(self, name: str) -> Tensor:
        """A tensor as training had it but for the adapter's layers."""
        value = self._whole.get(name)
        return self._base[name] if value is None else value

    def _merge(self, path: str) -> "MergedLayer":
        with loading(f"The adapter {self._folder}"):
            layer = MergedLayer(path, self._wrapped[path], self._read)
        if not layer.error <= 1e-3:  # or it is NaN
            changed = f"Merging changed outputs of {path} by {layer.error:.3g} of the largest"
            raise ValueError(f"{changed}. Nothing was written.")
        return layer

    def _are_alike(self) -> bool:
        """Whether embeddings and head, of which an adapter changes one or both, stay one tensor."""
        embeddings = self._embedding_table().float()
        layer = self._pair.get(_HEAD)
        head = layer.values["weight"] if layer else self._read(f"{_HEAD}.weight")
        # PEFT computes the same adapter's product for both, in another order.
        change = (embeddings - head.float()).abs().max()
        return bool(change <= 1e-6 * embeddings.abs().max())

    def _embedding_table(self) -> Tensor:
        layer = self._pair.get(self._embeddings)
        return layer.values["weight"] if layer else self._read(f"{self._embeddings}.weight")

    def _write_layer(self, path: str, layer: "MergedLayer") -> Iterator[tuple[str, Tensor]]:
        written = {}
        for name, value in layer.values.items():
            stored = f"{path}.{name}"
            if stored not in self.layout:  # the head, which stays one tensor with the embeddings
                stored = f"{self._embeddings}.{name}"
                value = self._embedding_table()
            written[name] = self._cast(stored, value)
        self._note(layer.difference(written))
        for name, value in written.items():
            if f"{path}.{name}" in self.layout:
                self._count(f"{path}.{name}", f"{path}.{name}")
                yield f"{path}.{name}", value
        self._unused.difference_update(self._used_by.get(path, ()))

    def _cast(self, name: str, value: Tensor) -> Tensor:
        """A value in the dtype that is written; raises ValueError if it is not finite there."""
        cast = value.to(self.layout[name].dtype)
        if cast.is_floating_point() and not cast.isfinite().all():
            fault = f"{name} would be NaN or infinite in {cast.dtype} after merging"
            raise ValueError(f"{fault}. Nothing was written.")
        return cast

    def _count(self, name: str, place: str) -> None:
        self._missing.remove(name)
        self._unused.difference_update(self._used_by.get(place, ()))

    def _note(self, difference: float) -> None:
        self.difference = max(self.difference, difference)

    def _free(self, path: str) -> None:
        """Frees the memory of a layer that was written."""
        self._wrapped[path].to("meta")
        if sys.platform == "linux":  # glibc would keep more than a gigabyte of small tensors
            with suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL("libc.so.6").malloc_trim(0)


class MergedLayer:
    """A layer after PEFT merged its adapter, in float32.

    Attributes:
        values: Its tensors, by their names in the layer.
        error: How much merging changed the layer's outputs, as [`difference`] says.
    """

    def __init__(self, path: str, module: nn.Module, read: Callable[[str], Tensor]):
        self._inputs: Tensor | None = None
        if isinstance(module, ModulesToSaveWrapper):
            self._layer = module.modules_to_save["default"]
            self.values = self._layer.state_dict()
            self._expected = dict(self.values)
            self.error = 0.0
            return
        adapter = module.token_adapter if isinstance(module, TrainableTokensWrapper) else module
        self._layer = layer = adapter.get_base_layer()
        trained = {name: read(f"{path}.{name}").float() for name in layer.state_dict()}
        layer.load_state_dict(trained, assign=True)
        for name, buffer in layer.named_buffers():
            if buffer.is_meta:  # computed from the configuration, such as Gemma's scale
                setattr(layer, name, torch.ones_like(buffer, device="cpu"))
        module.float().eval()
        self._inputs = _random_inputs(layer)
        if self._inputs is not None and adapter is not module:
            indices = torch.tensor(adapter.token_indices["default"])
            if isinstance(layer, nn.Embedding):
                self._inputs = torch.cat([indices, self._inputs])
        with torch.no_grad():
            if self._inputs is None:
                self._expected = _with_adapters(module)
            else:
                self._expected = {"outputs": module(self._inputs)}
            if isinstance(module, ParamWrapper | TrainableTokensWrapper):
                module.unload_and_optionally_merge_module(True, safe_merge=True, adapter_names=None)
            else:
                module.merge(safe_merge=True)
        self.values = layer.state_dict()
        self.error = self.difference(self.values)

    def difference(self, values: Mapping[str, Tensor]) -> float:
        """The largest change of outputs if the layer has these values in place of its adapter.

        It is a share of the largest output, for random inputs; of layers that take more than one
        input (experts), and of those saved whole, it is that of the tensors themselves.
        """
        if self._inputs is None:
            return relative_change(values, self._expected)
        wide = {name: value.float() for name, value in values.items()}
        self._layer.load_state_dict(wide, strict=False, assign=True)
        with torch.no_grad():
            return relative_change({"outputs": self._layer(self._inputs)}, self._expected)


def check_settings(adapter: Path, config: LoraConfig) -> None:
    """Raises ValueError for settings of an adapter whose effect merging would lose."""
    default = vars(type(config)())
    changed = {name: value for name, value in vars(config).items() if value != default.get(name)}
    odd = sorted(changed.keys() - MERGED)
    if odd:
        fault = f"{adapter} was trained with {odd[0]} {changed[odd[0]]!r}, which is not merged"
        raise ValueError(f"{fault}. Use the adapter with PEFT, or train one without it.")


def check_layers(adapter: Adapter) -> None:
    """Raises ValueError if PEFT cannot merge a layer; tried on meta."""
    remedy = "Use it with PEFT, or train one that PEFT can merge."
    with loading(f"The adapter {adapter.folder}", remedy=remedy):
        put_on_meta(on_meta(adapter.config), adapter.peft_config).merge_and_unload()


def relative_change(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest change of a number, as a share of the largest of its tensor."""
    changes = [0.0]
    for name, value in expected.items():
        if not value.is_floating_point() or not value.numel() or values[name] is value:
            continue
        largest = value.abs().max().item()
        if largest and not (values[name].dtype == value.dtype and torch.equal(values[name], value)):
            change = (values[name].to(value.dtype) - value).abs().max().item()
            changes.append(change / largest)
    return max(changes)


def _wrapped_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that PEFT put on a model, by their paths."""
    wrapped: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = path.startswith(tuple(f"{name}." for name in wrapped))
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not inside:
            wrapped[path] = module
    return wrapped


def _random_inputs(layer: nn.Module) -> Tensor | None:
    """Inputs for a layer that takes one; None for others."""
    random = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Embedding):
        return torch.randint(layer.num_embeddings, (16,), generator=random)
    if isinstance(layer, nn.Linear):
        return torch.randn(4, layer.in_features, generator=random)
    if isinstance(layer, Conv1D):
        return torch.randn(4, layer.nx, generator=random)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return torch.randn(4, layer.in_channels, *layer.kernel_size, generator=random)
    return None


def _with_adapters(module: ParamWrapper) -> dict[str, Tensor]:
    """The parameters of a layer that its adapters change, with that change."""
    expected: dict[str, Tensor] = {}
    wrapper: nn.Module = module
    while isinstance(wrapper, ParamWrapper):
        name = wrapper.parameter_name
        expected[name] = wrapper.get_param() + wrapper.get_delta_weight("default")
        wrapper = wrapper.base_layer
    return expected
