# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Images of any file format and colour mode as upright RGB, which files they may be, and why one cannot be used."""

import base64
import io
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import fsspec
import numpy as np
from huggingface_hub import constants
from PIL import Image, ImageOps


MAX_RATIO = 200
"""Longer side of an image over its shorter one, above which it is refused."""

MAX_PATH = 4096
"""Characters of the path of an image: no file system has longer ones."""

MAX_SCANS = 50
"""Passes over the image of which a progressive JPEG may consist. Programs write 20 at most."""

KEPT_SIDE = 2048
"""Pixels that both sides of an image keep when it is made smaller: twice what large image processors take."""


@dataclass(frozen=True)
class ImageRules:
    """Which files the images of a data set may be, decided here alone.

    Args:
        folder: Paths start from it and stay in it, links followed.
        hub: Id of a data set of the Hub. What `datasets` itself downloads or streams of it is allowed.

    Without either, rows were made in Python, by somebody who may name any file of this machine.
    """

    folder: str | None = None
    hub: str | None = None

    def image(self, value: Any) -> dict[str, Any]:
        """An image of a row as `{"path": str | None, "bytes": bytes | None}`, one of which is None.

        Args:
            value: The image's file as bytes, its path, a data URI, a mapping with `bytes` or `path`, or a PIL image.

        Raises:
            ValueError: It is none of these, or its path is not allowed.
        """
        if isinstance(value, Image.Image):
            value = datasets.Image().encode_example(value.copy())  # a copy has no file, which may have changed since
        made = isinstance(value, Mapping)
        path, content = (value.get("path"), value.get("bytes")) if made else (value, None)
        content, path = (path, None) if isinstance(path, bytes) else (content, path)
        if isinstance(content, bytes):
            # Not with its name: `datasets` would take a file of that name in the working directory in its place.
            return {"path": None, "bytes": content}
        if not isinstance(path, str) or not path or content is not None:
            raise ValueError(f"an image must be a path, bytes, or a mapping with either, got {short(value)}")
        if path.startswith("data:"):
            return {"path": None, "bytes": _from_data_uri(path)}
        if len(path) > MAX_PATH or printable(path) != path:
            raise ValueError(f"the path {short(path)} is not valid Unicode, or too long")
        # `datasets` names a file in an archive zip://a.png::b.zip, where b.zip is a path, or streamed from the Hub.
        archive, separator, file = path.rpartition("::")
        streamed = "://" in file
        if streamed or separator:
            known = made and re.fullmatch(r"(zip://((?!::).)*)?", archive, re.DOTALL)
            if not known or streamed and not self._streams(file):
                raise ValueError(
                    f"{short(path)} is an address, and nothing is fetched: download the images, give their paths, and "
                    "set image_folder"
                )
            if streamed:
                return {"path": path, "bytes": None}
        if self.hub and not self.folder and not os.path.isabs(file):
            raise ValueError(
                f"the image {path} is a path, and no folder is known that it starts from: set image_folder"
            )
        full = os.path.abspath(os.path.join(self.folder or "", file))
        if not self._allow(full, os.path.abspath):
            raise ValueError(f"the image {path} leaves {self._place}")
        return {"path": archive + separator + full, "bytes": None}

    def check_file(self, path: str) -> None:
        """Looks whether an image's file is there, and where it may be when all links are followed.

        Args:
            path: As [`image`] gives it; of what is streamed nothing is looked at.

        Raises:
            ValueError: It is not.
        """
        file = path.rpartition("::")[2]
        if "://" in file:
            return
        if not self._allow(os.path.realpath(file), os.path.realpath):
            raise ValueError(f"{path}: the image is a link that leaves {self._place}")
        if not os.path.isfile(file):
            raise ValueError(f"{path}: there is no such image" + (f" in {self._place}" if self.folder else ""))

    @property
    def _place(self) -> str:
        return f"image_folder {self.folder}" if self.folder else "the cache of the Hub"

    def _streams(self, address: str) -> bool:
        if self.folder and not self.hub:
            return False
        return address.startswith(f"hf://datasets/{self.hub}@" if self.hub else "hf://datasets/")

    def _allow(self, file: str, whole: Callable[[str], str]) -> bool:
        caches = (constants.HF_HUB_CACHE, str(datasets.config.HF_DATASETS_CACHE)) if self.hub else ()
        roots = [whole(root) for root in (self.folder, *caches) if root is not None]
        return not roots or any(_is_inside(file, root) for root in roots)


def open_image(image: dict[str, Any], max_pixels: int) -> Image.Image:
    """Decodes an image: the first frame of an animation, turned as its EXIF data says, on white where transparent.

    An image whose sides are both at least twice `KEPT_SIDE` is made smaller by a whole number; a JPEG is decoded at a
    half, a quarter or an eighth of its size, which takes that much less memory. Every other image keeps its pixels.

    Args:
        image: `path` and `bytes`, as `datasets` has them; the path may be a URL that fsspec reads.
        max_pixels: The size, read from the header, above which nothing is decoded. Pillow has a limit of its own,
            twice `PIL.Image.MAX_IMAGE_PIXELS`.

    Returns:
        The image in mode RGB.

    Raises:
        ValueError: The image is missing, unreadable, truncated, empty, too large or too narrow; the file is named.
    """
    name = image["path"] or "an image inside the data"
    try:
        with _open(image) as file, Image.open(file) as opened:
            width, height = opened.size
            if not 0 < width * height <= max_pixels:
                raise ValueError(f"{width} x {height} pixels; from 1 to {max_pixels:,} are allowed")
            # Image processors that resize by the shorter side would make a narrow strip as large as they like.
            if max(width, height) > MAX_RATIO * min(width, height):
                raise ValueError(f"{width} x {height} pixels; one side may be {MAX_RATIO} times the other at most")
            _check_scans(opened, file)
            opened.draft(None, (KEPT_SIDE, KEPT_SIDE))  # which does nothing to formats other than JPEG
            ImageOps.exif_transpose(opened, in_place=True)
            rgb = _rgb(opened)
            return rgb.reduce(factor) if (factor := min(rgb.size) // KEPT_SIDE) > 1 else rgb
    # Decoders of broken files raise whatever their own code stumbles over.
    except Exception as error:
        raise ValueError(f"{name}: {str(error) or type(error).__name__}") from error


def image_problem(
    images: list[dict[str, Any]], rules: ImageRules, max_pixels: int | None = None
) -> tuple[str | None, str] | None:
    """The file of the first image that is at fault, and why; None if there is none.

    Files are looked for, as [`ImageRules.check_file`] does; with `max_pixels`, every image is decoded too.
    """
    for image in images:
        try:
            if image["bytes"] is None:
                rules.check_file(image["path"])
            if max_pixels is not None:
                open_image(image, max_pixels)
        except ValueError as error:
            return image["path"], str(error)
    return None


def _from_data_uri(uri: str) -> bytes:
    header, _, content = uri.partition(",")
    if not header.startswith("data:image/") or not header.endswith(";base64"):
        raise ValueError(f"the data URI {short(header)} is not one of an image in base64")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ValueError(f"the image in a data URI is not valid base64: {error}") from error


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _check_scans(opened: Image.Image, file: Any) -> None:
    # Each scan of a progressive JPEG goes through the whole image again, and may take ten bytes.
    if opened.format in ("JPEG", "MPO"):
        file.seek(0)
        if (scans := file.read().count(b"\xff\xda")) > MAX_SCANS:
            raise ValueError(f"a JPEG of {scans:,} scans; {MAX_SCANS} are allowed")


def _open(image: dict[str, Any]) -> Any:
    if image["bytes"] is not None:
        return io.BytesIO(image["bytes"])
    path = image["path"]
    return fsspec.open(path, "rb") if "://" in path else open(path, "rb")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, of which nobody knows what white is")
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion turns all above 255 into white
        image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def printable(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which JSON can hold and a file cannot."""
    return text.encode(errors="replace").decode()


def short(value: Any) -> str:
    """A value as an error shows it, 80 characters at most."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
