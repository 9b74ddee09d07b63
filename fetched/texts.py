# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Texts without images, to see what training on images does to a language model: a speech, and definitions."""

import random
import re
from typing import NamedTuple

from .archives import SPEECHES, WORDNET
from .fetch import unpack


SPEECH = "1961_john_f_kennedy_d.txt"
FREQUENT = 15  # how often a sense occurs at least in the texts that WordNet counted


class Definition(NamedTuple):
    """A definition, four words, and the position of the word that it defines."""

    text: str
    words: tuple[str, ...]
    right: int


def passages(count: int, words: int) -> list[str]:
    """The first `count` passages of so many words of a State of the Union address of 1961."""
    file = unpack(SPEECHES) / "package" / "data" / SPEECH
    said = file.read_text(encoding="utf-8").split()
    return [" ".join(said[start : start + words]) for start in range(0, count * words, words)]


def definitions(count: int, seed: int) -> list[Definition]:
    """WordNet's definitions of frequent nouns in their first sense, each with three other such nouns.

    A definition that contains its word is left out, and so are synonyms among the four.
    """
    folder = unpack(WORDNET) / "package" / "dict"
    data = (folder / "data.noun").read_bytes()
    defined: dict[str, tuple[str, set[str]]] = {}
    for line in (folder / "index.sense").read_text(encoding="utf-8").splitlines():
        key, offset, sense, tagged = line.split()
        word, _, kind = key.partition("%")
        if kind[0] == "1" and sense == "1" and int(tagged) >= FREQUENT and word.isalpha() and len(word) > 3:
            synset, _, gloss = data[int(offset) : data.index(b"\n", int(offset))].decode().partition(" | ")
            text = re.split(r'; "', gloss)[0].strip()
            _, _, _, members, *rest = synset.split()
            synonyms = set(rest[: 2 * int(members, 16) : 2])
            if word in synonyms and word not in text.lower():
                defined[word] = text, synonyms
    rng = random.Random(seed)
    found = []
    for word in rng.sample(sorted(defined), count):
        text, synonyms = defined[word]
        words = [word, *rng.sample([each for each in sorted(defined) if each not in synonyms], 3)]
        rng.shuffle(words)
        found.append(Definition(text, tuple(words), words.index(word)))
    return found
