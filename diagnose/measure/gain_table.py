# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Gain and bias of the norm after the projector, and what training changed (table 5)."""

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedModel

from ...configuration_normalign_llava import NormAlignLlavaConfig, embedding_scales
from ...modeling_normalign_llava import _gathered, initial_gain
from ..report import Gain
from .embeddings import embedding_table_of


@torch.no_grad()
def gain_of(model: PreTrainedModel) -> Gain | None:
    """Size of gain and bias, and their distance from the start, in float64; of sharded and offloaded models, too.

    None for a model of another architecture or without the norm. The model is without PEFT's wrapper; if PEFT trains a
    copy of the projector, that copy is measured.
    """
    if model.config.model_type != NormAlignLlavaConfig.model_type:
        return None
    norm = model.base_model.multi_modal_projector.norm
    if isinstance(norm, nn.Identity):
        return None
    n_text = model.config.text_embedding_norm  # of the initial embeddings
    if n_text is None:
        scale_text, scale_all = embedding_scales(model.config.text_config)
        n_text = scale_text * scale_all * embedding_table_of(model, name="", top=0).mean
    start = initial_gain(model.config, n_text)
    with align_module_device(norm), _gathered(*norm.parameters()) as (gain, *rest):
        # Rounded as the gain is, so that a gain that never moved has distance 0.
        stored = torch.tensor(start, dtype=gain.dtype).double()
        gain = gain.detach().cpu().double()
        bias = rest[0].detach().cpu().double() if rest else None  # an RMSNorm has none
    return Gain(
        l2=gain.norm().item(),
        mean_abs=gain.abs().mean().item(),
        bias_mean_abs=None if bias is None else bias.abs().mean().item(),
        start=start,
        distance=(gain - stored).norm().item(),
        bias_distance=None if bias is None else bias.norm().item(),
    )
