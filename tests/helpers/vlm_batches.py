# SPDX-License-Identifier: Apache-2.0
"""Batches of two sequences as the families' processors would make them, with the tokens of an image written out."""

import tiny
import torch
from torch import Tensor


PAD, BOS, EOS = 0, 1, 2
WORDS = range(3, 89)  # ids of ordinary text
INDICATORS = (89, 90, 91, 92, 93)  # Ovis' visual indicators
VIDEO, START, END, IMAGE = 94, 95, 96, tiny.IMAGE
PIXELS = 16  # of `tiny.vision_config`: two by two patches


def sequences(first: list[int], second: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Ids and mask of two sequences that show images so, of different words; the shorter is padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for image, before, after in ((first, 4, 7), (second, 2, 3)):
        words = torch.randint(WORDS.start, WORDS.stop, (before + after,), generator=generator).tolist()
        rows.append([BOS, *words[:before], *image, *words[before:], EOS])
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def image(tokens: int, boundaries: bool = False) -> list[int]:
    """Placeholders of an image, between START and END where the family has such tokens."""
    return [START, *[IMAGE] * tokens, END] if boundaries else [IMAGE] * tokens


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 100))


def square(tokens: int, boundaries: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """One square image per sequence, as many tokens for each."""
    batch = sequences(image(tokens, boundaries), image(tokens, boundaries), seed)
    return {**batch, "pixel_values": pixels(2, 3, PIXELS, PIXELS, seed=seed)}


def tiled(seed: int = 0) -> dict[str, Tensor]:
    """Any-resolution images of LLaVA-NeXT and LLaVA-OneVision, 4 tokens to a tile.

    The first is one tile high and two wide: the small view's 4 tokens and 2 rows of 4 and a newline. The second is two
    by two tiles: 4 tokens and 4 rows of 4 and a newline. Missing tiles are zeros, as the image processor pads them.
    """
    batch = sequences(image(4 + 2 * 5), image(4 + 4 * 5), seed)
    views = pixels(2, 5, 3, PIXELS, PIXELS, seed=seed)
    views[0, 3:] = 0.0
    return {**batch, "pixel_values": views, "image_sizes": torch.tensor([[16, 32], [32, 32]])}


def grids(patch_shape: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """Images of 4 x 4 and 4 x 6 patches, of which two by two become one token."""
    batch = sequences(image(4, boundaries=True), image(6, boundaries=True), seed)
    grid = torch.tensor([[1, 4, 4], [1, 4, 6]])
    return {**batch, "pixel_values": pixels(16 + 24, *patch_shape, seed=seed), "image_grid_thw": grid}


def with_types(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the tensor `name` that is 1 where an image's tokens stand."""
    return {**batch, name: (batch["input_ids"] == IMAGE).long()}


def ovis(seed: int = 0) -> dict[str, Tensor]:
    """An image in one tile, and one in a small view and two tiles beside each other, each tile of 4 tokens."""
    start, end, prefix, column, _ = INDICATORS
    whole = [start, *image(4), prefix, end]
    tiles = [start, *image(4), prefix, *image(4), column, *image(4), end]
    return {**sequences(whole, tiles, seed), "pixel_values": pixels(4, 3, PIXELS, PIXELS, seed=seed)}


def listed(seed: int = 0) -> dict[str, Tensor]:
    """Two images in the first sequence and one in the second, 4 tokens each, as Idefics3 and SmolVLM take them.

    The image that the second lacks is zeros; the mask leaves out the right half of the one that it has.
    """
    batch = sequences(image(4, boundaries=True) * 2, image(4, boundaries=True), seed)
    images = pixels(2, 2, 3, PIXELS, PIXELS, seed=seed)
    mask = torch.ones(2, 2, PIXELS, PIXELS, dtype=torch.long)
    images[1, 1], mask[1, 1] = 0.0, 0
    mask[1, 0, :, PIXELS // 2 :] = 0
    return {**batch, "pixel_values": images, "pixel_attention_mask": mask}
