# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The Xet side of the hub of the tests: a folder that hf_xet's clients write and read without a server."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ENTRY = 48
"""Bytes of every entry of a shard: a 32-byte hash, and 16 bytes of numbers."""


@dataclass(frozen=True)
class XetFile:
    """A file in a Xet store; `hash` is its Xet hash."""

    store: "XetStore"
    hash: str
    size: int

    def read(self, first: int, last: int) -> bytes:
        """Bytes `first` to `last`, both included."""
        import hf_xet

        group = hf_xet.XetSession().new_download_stream_group(endpoint=self.store.url)
        file = hf_xet.XetFileInfo(self.hash, self.size)
        return b"".join(group.download_stream(file, start=first, end=last + 1))


@dataclass(frozen=True)
class XetStore:
    """The folder behind a `local://` URL. A client uploads content there by itself, and tells the hub its SHA-256."""

    folder: Path

    @property
    def url(self) -> str:
        """What the hub names as the server of content."""
        return f"local://{self.folder}"

    def find(self, sha256: str) -> XetFile | None:
        """The file of this content: the shards that uploads leave hold both hashes of each file."""
        for shard in self.folder.glob("xet/xorbs/shards/*.mdb"):
            for found_sha256, xet_hash, size in _files(shard.read_bytes()):
                if found_sha256 == sha256:
                    return XetFile(self, xet_hash, size)
        return None


def _files(shard: bytes) -> Iterator[tuple[str, str, int]]:
    """SHA-256, Xet hash and size of the files of a shard: https://huggingface.co/docs/xet/shard."""
    entries = (shard[start : start + ENTRY] for start in range(ENTRY, len(shard), ENTRY))
    for header in entries:
        if header[:32] == b"\xff" * 32:
            return
        flags, segments = struct.unpack_from("<II", header, 32)
        size = sum(struct.unpack_from("<I", next(entries), 36)[0] for _ in range(segments))
        if flags & 1 << 31:
            for _ in range(segments):
                next(entries)
        if flags & 1 << 30:
            yield _hex(next(entries)), _hex(header), size


def _hex(entry: bytes) -> str:
    """A hash as text: four little-endian numbers of 64 bits."""
    return "".join(f"{number:016x}" for number in struct.unpack_from("<4Q", entry))
