# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Pictures of any file format and colour mode as upright RGB, or the reason why one cannot be used."""

import io
import os
from typing import Any

import fsspec
import numpy as np
from PIL import Image, ImageOps


MAX_RATIO = 200
"""Longer side of a picture over its shorter one, above which it is refused."""


def open_picture(image: dict[str, Any], max_pixels: int) -> Image.Image:
    """Decodes a picture: the first frame of an animation, turned as its EXIF data says, on white where transparent.

    Args:
        image: `path` and `bytes`, as `datasets` has them; the path may be a URL that fsspec reads.
        max_pixels: The size, read from the header, above which nothing is decoded. Pillow has a limit of its own,
            twice `PIL.Image.MAX_IMAGE_PIXELS`.

    Returns:
        The picture in mode RGB.

    Raises:
        ValueError: The picture is missing, unreadable, truncated, empty, too large or too narrow; the file is named.
    """
    name = image["path"] or "a picture inside the data"
    try:
        with _open(image) as file, Image.open(file) as picture:
            width, height = picture.size
            if not 0 < width * height <= max_pixels:
                raise ValueError(f"{width} x {height} pixels; from 1 to {max_pixels:,} are allowed")
            # Image processors that resize by the shorter side would make a narrow strip as large as they like.
            if max(width, height) > MAX_RATIO * min(width, height):
                raise ValueError(f"{width} x {height} pixels; one side may be {MAX_RATIO} times the other at most")
            return _rgb(ImageOps.exif_transpose(picture))
    # Decoders of broken files raise whatever their own code stumbles over.
    except Exception as error:
        raise ValueError(f"{name}: {str(error) or type(error).__name__}") from error


def check_picture_file(path: str, image_folder: str | None) -> None:
    """Looks whether a picture's file is there, and in the folder when all links are followed.

    Args:
        path: The file; of a URL nothing is looked at.
        image_folder: The folder; None for a file that `datasets` found itself.

    Raises:
        ValueError: It is not.
    """
    if "://" in path:
        return
    if image_folder and not _is_inside(os.path.realpath(path), os.path.realpath(image_folder)):
        raise ValueError(f"{path}: the picture is a link that leaves the image folder {image_folder}")
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such picture")


def picture_problem(
    images: list[dict[str, Any]], image_folder: str | None, max_pixels: int | None = None
) -> tuple[str | None, str] | None:
    """The file of the first picture that is at fault, and why; None if there is none.

    Files are looked for, as [`check_picture_file`] does; with `max_pixels`, every picture is decoded too.
    """
    for image in images:
        try:
            if image["bytes"] is None:
                check_picture_file(image["path"], image_folder)
            if max_pixels is not None:
                open_picture(image, max_pixels)
        except ValueError as error:
            return image["path"], str(error)
    return None


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _open(image: dict[str, Any]) -> Any:
    if image["bytes"] is not None:
        return io.BytesIO(image["bytes"])
    path = image["path"]
    return fsspec.open(path, "rb") if "://" in path else open(path, "rb")


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers, of which nobody knows what white is")
    if picture.mode.startswith("I"):  # 16 bits; Pillow's own conversion turns all above 255 into white
        picture = Image.fromarray((np.asarray(picture) // 256).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return picture.convert("RGB")
