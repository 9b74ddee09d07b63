# SPDX-License-Identifier: Apache-2.0
"""The quickstart's questions: easy-VQA, and the names of emoji. Also passages of a speech.

Training images are easy-VQA's own and emoji as Google draws them. Held out are easy-VQA's test
images, and emoji as Microsoft and Twitter draw them. Questions and answers are worded in the same
way in both.
"""

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, Features, Image, List
from PIL import Image as PILImage, ImageOps

from ..data.rows.images import decode_image
from ..data.rows.parse import MESSAGES
from ..data.rows.turns import text_part
from .fetch import (
    EASY_VQA,
    FLUENT_EMOJI,
    GOOGLE_EMOJI,
    SPEECHES,
    TWITTER_EMOJI,
    Archive,
    fetch_unpacked,
)


EMOJI = (
    "dog",
    "cat",
    "monkey",
    "elephant",
    "whale",
    "turtle",
    "apple",
    "banana",
    "pizza",
    "hamburger",
    "taxi",
    "truck",
)
SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SIDE = 64  # pixels, of easy-VQA's images and of Google's drawings
CHOICES = {"shape": SHAPES, "colour": COLOURS, "yes/no": ("yes", "no")}
QUESTION_KINDS = tuple(CHOICES)
OVERALL = "easy-VQA"
SYSTEM = "Answer briefly."  # the system turn of all rows
DATA_FEATURES = Features({"images": List(Image()), "messages": MESSAGES})


class Question(NamedTuple):
    """A question about an image."""

    kind: str  # one of QUESTION_KINDS, or "emoji"
    text: str
    answer: str  # one word in lower case
    image: Path
    taught: str | None  # the answer to train on, if it is trained on
    is_mirrored: bool = False  # whether the image is shown as in a mirror

    def shown(self) -> PILImage.Image:
        """Returns the image that is asked about."""
        image = load_image(self.image)
        if self.is_mirrored:
            return ImageOps.mirror(image)
        return image


def easy_vqa(split: str, seed: int) -> list[Question]:
    """Returns the questions of easy-VQA's `split` in random order.

    Each wording has as many questions whose answer is "yes" as "no". easy-VQA asks "is there a blue
    shape?" of images of any colour, so "no" would be right seven times in eight.
    """
    folder = fetch_unpacked(EASY_VQA) / "easy_vqa" / "data" / split
    entries = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    rng = random.Random(seed)
    rng.shuffle(entries)
    # The words with which open questions and their answers name what each image shows.
    words_by_image: dict[int, set[str]] = defaultdict(set)
    for question_text, answer, image_number in entries:
        if answer not in ("yes", "no"):
            words_by_image[image_number].update(question_text.rstrip("?").split(), [answer])
    questions = []
    yes_or_no: dict[str, dict[str, list[Question]]] = defaultdict(lambda: {"yes": [], "no": []})
    for question_text, answer, image_number in entries:
        kind = next(kind for kind, choices in CHOICES.items() if answer in choices)
        image_file = folder / "images" / f"{image_number}.png"
        if kind == "yes/no":
            taught = _taught_answer(question_text, answer, words_by_image[image_number])
            question = Question(kind, question_text, answer, image_file, taught)
            yes_or_no[question_text][answer].append(question)
        else:
            questions.append(Question(kind, question_text, answer, image_file, answer))
    answer_pairs = [
        question_pair
        for by_answer in yes_or_no.values()
        for question_pair in zip(by_answer["yes"], by_answer["no"], strict=False)
    ]
    rng.shuffle(answer_pairs)
    for question_pair in answer_pairs:
        questions += question_pair
    return questions


def _taught_answer(text: str, answer: str, shown: set[str]) -> str | None:
    """Returns the answer to train on, such as "red circle, not blue, no".

    It begins with what the image shows, and whether that is asked for. In trials a bare "yes" or
    "no" was not learned, and "red circle, no" was learned with some seeds only.

    Args:
        text: The question for one colour or shape.
        answer: "yes" or "no".
        shown: Words for what the image shows, from other questions.

    Returns:
        None if either the colour or the shape in the image is not known.
    """
    words = [word for word in (*COLOURS, *SHAPES) if word in shown]
    if len(words) != 2:
        return None
    [requested] = {*COLOURS, *SHAPES} & set(text.rstrip("?").split())
    fact = requested if requested in words else f"not {requested}"
    return f"{' '.join(words)}, {fact}, {answer}"


def emoji(split: str) -> list[Question]:
    """Returns the names of the `EMOJI`, as drawn by Google (`"train"`) or Microsoft (`"test"`)."""
    archives = {"train": GOOGLE_EMOJI, "test": FLUENT_EMOJI}
    return _drawn_emoji(archives[split])


def emoji_by_others() -> list[Question]:
    """Returns 48 questions: the 12 `EMOJI` as Microsoft and Twitter draw them, and mirrored."""
    questions = emoji("test") + _drawn_emoji(TWITTER_EMOJI)
    mirrored = [question._replace(is_mirrored=True) for question in questions]
    return questions + mirrored


def _drawn_emoji(archive: Archive) -> list[Question]:
    """Returns the question for the name of each of the `EMOJI`, as an archive's vendor draws it."""
    names_file = fetch_unpacked(GOOGLE_EMOJI) / "package/emoji.json"
    code_points = {}
    for entry in json.loads(names_file.read_text(encoding="utf-8")):
        code_points[entry["short_name"]] = entry["unified"].lower()
    folder = fetch_unpacked(archive)
    questions = []
    for name in EMOJI:
        drawing_file = folder / archive.members[-1].replace("*", code_points[name])
        questions.append(Question("emoji", "what is this?", name, drawing_file, name))
    return questions


def training_data(rows: int, emoji_share: float = 0.30, seed: int = 0) -> Dataset:
    """Returns conversations about training images.

    Args:
        rows: How many conversations.
        emoji_share: The share of conversations that ask for the names of emoji.
        seed: What the conversations are drawn with.
    """
    generator = random.Random(seed)
    by_image: dict[Path, dict[str, list[Question]]] = defaultdict(lambda: defaultdict(list))
    for question in easy_vqa("train", seed):
        if question.taught:
            by_image[question.image][question.kind].append(question)
    # A conversation asks for yes or no, and for a shape or colour.
    images = sorted(image for image, kinds in by_image.items() if kinds.keys() > {"yes/no"})
    drawings = emoji("train")
    conversations = []
    for _ in range(rows):
        if generator.random() < emoji_share:
            questions = generator.sample(drawings, 2)  # two are about as long as a row of easy-VQA
            shown_images = [placed_at_random(drawing.image, generator) for drawing in questions]
        else:
            kinds = by_image[generator.choice(images)]
            yes_or_no = generator.choice(kinds["yes/no"])
            questions = [yes_or_no, generator.choice(kinds["shape"] + kinds["colour"])]
            generator.shuffle(questions)
            shown_images = [load_image(yes_or_no.image)]
        conversations.append(conversation(questions, shown_images))
    return Dataset.from_list(conversations, features=DATA_FEATURES)


def held_out(per_kind: int, seed: int = 0) -> list[Question]:
    """Returns the first `per_kind` test questions of each kind, then all for Microsoft's emoji."""
    questions = easy_vqa("test", seed)
    chosen = []
    for kind in QUESTION_KINDS:
        chosen += [question for question in questions if question.kind == kind][:per_kind]
    return chosen + emoji("test")


def placed_at_random(drawing: Path, rng: random.Random) -> PILImage.Image:
    """Returns a drawing on white, at a random place and 65 to 100 % of its size, maybe mirrored."""
    drawing_image = load_image(drawing)
    if rng.random() < 0.5:
        drawing_image = ImageOps.mirror(drawing_image)
    side_length = rng.randint(round(0.65 * SIDE), SIDE)
    left = rng.randint(0, SIDE - side_length)
    top = rng.randint(0, SIDE - side_length)
    canvas = PILImage.new("RGB", (SIDE, SIDE), "white")
    canvas.paste(drawing_image.resize((side_length, side_length)), (left, top))
    return canvas


def conversation(turns: list[Question], images: list[PILImage.Image]) -> dict:
    """Returns one row of questions with the answers to train on.

    Args:
        turns: The questions.
        images: One image that all are about, or one for each question.
    """
    messages = []
    for number, turn in enumerate(turns):
        system, user = prompt(turn.text)
        if number == 0:
            messages.append(system)
        elif len(images) == 1:  # it was in the first turn
            del user["content"][0]
        messages += [user, {"role": "assistant", "content": [text_part(turn.taught)]}]
    return {"images": images, "messages": messages}


def prompt(text: str, image: PILImage.Image | str | None = None) -> list[dict]:
    """Returns the messages that ask a question.

    Args:
        text: The question.
        image: The image or its path, or None for the image of a row.
    """
    image_part: dict[str, Any] = {"type": "image"}
    if image is not None:
        image_part["image"] = image
    return [
        {"role": "system", "content": [text_part(SYSTEM)]},
        {"role": "user", "content": [image_part, text_part(text)]},
    ]


def load_image(path: Path) -> PILImage.Image:
    """Reads an image in RGB, on white where it is transparent."""
    return decode_image({"path": str(path), "bytes": None})


def passages(count: int, words: int) -> list[str]:
    """Reads the first passages of a State of the Union address of 1961.

    Args:
        count: How many passages.
        words: The length of each.
    """
    speech_file = fetch_unpacked(SPEECHES) / "package" / "data" / "1961_john_f_kennedy_d.txt"
    speech_words = speech_file.read_text(encoding="utf-8").split()
    starts = range(0, count * words, words)
    return [" ".join(speech_words[start : start + words]) for start in starts]
