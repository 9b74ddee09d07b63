# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's questions: easy-VQA, and the names of emoji.

Held out are easy-VQA's own test images, none of which is among its training images, and another vendor's drawings: the
emoji in training were drawn by Google, those in the test by Microsoft. Questions and answers are worded alike in both.
"""

import io
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset, Features, Image, List
from PIL import Image as PILImage

from ..data.rows.images import decode_image
from ..data.rows.parse import MESSAGES
from ..data.sources.arguments import DataArguments
from .archives import EASY_VQA, FLUENT_EMOJI, GOOGLE_EMOJI
from .fetch import unpack


SYSTEM = "Answer briefly."
EMOJI_QUESTION = "what is this?"
EMOJI_SEED = 0
EMOJI_CATEGORIES = ("Animals & Nature", "Food & Drink")
SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
CHOICES = {"shape": SHAPES, "colour": COLOURS, "yes/no": ("yes", "no")}
KINDS = tuple(CHOICES)
OVERALL = "easy-VQA"

FEATURES = Features({"images": List(Image()), "messages": MESSAGES})


class Question(NamedTuple):
    """A question about an image.

    Attributes:
        kind: One of `KINDS`, or `"emoji"`.
        answer: The true answer, one word in lower case.
        taught: The answer to train on; None if the question is not trained on.
    """

    kind: str
    text: str
    answer: str
    image: Path
    taught: str | None


def easy_vqa(split: str, seed: int, cache: Path | None = None) -> list[Question]:
    """The questions of easy-VQA's `"train"` or `"test"` split, shuffled, with as many "yes" as "no" to each wording.

    easy-VQA asks "is there a blue shape?" of images of any colour, so that "no" is right seven times in eight without
    a look at the image. Here each wording keeps as many questions with the answer "yes" as "no", in pairs: guessing
    from the question alone is right half the time. All shape and colour questions are kept; their answers are about
    even.

    The answer taught to a yes/no question begins with what the image shows and whether that is what is asked for:
    "red circle, not blue, no". Half of these questions are negated ("is there not a blue shape?"): in trials a bare
    "yes" or "no" was not learned, and "red circle, no" with some seeds only. Colour and shape come from the split's
    other questions about the image; without both, the question is not trained on.
    """
    folder = unpack(EASY_VQA, cache) / "easy_vqa" / "data" / split
    triples = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    rng = random.Random(seed)
    rng.shuffle(triples)
    seen: dict[int, set[str]] = defaultdict(set)
    for text, answer, image in triples:
        if answer not in ("yes", "no"):
            seen[image].update(text.rstrip("?").split(), [answer])
    kept: list[Question] = []
    by_wording: dict[str, dict[str, list[Question]]] = defaultdict(lambda: {"yes": [], "no": []})
    for text, answer, image in triples:
        kind = "shape" if answer in SHAPES else "colour" if answer in COLOURS else "yes/no"
        taught = answer
        if kind == "yes/no":
            words = [word for word in (*COLOURS, *SHAPES) if word in seen[image]]
            (asked,) = {*COLOURS, *SHAPES} & set(text.rstrip("?").split())
            fact = asked if asked in words else f"not {asked}"
            taught = f"{' '.join(words)}, {fact}, {answer}" if len(words) == 2 else None
        question = Question(kind, text, answer, folder / "images" / f"{image}.png", taught)
        (by_wording[text][answer] if kind == "yes/no" else kept).append(question)
    pairs = [pair for answers in by_wording.values() for pair in zip(answers["yes"], answers["no"], strict=False)]
    rng.shuffle(pairs)
    return kept + [question for pair in pairs for question in pair]


def emoji(count: int, seed: int, cache: Path | None = None) -> tuple[list[Question], list[Question]]:
    """`count` animals, plants, foods and drinks with one-word names, drawn by Google and drawn by Microsoft."""
    google = unpack(GOOGLE_EMOJI, cache) / "package"
    fluent = unpack(FLUENT_EMOJI, cache) / "package" / "assets"
    pairs = []
    for entry in json.loads((google / "emoji.json").read_text(encoding="utf-8")):
        name, other = entry["short_name"], fluent / f"{entry['unified'].lower()}.webp"
        drawn = entry["has_img_google"] and other.exists()
        if drawn and entry["category"] in EMOJI_CATEGORIES and name.isalpha():
            drawing = google / "img" / "google" / "64" / entry["image"]
            pairs.append([Question("emoji", EMOJI_QUESTION, name, path, name) for path in (drawing, other)])
    pairs = random.Random(seed).sample(sorted(pairs), count)
    return [drawn for drawn, _ in pairs], [other for _, other in pairs]


def training_data(
    rows: int, emoji_count: int, emoji_share: float = 0.08, seed: int = 0, cache: Path | None = None
) -> Dataset:
    """Conversations about training images, in the form that TRL's `SFTTrainer` reads.

    A row of easy-VQA has a yes/no question about an image and one about its shape or colour, in random order, so that
    rows have about one length and need little padding. Images without both are left out.
    Of the rows, `emoji_share` ask for the name of one of `emoji_count` emoji.
    """
    rng = random.Random(seed)
    by_image: dict[Path, dict[str, list[Question]]] = defaultdict(lambda: defaultdict(list))
    for question in easy_vqa("train", seed, cache):
        if question.taught:
            by_image[question.image][question.kind].append(question)
    both = [image for image, kinds in by_image.items() if kinds["yes/no"] and kinds["shape"] + kinds["colour"]]
    images, drawings = sorted(both), emoji(emoji_count, EMOJI_SEED, cache)[0]
    conversations = []
    for _ in range(rows):
        if rng.random() < emoji_share:
            conversations.append([rng.choice(drawings)])
            continue
        of_kind = by_image[rng.choice(images)]
        turns = [rng.choice(of_kind["yes/no"]), rng.choice(of_kind["shape"] + of_kind["colour"])]
        rng.shuffle(turns)
        conversations.append(turns)
    return Dataset.from_list([conversation(turns) for turns in conversations], features=FEATURES)


def held_out(per_kind: int, emoji_count: int, seed: int = 0, cache: Path | None = None) -> list[Question]:
    """`per_kind` easy-VQA test questions of each kind, then the Microsoft drawings of the emoji named in training."""
    if per_kind % 2:
        raise ValueError(f"per_kind is {per_kind}; it must be even, as yes/no questions come in pairs")
    questions = easy_vqa("test", seed, cache)
    chosen = [question for kind in KINDS for question in [q for q in questions if q.kind == kind][:per_kind]]
    return chosen + emoji(emoji_count, EMOJI_SEED, cache)[1]


def conversation(turns: list[Question]) -> dict:
    """One row: the image, the system turn, and a user and an assistant turn for each question."""
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": [{"type": "text", "text": turn.text}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.taught}]})
    messages[:1] = prompt(turns[0].text)
    return {"images": [{"bytes": png(load_image(turns[0].image))}], "messages": messages}


def prompt(text: str, image: PILImage.Image | str | None = None) -> list[dict]:
    """The messages that ask `text` about an image (or its path); without one, about the image in the row's column."""
    part = {"type": "image"} if image is None else {"type": "image", "image": image}
    user = [part, {"type": "text", "text": text}]
    return [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}, {"role": "user", "content": user}]


def load_image(path: Path) -> PILImage.Image:
    """The image in RGB, on white where it is transparent."""
    return decode_image({"path": str(path), "bytes": None}, DataArguments.max_image_pixels)


def png(image: PILImage.Image) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
