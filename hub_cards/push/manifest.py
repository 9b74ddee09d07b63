# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a publication leaves in the repository to know its own files by, the next time."""

import json
import re
from dataclasses import asdict, dataclass


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
    """

    files: dict[str, str]

    def to_bytes(self) -> bytes:
        """The file."""
        content = {"schema_version": SCHEMA_VERSION, **asdict(self), "files": dict(sorted(self.files.items()))}
        return (json.dumps(content, indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest | None":
        """The manifest in a file, or None where it is none of this schema, and so says nothing about any file."""
        try:
            read = json.loads(content)
            version, files = read["schema_version"], read["files"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return cls(files) if version == SCHEMA_VERSION and isinstance(files, dict) else None
