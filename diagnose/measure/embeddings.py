# SPDX-License-Identifier: Apache-2.0
"""Norms of token embeddings (tables 6 to 8), and gain and bias of the norm (table 5)."""

import math

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...assembly.gain import EmbeddingStatistics, statistics_of
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ...modeling_normalign_llava import embedding_row_norms, initial_gain
from ..report import Gain


def row_norms(embeddings: nn.Module) -> Tensor:
    """L2 norms of the rows of an embedding matrix, which may be offloaded, `(V,)`, float64."""
    with align_module_device(embeddings):
        return embedding_row_norms(embeddings.weight)  # type: ignore[arg-type]


def embedding_table_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str
) -> EmbeddingStatistics:
    """The table of a model in memory, which may be sharded or offloaded, without the image token's row."""
    norms, width = row_norms(model.get_input_embeddings()), model.config.get_text_config().hidden_size
    return statistics_of(name, "", norms, width, model.config, tokenizer)


@torch.no_grad()
def gain_of(model: PreTrainedModel) -> Gain | None:
    """Size of gain and bias, and their distance from the start, in float64; of an offloaded model, too.

    None for a model of another architecture or without the norm. The model is without PEFT's wrapper; if PEFT trains a
    copy of the projector, that copy is measured.
    """
    if model.config.model_type != NormAlignLlavaConfig.model_type:
        return None
    norm = model.base_model.multi_modal_projector.norm
    if isinstance(norm, nn.Identity):
        return None
    start = initial_gain(model.config, model.config.text_embedding_norm or math.nan)  # of the initial embeddings
    # Rounded as the gain is, so that a gain that never moved has distance 0.
    stored = torch.tensor(start, dtype=norm.weight.dtype).double()
    with align_module_device(norm):
        gain, *rest = (parameter.cpu().double() for parameter in norm.parameters())
    bias = rest[0] if rest else None  # an RMSNorm has none
    return Gain(
        l2=gain.norm().item(),
        mean_abs=gain.abs().mean().item(),
        bias_mean_abs=None if bias is None else bias.abs().mean().item(),
        start=start,
        distance=(gain - stored).norm().item(),
        bias_distance=None if bias is None else bias.norm().item(),
    )
