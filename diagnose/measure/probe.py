# SPDX-License-Identifier: Apache-2.0
"""Measuring a vision-language model: `probe(model, batches) -> Report`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ...checkpoint.precision import quantization_name
from ..report import KINDS, Report
from .depth import DepthProbe
from .families import (
    Parts,
    boundary_ids,
    find_parts,
    in_evaluation_mode,
    token_kinds,
    tokenizer_ids,
)
from .interface import InterfaceProbe


def probe(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    name: str | None = None,
    data: str | None = None,
) -> Report:
    """Measures norms at the interface and rotation in depth (RQ1 to RQ4) in a pass over `batches`.

    Memory does not grow with the number of batches or of layers. The model is unchanged afterwards,
    and its head is not run. Hooks are used, so two threads must not measure a model at once.

    Args:
        model: A vision-language model of transformers, also quantized, offloaded or with adapters.
        batches: Inputs of its forward pass: `input_ids` with image tokens expanded, `pixel_values`,
            `attention_mask` and whatever else the family needs. Labels are ignored.
        tokenizer: The tokenizer or the processor. Its special tokens are known then, and not only
            the ones in the configuration.
        name: Name of the model. By default, the last part of its folder or Hub id.
        data: Name of the data.

    Returns:
        The report, with `interface` and `depth` filled.

    Raises:
        ValueError: The model or a batch cannot be read, no token is visual, or states are NaN,
            infinite or zero.
    """
    parts = find_parts(model)
    config = parts.model.config
    interface_probe = InterfaceProbe(parts)
    depth_probe = DepthProbe(parts.decoder.layers, parts.decoder.norm)
    special_ids = boundary_ids(config) | tokenizer_ids(getattr(tokenizer, "tokenizer", tokenizer))

    def kinds_of_pass() -> Tensor:
        return token_kinds(inputs, config, special_ids, interface_probe.newline)

    token_counts = torch.zeros(len(KINDS), dtype=torch.long)
    sample_count = 0
    for batch in batches:
        inputs = model_inputs(parts, batch)
        with (
            in_evaluation_mode(parts.inner),
            interface_probe.watching(),
            depth_probe.watching(kinds_of_pass),
        ):
            parts.inner(**inputs, use_cache=False)
        kind_masks = kinds_of_pass()
        interface_probe.add_text(inputs["input_ids"].flatten()[kind_masks[KINDS.index("text")]])
        token_counts += kind_masks.sum(-1).cpu()
        sample_count += len(inputs["input_ids"])
    counts_by_kind = zip(KINDS, token_counts.tolist(), strict=True)
    tokens = {kind: count for kind, count in counts_by_kind if count}
    if "visual" not in tokens:
        raise ValueError(
            f"None of the {sample_count} sequences has a visual token (config.image_token_id, "
            f"{config.image_token_id}). Put it into the prompts, as the processor does."
        )
    interface_norms = interface_probe.result(depth_probe.norm_received())
    weight = next(parts.decoder.layers.parameters())
    dtype = str(weight.dtype).removeprefix("torch.")
    model = parts.model
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        dtype = quantization_name(config.quantization_config.to_dict())
    left_out = []
    if parts.projector is None:
        left_out.append(f"The projector, whose name in {config.model_type!r} is not known.")
    if interface_norms.scale is None:
        left_out.append(
            "N_text and what depends on it: norms of text tokens are not proportional to norms of "
            "their embedding rows, because of an adapter on these, or of position embeddings."
        )
    return Report(
        model=name or Path(config.name_or_path).name or config.model_type,
        model_type=config.model_type,
        dtype=dtype,
        hidden_size=config.get_text_config().hidden_size,
        projector=parts.projector_name,
        data=data,
        samples=sample_count,
        tokens=tokens,
        interface=interface_norms,
        depth=depth_probe.result(),
        left_out=left_out,
        norm=config.projector_norm if config.model_type == "normalign_llava" else None,
    )


def model_inputs(parts: Parts, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the batch without labels, on the model's device and in its precision.

    Raises ValueError if it is not a batch with `input_ids`, or has video or sound.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise ValueError("A batch must be a mapping with input_ids. Give a list of batches.")
    inputs = {}
    for name, value in batch.items():
        if name in ("pixel_values_videos", "input_features"):
            raise ValueError(f"A batch has {name}. Give images, not video or sound.")
        if name not in ("labels", "use_cache"):
            inputs[name] = moved_and_cast(value, parts.model)
    return inputs


def moved_and_cast(value: Any, model: PreTrainedModel) -> Any:
    """Moves a tensor to the model's device and, if it has floats, casts it to its precision."""
    if not isinstance(value, Tensor):
        return value
    if model.device.type != "meta":  # otherwise offloaded: accelerate's hooks move the inputs
        value = value.to(model.device)
    return value.to(model.dtype) if value.is_floating_point() else value
