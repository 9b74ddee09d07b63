# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's questions: easy-VQA and the naming of emoji.

What is held out: easy-VQA's own test images, none of which is among its training images, and the drawings of
another vendor. The emoji named in training were drawn by Google; the same emoji drawn by Microsoft are never trained
on. The wordings of questions and the answers are the same on both sides.
"""

import io
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage

from .archives import EASY_VQA, FLUENT_EMOJI, GOOGLE_EMOJI
from .fetch import unpack


SYSTEM = "Answer briefly."
EMOJI_QUESTION = "what is this?"
EMOJI_SEED = 0
EMOJI_CATEGORIES = ("Animals & Nature", "Food & Drink")
SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
KINDS = ("shape", "colour", "yes/no")
OVERALL = "easy-VQA"
YES_NO_PER_ROW = 3

PART = {"type": Value("string"), "text": Value("string")}
FEATURES = Features({"images": List(Image()), "messages": List({"role": Value("string"), "content": List(PART)})})


class Question(NamedTuple):
    """A question about an image.

    Attributes:
        kind: One of `KINDS`, or `"emoji"`.
        text: The question.
        answer: The true answer, one word in lower case.
        image: Path of the image.
        taught: What training makes of the answer; None if the question is not trained on.
    """

    kind: str
    text: str
    answer: str
    image: Path
    taught: str | None


def split_size(split: str, cache: Path | None = None) -> int:
    """How many questions easy-VQA's `"train"` or `"test"` split has."""
    return len(_triples(split, cache)[1])


def easy_vqa(split: str, seed: int, cache: Path | None = None) -> list[Question]:
    """The questions of easy-VQA's `"train"` or `"test"` split, shuffled, with yes/no balanced wording by wording.

    easy-VQA asks "is there a blue shape?" of images of any colour, so that "no" is right seven times in eight
    without a look. Of each wording as many questions are kept whose answer is "yes" as "no", one after the other in
    the list: then the question alone is worth one half, in any even number of them. Shape and colour questions are all
    kept; their answers are about even.

    What is taught as the answer to a yes/no question begins with what is seen, "red circle, no": in trials the model
    learned to compare a question with its own words, and in as many steps not with the image directly. Colour and
    shape come from the split's other questions about the image; a yes/no question about an image whose other
    questions do not give both is not trained on.
    """
    folder, triples = _triples(split, cache)
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
            taught = f"{' '.join(words)}, {answer}" if len(words) == 2 else None
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
            ours = google / "img" / "google" / "64" / entry["image"]
            pairs.append([Question("emoji", EMOJI_QUESTION, name, path, name) for path in (ours, other)])
    pairs = random.Random(seed).sample(sorted(pairs), count)
    return [ours for ours, _ in pairs], [other for _, other in pairs]


def training_data(
    rows: int, emoji_count: int, emoji_share: float = 0.25, seed: int = 0, cache: Path | None = None
) -> Dataset:
    """Conversations about training images, in the form TRL's `SFTTrainer` reads.

    A row of easy-VQA asks up to three yes/no questions about one image and one about its shape or colour, in random
    order: several answers for the price of one image. The loss is on the answers only, by `assistant_only_loss`.

    Args:
        rows: Number of conversations, which is batch size times steps for a single pass.
        emoji_count: Number of different emoji.
        emoji_share: Share of the rows that name an emoji.
        seed: Decides everything that is drawn.
        cache: Where the archives are.

    Returns:
        A dataset with columns `images` and `messages`.
    """
    rng = random.Random(seed)
    by_image: dict[Path, dict[str, list[Question]]] = defaultdict(lambda: defaultdict(list))
    for question in easy_vqa("train", seed, cache):
        if question.taught:
            by_image[question.image][question.kind].append(question)
    images, drawings = sorted(by_image), emoji(emoji_count, EMOJI_SEED, cache)[0]
    conversations = []
    for _ in range(rows):
        if rng.random() < emoji_share:
            conversations.append([rng.choice(drawings)])
            continue
        of_kind = by_image[rng.choice(images)]
        turns = rng.sample(of_kind["yes/no"], min(YES_NO_PER_ROW, len(of_kind["yes/no"])))
        if others := [question for kind in ("shape", "colour") for question in of_kind[kind]]:
            turns.append(rng.choice(others))
        rng.shuffle(turns)
        conversations.append(turns)
    return Dataset.from_list([conversation(turns) for turns in conversations], features=FEATURES)


def held_out(per_kind: int, emoji_count: int, seed: int = 0, cache: Path | None = None) -> list[Question]:
    """`per_kind` easy-VQA test questions of each kind, then the Microsoft drawings of the emoji named in training.

    Args:
        per_kind: Questions of each kind; an even number, so that yes/no stays balanced.
        emoji_count: Number of different emoji, the same as in training.
        seed: Decides which questions are drawn.
        cache: Where the archives are.

    Raises:
        ValueError: `per_kind` is odd.
    """
    if per_kind % 2:
        raise ValueError(f"per_kind is {per_kind}; it must be even, as yes/no questions come in pairs")
    questions = easy_vqa("test", seed, cache)
    chosen = [question for kind in KINDS for question in [q for q in questions if q.kind == kind][:per_kind]]
    return chosen + emoji(emoji_count, EMOJI_SEED, cache)[1]


def conversation(turns: list[Question]) -> dict:
    """One row: the image, the system turn, and a user and an assistant turn for each question."""
    messages = prompt(turns[0].text)
    for number, turn in enumerate(turns):
        if number:
            messages.append({"role": "user", "content": [{"type": "text", "text": turn.text}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.taught}]})
    return {"images": [{"bytes": png(load_image(turns[0].image))}], "messages": messages}


def prompt(text: str, image: PILImage.Image | str | None = None) -> list[dict]:
    """The messages that ask `text` about one image, which is in the message (or its path is), or in a column."""
    part = {"type": "image"} if image is None else {"type": "image", "image": image}
    user = [part, {"type": "text", "text": text}]
    return [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}, {"role": "user", "content": user}]


def load_image(path: Path) -> PILImage.Image:
    """The image in RGB; what is transparent becomes white."""
    with PILImage.open(path) as image:
        layer = image.convert("RGBA")
    white = PILImage.new("RGBA", layer.size, "white")
    return PILImage.alpha_composite(white, layer).convert("RGB")


def png(image: PILImage.Image) -> bytes:
    """The image's PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _triples(split: str, cache: Path | None) -> tuple[Path, list]:
    folder = unpack(EASY_VQA, cache) / "easy_vqa" / "data" / split
    return folder, json.loads((folder / "questions.json").read_text(encoding="utf-8"))
