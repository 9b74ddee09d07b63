# SPDX-License-Identifier: Apache-2.0
"""The encoder's image processor: images of one size, and `pixel_values` only."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from transformers import AutoImageProcessor, BaseImageProcessor, BatchFeature

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
    if [*_process_picture(image_processor, 97, 61)] == ["pixel_values"]:
        return image_processor
    plain_settings = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}
    for setting, value in image_processor.to_dict().items():
        if setting in _SHARED_SETTINGS and value is not None:
            plain_settings[setting] = value
    with TemporaryDirectory() as folder:
        write_json(Path(folder, "preprocessor_config.json"), plain_settings)
        plain = AutoImageProcessor.from_pretrained(folder)
    if not _make_same_pixels(image_processor, plain):
        remedy = (
            "Save in the encoder's folder the image processor of an encoder of the same family "
            "that makes one image of one size of every picture, such as SiglipImageProcessor for "
            "SigLIP."
        )
        if getattr(image_processor, "crop_to_patches", False):
            remedy = 'Set "crop_to_patches": false in preprocessor_config.json.'
        raise ValueError(
            f"The image processor ({type(image_processor).__name__}) does more than resize and "
            f"normalize a picture. {remedy}"
        )
    return plain


def _make_same_pixels(image_processor: BaseImageProcessor, plain: BaseImageProcessor) -> bool:
    """Whether two image processors make the same pixels of a small picture and of a large one."""
    for width, height in ((97, 61), (610, 970)):
        pixels = _process_picture(image_processor, width, height)["pixel_values"]
        try:
            plain_pixels = _process_picture(plain, width, height)["pixel_values"]
        except ValueError:  # a size that a plain image processor does not take
            return False
        is_as_large = pixels.shape == plain_pixels.shape
        if not (is_as_large and torch.allclose(pixels, plain_pixels, atol=1e-4)):
            return False
    return True


def make_size_constant(image_processor: BaseImageProcessor) -> tuple[int, int]:
    """Returns height and width of all images that an image processor makes.

    They become its `crop_size` unless it crops, since serving engines compute the number of image
    tokens by that.

    Raises:
        ValueError: If the images of two pictures differ in size, or have no usable pixels.
    """
    sizes = set()
    for width, height in ((97, 61), (61, 97)):
        pixels = _process_picture(image_processor, width, height)["pixel_values"][0]
        fault = None
        if not pixels.isfinite().all():
            fault = "NaN or infinite"
        elif (pixels == pixels[:, :1, :1]).all():  # though the picture has many colours
            fault = "the same everywhere"
        if fault:
            settings = image_processor.to_dict()
            values = [f"{name} {settings.get(name)}" for name in _PIXEL_SETTINGS]
            raise ValueError(
                f"The pixels of a picture become {fault} in the image processor "
                f"({', '.join(values)}). Set these in preprocessor_config.json as the encoder was "
                "trained with."
            )
        sizes.add(tuple(pixels.shape[-2:]))
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


def _process_picture(image_processor: BaseImageProcessor, width: int, height: int) -> BatchFeature:
    """Processes a picture of colours that vary in both directions."""
    ramp = Image.linear_gradient("L").resize((width, height))
    picture = Image.merge("RGB", (ramp, ramp.transpose(Image.Transpose.ROTATE_180), ramp))
    return image_processor(picture, return_tensors="pt")
