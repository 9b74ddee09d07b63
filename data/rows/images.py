# SPDX-License-Identifier: Apache-2.0
"""Images of any file format and colour mode as upright RGB, and which files they may be."""

import base64
import functools
import io
import itertools
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import datasets
import fsspec
import numpy as np
from huggingface_hub import constants
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from ...errors import printable
from .zips import MAX_IMAGE_BYTES, TOO_LARGE, find_entry, read_entry


# What images may be, whatever their names say. Of Pillow's others, EPS would start Ghostscript.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF")
SUFFIXES: tuple[str, ...] = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif", ".bmp", ".ppm")
SUFFIXES += (".tif", ".tiff", ".avif")
KEPT_SIDE = 2048  # pixels, at least, of a reduced image: twice what large image processors take
MAX_PIXELS = 89_478_485  # of an image: Pillow's own limit
MAX_RATIO = 200  # of the longer side to the shorter one
_LISTED_FOR_EACH = 20  # entries of a folder that are listed, at most, for each image in it
MAX_PATH = 4096  # characters; no file system has longer paths

_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
_STARTS = re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|RIFF....WEBP|II\*\0|MM\0\*|....ftypavi", re.S)


@dataclass(frozen=True)
class ImageRules:
    """Which files images may be; with neither field any local file, for rows made in Python."""

    folder: str | None = None  # or zip file that paths start from and must stay in
    hub: str | None = None  # id of a Hub data set; what `datasets` has of it is allowed

    def image(self, value: Any) -> dict[str, Any]:
        """An image of a row as `{"path": str | None, "bytes": bytes | None}`, one of which is None.

        `value` is the file's bytes or path, a data URI or its base64 alone, a mapping with `bytes`
        or `path`, or a PIL image. Raises ValueError if it is none of them, or a path not allowed.
        """
        if isinstance(value, Image.Image):
            value = datasets.Image().encode_example(value.copy())  # its file may change
        key = "bytes" if isinstance(value, bytes) else "path"
        fields = value if isinstance(value, Mapping) else {key: value}
        path, content = fields.get("path"), fields.get("bytes")
        if content is None and isinstance(path, str):
            content = _from_base64(path)
        if isinstance(content, bytes):
            # Without its name: `datasets` would read a file of that name in the working directory.
            return {"path": None, "bytes": content}
        if not isinstance(path, str) or not path or content is not None:
            kinds = "a path, bytes, or a mapping with either"
            raise ValueError(f"an image must be {kinds}, got {short(value)}")
        if len(path) > MAX_PATH or printable(path) != path:
            raise ValueError(f"{short(path)} is neither a valid path nor an image file in base64")
        if path.startswith("~") and not self.archive:
            path = os.path.expanduser(path)
        return {"path": self._address(path, by_datasets=fields is value), "bytes": None}

    def _address(self, path: str, by_datasets: bool) -> str:
        """The address of an image by its path, which `datasets` may have written itself."""
        # It writes zip://a.png::b.zip, in which b.zip is a path or an address of the Hub.
        archive, separator, file = path.rpartition("::")
        streamed = "://" in file
        if streamed or separator:
            known = by_datasets and re.fullmatch(r"(?s)(zip://((?!::).)*)?", archive)
            start = f"hf://datasets/{self.hub}@" if self.hub else "hf://datasets/"
            allowed = file.startswith(start) and (self.hub or not self.folder)
            if not known or streamed and not allowed:
                raise ValueError(f"{short(path)} is an address; nothing is fetched: give a path")
            if streamed:
                return path
        if self.hub and not self.folder and not os.path.isabs(file):
            raise ValueError(f"the image {path} is a path in an unknown folder: set image_folder")
        if self.archive and not separator and not os.path.isabs(file):
            name = posixpath.normpath(file)
            leaves, address = name.startswith("../"), f"zip://{name}::{self.archive}"
        else:
            full = os.path.abspath(os.path.join(self.folder or "", file))
            leaves, address = not self._allow(full, os.path.abspath), archive + separator + full
        if leaves:
            raise ValueError(f"the image {path} leaves {self._place}")
        return address

    def check_file(self, path: str) -> None:
        """Raises ValueError if a local path of [`image`] does not exist, or links to elsewhere."""
        file = path.rpartition("::")[2]
        if "://" in file:
            return
        if not os.path.isfile(file):
            start = "the folder or .zip file that the paths start from"
            remedy = f"copy it there, or set image_folder to {start}"
            raise ValueError(f"{path}: there is no such image; {remedy}")
        folder = os.path.dirname(os.path.realpath(file) if os.path.islink(file) else file)
        if not _allows_folder(self, folder) and file != self.archive:
            raise ValueError(f"{path}: the image is a link that leaves {self._place}")
        if path.startswith("zip://"):
            find_entry(path)

    @property
    def archive(self) -> str | None:
        """The zip file that `folder` is, or None."""
        folder = self.folder or ""
        is_zip = folder.lower().endswith(".zip") and not os.path.isdir(folder)
        return os.path.abspath(folder) if is_zip else None

    @property
    def _place(self) -> str:
        return f"image_folder {self.folder}" if self.folder else "the cache of the Hub"

    def _allow(self, file: str, whole: Callable[[str], str]) -> bool:
        hub = (constants.HF_HUB_CACHE, str(datasets.config.HF_DATASETS_CACHE)) if self.hub else ()
        roots = [os.path.join(whole(root), "") for root in (self.folder, *hub) if root is not None]
        return not roots or os.path.join(file, "").startswith(tuple(roots))


@functools.cache  # many images are in one folder
def _allows_folder(rules: ImageRules, folder: str) -> bool:
    """Whether images may be in a folder, its links resolved."""
    return rules._allow(os.path.realpath(folder), os.path.realpath)


def decode_image(image: dict[str, Any], kept_side: int = KEPT_SIDE) -> Image.Image:
    """Decodes an image into RGB: the first frame, upright, on white where it is transparent.

    If both sides are at least twice `kept_side` pixels, it is reduced by a whole number; 1 is
    fastest, where only errors matter. Raises ValueError with the file and the reason.
    """
    try:
        with Image.open(io.BytesIO(stored_bytes(image)), formats=FORMATS) as opened:
            width, height = opened.size
            if not 0 < width * height <= MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels; from 1 to {MAX_PIXELS:,} are allowed")
            # Image processors that resize the shorter side would make a narrow strip huge.
            if max(width, height) > MAX_RATIO * min(width, height):
                raise ValueError(f"{width} x {height} pixels; at most {MAX_RATIO}:1 is allowed")
            opened.draft(None, (kept_side, kept_side))  # which does something to JPEG alone
            rgb = _upright_rgb(opened)
            return rgb.reduce(factor) if (factor := min(rgb.size) // kept_side) > 1 else rgb
    except Exception as error:  # decoders raise errors of any kind on broken files
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = f"cannot identify image file; it is broken, or not one of {', '.join(FORMATS)}"
        raise ValueError(f"{image['path'] or 'an image inside the data'}: {reason}") from error


def _upright_rgb(opened: ImageFile.ImageFile) -> Image.Image:
    """Decodes an opened image into RGB: upright by its EXIF data, on white where transparent.

    White is the largest number of the bits that the brightest grey needs, an even number from 8 up:
    12 bits in a file of 16 keep their brightness. Of 16-bit colours Pillow gives the higher byte.
    """
    deep = ";16" in str(opened.tile)
    ImageOps.exif_transpose(opened, in_place=True)
    image: Image.Image = opened
    is_unknown = image.mode == "F"
    if image.mode.startswith("I"):  # Pillow makes all above 255 white
        values = np.asarray(image)
        is_unknown, bits = values.min() < 0, int(values.max()).bit_length()
        image = Image.fromarray((values >> max(0, bits + bits % 2 - 8)).astype(np.uint8))
    elif deep:
        is_unknown = np.asarray(image.convert("RGB")).max() < 64
    if is_unknown:
        raise ValueError("the range of its brightness is not known; save it with 8 bits")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def image_problem(
    images: list[dict[str, Any]], rules: ImageRules, decode: bool = True
) -> tuple[str | None, str] | None:
    """File of the first bad image, and the reason, or None."""
    for image in images:
        try:
            if image["bytes"] is None:
                rules.check_file(image["path"])
            if decode:
                decode_image(image, kept_side=1)
        except ValueError as error:
            return image["path"], str(error)
    return None


class PlainFiles:
    """The files of some folders that may be images, and need no look at each of them.

    They are regular files, no links, in folders where images may be. A folder is listed once, and
    not to its end if it has many more files than images that are asked about. Of each file 8 bytes
    are kept, a hash that differs between runs of Python.

    Args:
        folders: Numbers of images that are asked about, by the folders that they are in.
        rules: Where images may be.
    """

    def __init__(self, folders: Mapping[str, int], rules: ImageRules):
        listed = [np.zeros(0, np.int64)]
        for folder, images in folders.items():
            if "://" not in folder and _allows_folder(rules, folder):
                files = _regular_files(folder, _LISTED_FOR_EACH * images)
                listed.append(np.fromiter(map(hash, files), np.int64))
        self._hashes = np.concatenate(listed)
        self._hashes.sort()

    def include(self, paths: Sequence[str]) -> np.ndarray:
        """Which of these paths, as [`ImageRules.image`] gives them, are of such files: `(n,)`."""
        hashes = np.fromiter(map(hash, paths), np.int64, len(paths))
        starts = self._hashes.searchsorted(hashes, side="left")
        return self._hashes.searchsorted(hashes, side="right") > starts


def _regular_files(folder: str, most: int) -> Iterator[str]:
    """Paths of the files in a folder that are no links, among its first `most` entries."""
    with suppress(OSError), os.scandir(folder) as entries:  # it may be absent, or not readable
        for entry in itertools.islice(entries, most):
            if entry.is_file(follow_symlinks=False):
                yield f"{folder}/{entry.name}"


def _from_base64(text: str) -> bytes | None:
    """The bytes of a data URI or of an image file in base64; None for other texts, as paths."""
    if text.startswith("data:"):
        try:
            _, encoded = text.split(";base64,")
            return base64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise ValueError(f"the data URI {short(text)} is no image in base64") from error
    try:
        start = base64.b64decode("".join(text[:100].split())[:64])
        return base64.b64decode(text) if _STARTS.match(start) and _BASE64.fullmatch(text) else None
    except ValueError:
        return None


def stored_bytes(image: dict[str, Any]) -> bytes:
    """The image file's content. Raises ValueError if it is too large."""
    content, path = image["bytes"], image["path"]
    if content is None and path.startswith("zip://") and "://" not in path.rpartition("::")[2]:
        content = read_entry(path)
    elif content is None:
        with fsspec.open(path, "rb") if "://" in path else open(path, "rb") as file:
            content = file.read(MAX_IMAGE_BYTES + 1)  # a sparse or packed file may hold far more
    if len(content) > MAX_IMAGE_BYTES:
        raise ValueError(TOO_LARGE)
    return content


def short(value: Any) -> str:
    """The value for an error message, 80 characters at most."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
