# SPDX-License-Identifier: Apache-2.0
"""How llama.cpp brings a picture to the vision encoder's size, and how training did.

llama.cpp's LLaVA pads a picture to a square. If the file lists sizes of tilings, as for LLaVA 1.6,
llama.cpp stretches the whole picture to a square, and puts tiles of it beside. In a tiling of 0 x 0
pixels there are no tiles, and the stretched picture remains: the pixels of SigLIP's processor.
"""

from typing import Any

from PIL.Image import Resampling


NO_TILES = [0, 0]
"""Width and height of the tiling that makes llama.cpp stretch pictures."""


def is_padded(image_processor: Any) -> bool:
    """Whether pictures were padded to a square in training, as `LlavaImageProcessor` can."""
    return bool(getattr(image_processor, "do_pad", False))


def describe_resizing(image_processor: Any) -> str:
    """Returns what is done with a picture of another size, in training and by llama.cpp."""
    if is_padded(image_processor):
        return "padded, as in training"
    if getattr(image_processor, "do_center_crop", False):
        return "stretched, but cropped in training"
    interpolation = Resampling(image_processor.resample)
    if interpolation != Resampling.BICUBIC:
        name = interpolation.name.lower()
        return f"stretched with bicubic interpolation, but with {name} in training"
    return "stretched, as in training"
