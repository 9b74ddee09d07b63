# SPDX-License-Identifier: Apache-2.0
"""Attention from the text after an image to the image (appendix G), one layer's map at a time."""

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..report import KINDS, Attention
from .families import RESAMPLED, Parts, boundary_ids, find_parts, in_evaluation_mode, token_kinds
from .probe import model_inputs


def attention_maps(
    model: nn.Module, batch: Mapping[str, Tensor], *, question: str, special_ids: Iterable[int] = ()
) -> Attention:
    """Measures attention from the text after an image to the image, by layer.

    It is a mean over heads and over the text tokens after the last visual one. A layer is left out
    if it has no attention map (linear attention), if its map has NaN, or if its mask hides a part
    of the image from that text (a sliding window, chunks).

    Only one layer's map is in memory at a time. It has `heads * tokens^2` numbers.

    Args:
        model: A vision-language model of transformers, also with adapters.
        batch: Inputs of its forward pass, with a single sequence.
        question: The sequence's question, for the report.
        special_ids: Ids of special tokens, in addition to those in the configuration.

    Raises:
        ValueError: The model cannot be read, the batch has several sequences, no text comes after
            an image, or no layer has a map that reaches the whole image.
    """
    parts = find_parts(model)
    config = parts.model.config
    inputs = model_inputs(parts, batch)
    sequence_count = len(inputs["input_ids"])
    if sequence_count != 1:
        raise ValueError(f"The batch has {sequence_count} sequences. Give one question at a time.")
    kind_masks = token_kinds(inputs, config, boundary_ids(config) | set(special_ids)).cpu()
    visual_positions = kind_masks[KINDS.index("visual")].nonzero().flatten()
    text_positions = kind_masks[KINDS.index("text")].nonzero().flatten()
    image_end = max(visual_positions.tolist(), default=math.inf)
    asking_positions = text_positions[text_positions > image_end]
    if not len(asking_positions):
        raise ValueError("No text comes after an image. Put the question after it.")
    received = _attention_to_image(parts, inputs, asking_positions, visual_positions)
    if not received:
        raise ValueError(
            f"None of the {len(parts.decoder.layers)} layers of {type(parts.decoder).__name__} has "
            "an attention map that reaches the whole image."
        )
    grid = None
    if config.model_type not in RESAMPLED:  # even if the number of learned queries is a square
        grid = image_grid(inputs, len(visual_positions))
    maps = [
        (image_attention / image_attention.sum()).reshape(grid or (1, -1))
        for image_attention in received.values()
    ]
    return Attention(
        question=question,
        image=None,
        grid=grid,
        maps=[shares.tolist() for shares in maps],
        image_share=[image_attention.sum().item() for image_attention in received.values()],
        entropy=[relative_entropy(shares) for shares in maps],
        bottom_bias=None if grid is None else [bottom_bias(shares) for shares in maps],
        layers=list(received),
    )


def _attention_to_image(
    parts: Parts, inputs: Mapping[str, Any], text: Tensor, image: Tensor
) -> dict[int, Tensor]:
    """Returns mean attention from the positions `text` to each of the positions `image`.

    Its keys are numbers of layers, from 1. Layers whose map cannot be used are left out.
    """
    received = {}

    def keep_mean(
        layer_number: int, module: nn.Module, args: tuple, kwargs: dict, output: tuple
    ) -> Any:
        states, attention, *rest = output
        if attention is None:
            return None
        mask = kwargs.get("attention_mask")  # added to attention scores, (1, 1, tokens, tokens)
        if mask is None or mask[0, 0, text][:, image].min() > torch.finfo(mask.dtype).min / 2:
            mean_attention = attention[0][:, text].mean((0, 1), dtype=torch.float32)
            image_attention = mean_attention[image].cpu().double()
            if image_attention.sum() > 0:  # not NaN
                received[layer_number] = image_attention
        return states, None, *rest  # the layer would keep the map in memory

    # Through the decoder: families name its configuration within the model's differently.
    decoder = parts.decoder
    implementation = decoder.config._attn_implementation
    with in_evaluation_mode(parts.inner), ExitStack() as hooks:
        hooks.callback(setattr, decoder.config, "_attn_implementation", implementation)
        decoder.set_attn_implementation("eager")
        for layer_number, layer in enumerate(decoder.layers, start=1):
            attention_module = getattr(layer, "self_attn", None)
            if attention_module is not None:
                forward_hook = partial(keep_mean, layer_number)
                hooks.enter_context(
                    attention_module.register_forward_hook(forward_hook, with_kwargs=True)
                )
        parts.inner(**inputs, use_cache=False)
    return received


def image_grid(inputs: Mapping[str, Any], tokens: int) -> tuple[int, int] | None:
    """Returns rows and columns of an image's visual tokens, by the ratio of height to width.

    Returns None for several images or tiles, or if some tokens have no place in the image (class
    token, newline rows).
    """
    patches = inputs.get("image_grid_thw")
    pixels = inputs.get("pixel_values")
    if patches is not None:
        image_count = patches[:, 0].sum().item()
        height, width = patches[0, 1:].tolist()
    elif pixels is not None and pixels.dim() > 3:
        image_count = math.prod(pixels.shape[:-3])
        height, width = pixels.shape[-2:]
    else:
        return None
    rows = max(1, math.isqrt(tokens * height // width))
    columns = tokens // rows
    is_filled = rows * columns == tokens
    is_proportional = rows * width == columns * height
    if image_count == 1 and is_filled and is_proportional:
        return rows, columns
    return None


def relative_entropy(shares: Tensor) -> float:
    """Returns the entropy of shares over the entropy of even shares. It is 1 for a single share.

    The shares sum to 1 and may have any shape.
    """
    entropy_if_even = math.log(shares.numel())
    if not entropy_if_even:
        return 1.0
    return torch.special.entr(shares).sum().item() / entropy_if_even


def bottom_bias(shares: Tensor) -> float:
    """Returns the sum of shares in the bottom third of an image, over 1/3. Even shares have 1.

    The shares `(rows, columns)` sum to 1.
    """
    row_count = len(shares)
    bottom_edges = torch.arange(1, row_count + 1, dtype=shares.dtype)
    rows_within = bottom_edges - 2 * row_count / 3
    weights = rows_within.clamp(0, 1)  # the row at the third's edge counts in part
    return 3 * (weights @ shares.sum(1)).item()
