# SPDX-License-Identifier: Apache-2.0
"""The tensors of an adapter's base as in training: read one at a time, quantized, dequantized."""

import copy
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from ..checkpoint.opening import Checkpoint
from ..checkpoint.precision import torch_dtype
from ..checkpoint.untrusted import AGAIN, fetch_checked_weights
from ..modeling_normalign_llava import (
    NormAlignLlavaForConditionalGeneration,
    decoder_quantization,
)
from .adapter import Adapter, on_meta


NORM = "model.multi_modal_projector.norm."


class BaseTensors:
    """The base's tensors as training had them. Each is read from its file when asked for.

    Args:
        adapter: An adapter that [`open_adapter`] opened.

    Attributes:
        config: The adapter's configuration with two settings as loading the base corrects them:
            `tie_word_embeddings` if files have different embeddings and head, and
            `text_embedding_norm` if the norm starts anew, see [`restarts_norm`].
        dtype: The dtype that training loaded.
        quantized_layers: bitsandbytes' layers, on meta, by the names of the weights that they
            quantize.

    Raises:
        ValueError: If tensors of the base are missing, damaged, or have other shapes than
            config.json says.
    """

    def __init__(self, adapter: Adapter):
        self.config = copy.deepcopy(adapter.config)
        model = on_meta(self.config)
        self._stored = _with_tied_names(_open_tensors(adapter.base, model), model)
        if _differ_though_tied(self._stored, model):
            for config in (self.config, self.config.text_config):
                config.tie_word_embeddings = False
        self.quantized_layers = _quantized_layers(adapter)
        _check_shapes(adapter.base.name, self._stored, model)

        # The weights were quantized from the dtype that training loaded.
        dtype = adapter.dtype or adapter.config.dtype
        if not dtype:
            dtype = next(iter(self._stored.values()))[...].dtype
        self.dtype = torch_dtype(dtype)

        parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        norm_names = {name for name in parameter_names if name.startswith(NORM)}
        self._in_training_dtype = parameter_names - norm_names
        self._aligned_norm: dict[str, Tensor] = {}
        is_norm_stored = norm_names <= self._stored.keys()
        if norm_names and (adapter.realigned or not is_norm_stored):
            embeddings = self[model._tied_weights_keys["lm_head.weight"]]
            self._aligned_norm = _align_norm(model, embeddings)

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor in `dtype`.

        Tensors that were quantized and an aligned norm are in float32. A norm that is not aligned
        and buffers are as stored.
        """
        if name in self._aligned_norm:
            return self._aligned_norm[name]
        value = self._stored[name][...]
        if name in self._in_training_dtype and value.is_floating_point():
            value = value.to(self.dtype)
        if name in self.quantized_layers:
            value = _quantize_and_dequantize(value, self.quantized_layers[name])
        return value


def _open_tensors(
    base: Checkpoint, model: NormAlignLlavaForConditionalGeneration
) -> dict[str, Any]:
    """Opens the base's files, and returns slices of their tensors by their names in the model.

    `[...]` reads a tensor.
    """
    stored_tensors = {}
    model_names = model.state_dict().keys()
    renamings = get_model_conversion_mapping(model, key_mapping=model._llava_names)
    for weights_path in fetch_checked_weights(base.name, base.revision):
        weights_file = safe_open(weights_path, "pt")
        for stored_name in weights_file.keys():  # noqa: SIM118
            model_name = stored_name
            if stored_name not in model_names:  # an older LLaVA has other names
                for renaming in renamings:
                    model_name, _ = renaming.rename_source_key(model_name)
            stored_tensors[model_name] = weights_file.get_slice(stored_name)
    return stored_tensors


def _with_tied_names(
    stored_tensors: dict[str, Any], model: NormAlignLlavaForConditionalGeneration
) -> dict[str, Any]:
    """Returns the tensors by both of their names if two are tied and only one of them is stored."""
    by_both_names = dict(stored_tensors)
    for tied_names in model.all_tied_weights_keys.items():
        stored = [by_both_names[name] for name in tied_names if name in by_both_names]
        if len(stored) == 1:
            by_both_names |= dict.fromkeys(tied_names, stored[0])
    return by_both_names


def _differ_though_tied(
    stored_tensors: dict[str, Any], model: NormAlignLlavaForConditionalGeneration
) -> bool:
    """Reads whether files have two values for tied tensors. transformers does not tie these."""
    for first_name, second_name in model.all_tied_weights_keys.items():
        first = stored_tensors.get(first_name)
        second = stored_tensors.get(second_name)
        if first is None or second is None or first is second:
            continue
        if not torch.equal(first[...], second[...]):
            return True
    return False


def _quantized_layers(adapter: Adapter) -> dict[str, Any]:
    """Returns bitsandbytes' layers, on meta, by the names of the weights that they quantize."""
    if not adapter.quantization:
        return {}
    settings = decoder_quantization(BitsAndBytesConfig.from_dict(adapter.quantization))
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantized_model = on_meta(adapter.config)
    quantizer.preprocess_model(model=quantized_model, device_map={"": "cpu"})
    return {
        f"{module_path}.weight": module
        for module_path, module in quantized_model.named_modules()
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    }


def _check_shapes(
    base: str, stored_tensors: dict[str, Any], model: NormAlignLlavaForConditionalGeneration
) -> None:
    """Raises ValueError if tensors but the norm's are missing, or have other shapes."""
    faults = []
    for tensor_name, expected in model.state_dict().items():
        expected_shape = list(expected.shape)
        stored_shape = None
        if tensor_name in stored_tensors:
            stored_shape = stored_tensors[tensor_name].get_shape()
        elif tensor_name.startswith(NORM):
            continue
        if stored_shape != expected_shape:
            faults.append(f"{tensor_name} has shape {stored_shape}, not {expected_shape}")
    if faults:
        raise ValueError(
            f"{len(faults)} tensors of {base} are not config.json's: {faults[0]}. {AGAIN}"
        )


def _align_norm(
    model: NormAlignLlavaForConditionalGeneration, embeddings: Tensor
) -> dict[str, Tensor]:
    """Aligns the norm of a model on meta to the embeddings `(V, d)`, as training did.

    Returns the norm's tensors.
    """
    model.get_input_embeddings().weight = nn.Parameter(embeddings, requires_grad=False)
    norm = model.model.multi_modal_projector.norm
    norm.to_empty(device="cpu")
    model.align_projector_norm()
    return {f"{NORM}{name}": value for name, value in norm.state_dict().items()}


def _quantize_and_dequantize(weight: Tensor, layer: Any) -> Tensor:
    """Returns a weight in float32, rounded as the quantized layer rounds it."""
    import bitsandbytes as bnb

    is_transposed = layer.source_cls is Conv1D
    if is_transposed:
        weight = weight.T
    settings = {**vars(layer.weight), "requires_grad": False}
    if isinstance(layer, bnb.nn.Linear4bit):
        settings["module"] = None
        quantized = bnb.nn.Params4bit(weight, **settings).to("cpu")
        state = quantized.quant_state
        state.dtype = torch.float32  # otherwise it would be rounded to the loading dtype
        dequantized = bnb.functional.dequantize_4bit(quantized.data, state)
    else:
        quantized = bnb.nn.Int8Params(weight, **settings).to("cpu")
        dequantized = bnb.functional.int8_vectorwise_dequant(quantized.data, quantized.SCB)
    return dequantized.T if is_transposed else dequantized
