# SPDX-License-Identifier: Apache-2.0
"""A vision encoder alone: the norms of its output (RQ1, table 1)."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..report import Interface, Report
from .moments import RunningMoments, token_rows, widest
from .probe import in_evaluation_mode, placed, precision


def probe_encoder(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    name: str,
    data: str | None = None,
) -> Report:
    """Measures the L2 norms of an encoder's output: the rows of `last_hidden_state`, in one pass over `batches`.

    Class token and registers are included; the padding of images with fewer patches (SigLIP 2 NaFlex) is not. All but
    CLIP apply their final norm to them. Memory does not grow with the number of batches.

    Args:
        model: CLIP, SigLIP, SigLIP 2, DINOv2, ViT, Kimi's encoder, or another of transformers' with a
            `last_hidden_state` of shape `(batch, tokens, d)`, `(batch, d, height, width)`, or `(tokens, d)` for all
            images one after the other; of a model with a text tower too, its `vision_model` is measured.
        batches: Inputs of its forward pass, as its image processor makes them; at least one.
        name, data: Names of the model and of the data, for the report.
    """
    encoder = model.vision_model if getattr(model.config, "vision_config", None) is not None else model
    samples, norms = 0, RunningMoments()
    with in_evaluation_mode(encoder):
        for batch in batches:
            # Image processors use the whole model's name for the grid, encoders their own.
            inputs = {key.replace("image_grid", "grid"): placed(value, encoder) for key, value in batch.items()}
            rows, mask = token_rows(encoder(**inputs).last_hidden_state), inputs.get("pixel_attention_mask")
            rows = rows.flatten(0, -2) if mask is None else rows[mask.bool()]  # without padding
            norms.add(torch.linalg.vector_norm(rows, dim=-1, dtype=widest(rows.device)))
            samples += len(inputs.get("grid_thw", inputs["pixel_values"]))
    moments = norms.result()
    if moments is None or not math.isfinite(moments.mean + moments.std):
        raise ValueError(f"{name} gives NaN or infinite values. Are its weights damaged? In float16, try float32.")
    return Report(
        model=name,
        model_type=encoder.config.model_type,
        dtype=precision(model, encoder),
        hidden_size=rows.shape[-1],
        data=data,
        samples=samples,
        interface=Interface(encoder_output=moments),
        left_out=["Norms at the projector and of text, depth, attention, verdict: this is a vision encoder alone."],
    )
