# SPDX-License-Identifier: Apache-2.0
"""Reads images of any file format and colour mode as upright RGB, from files that are allowed."""

import base64
import functools
import io
import itertools
import os
import posixpath
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import datasets
import fsspec
import numpy as np
from huggingface_hub import constants
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from ...console import printable


# Pillow opens images only in these formats, whatever their names are. EPS would start Ghostscript.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF")
SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jfif",
    ".webp",
    ".gif",
    ".bmp",
    ".ppm",
    ".tif",
    ".tiff",
    ".avif",
)
KEPT_SIDE = 2048  # pixels that a reduced image keeps: twice as many as large processors take
MAX_PIXELS = 89_478_485  # of an image: Pillow's own limit
MAX_RATIO = 200  # of the longer side to the shorter one
_LISTED_FOR_EACH = 20  # entries of a folder that are listed at most for each image in it
MAX_PATH = 4096  # characters; no file system has longer paths

_UNKNOWN_RANGE = "the range of its brightness is not known; save it with 8 bits"
_IN_ARCHIVE = re.compile(r"(?s)(zip://((?!::).)*)?")  # before the path of the archive
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
_STARTS = re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|RIFF....WEBP|II\*\0|MM\0\*|....ftypavi", re.S)

MAX_IMAGE_BYTES = 256 * 2**20  # of one encoded image
TOO_LARGE = f"the file has more than {MAX_IMAGE_BYTES >> 20} MiB. Save it smaller"

# Of zip files.
_LOCAL_HEADER = struct.Struct("<4s22x2H")  # before an entry: its signature, and two lengths
_ENTRY_TYPE = np.dtype("i8, i8, i8, u4, u1")  # of the fields of an entry
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_REFUSED = 255  # as a method: a link, encrypted, or packed by another method than deflate

StoredImage: TypeAlias = dict[str, Any]
"""An image of a row: `{"path": str | None, "bytes": bytes | None}`. One of the two is None."""
Problem: TypeAlias = tuple[str | None, str]
"""The file of a bad image, and the reason."""


@dataclass(frozen=True)
class ImageRules:
    """Which files images may be.

    Without both fields, any local file is allowed. That is for rows made in Python.
    """

    folder: str | None = None  # or zip file that paths start from and must stay in
    hub: str | None = None  # id of a Hub data set; what `datasets` has of it is allowed

    def image(self, value: Any) -> StoredImage:
        """Returns an image of a row.

        Args:
            value: The file's bytes or path, a data URI or only its base64, a mapping with `bytes`
                or `path`, or a PIL image.

        Raises:
            ValueError: The value is none of them, or a path that is not allowed.
        """
        if isinstance(value, Image.Image):
            value = datasets.Image().encode_example(value.copy())  # its file may change
        is_mapping = isinstance(value, Mapping)
        path = value
        content = value if isinstance(value, bytes) else None
        if is_mapping:
            path = value.get("path")
            content = value.get("bytes")
        if content is None and isinstance(path, str):
            content = _from_base64(path)
        if isinstance(content, bytes):
            # Without its name: `datasets` would read a file of that name in the working directory.
            return {"path": None, "bytes": content}
        if not isinstance(path, str) or not path or content is not None:
            raise ValueError(
                f"an image must be a path, bytes, or a mapping with either, got {short(value)}"
            )
        if len(path) > MAX_PATH or printable(path) != path:
            raise ValueError(f"{short(path)} is neither a valid path nor an image file in base64")
        if path.startswith("~") and not self.archive:
            path = os.path.expanduser(path)
        return {"path": self._address(path, by_datasets=is_mapping), "bytes": None}

    def _address(self, path: str, by_datasets: bool) -> str:
        """Returns the address of an image. Raises ValueError if it is not allowed.

        Args:
            path: A path, or an address.
            by_datasets: Whether `datasets` may have written it. Only then is an address allowed. It
                looks like zip://a.png::b.zip, where b.zip is a path or an address of the Hub.
        """
        archive, separator, file = path.rpartition("::")
        is_streamed = "://" in file
        if is_streamed or separator:
            is_known = by_datasets and _IN_ARCHIVE.fullmatch(archive)
            # In the Hub's data set, or in any one if no place is given.
            hub_start = f"hf://datasets/{self.hub}@" if self.hub else "hf://datasets/"
            is_of_hub = file.startswith(hub_start) and (self.hub or not self.folder)
            if not is_known or (is_streamed and not is_of_hub):
                raise ValueError(f"{short(path)} is an address; nothing is fetched: give a path")
        if is_streamed:
            return path
        if not os.path.isabs(file):
            if self.hub and not self.folder:
                raise ValueError(
                    f"the image {path} is a path in an unknown folder: set image_folder"
                )
            if self.archive and not separator:
                name = posixpath.normpath(path)
                if name.startswith("../"):
                    raise ValueError(f"the image {path} leaves {self._place}")
                return f"zip://{name}::{self.archive}"
        full_path = os.path.abspath(os.path.join(self.folder or "", file))
        if not self._allow(full_path, os.path.abspath):
            raise ValueError(f"the image {path} leaves {self._place}")
        return archive + separator + full_path

    def check_file(self, path: str) -> None:
        """Raises ValueError if a file does not exist, or is a link to where images may not be.

        `path` is a path that [`image`] returns. Addresses of the Hub are not checked.
        """
        file = path.rpartition("::")[2]
        if "://" in file:
            return
        if not os.path.isfile(file):
            raise ValueError(
                f"{path}: there is no such image; copy it there, or set image_folder to the folder "
                "or .zip file that the paths start from"
            )
        target = os.path.realpath(file) if os.path.islink(file) else file
        if not _allows_folder(self, os.path.dirname(target)) and file != self.archive:
            raise ValueError(f"{path}: the image is a link that leaves {self._place}")
        if path.startswith("zip://"):
            find_entry(path)

    @property
    def archive(self) -> str | None:
        """The zip file that `folder` is, or None."""
        if self.folder and self.folder.lower().endswith(".zip") and not os.path.isdir(self.folder):
            return os.path.abspath(self.folder)
        return None

    @property
    def _place(self) -> str:
        """What messages call the place that images may be in."""
        return f"image_folder {self.folder}" if self.folder else "the cache of the Hub"

    def _allow(self, path: str, resolve: Callable[[str], str]) -> bool:
        """Whether a file or folder is where images may be.

        Args:
            path: Its absolute path.
            resolve: Returns the absolute path of a folder that images may be in.
        """
        folders = []
        if self.folder is not None:
            folders.append(self.folder)
        if self.hub:
            folders += [constants.HF_HUB_CACHE, str(datasets.config.HF_DATASETS_CACHE)]
        prefixes = tuple(os.path.join(resolve(folder), "") for folder in folders)
        return not prefixes or os.path.join(path, "").startswith(prefixes)


@functools.cache  # many images are in one folder
def _allows_folder(rules: ImageRules, folder: str) -> bool:
    """Whether images may be in a folder, after its links are resolved."""
    return rules._allow(os.path.realpath(folder), os.path.realpath)


def decode_image(image: StoredImage, kept_side: int = KEPT_SIDE) -> Image.Image:
    """Decodes an image into RGB: the first frame, upright, on white where it is transparent.

    Args:
        image: An image as [`ImageRules.image`] returns it.
        kept_side: Pixels. If both sides are at least twice as long, the image is reduced by a whole
            number. 1 is fastest, if only errors matter.

    Raises:
        ValueError: The image cannot be read or decoded, or is too large or too narrow. The message
            has the file and the reason.
    """
    try:
        with Image.open(io.BytesIO(stored_bytes(image)), formats=FORMATS) as opened:
            width = opened.width
            height = opened.height
            if not 0 < width * height <= MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels; from 1 to {MAX_PIXELS:,} are allowed")
            # Image processors that resize the shorter side would make a narrow strip huge.
            if max(width, height) > MAX_RATIO * min(width, height):
                raise ValueError(f"{width} x {height} pixels; at most {MAX_RATIO}:1 is allowed")
            opened.draft(None, (kept_side, kept_side))  # has an effect only on JPEG
            rgb = _upright_rgb(opened)
            factor = min(rgb.size) // kept_side
            return rgb.reduce(factor) if factor > 1 else rgb
    except Exception as error:  # decoders raise errors of any kind on broken files
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = f"cannot identify image file; it is broken, or not one of {', '.join(FORMATS)}"
        raise ValueError(f"{image['path'] or 'an image inside the data'}: {reason}") from error


def _upright_rgb(opened: ImageFile.ImageFile) -> Image.Image:
    """Decodes an opened image into RGB: upright by its EXIF data, on white where transparent.

    Raises ValueError if the range of its brightness is not known, and any error of a decoder.
    """
    has_deep_colours = ";16" in str(opened.tile)
    ImageOps.exif_transpose(opened, in_place=True)
    image: Image.Image = opened
    if image.mode.startswith("I"):  # Pillow makes all above 255 white
        values = np.asarray(image)
        if values.min() < 0:
            raise ValueError(_UNKNOWN_RANGE)
        # White is the largest number with as many bits as the brightest grey needs, rounded up to
        # an even number from 8 on. So 12 bits in a file of 16 keep their brightness.
        bits = int(values.max()).bit_length()
        even_bits = bits + bits % 2
        shifted = values >> max(0, even_bits - 8)
        image = Image.fromarray(shifted.astype(np.uint8))
    elif has_deep_colours:  # Pillow gives the higher byte
        if np.asarray(image.convert("RGB")).max() < 64:
            raise ValueError(_UNKNOWN_RANGE)
    elif image.mode == "F":
        raise ValueError(_UNKNOWN_RANGE)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def open_and_find_problem(
    images: list[StoredImage], rules: ImageRules, decode: bool = True
) -> Problem | None:
    """Returns the problem of the first bad image, or None.

    Args:
        images: Images as [`ImageRules.image`] returns them.
        rules: Which files they may be.
        decode: Whether they are opened. Otherwise only their files are looked for.
    """
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
    """Files of some folders that are known to exist and to be allowed as images.

    They are regular files, not links, in folders where images may be. Each folder is listed once.
    That is faster than a look at each file. The list ends early if a folder has many more files
    than images that are asked about. For each file, only a hash of 8 bytes is kept. It differs
    between runs of Python.

    Args:
        folders: The number of images that are asked about, by folder.
        rules: Where images may be.
    """

    def __init__(self, folders: Mapping[str, int], rules: ImageRules):
        hashes_by_folder = [_hashes([])]
        for folder, image_count in folders.items():
            if "://" in folder or not _allows_folder(rules, folder):
                continue
            with suppress(OSError), os.scandir(folder) as entries:  # absent, or not readable
                listed_entries = itertools.islice(entries, _LISTED_FOR_EACH * image_count)
                regular_files = (
                    f"{folder}/{entry.name}"
                    for entry in listed_entries
                    if entry.is_file(follow_symlinks=False)
                )
                hashes_by_folder.append(_hashes(regular_files))
        self._hashes = np.sort(np.concatenate(hashes_by_folder))

    def missing(self, paths: Sequence[str]) -> set[str]:
        """Returns the paths that are not such files. [`ImageRules.image`] makes such paths."""
        hashes = _hashes(paths)
        starts = self._hashes.searchsorted(hashes, side="left")
        ends = self._hashes.searchsorted(hashes, side="right")
        return set(itertools.compress(paths, starts == ends))


def _hashes(paths: Iterable[str]) -> np.ndarray:
    """Returns a hash of 8 bytes for each path."""
    return np.fromiter(map(hash, paths), np.int64)


def _from_base64(text: str) -> bytes | None:
    """Returns the bytes of a data URI or of an image file in base64. Returns None for a path.

    Raises ValueError if a data URI is not in base64.
    """
    if text.startswith("data:"):
        try:
            _, encoded = text.split(";base64,")
            return base64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise ValueError(f"the data URI {short(text)} is not in base64") from error
    try:
        first_characters = "".join(text[:100].split())
        start = base64.b64decode(first_characters[:64])
        if _STARTS.match(start) and _BASE64.fullmatch(text):
            return base64.b64decode(text)
    except ValueError:
        pass
    return None


def stored_bytes(image: StoredImage) -> bytes:
    """Returns the content of an image, read from its file or zip file if it is in one.

    Raises:
        ValueError: It is too large, or cannot be read from a zip file.
        OSError: It cannot be read.
    """
    content = image["bytes"]
    path = image["path"]
    if content is None and path.startswith("zip://") and "://" not in path.rpartition("::")[2]:
        content = read_entry(path)
    elif content is None:
        open_file = fsspec.open if "://" in path else open
        with open_file(path, "rb") as file:
            content = file.read(MAX_IMAGE_BYTES + 1)  # a sparse or packed file may hold far more
    if len(content) > MAX_IMAGE_BYTES:
        raise ValueError(TOO_LARGE)
    return content


def short(value: Any) -> str:
    """Returns the value for an error message, 80 characters at most."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Entry(NamedTuple):
    """Where an image is in a zip file."""

    offset: int  # of its header, in bytes
    packed_size: int  # bytes
    size: int  # bytes
    checksum: int
    method: int


def read_entry(address: str) -> bytes:
    """Reads an image `zip://name::file`, at most `MAX_IMAGE_BYTES + 1` bytes of it.

    Raises ValueError if the entry is broken, or as [`find_entry`] does.
    """
    file, entry = find_entry(address)
    header = os.pread(file.fileno(), _LOCAL_HEADER.size, entry.offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    content_offset = entry.offset + _LOCAL_HEADER.size + name_length + extra_length
    content = os.pread(file.fileno(), entry.packed_size, content_offset)
    if entry.method != zipfile.ZIP_STORED:
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, MAX_IMAGE_BYTES + 1)
    is_whole = len(content) <= MAX_IMAGE_BYTES
    if signature != b"PK\3\4" or (is_whole and zlib.crc32(content) != entry.checksum):
        raise ValueError("it is broken in the zip file: its checksum differs")
    return content


def find_entry(address: str) -> tuple[BinaryIO, Entry]:
    """Returns the open file of an image `zip://name::file`, and its entry.

    Raises ValueError if the zip file cannot be opened, or if the image is missing or may not be
    read.
    """
    name, _, file = address.removeprefix("zip://").rpartition("::")
    archive = open_zip(file)
    # zipfile decodes names from cp437, unless the archive marks them as UTF-8.
    entry = archive.entry(name) or archive.entry(name.encode().decode("cp437"))
    if entry is None:
        raise ValueError(f"there is no such image in {file}. Its first are: {archive.first}")
    if entry.method == _REFUSED:
        raise ValueError("it is a link, encrypted, or not stored or deflated. Zip the images again")
    if max(entry.packed_size, entry.size) > MAX_IMAGE_BYTES:
        raise ValueError(TOO_LARGE)
    return archive.file, entry


def open_zip(file: str) -> "ZipImages":
    """Opens a zip file. It stays open, and is opened anew if it has changed.

    Raises ValueError if it cannot be read.
    """
    try:
        state = os.stat(file)
        return _open_version(file, state.st_size, state.st_mtime_ns)
    except (OSError, ValueError, struct.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{file} cannot be read as a zip file: {error}") from error


@functools.lru_cache(maxsize=64)
def _open_version(file: str, size: int, changed: int) -> "ZipImages":
    return ZipImages(file)


class ZipImages:
    """An open zip file, with its entries sorted by the hashes of their names."""

    def __init__(self, file: str):
        self.file = open(file, "rb")  # noqa: SIM115
        infos = zipfile.ZipFile(self.file).infolist()
        names = [info.filename for info in infos]
        self.first = ", ".join(names[:3]) or "none"
        hashes = _hashes(names)
        entries = np.fromiter(map(_entry, infos), _ENTRY_TYPE)
        order = hashes.argsort(kind="stable")
        self._hashes = hashes[order]
        self._entries = entries[order]

    def entry(self, name: str) -> Entry | None:
        """Returns the last entry of a name, or None."""
        name_hash = hash(name)
        position = int(self._hashes.searchsorted(name_hash, side="right")) - 1
        if position < 0 or self._hashes[position] != name_hash:
            return None
        return Entry(*self._entries[position].tolist())


def _entry(info: zipfile.ZipInfo) -> Entry:
    """Returns where a file is in the archive. The method `_REFUSED` says: not to be read."""
    is_link = stat.S_ISLNK(info.external_attr >> 16)
    is_encrypted = info.flag_bits & 1
    method = info.compress_type
    if is_link or is_encrypted or method not in _METHODS:
        method = _REFUSED
    return Entry(info.header_offset, info.compress_size, info.file_size, info.CRC, method)
