# SPDX-License-Identifier: Apache-2.0
"""The model of a dry run: its shapes and dtypes, without weights."""

from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import decoder_quantization


def model_without_weights(
    cls: Any, config: NormAlignLlavaConfig, init_kwargs: dict[str, Any]
) -> PreTrainedModel:
    """Returns the model that `cls.from_pretrained` would load, on meta, also in 4 bits.

    Args:
        cls: The model's class.
        config: The model's configuration.
        init_kwargs: The arguments of `from_pretrained`, with `dtype`.
    """
    arguments = dict(init_kwargs)
    precision = getattr(torch, arguments.pop("dtype"))
    device_map = arguments.pop("device_map", None)
    quantization = arguments.pop("quantization_config", None)
    with torch.device("meta"):
        model = cls._from_config(config, dtype=precision, **arguments)
    for parameter_name, parameter in model.named_parameters():
        if any(place in parameter_name for place in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    if quantization is not None:
        _quantize(model, quantization, device_map)
        _pack(model, precision)
    return model


def _quantize(model: PreTrainedModel, quantization: BitsAndBytesConfig, device_map: Any) -> None:
    """Replaces the layers of the decoder, as `from_pretrained` does."""
    if quantization.load_in_8bit:
        raise ValueError("dry_run cannot count load_in_8bit. Leave it out, or use load_in_4bit.")
    from bitsandbytes.functional import create_dynamic_map, name2qmap

    name2qmap.setdefault("dynamic", create_dynamic_map())  # or one on meta would be kept for all
    quantizer = AutoHfQuantizer.from_config(decoder_quantization(quantization), pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=device_map)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def _pack(model: PreTrainedModel, precision: torch.dtype) -> None:
    """Gives layers in 4 bits the shapes and dtypes that loading would give them."""
    for module in model.modules():
        if type(module).__name__ != "Linear4bit":
            continue
        module.to(precision)
        module.weight._quantize("meta")
        if module.weight.quant_state.nested:
            module.weight.quant_state.offset = torch.zeros(())  # read where bytes are counted
