# SPDX-License-Identifier: Apache-2.0
"""Reads images in a zip file, without unpacking it, in any number of threads and processes.

`zipfile` reads the directory. 37 bytes are kept of each entry, since its own objects take 570. They
share one position in the file, so entries are read at their places here.
"""

import os
import stat
import struct
import zipfile
import zlib
from functools import lru_cache
from typing import BinaryIO

import numpy as np


MAX_IMAGE_BYTES = 256 * 2**20  # of one encoded image
TOO_LARGE = f"the file has more than {MAX_IMAGE_BYTES >> 20} MiB. Save it smaller"

_LOCAL = struct.Struct("<4s22x2H")  # the header before an entry: its mark, and two lengths
_ENTRY = np.dtype("i8, i8, i8, u4, u1")  # place, packed size, size, checksum, method
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_REFUSED = 255  # as a method: a link, encrypted, or packed by another method than deflate


def read_entry(address: str) -> bytes:
    """Returns the bytes of an image `zip://name::file`, `MAX_IMAGE_BYTES + 1` at most.

    Raises ValueError if the entry is broken, and as [`find_entry`] does.
    """
    file, numbers = find_entry(address)
    place, packed_size, _, checksum, method = numbers
    header = os.pread(file.fileno(), _LOCAL.size, place)
    mark, name_length, extra_length = _LOCAL.unpack(header)
    start = place + _LOCAL.size + name_length + extra_length
    content = os.pread(file.fileno(), packed_size, start)
    if method != zipfile.ZIP_STORED:
        decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        content = decompressor.decompress(content, MAX_IMAGE_BYTES + 1)
    is_whole = len(content) <= MAX_IMAGE_BYTES
    if mark != b"PK\3\4" or (is_whole and zlib.crc32(content) != checksum):
        raise ValueError("it is broken in the zip file: its checksum differs")
    return content


def find_entry(address: str) -> tuple[BinaryIO, list[int]]:
    """Returns the open file of an image `zip://name::file`, and its entry's numbers as in `_ENTRY`.

    Raises ValueError if there is no such image, or it may not be read.
    """
    name, _, file = address.removeprefix("zip://").rpartition("::")
    archive = opened(file)
    numbers = archive.numbers_of(name)
    if numbers is None:
        # zipfile decodes a name so, unless the archive marks it as UTF-8.
        numbers = archive.numbers_of(name.encode().decode("cp437"))
    if numbers is None:
        raise ValueError(f"there is no such image in {file}, which begins with {archive.first}")
    _, packed_size, size, _, method = numbers
    if method == _REFUSED:
        raise ValueError("it is a link, encrypted, or not stored or deflated. Zip the images again")
    if max(packed_size, size) > MAX_IMAGE_BYTES:
        raise ValueError(TOO_LARGE)
    return archive.file, numbers


def opened(file: str) -> "ZipImages":
    """Opens a zip file, once as long as it does not change.

    Raises ValueError if it cannot be read.
    """
    try:
        state = os.stat(file)
        return _opened(file, state.st_size, state.st_mtime_ns)
    except (OSError, ValueError, struct.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{file} cannot be read as a zip file: {error}") from error


@lru_cache(maxsize=64)
def _opened(file: str, size: int, changed: int) -> "ZipImages":
    return ZipImages(file)


class ZipImages:
    """An open zip file, its entries' names as sorted hashes, and their numbers in this order."""

    def __init__(self, file: str):
        self.file = open(file, "rb")  # noqa: SIM115
        entries = zipfile.ZipFile(self.file).infolist()
        first_names = [entry.filename for entry in entries[:3]]
        self.first = ", ".join(first_names) or "none"
        hashes = (hash(entry.filename) for entry in entries)
        names = np.fromiter(hashes, np.int64, len(entries))
        numbers = np.fromiter(map(_numbers, entries), _ENTRY, len(entries))
        order = names.argsort(kind="stable")
        self.names = names[order]
        self.entries = numbers[order]

    def numbers_of(self, name: str) -> list[int] | None:
        """Returns the numbers of the last entry of a name, or None."""
        hashed = hash(name)
        place = int(self.names.searchsorted(hashed, side="right")) - 1
        if place < 0 or self.names[place] != hashed:
            return None
        return self.entries[place].tolist()


def _numbers(entry: zipfile.ZipInfo) -> tuple[int, int, int, int, int]:
    """Returns the numbers of an entry as in `_ENTRY`."""
    is_link = stat.S_ISLNK(entry.external_attr >> 16)
    is_encrypted = bool(entry.flag_bits & 1)
    method = entry.compress_type
    if is_link or is_encrypted or method not in _METHODS:
        method = _REFUSED
    return entry.header_offset, entry.compress_size, entry.file_size, entry.CRC, method
