# SPDX-License-Identifier: Apache-2.0
"""Images in a zip file, read in place by any number of threads and forked processes.

`zipfile` keeps 570 bytes for each entry, and has one position in the file. Here the directory is kept as it is in the
file, with 16 bytes an entry to find a name in it, and the file is read at given places.
"""

import os
import stat
import struct
import zlib
from array import array
from bisect import bisect_right
from functools import lru_cache

import numpy as np


MAX_IMAGE_BYTES = 256 * 2**20
"""Bytes of one encoded image."""

TOO_LARGE = f"the file has more than {MAX_IMAGE_BYTES >> 20} MiB. Save it smaller"

_END, _LOCATOR, _END_64 = struct.Struct("<4s4HIIH"), struct.Struct("<4sIQI"), struct.Struct("<4sQHHIIQQQQ")
_ENTRY, _LENGTHS, _LOCAL = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s24x3H"), struct.Struct("<4s22x2H")
_LARGE = 0xFFFFFFFF  # the number is in another field, of 64 bits
_SHOWN = 3  # names in an error
_COMMENT = 0xFFFF  # bytes of the longest comment, which ends the file
_LARGEST_DIRECTORY = 2**30  # bytes


def check_entry(address: str) -> None:
    """Raises ValueError if an image in a zip file, `zip://name::file`, does not exist or may not be read."""
    name, file = _parts(address)
    opened(file).entry(name)


def read_entry(address: str) -> bytes:
    """The bytes of an image in a zip file, `MAX_IMAGE_BYTES + 1` at most; ValueError as of [`check_entry`]."""
    name, file = _parts(address)
    return opened(file).read(name)


def opened(file: str) -> "ZipImages":
    """A zip file, opened once in a process as long as it does not change. Raises ValueError if it cannot be read."""
    try:
        state = os.stat(file)
        return _opened(file, state.st_size, state.st_mtime_ns)
    except (OSError, ValueError, struct.error) as error:
        raise ValueError(f"{file} cannot be read as a zip file: {error}") from error


@lru_cache(maxsize=64)
def _opened(file: str, size: int, changed: int) -> "ZipImages":
    return ZipImages(file)


def _parts(address: str) -> tuple[str, str]:
    name, _, file = address.removeprefix("zip://").rpartition("::")
    return name, file


class ZipImages:
    """An open zip file and its directory."""

    def __init__(self, file: str):
        self._name, self._file = file, os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._directory, self._base, count = self._read_directory()
        hashes, places = np.empty(count, np.int64), np.empty(count, np.int64)
        place = 0
        for number in range(count):
            mark, name, extra, comment = _LENGTHS.unpack_from(self._directory, place)
            if mark != b"PK\1\2":
                raise ValueError(f"entry {number} of its directory is broken")
            start = place + _ENTRY.size
            hashes[number], places[number] = hash(self._directory[start : start + name]), place
            place = start + name + extra + comment
        if place > len(self._directory):
            raise ValueError("its directory is cut off")
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._places = (array("q", numbers[order].tobytes()) for numbers in (hashes, places))
        names = map(self._named, places[:_SHOWN].tolist())
        self._first = ", ".join(name.decode(errors="replace") for name in names) or "none"

    def __del__(self):
        if hasattr(self, "_file"):
            os.close(self._file)

    def entry(self, name: str) -> tuple[int, int, int, int]:
        """Method, checksum, packed size and place of an entry; ValueError if there is none, or it may not be read."""
        for written in (name.encode(), name.encode("cp437", errors="replace")):
            number = bisect_right(self._hashes, hashed := hash(written)) - 1
            while number >= 0 and self._hashes[number] == hashed:  # of entries with one name, the last
                if self._named(place := self._places[number]) == written:
                    return self._checked(place)
                number -= 1
        raise ValueError(f"there is no such image in {self._name}, whose first entries are {self._first}")

    def read(self, name: str) -> bytes:
        method, checksum, packed, place = self.entry(name)
        mark, *lengths = _LOCAL.unpack(os.pread(self._file, _LOCAL.size, place))
        content = os.pread(self._file, packed, place + _LOCAL.size + sum(lengths))
        if method:
            content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, MAX_IMAGE_BYTES + 1)
        if mark != b"PK\3\4" or len(content) <= MAX_IMAGE_BYTES and zlib.crc32(content) != checksum:
            raise ValueError("it is broken in the zip file: its checksum differs")
        return content

    def _read_directory(self) -> tuple[bytes, int, int]:
        """The directory, the place that others are counted from, and the number of entries."""
        start = max(0, os.fstat(self._file).st_size - _END.size - _COMMENT)
        tail = os.pread(self._file, _END.size + _COMMENT, start)
        if (mark := tail.rfind(b"PK\5\6")) < 0:
            raise ValueError("its end is missing")
        *_, count, size, place, _ = _END.unpack_from(tail, mark)
        end = start + mark
        if end >= (wide := _END_64.size + _LOCATOR.size):
            record = os.pread(self._file, wide, end - wide)
            if record.startswith(b"PK\6\6") and record[_END_64.size :].startswith(b"PK\6\7"):
                *_, count, size, place = _END_64.unpack_from(record)
                end -= wide
        if not count * _ENTRY.size <= size <= min(end, _LARGEST_DIRECTORY):
            raise ValueError(f"its directory of {count:,} entries in {size:,} bytes is broken")
        return os.pread(self._file, size, end - size), end - size - place, count

    def _named(self, place: int) -> bytes:
        _, length, *_ = _LENGTHS.unpack_from(self._directory, place)
        return self._directory[place + _ENTRY.size : place + _ENTRY.size + length]

    def _checked(self, place: int) -> tuple[int, int, int, int]:
        fields = _ENTRY.unpack_from(self._directory, place)
        flags, method, checksum, packed, size, name, extra = (fields[number] for number in (3, 4, 7, 8, 9, 10, 11))
        if stat.S_ISLNK(fields[15] >> 16):
            raise ValueError("it is a link, and links in a zip file are not followed. Put the image there")
        if flags & 1:
            raise ValueError("it is encrypted. Make the zip file again without a password")
        if method not in (0, 8):
            raise ValueError(f"it is packed by method {method}. Make the zip file again, stored or deflated")
        start = place + _ENTRY.size + name
        size, packed, where = _widened([size, packed, fields[16]], self._directory[start : start + extra])
        if max(size, packed) > MAX_IMAGE_BYTES:
            raise ValueError(TOO_LARGE)
        return method, checksum, packed, self._base + where


def _widened(numbers: list[int], extra: bytes) -> list[int]:
    """Size, packed size and place of an entry, some of which may be among its extra fields."""
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, place)
        if kind == 1:
            wide = (value for (value,) in struct.iter_unpack("<Q", extra[place + 4 : place + 4 + length // 8 * 8]))
            return [next(wide, number) if number == _LARGE else number for number in numbers]
        place += 4 + length
    return numbers
