# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Scenes of several emoji on a white canvas, and questions about them: what is there, how many, and on which side.

Questions are about one scene of ten, by a checksum of what is where, so that one may train on the others.
"""

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import combinations
from typing import NamedTuple

from PIL import Image

from .easy_vqa import GROUPS, drawing_files, load_image


OBJECTS = tuple(name for group in GROUPS for name in group)

SETTINGS = ("random", "popular", "adversarial")
COUNTS = (1, 2, 3, 4)
SIDES = ("left", "right")

GRID, CELL, DRAWING = 3, 74, 64  # cells in a row; pixels of a cell and of a drawing
CANVAS = 224
COUNTED = 6  # drawings in a scene for counting, so that how full it is does not tell the count

Scene = tuple[tuple[int, str], ...]
"""Cell, from 0 at the top left to 8, and name of each object, by cell."""


class SceneQuestion(NamedTuple):
    """A question about a scene; its kind is one of `SETTINGS`, `"count"` or `"side"`, its answer a word or figure."""

    kind: str
    text: str
    answer: str
    scene: Scene


def presence(scenes: int, seed: int) -> list[SceneQuestion]:
    """Questions for objects as POPE asks them: two that are there, and two that are not, in each setting.

    A scene has three objects of one group and one of any other. Objects that are not there are drawn at random, or are
    the most frequent in these scenes ("popular"), or those that are most often beside the present ones
    ("adversarial"). The settings differ in these objects only.
    """
    rng = random.Random(seed)
    drawn = [_scene(_together(rng), lambda: rng.sample(range(GRID**2), 4)) for _ in range(scenes)]
    frequency = Counter(name for scene in drawn for _, name in scene)
    beside = Counter(pair for scene in drawn for one, other in combinations(_names(scene), 2)
                     for pair in ((one, other), (other, one)))  # fmt: skip
    questions = []
    for scene in drawn:
        there = rng.sample(_names(scene), 2)
        absent = [name for name in rng.sample(OBJECTS, len(OBJECTS)) if name not in _names(scene)]
        chosen = {
            "random": absent,
            "popular": sorted(absent, key=lambda name: -frequency[name]),
            "adversarial": sorted(absent, key=lambda name: -sum(beside[name, each] for each in _names(scene))),
        }
        for setting in SETTINGS:
            for name, answer in [(name, "yes") for name in there] + [(name, "no") for name in chosen[setting][:2]]:
                article = "an" if name[0] in "aeiou" else "a"
                questions.append(SceneQuestion(setting, f"Is there {article} {name} in the image?", answer, scene))
    return questions


def counting(objects: int, seed: int) -> list[SceneQuestion]:
    """How many of an object there are, 1 to 4: each question with each answer, so that it tells nothing by itself."""
    rng = random.Random(seed)
    questions = []
    for name in _cycled(objects, rng):
        for count in COUNTS:
            others = rng.sample([each for each in OBJECTS if each != name], COUNTED - count)
            scene = _scene([name] * count + others, lambda: rng.sample(range(GRID**2), COUNTED))
            questions.append(SceneQuestion("count", f"How many {name}s are in the image?", str(count), scene))
    return questions


def sides(pairs: int, seed: int) -> list[SceneQuestion]:
    """On which side of another an object is, of three in three columns: each question with both answers."""
    rng = random.Random(seed)
    questions = []
    for one in _cycled(pairs, rng):
        other, third = rng.sample([each for each in OBJECTS if each != one], 2)
        text = f"Is the {one} to the left or the right of the {other}?"
        for side in SIDES:
            scene = _scene([one, other, third], partial(_columns, side, rng))
            questions.append(SceneQuestion("side", text, side, scene))
    return questions


def draw(scene: Scene) -> Image.Image:
    """A scene in RGB, 224 pixels a side, of Microsoft's drawings.

    Each drawing lies up to ten pixels off in its cell, by chance, but always alike for one scene.
    """
    rng = random.Random(repr(scene))
    drawings = _drawings()
    canvas = Image.new("RGB", (CANVAS, CANVAS), "white")
    for cell, name in scene:
        row, column = divmod(cell, GRID)
        corner = (column * CELL + rng.randint(0, CELL - DRAWING), row * CELL + rng.randint(0, CELL - DRAWING))
        canvas.paste(drawings[name], corner)
    return canvas


def _scene(names: Iterable[str], cells: Callable[[], Iterable[int]]) -> Scene:
    """Objects in cells, which are drawn until the scene belongs to the test."""
    while True:
        scene = tuple(sorted(zip(cells(), names, strict=True)))
        if zlib.crc32(repr(scene).encode()) % 10 == 0:
            return scene


def _names(scene: Scene) -> list[str]:
    return [name for _, name in scene]


def _together(rng: random.Random) -> list[str]:
    group = rng.choice(GROUPS)
    frequent = sorted(group, key=lambda name: -(rng.random() ** (1 + group.index(name))))
    return [*frequent[:3], rng.choice([name for name in OBJECTS if name not in group])]


def _cycled(count: int, rng: random.Random) -> list[str]:
    names = rng.sample(OBJECTS, len(OBJECTS))
    return [names[number % len(names)] for number in range(count)]


def _columns(side: str, rng: random.Random) -> list[int]:
    one, other, third = rng.sample(range(GRID), GRID)
    if (one < other) != (side == "left"):
        one, other = other, one
    return [rng.randrange(GRID) * GRID + column for column in (one, other, third)]


@cache
def _drawings() -> dict[str, Image.Image]:
    files, size = drawing_files(OBJECTS, "test"), (DRAWING, DRAWING)
    return {name: load_image(file).resize(size, Image.Resampling.LANCZOS) for name, file in files.items()}
