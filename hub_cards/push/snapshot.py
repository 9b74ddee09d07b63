# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The files of a publication as they are when it begins, so that no other ones are sent."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils.sha import git_hash, sha256, sha_fileobj

from .contents import Contents


IN_MEMORY = 10 * 2**20
"""Bytes below which a file is read once and kept: the Hub wants all larger ones in LFS."""


@dataclass(frozen=True)
class File:
    """A file to send: its path in the repository, its content or where that lies, its bytes and its SHA-256."""

    path: str
    source: bytes | Path
    size: int
    sha256: str

    def is_stored_as(self, blob_id: str | None) -> bool:
        """Whether the Hub's id of a content is this one's: the SHA-256 in LFS, git's SHA-1 elsewhere."""
        if blob_id == self.sha256:
            return True
        return isinstance(self.source, bytes) and blob_id == git_hash(self.source)


@dataclass(frozen=True)
class Snapshot:
    """Files to send, and what the ones on disk were like.

    Attributes:
        files: The files.
        stamps: File on disk -> size in bytes, time of last change in ns, inode.
    """

    files: list[File]
    stamps: dict[Path, tuple[int, int, int]]

    def check(self) -> None:
        """Raises ValueError if a file on disk is not what it was."""
        changed = [path for path, stamp in self.stamps.items() if not path.is_file() or _stamp(path) != stamp]
        if changed:
            raise changed_error([str(path) for path in changed])


def take_snapshot(contents: Contents) -> Snapshot:
    """Reads the small files, and hashes all.

    Raises:
        ValueError: A file changed meanwhile.
        OSError: A file cannot be read.
    """
    stamps = {each.source: _stamp(each.source) for each in contents.sent if isinstance(each.source, Path)}
    snapshot = Snapshot([_file(each.path, each.source) for each in contents.sent], stamps)
    snapshot.check()
    return snapshot


def in_memory(path: str, content: bytes) -> File:
    """A file that lies on no disk."""
    return File(path, content, len(content), sha256(content).hexdigest())


def changed_error(names: list[str]) -> ValueError:
    """The error of files that changed."""
    return ValueError(
        f"{', '.join(names)} changed while being published. Nothing was committed. Is something still writing there? "
        "Publish again when it has ended."
    )


def _file(path: str, source: bytes | Path) -> File:
    if isinstance(source, bytes):
        return in_memory(path, source)
    if (size := source.stat().st_size) < IN_MEMORY:
        return in_memory(path, source.read_bytes())
    with source.open("rb") as file:
        return File(path, source, size, sha_fileobj(file).hex())


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
