# SPDX-License-Identifier: Apache-2.0
"""Measuring a vision-language model: `probe(model, batches) -> Report`."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ...checkpoint.precision import quantization_name
from ..report import KINDS, Report
from .depth import DepthProbe
from .families import Parts, boundary_ids, find_parts, token_kinds, tokenizer_ids
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

    Memory does not grow with the number of batches or of layers. The model is unchanged afterwards;
    its head is not run. Uses hooks, so not from two threads at once.

    Args:
        model: A vision-language model of transformers, also quantized, offloaded or with adapters.
        batches: Inputs of its forward pass: `input_ids` with image tokens expanded, `pixel_values`,
            `attention_mask` and whatever else the family needs. Labels are ignored.
        tokenizer: Names special tokens, in addition to the configuration; or the processor.
        name: Name of the model; by default the last part of its folder or Hub id.
        data: Name of the data.

    Returns:
        The report, with `interface` and `depth` filled.

    Raises:
        ValueError: The model cannot be read, no token is visual, or states are NaN or infinite.
    """
    parts = find_parts(model)
    config = parts.model.config
    interface, depth = InterfaceProbe(parts), DepthProbe(parts.decoder.layers, parts.decoder.norm)
    special = boundary_ids(config) | tokenizer_ids(getattr(tokenizer, "tokenizer", tokenizer))
    tokens, samples = torch.zeros(len(KINDS), dtype=torch.long), 0
    inputs: dict[str, Any] = {}

    def masks() -> Tensor:
        return token_kinds(inputs, config, special, interface.newline)

    for batch in batches:
        inputs = model_inputs(parts, batch)
        interface.newline = None
        with in_evaluation_mode(parts.inner), interface.watching(), depth.watching(masks):
            parts.inner(**inputs, use_cache=False)
        kinds = masks()
        interface.add_text(inputs["input_ids"].flatten()[kinds[KINDS.index("text")]])
        tokens += kinds.sum(-1).cpu()
        samples += len(inputs["input_ids"])
    counts = {kind: count for kind, count in zip(KINDS, tokens.tolist(), strict=True) if count}
    if "visual" not in counts:
        raise ValueError(
            f"None of the {samples} sequences has a visual token (config.image_token_id, "
            f"{config.image_token_id}). Put it into the prompts, as the processor does."
        )
    norms, left_out = interface.result(depth.norm_received()), []
    if parts.projector is None:
        left_out.append(f"The projector, whose name in {config.model_type!r} is not known.")
    if norms.scale is None:
        left_out.append(
            "N_text and what depends on it: text tokens' norms are not proportional to those of "
            "their embedding rows, because of an adapter on these, or of position embeddings."
        )
    dtype = str(next(parts.decoder.layers.parameters()).dtype).removeprefix("torch.")
    if any(getattr(parts.model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
        dtype = quantization_name(config.quantization_config.to_dict())
    return Report(
        model=name or Path(config.name_or_path).name or config.model_type,
        model_type=config.model_type,
        dtype=dtype,
        hidden_size=config.get_text_config().hidden_size,
        projector=parts.projector_name,
        data=data,
        samples=samples,
        tokens=counts,
        interface=norms,
        depth=depth.result(),
        left_out=left_out,
        norm=config.projector_norm if config.model_type == "normalign_llava" else None,
    )


def model_inputs(parts: Parts, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The batch without labels, on the model's device and in its precision."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise ValueError("A batch must be a mapping with input_ids. Give a list of batches.")
    if others := {"pixel_values_videos", "input_features"} & set(batch):
        raise ValueError(f"A batch has {others.pop()}. Give images, not video or sound.")
    names = [name for name in batch if name not in ("labels", "use_cache")]
    return {name: placed(batch[name], parts.model) for name in names}


def placed(value: Any, model: PreTrainedModel) -> Any:
    """A tensor on the model's device and, if it has floats, in its precision."""
    if not isinstance(value, Tensor):
        return value
    if model.device.type != "meta":  # otherwise offloaded: accelerate's hooks move the inputs
        value = value.to(model.device)
    return value.to(model.dtype) if value.is_floating_point() else value


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module is in its earlier mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
