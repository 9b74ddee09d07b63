# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Images in a zip file, read in place by any number of threads and forked processes.

`zipfile` reads the directory. 44 of its 570 bytes an entry are kept, without the name, and each read opens the file.
"""

import os
import stat
import struct
import zipfile
import zlib
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ...checkpoint.limits import MAX_IMAGE_BYTES


TOO_LARGE = f"the file has more than {MAX_IMAGE_BYTES >> 20} MiB. Save it smaller"

_ENTRY = np.dtype("i8, i8, i8, u4, u4, u2, u2")  # place, packed size, size, checksum, attributes, method, flags
_LOCAL = struct.Struct("<4s22x2H")  # the header before an entry's content: its mark, and the lengths of what follows
_SHOWN = 3  # names in an error


class ZipImages(NamedTuple):
    """The directory of a zip file: hashes of the names, sorted, the entry of each, and the first names."""

    hashes: np.ndarray
    entries: np.ndarray
    first: str


def opened(file: str) -> ZipImages:
    """A zip file, opened once in a process as long as it does not change. Raises ValueError if it cannot be read."""
    try:
        found = os.stat(file)
        return _opened(file, found.st_size, found.st_mtime_ns)
    except Exception as error:  # zipfile raises errors of many kinds
        raise ValueError(f"{file} cannot be read as a zip file: {error}") from error


@lru_cache(maxsize=64)
def _opened(file: str, size: int, changed: int) -> ZipImages:
    with zipfile.ZipFile(file) as archive:
        found = archive.infolist()
    hashes = np.array([hash(each.filename) for each in found], np.int64)
    fields = attrgetter(
        "header_offset", "compress_size", "file_size", "CRC", "external_attr", "compress_type", "flag_bits"
    )
    entries = np.fromiter(map(fields, found), _ENTRY, len(found))
    order = np.argsort(hashes, kind="stable")
    return ZipImages(hashes[order], entries[order], ", ".join(each.filename for each in found[:_SHOWN]) or "none")


def check_entry(address: str) -> tuple[str, int, int, int, int]:
    """File, place, packed size, checksum and method of an image in a zip file, `zip://name::file`.

    Raises ValueError if it does not exist or may not be read.
    """
    name, _, file = address.removeprefix("zip://").rpartition("::")
    images = opened(file)
    for written in (name, name.encode().decode("cp437")):  # as which names are read that do not say they are UTF-8
        number = np.searchsorted(images.hashes, hash(written), side="right") - 1  # of entries with one name, the last
        if number >= 0 and images.hashes[number] == hash(written):
            break
    else:
        raise ValueError(f"there is no such image in {file}, whose first entries are {images.first}")
    place, packed, size, checksum, attributes, method, flags = images.entries[number].item()
    if stat.S_ISLNK(attributes >> 16):
        raise ValueError("it is a link, and links in a zip file are not followed. Put the image there")
    if flags & 1:
        raise ValueError("it is encrypted. Make the zip file again without a password")
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"it is packed by method {method}. Make the zip file again, stored or deflated")
    if max(size, packed) > MAX_IMAGE_BYTES:
        raise ValueError(TOO_LARGE)
    return file, place, packed, checksum, method


def read_entry(address: str) -> bytes:
    """The bytes of an image in a zip file, `MAX_IMAGE_BYTES + 1` at most; ValueError as of [`check_entry`]."""
    file, place, packed, checksum, method = check_entry(address)
    with open(file, "rb") as archive:  # its own place, whatever other threads and processes read
        archive.seek(place)
        mark, *lengths = _LOCAL.unpack(archive.read(_LOCAL.size))
        archive.seek(sum(lengths), os.SEEK_CUR)
        content = archive.read(packed)
    if method:
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, MAX_IMAGE_BYTES + 1)
    if mark != b"PK\3\4" or len(content) <= MAX_IMAGE_BYTES and zlib.crc32(content) != checksum:
        raise ValueError("it is broken in the zip file: its checksum differs")
    return content
