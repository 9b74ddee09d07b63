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
from .families import RESAMPLED, boundary_ids, find_parts, token_kinds
from .probe import in_evaluation_mode, model_inputs


def attention_maps(
    model: nn.Module, batch: Mapping[str, Tensor], *, question: str, special_ids: Iterable[int] = ()
) -> Attention:
    """Attention from the text after an image to the image, by layer, of a batch of one sequence.

    It is a mean over heads and over the text tokens after the last visual one. Left out are layers
    without an attention map (linear attention), with NaN in it, or whose mask hides a part of the
    image from that text (a sliding window, chunks). One layer's map has `heads * tokens^2` numbers.
    """
    parts = find_parts(model)
    inputs, config, decoder = model_inputs(parts, batch), parts.model.config, parts.decoder
    if (sequences := len(inputs["input_ids"])) != 1:
        raise ValueError(f"The batch has {sequences} sequences. Give one question at a time.")
    kinds = token_kinds(inputs, config, boundary_ids(config) | set(special_ids)).cpu()
    visual, text = (kinds[KINDS.index(kind)].nonzero().flatten() for kind in ("visual", "text"))
    asking = text[text > visual.max()] if len(visual) else visual
    if not len(asking):
        raise ValueError("No text comes after an image. Put the question after it.")
    received: dict[int, Tensor] = {}

    def reduce(number: int, module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> Any:
        if output[1] is None:
            return None
        if sees_all(kwargs.get("attention_mask"), asking, visual):
            row = output[1][0][:, asking].mean((0, 1), dtype=torch.float32)[visual]
            received[number] = row.cpu().double()
        return output[0], None, *output[2:]  # without the map, which the layer would keep in memory

    # Through the decoder: families name its configuration within the model's differently.
    implementation = decoder.config._attn_implementation
    with in_evaluation_mode(parts.inner), ExitStack() as hooks:
        hooks.callback(setattr, decoder.config, "_attn_implementation", implementation)
        decoder.set_attn_implementation("eager")
        for number, layer in enumerate(decoder.layers, 1):
            if attention := dict(layer.named_children()).get("self_attn"):
                hook = partial(reduce, number)
                hooks.enter_context(attention.register_forward_hook(hook, with_kwargs=True))
        parts.inner(**inputs, use_cache=False)
    if not (received := {number: row for number, row in received.items() if row.sum() > 0}):
        raise ValueError(
            f"None of the {len(decoder.layers)} layers of {type(decoder).__name__} has an "
            "attention map that reaches the whole image."
        )
    # Learned queries are not places in the image, even if their number is a square.
    grid = None if config.model_type in RESAMPLED else image_grid(inputs, len(visual))
    maps = [(row / row.sum()).reshape(grid or (1, -1)) for row in received.values()]
    return Attention(
        question=question,
        image=None,
        grid=grid,
        maps=[shares.tolist() for shares in maps],
        image_share=[row.sum().item() for row in received.values()],
        entropy=[relative_entropy(shares) for shares in maps],
        bottom_bias=None if grid is None else [bottom_bias(shares) for shares in maps],
        layers=list(received),
    )


def sees_all(mask: Tensor | None, text: Tensor, image: Tensor) -> bool:
    """Whether an additive mask, `(1, 1, tokens, tokens)`, hides nothing of `image` from `text`."""
    return mask is None or bool(mask[0, 0, text][:, image].min() > torch.finfo(mask.dtype).min / 2)


def image_grid(inputs: Mapping[str, Any], tokens: int) -> tuple[int, int] | None:
    """Rows and columns of an image's visual tokens, by the ratio of its height to its width.

    None for several images or tiles, or with tokens of no place (class token, newline rows).
    """
    patches, pixels = inputs.get("image_grid_thw"), inputs.get("pixel_values")
    if patches is not None:
        count, (height, width) = patches[:, 0].sum().item(), patches[0, 1:].tolist()
    elif pixels is not None and pixels.dim() > 3:
        count, (height, width) = math.prod(pixels.shape[:-3]), pixels.shape[-2:]
    else:
        return None
    rows = max(1, math.isqrt(tokens * height // width))
    columns = tokens // rows
    single = count == 1 and rows * columns == tokens and rows * width == columns * height
    return (rows, columns) if single else None


def relative_entropy(shares: Tensor) -> float:
    """Entropy of shares that sum to 1, of any shape, over that of even ones; 1 of a single one."""
    even = math.log(shares.numel())
    return torch.special.entr(shares).sum().item() / even if even else 1.0


def bottom_bias(shares: Tensor) -> float:
    """Sum of the bottom third of shares `(rows, columns)` that sum to 1, over 1/3: even is 1."""
    rows = len(shares)  # of which the one at the third's edge counts in part
    weights = (torch.arange(1, rows + 1, dtype=shares.dtype) - 2 * rows / 3).clamp(0, 1)
    return 3 * (weights @ shares.sum(1)).item()
