# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Pictures: read from files that people upload, and drawn as examples."""

import html
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image, ImageDraw, ImageOps


MAX_PIXELS, MAX_RATIO = 50_000_000, 200
EXAMPLES = [
    ("circle", "red", "what color is the circle?"),
    ("triangle", "blue", "what shape is in the image?"),
    ("rectangle", "green", "is there a red shape?"),
]


class Refused(ValueError):
    """A message for the person who asked."""


def open_picture(path: str) -> Image.Image:
    """The picture in a file as upright RGB: of an animation the first frame, on white where transparent.

    Raises:
        ValueError: It is no picture, is cut short, or is too large or too narrow; with a sentence for the page.
    """
    try:
        with Image.open(path) as file:
            width, height = file.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_RATIO * min(width, height):
                raise Image.DecompressionBombError(f"{width} x {height} pixels")
            picture: Image.Image = ImageOps.exif_transpose(file)
            if picture.mode.startswith("I"):  # 16 bits; Pillow's own conversion turns all above 255 into white
                picture = Image.fromarray((np.asarray(picture) // 256).clip(0, 255).astype(np.uint8))
            if picture.has_transparency_data:
                layer = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
            return picture.convert("RGB")
    except Image.DecompressionBombError as error:
        raise Refused(
            f"The picture is too large or too narrow. At most {MAX_PIXELS // 1_000_000} million pixels are read, and "
            f"one side may be {MAX_RATIO} times the other. Make it smaller."
        ) from error
    # Decoders of broken files raise whatever their own code stumbles over.
    except Exception as error:
        raise Refused(
            "This file is no picture that can be read: it may be damaged, cut short, or of another kind than its name "
            "says. Choose a PNG, JPEG, WebP or GIF file."
        ) from error


def check_upload(file: dict[str, Any]) -> Any:
    """Takes an uploaded file that cannot be read away again, with a message; says so where only one frame is used."""
    try:
        open_picture(file["path"])
    except ValueError as error:
        gr.Warning(html.escape(str(error)))
        return None
    with Image.open(file["path"]) as picture:
        if getattr(picture, "is_animated", False):
            gr.Info("The picture is animated. Its first frame is used.")
    return gr.skip()


def draw_example(shape: str, color: str) -> Image.Image:
    """A shape on a pale ground."""
    picture = Image.new("RGB", (256, 256), "#E8E4DA")
    pen, box = ImageDraw.Draw(picture), (70, 60, 190, 180)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "rectangle":
        pen.rectangle((50, 80, 206, 176), fill=color)
    else:
        pen.polygon([(128, 56), (196, 184), (60, 184)], fill=color)
    return picture
