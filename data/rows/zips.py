# SPDX-License-Identifier: Apache-2.0
"""Images in a zip file, read in place by any number of threads and forked processes.

`zipfile` reads the directory, of which 37 bytes an entry are kept: its own objects take 570. As it
has one position in the file, entries are read at their places here.
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
_REFUSED = 255  # as a method: a link, encrypted, or packed by another method than deflate


def read_entry(address: str) -> bytes:
    """The bytes of an image, `MAX_IMAGE_BYTES + 1` at most; ValueError as of [`find_entry`]."""
    file, (place, packed, _, checksum, method) = find_entry(address)
    mark, *lengths = _LOCAL.unpack(os.pread(file.fileno(), _LOCAL.size, place))
    content = os.pread(file.fileno(), packed, place + _LOCAL.size + sum(lengths))
    if method:
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, MAX_IMAGE_BYTES + 1)
    if mark != b"PK\3\4" or len(content) <= MAX_IMAGE_BYTES and zlib.crc32(content) != checksum:
        raise ValueError("it is broken in the zip file: its checksum differs")
    return content


def find_entry(address: str) -> tuple[BinaryIO, list[int]]:
    """The open file of an image `zip://name::file`, and its entry's numbers as in `_ENTRY`.

    Raises ValueError if there is no such image, or it may not be read.
    """
    name, _, file = address.removeprefix("zip://").rpartition("::")
    archive = opened(file)
    for written in (name, name.encode().decode("cp437")):  # so zipfile reads names without a mark
        number = int(archive.names.searchsorted(hashed := hash(written), side="right")) - 1
        if number >= 0 and archive.names[number] == hashed:  # of entries with one name, the last
            break
    else:
        raise ValueError(f"there is no such image in {file}, which begins with {archive.first}")
    numbers = archive.entries[number].tolist()
    if numbers[-1] == _REFUSED:
        raise ValueError("it is a link, encrypted, or not stored or deflated. Zip the images again")
    if max(numbers[1:3]) > MAX_IMAGE_BYTES:
        raise ValueError(TOO_LARGE)
    return archive.file, numbers


def opened(file: str) -> "ZipImages":
    """A zip file, opened once as long as it does not change; ValueError if it cannot be read."""
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
        listed = zipfile.ZipFile(self.file).infolist()
        self.first = ", ".join(entry.filename for entry in listed[:3]) or "none"
        names = np.fromiter((hash(entry.filename) for entry in listed), np.int64, len(listed))
        order = names.argsort(kind="stable")
        self.names = names[order]
        self.entries = np.fromiter(map(_numbers, listed), _ENTRY, len(listed))[order]


def _numbers(entry: zipfile.ZipInfo) -> tuple[int, int, int, int, int]:
    method = entry.compress_type
    if stat.S_ISLNK(entry.external_attr >> 16) or entry.flag_bits & 1 or method not in (0, 8):
        method = _REFUSED
    return entry.header_offset, entry.compress_size, entry.file_size, entry.CRC, method
