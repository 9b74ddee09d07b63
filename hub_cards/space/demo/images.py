# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Images: read from files that people upload, and drawn as examples."""

from pathlib import Path
from typing import Any

import numpy as np
from gradio.utils import get_upload_folder
from PIL import Image, ImageDraw, ImageFile, ImageOps


FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF")
"""What images may be, whatever their names say. Pillow reads more, EPS among them, for which it starts Ghostscript."""
MAX_PIXELS, MAX_RATIO = 50_000_000, 200
MAX_SCANS = 50
"""Passes over the image of which a progressive JPEG may consist. Programs write 20 at most."""
EXAMPLES = [
    ("circle", "red", "what color is the circle?"),
    ("triangle", "blue", "what shape is in the image?"),
    ("rectangle", "green", "is there a red shape?"),
]


class Refused(ValueError):
    """A message for the person who asked."""


def uploaded(entry: Any) -> Path:
    """The file that the page's image names; [`Refused`] unless it is in Gradio's folder of uploads.

    Gradio itself checks only entries that carry `meta`, which a request may leave out; the figures would then show any
    image of the server.
    """
    try:
        path = Path(entry["path"]).resolve(strict=True)  # of links too
        if path.is_relative_to(Path(get_upload_folder()).resolve()) and path.is_file():
            return path
    # The entry comes from the request: its path may be missing, or one that no system takes.
    except (TypeError, ValueError, OSError, RuntimeError):
        pass
    raise Refused("The image is not among those uploaded here, which are kept for an hour: choose it again.")


def open_image(path: Path) -> Image.Image:
    """The image in a file as upright RGB, of an animation the first frame; [`Refused`] if it cannot be read."""
    try:
        with Image.open(path, formats=FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_RATIO * min(width, height):
                raise ValueError("too large or too narrow")
            if file.format in ("JPEG", "MPO") and path.read_bytes().count(b"\xff\xda") > MAX_SCANS:
                raise ValueError("too many scans")
            return upright_rgb(file)
    except Exception as error:  # decoders of broken files raise whatever their own code stumbles over
        raise Refused(
            "This file is no image that can be read. Choose a whole PNG, JPEG, WebP or GIF file of at most "
            f"{MAX_PIXELS // 1_000_000} million pixels, with no side over {MAX_RATIO} times as long as the other."
        ) from error


# As in data/rows/images.py, word for word: a Space has nothing of the package but this folder.
def upright_rgb(opened: ImageFile.ImageFile) -> Image.Image:
    """Decodes an opened image into RGB: turned as its EXIF data say, on white where it is transparent.

    White is the largest number of as many bits, an even number from 8 up, as the brightest grey needs: 12 bits in a
    file of 16 keep their brightness. Of colours of 16 bits Pillow gives the higher byte alone.

    Raises:
        ValueError: Its pixels are negative or floating-point numbers, or colours that leave the higher byte empty.
    """
    deep = ";16" in str(opened.tile)
    ImageOps.exif_transpose(opened, in_place=True)
    image: Image.Image = opened
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range; save it with 8 bits")
    if image.mode.startswith("I"):  # Pillow makes all above 255 white
        values = np.asarray(image)
        if values.min() < 0:
            raise ValueError(f"its pixels go down to {values.min()}; save it with 8 bits")
        bits = int(values.max()).bit_length()
        image = Image.fromarray((values >> max(0, bits + bits % 2 - 8)).astype(np.uint8))
    elif deep and np.asarray(image.convert("RGB")).max() < 64:
        raise ValueError("its colours have 16 bits, and use 14 at most; save it with 8 bits")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def draw_example(shape: str, color: str) -> Image.Image:
    """A shape on a pale ground."""
    image = Image.new("RGB", (256, 256), "#E8E4DA")
    sides = {"circle": 180, "triangle": 3, "rectangle": 4}[shape]
    ImageDraw.Draw(image).regular_polygon((128, 128, 64), sides, fill=color)
    return image
