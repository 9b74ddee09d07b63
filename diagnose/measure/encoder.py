# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A vision encoder alone: the norms of its output (RQ1, table 1)."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..report import Interface, Report
from .moments import RunningMoments, widest
from .probe import in_evaluation_mode, placed


LEFT_OUT = (
    "Norms at the projector and of text, depth, attention and the verdict: this is a vision encoder alone, without "
    "projector and language model."
)


def probe_encoder(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    name: str | None = None,
    data: str | None = None,
) -> Report:
    """Measures the L2 norms of an encoder's output: the rows of `last_hidden_state`, in one pass over `batches`.

    Class token and registers are included; the padding of images with fewer patches (SigLIP 2 NaFlex) is not. All but
    CLIP apply their final norm to them. Memory does not grow with the number of batches.

    Args:
        model: CLIP, SigLIP, SigLIP 2, DINOv2, ViT, Kimi's encoder, or another of transformers' with a
            `last_hidden_state` of shape `(batch, tokens, d)`, or `(tokens, d)` for all images one after the other;
            of a model with a text tower too, its `vision_model` is measured.
        batches: Inputs of its forward pass, as its image processor makes them.
        name: By default the last part of its folder or Hub id.
    """
    name = name or Path(model.config.name_or_path).name or model.config.model_type
    encoder = model.vision_model if getattr(model.config, "vision_config", None) is not None else model
    samples, norms = 0, RunningMoments()
    with in_evaluation_mode(encoder):
        for batch in batches:
            # Image processors use the whole model's name for the grid, encoders their own.
            inputs = {key.replace("image_grid", "grid"): placed(value, encoder) for key, value in batch.items()}
            rows = _rows(name, encoder(**inputs), inputs.get("pixel_attention_mask"))
            norms.add(torch.linalg.vector_norm(rows, dim=-1, dtype=widest(rows.device)))
            samples += len(inputs.get("grid_thw", inputs["pixel_values"]))
    moments = norms.result()
    if moments is None:
        raise ValueError(f"There is no batch to measure {name} with. Give at least one.")
    if not torch.tensor([moments.mean, moments.std]).isfinite().all():
        raise ValueError(f"{name} gives NaN or infinite values. Are its weights damaged? In float16, try float32.")
    return Report(
        model=name,
        model_type=encoder.config.model_type,
        dtype="4-bit" if getattr(model, "is_loaded_in_4bit", False) else str(encoder.dtype).removeprefix("torch."),
        hidden_size=encoder.config.hidden_size,
        data=data,
        samples=samples,
        interface=Interface(encoder_output=moments),
        left_out=[LEFT_OUT],
    )


def _rows(name: str, output: object, mask: Tensor | None) -> Tensor:
    """Output rows `(rows, d)` that are not padding."""
    rows = getattr(output, "last_hidden_state", None)
    if not isinstance(rows, Tensor) or rows.dim() not in (2, 3):
        raise ValueError(f"{name} has no last_hidden_state of shape (batch, tokens, d) or (tokens, d).")
    return rows.flatten(0, -2) if mask is None else rows[mask.bool()]
