# SPDX-License-Identifier: Apache-2.0
"""One layer with an adapter, merged by PEFT, and how much its outputs change by that."""

import math
from collections.abc import Callable, Mapping

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


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
        _load(self._layer, path, read)
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
            _merge(module)
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


def _load(layer: nn.Module, path: str, read: Callable[[str], Tensor]) -> None:
    """Reads the tensors of a layer on meta, in float32."""
    values = {name: read(f"{path}.{name}").float() for name in layer.state_dict()}
    layer.load_state_dict(values, assign=True)
    for name, buffer in layer.named_buffers():
        if buffer.is_meta:  # computed from the configuration, such as Gemma's scale
            setattr(layer, name, torch.ones_like(buffer, device="cpu"))


def _merge(module: nn.Module) -> None:
    """Makes PEFT write the adapter's change into the layer."""
    if isinstance(module, ParamWrapper | TrainableTokensWrapper):
        module.unload_and_optionally_merge_module(True, safe_merge=True, adapter_names=None)
    else:
        module.merge(safe_merge=True)


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
    expected: dict[str, Tensor] = {}
    wrapper: nn.Module = module
    while isinstance(wrapper, ParamWrapper):
        parameter_name = wrapper.parameter_name
        expected[parameter_name] = wrapper.get_param() + wrapper.get_delta_weight("default")
        wrapper = wrapper.base_layer
    return expected
