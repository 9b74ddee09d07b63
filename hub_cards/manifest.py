# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a publication leaves in the repository to know its own files by, the next time."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from .. import __version__


NAME = "normalign_publication.json"
SCHEMA_VERSION = 1

WEIGHTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|adapter_(model\.safetensors|config\.json)"
)
"""Weights of a repository, of which it has one set."""


@dataclass(frozen=True)
class Manifest:
    """What was sent; the same for the same contents.

    Attributes:
        files: Path -> SHA-256 of every file of the publication but this one.
        hand_written: Part of the card -> SHA-256 of what its author wrote there.
        version: Of this package.
    """

    files: dict[str, str]
    hand_written: dict[str, str] = field(default_factory=dict)
    version: str = __version__

    def to_bytes(self) -> bytes:
        """The file."""
        content = {"schema_version": SCHEMA_VERSION, **asdict(self), "files": dict(sorted(self.files.items()))}
        return (json.dumps(content, indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest | None":
        """The manifest in a file, or None where it is none of this schema, and so says nothing about any file."""
        try:
            read = json.loads(content)
            if read.pop("schema_version") != SCHEMA_VERSION or not all(
                isinstance(read[key], dict) for key in ("files", "hand_written")
            ):
                return None
            return cls(**read)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def stale(there: Iterable[str], earlier: Manifest | None, sent: Iterable[str]) -> list[str]:
    """Files that a publication removes.

    They are what an earlier publication sent and this one does not, and weights that would lie beside the new ones:
    shards of another number. Files that a person has added are not among them.

    Args:
        there: Paths in the repository.
        earlier: The manifest there.
        sent: Paths of this publication.
    """
    there, sent = set(there), set(sent)
    ours = set(earlier.files) if earlier else set()
    if any(WEIGHTS.fullmatch(path) for path in sent):
        ours |= {path for path in there if WEIGHTS.fullmatch(path)}
    return sorted((ours & there) - sent)
