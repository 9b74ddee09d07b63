# SPDX-License-Identifier: Apache-2.0
"""Reads images in a zip file, without unpacking it, in any number of threads and processes.

`zipfile` reads only the archive's directory. Its objects take 570 bytes for each entry, and 37 are
kept here. Because it has one position in the file, entries are read here, at their own offsets.
"""

import os
import stat
import struct
import zipfile
import zlib
from functools import lru_cache
from typing import BinaryIO, NamedTuple

import numpy as np


MAX_IMAGE_BYTES = 256 * 2**20  # of one encoded image
TOO_LARGE = f"the file has more than {MAX_IMAGE_BYTES >> 20} MiB. Save it smaller"

_LOCAL_HEADER = struct.Struct("<4s22x2H")  # before an entry: its signature, and two lengths
_ENTRY_TYPE = np.dtype("i8, i8, i8, u4, u1")  # of the fields of an entry
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_REFUSED = 255  # as a method: a link, encrypted, or packed by another method than deflate


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
        decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        content = decompressor.decompress(content, MAX_IMAGE_BYTES + 1)
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
    entry = archive.entry(name)
    if entry is None:
        # zipfile decodes names in this way, unless the archive marks them as UTF-8.
        entry = archive.entry(name.encode().decode("cp437"))
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


@lru_cache(maxsize=64)
def _open_version(file: str, size: int, changed: int) -> "ZipImages":
    return ZipImages(file)


class ZipImages:
    """An open zip file, with its entries sorted by the hashes of their names."""

    def __init__(self, file: str):
        self.file = open(file, "rb")  # noqa: SIM115
        infos = zipfile.ZipFile(self.file).infolist()
        names = [info.filename for info in infos]
        self.first = ", ".join(names[:3]) or "none"
        hashes = np.fromiter(map(hash, names), np.int64)
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
