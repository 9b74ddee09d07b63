# SPDX-License-Identifier: Apache-2.0
"""The encoder's image processor: images of one size, and `pixel_values` only."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from transformers import AutoImageProcessor, BaseImageProcessor

from ..checkpoint.files import write_json


_SHARED_SETTINGS = (
    "do_convert_rgb",
    "do_normalize",
    "do_rescale",
    "do_resize",
    "image_mean",
    "image_std",
    "resample",
    "rescale_factor",
    "size",
)
"""Settings of image processors that only resize and normalize."""

_PIXEL_SETTINGS = ("image_mean", "image_std", "rescale_factor")
"""Settings by which image processors compute with the values of pixels."""


def plain_image_processor(image_processor: BaseImageProcessor) -> BaseImageProcessor:
    """Returns an image processor that makes the same pixels, and nothing but `pixel_values`.

    InternVL's also counts the parts of a picture. [`LlavaProcessor`] would pass the count on to the
    model, and the model does not take it.

    Raises:
        ValueError: If no plain image processor makes the same pixels.
    """
    if [*image_processor(_picture(97, 61), return_tensors="pt")] == ["pixel_values"]:
        return image_processor
    plain_settings = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}
    for setting, value in image_processor.to_dict().items():
        if setting in _SHARED_SETTINGS and value is not None:
            plain_settings[setting] = value
    with TemporaryDirectory() as folder:
        write_json(Path(folder, "preprocessor_config.json"), plain_settings)
        plain = AutoImageProcessor.from_pretrained(folder)
    if not _make_same_pixels(image_processor, plain):
        raise ValueError(
            f"The image processor ({type(image_processor).__name__}) does more than resize and "
            f"normalize a picture. {_remedy(image_processor)}"
        )
    return plain


def _make_same_pixels(image_processor: BaseImageProcessor, plain: BaseImageProcessor) -> bool:
    """Whether two image processors make the same pixels of a small picture and of a large one."""
    for width, height in ((97, 61), (610, 970)):
        pixels = image_processor(_picture(width, height), return_tensors="pt")["pixel_values"]
        try:
            plain_pixels = plain(_picture(width, height), return_tensors="pt")["pixel_values"]
        except ValueError:  # a size that a plain image processor does not take
            return False
        is_as_large = pixels.shape == plain_pixels.shape
        if not (is_as_large and torch.allclose(pixels, plain_pixels, atol=1e-4)):
            return False
    return True


def _remedy(image_processor: BaseImageProcessor) -> str:
    """Says how to get an image processor that only resizes and normalizes."""
    if getattr(image_processor, "crop_to_patches", False):
        return 'Set "crop_to_patches": false in preprocessor_config.json.'
    return (
        "Save in the encoder's folder the image processor of an encoder of the same family that "
        "makes one image of one size of every picture, such as SiglipImageProcessor for SigLIP."
    )


def make_size_constant(image_processor: BaseImageProcessor) -> tuple[int, int]:
    """Returns height and width of all images that an image processor makes.

    They become its `crop_size` unless it crops, since serving engines compute the number of image
    tokens by that.

    Raises:
        ValueError: If the images of two pictures differ in size, or have no usable pixels.
    """
    sizes = set()
    for width, height in ((97, 61), (61, 97)):
        pixels = image_processor(_picture(width, height), return_tensors="pt")["pixel_values"]
        _check_pixels(pixels[0], image_processor)
        sizes.add(tuple(pixels[0].shape[-2:]))
    if len(sizes) > 1:
        listed = " and ".join(f"{height} x {width}" for height, width in sorted(sizes))
        raise ValueError(
            f"The image processor's size {dict(image_processor.size)} has no height and width for "
            f"every picture: two pictures became {listed}. Set both in preprocessor_config.json."
        )
    [(height, width)] = sizes
    if not (image_processor.crop_size and getattr(image_processor, "do_center_crop", False)):
        image_processor.crop_size = {"height": height, "width": width}
    return height, width


def _check_pixels(pixels: torch.Tensor, image_processor: BaseImageProcessor) -> None:
    """Raises ValueError if the pixels of a picture of many colours are not finite, or all equal.

    Args:
        pixels: What the image processor made of the picture, `(3, H, W)`.
        image_processor: The image processor. Its settings are named in the error.
    """
    fault = None
    if not pixels.isfinite().all():
        fault = "NaN or infinite"
    elif (pixels == pixels[:, :1, :1]).all():
        fault = "the same everywhere"
    if fault:
        settings = image_processor.to_dict()
        values = [f"{name} {settings.get(name)}" for name in _PIXEL_SETTINGS]
        raise ValueError(
            f"The pixels of a picture become {fault} in the image processor "
            f"({', '.join(values)}). Set these in preprocessor_config.json as the encoder was "
            "trained with."
        )


def _picture(width: int, height: int) -> Image.Image:
    """Returns a picture of colours that vary in both directions."""
    ramp = Image.linear_gradient("L").resize((width, height))
    return Image.merge("RGB", (ramp, ramp.transpose(Image.Transpose.ROTATE_180), ramp))
