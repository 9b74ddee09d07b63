# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Whether a model can be trained in float16, in which numbers end at 65,504, on a GPU without bfloat16."""

import math
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..options.arguments import NormAlignConfig


END = torch.finfo(torch.float16).max
LARGEST = END / 4
"""The largest hidden state with which a run begins in float16; they may grow while it is trained."""


def settle_float16(
    model: NormAlignLlavaForConditionalGeneration, args: NormAlignConfig, batch: dict[str, Any]
) -> None:
    """Leaves `args.fp16` on if hidden states of a batch stay well below 65,504, or else has all trained in float32.

    `args.precision_because` says so, and the model's 4-bit layers follow. All processes must call it together.
    """
    if getattr(model, "hf_device_map", None) is None:
        model.to(args.device)
    found = broadcast_object_list([largest_hidden_state(model, batch)])[0]
    reach = f"reach {found:,.0f}" if math.isfinite(found) else "overflow"
    args.precision_because = f"hidden states of the longest rows {reach}, and float16 ends at {END:,.0f}"
    if found < LARGEST:
        return
    args.fp16, args.mixed_precision = False, "no"
    args.model_init_kwargs = {**(args.model_init_kwargs or {}), "dtype": "float32"}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    if (quantization := getattr(model.config, "quantization_config", None)) is not None:
        quantization.bnb_4bit_compute_dtype = torch.float32
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = torch.float32


@torch.no_grad()
def largest_hidden_state(model: NormAlignLlavaForConditionalGeneration, batch: dict[str, Any]) -> float:
    """The largest absolute value that a module gives in a forward pass in float16; infinity if one is not finite."""
    device = model.device
    largest: list[Tensor] = []

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        values = (each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point())
        largest.extend(each.float().abs().max() for each in values)

    names = ("input_ids", "attention_mask", "position_ids", "pixel_values")
    inputs = {name: batch[name].to(device) for name in names if name in batch}
    hooks = [module.register_forward_hook(watch) for module in model.model.modules()]
    try:
        with torch.autocast(device.type, torch.float16):
            model.model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(largest).nan_to_num(nan=math.inf, posinf=math.inf).max().item()
