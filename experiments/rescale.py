# SPDX-License-Identifier: Apache-2.0
"""Changes the scale of pre-trained parts, so that norms can be compared. Their function stays.

A pre-norm network reads its hidden states only through norms. If everything that is added to the
hidden states is multiplied by one factor, and the norms' epsilon by its square, the states are
multiplied by that factor, and all that the network computes from them stays the same. With powers
of two it stays the same bit for bit.
"""

from pathlib import Path
from typing import Any

import torch
from files import new_path
from torch import nn
from transformers import AutoImageProcessor, AutoTokenizer, Dinov2Model, LlamaForCausalLM


def rescale(
    vision: Path, language: Path, output: Path, *, text: float, features: float
) -> tuple[Path, Path]:
    """Writes the rescaled parts, unless they are there.

    Args:
        vision: Folder of a Dinov2Model with its image processor.
        language: Folder of a LlamaForCausalLM with its tokenizer.
        output: Folder of both results.
        text: Factor on the language model's hidden states, its embeddings among them.
        features: Factor on the encoder's hidden states.

    Returns:
        The folders of the encoder and the language model.
    """
    encoder = output / f"vision-{features:g}"
    decoder = output / f"language-{text:g}"
    if not encoder.exists():
        encoder_model = Dinov2Model.from_pretrained(vision, dtype=torch.float32)
        rescale_encoder(encoder_model, features)
        image_processor = AutoImageProcessor.from_pretrained(vision, trust_remote_code=False)
        save_together(encoder, encoder_model, image_processor)
    if not decoder.exists():
        language_model = LlamaForCausalLM.from_pretrained(language, dtype=torch.float32)
        rescale_language_model(language_model, text)
        tokenizer = AutoTokenizer.from_pretrained(language, trust_remote_code=False)
        save_together(decoder, language_model, tokenizer)
    return encoder, decoder


def save_together(folder: Path, *saved: Any) -> None:
    """Writes a new folder with a model and its processor or tokenizer."""
    with new_path(folder) as partial_folder:
        for model_or_processor in saved:
            model_or_processor.save_pretrained(partial_folder)


@torch.no_grad()
def rescale_language_model(model: LlamaForCausalLM, factor: float) -> None:
    """Multiplies the hidden states of a Llama by a factor, in place. Logits stay the same."""
    for layer in model.model.layers:
        _multiply(layer.self_attn.o_proj, factor)
        _multiply(layer.mlp.down_proj, factor)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= factor**2
    model.config.rms_norm_eps *= factor**2
    _multiply(model.model.embed_tokens, factor)
    if model.config.tie_word_embeddings:  # the head has the embeddings' factor
        _multiply(model.model.norm, 1 / factor)


@torch.no_grad()
def rescale_encoder(model: Dinov2Model, factor: float) -> None:
    """Multiplies a DINOv2's hidden states by a factor, in place. Its last norm's output stays."""
    _multiply(model.embeddings, factor)  # patches, positions and the class token
    for layer in model.encoder.layer:
        _multiply(layer.layer_scale1, factor)
        _multiply(layer.layer_scale2, factor)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps *= factor**2
    model.config.layer_norm_eps *= factor**2


def _multiply(module: nn.Module, factor: float) -> None:
    for parameter in module.parameters():
        parameter.mul_(factor)
