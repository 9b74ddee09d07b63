# SPDX-License-Identifier: Apache-2.0
"""The questions that `normalign ask` asks: of the command line, of a folder of images, of data."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import track

from ..data.rows.forms import known_row
from ..data.rows.images import SUFFIXES, decode_image, image_problem
from ..data.sources.arguments import DataSource
from ..data.sources.source import Source, open_source
from .answering import Message, system_turn, user_turn


@dataclass(frozen=True)
class Question:
    """A question, with the images and turns before it.

    Attributes:
        name: What it is called in messages: an image's file, or data set and row.
        turns: The turns up to the question, whose image parts have no image yet.
        images: Each image's `path` or `bytes`, in the order of the image parts.
        truth: The answer in the data; None if it has none.
        further_turns: How many turns of the row come after that answer.
    """

    name: str
    turns: list[Message]
    images: list[dict[str, Any]] = field(default_factory=list)
    truth: str | None = None
    further_turns: int = 0

    @property
    def text(self) -> str:
        """The text of the question itself."""
        return text_of(self.turns[-1])

    def conversation(self) -> list[Message]:
        """The turns with their images, decoded. Raises ValueError if an image cannot be."""
        return with_images(self.turns, self.images)


def text_of(message: Message) -> str:
    """The text of a turn, without its images."""
    return "".join(part.get("text") or "" for part in message["content"]).strip()


def with_images(turns: Sequence[Message], images: Sequence[dict[str, Any]]) -> list[Message]:
    """A copy of the turns whose image parts have the stored images, decoded, in order."""
    filled = copy.deepcopy(list(turns))
    stored = iter(images)
    for turn in filled:
        for part in turn["content"]:
            if part["type"] == "image":
                part["image"] = decode_image(dict(next(stored)))
    return filled


def read_words(words: Sequence[str]) -> tuple[list[Path], str | None]:
    """Images (files or folders) and the question, if the last word is one, of a command line.

    Raises ValueError if a word that must be an image is no file or folder.
    """
    images = [Path(word).expanduser() for word in words]
    question = None
    if words and not _exists(images[-1]) and not _names_an_image(words[-1]):
        question = words[-1]
        images.pop()
    for image in images:
        if not _exists(image):
            hint = "Check the path of the image; the question comes last, in quotes."
            raise ValueError(f"There is no file {image}. {hint}")
    if question is not None and not question.strip():
        raise ValueError("The question is empty. Write one, in quotes.")
    return images, question


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a long question is too long for the name of a file
        return False


def _names_an_image(word: str) -> bool:
    """Whether a word that is no file looks like one: `kite.png`, but not `What is in kite.png?`."""
    return word.lower().endswith(SUFFIXES) and " " not in word.strip()


def question_about(images: Sequence[Path], text: str, system: str | None) -> Question:
    """One question about all of the images."""
    names = ", ".join(image.name for image in images)
    stored = [{"path": str(image), "bytes": None} for image in images]
    asked = user_turn(text, [None] * len(stored))
    return Question(names or "the question", [*_system(system), asked], stored)


def questions_about_each(
    folder: Path, further: Sequence[Path], text: str | None, system: str | None
) -> list[Question]:
    """The same question about each image in a folder and the folders in it, in order of path.

    Raises ValueError if there is none, or if other images are given too.
    """
    if text is None:
        raise ValueError(
            f"{folder} is a folder of images. Give the question about each, in quotes."
        )
    if further:
        raise ValueError(f"{folder} is a folder: give it alone, to ask about each image in it.")
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not found:
        raise ValueError(f"{folder} has no image. Images end in {', '.join(SUFFIXES)}.")
    questions = []
    for file in found:
        question = question_about([file], text, system)
        name = file.relative_to(folder).as_posix()
        questions.append(Question(name, question.turns, question.images))
    return questions


def questions_of_data(
    data: str, *, image_folder: str | None, columns: str | None, system: str | None
) -> list[Question]:
    """The first question of each row of data, in any form that training reads.

    `system` is the system turn of rows without one. Raises ValueError that names the row which
    cannot be asked.
    """
    source = DataSource.named(data, image_folder=image_folder, columns=columns)
    opened = open_source(source, streaming=False)
    label = Path(source.path).name if Path(source.path).exists() else source.path
    questions = []
    for origin, number, raw in opened:
        file = label if origin == opened.name else Path(origin).name
        name = f"{file}, row {number}"
        try:
            questions.append(_question_of_row(name, raw, opened, system))
        except ValueError as error:
            raise ValueError(f"{name} cannot be asked: {error}.") from error
    if not questions:
        raise ValueError(f"{data} has no rows.")
    return questions


def check_images(questions: Sequence[Question]) -> None:
    """Decodes the images of each question, so that a bad one is an error before answers are made.

    Shows a bar where there are many. Raises ValueError that names the question.
    """
    few = len(questions) < 100
    for question in track(questions, "checking images", disable=few):
        for image in question.images:
            try:
                decode_image(dict(image), kept_side=1)
            except ValueError as error:
                raise ValueError(f"{question.name} cannot be used: {error}.") from error


def _question_of_row(name: str, raw: Any, opened: Source, system: str | None) -> Question:
    row = known_row(raw)
    images = [opened.rules.image(image) for image in row.images]
    if problem := image_problem(images, opened.rules, decode=False):
        raise ValueError(problem[1])
    roles = [message["role"] for message in row.messages]
    if "user" not in roles:
        raise ValueError("it has no question")
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    turns = [_parts(message) for message in row.messages[:end]]
    if not turns or turns[-1]["role"] != "user" or not text_of(turns[-1]):
        raise ValueError("it has no question")
    if system and roles[0] != "system":
        turns = [*_system(system), *turns]
    truth = text_of(row.messages[end]) if end < len(roles) else None
    shown = sum(part["type"] == "image" for turn in turns for part in turn["content"])
    return Question(name, turns, images[:shown], truth, max(0, len(roles) - end - 1))


def _parts(message: Mapping[str, Any]) -> Message:
    """A turn with the type of each part, and the text of texts."""
    content = []
    for part in message["content"]:
        if part["type"] == "image":
            content.append({"type": "image"})
        else:
            content.append({"type": "text", "text": part.get("text") or ""})
    return {"role": message["role"], "content": content}


def _system(text: str | None) -> list[Message]:
    return [system_turn(text)] if text else []
