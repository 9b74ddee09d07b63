# SPDX-License-Identifier: Apache-2.0
"""The questions that `normalign ask` asks: of the command line, of a folder of images, of data."""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import track

from ..data.rows.forms import read_row_with_proposal
from ..data.rows.images import SUFFIXES, decode_image, open_and_find_problem
from ..data.sources.arguments import DataSource
from ..data.sources.source import Source, open_source
from .answering import Message, make_turn, user_turn


@dataclass(frozen=True)
class Question:
    """A question, with the images and turns before it.

    Attributes:
        name: What messages call it: an image's file, or data set and row.
        turns: The turns up to the question. Their image parts have no image yet.
        images: Each image's `path` or `bytes`, in the order of the image parts.
        truth: The answer in the data, if it has one.
        further_turns: How many turns of the row come after that answer.
    """

    name: str
    turns: list[Message]
    images: list[dict] = field(default_factory=list)
    truth: str | None = None
    further_turns: int = 0

    @property
    def text(self) -> str:
        """The text of the question itself."""
        return text_of(self.turns[-1])

    def conversation(self) -> list[Message]:
        """Returns the turns with their images. Raises ValueError if one cannot be decoded."""
        return with_images(self.turns, self.images)


def text_of(message: Message) -> str:
    """Returns the text of a turn, without its images."""
    return "".join(part.get("text") or "" for part in message["content"]).strip()


def with_images(turns: Sequence[Message], images: Sequence[dict]) -> list[Message]:
    """Returns a copy of the turns whose image parts have the stored images, decoded, in order."""
    filled = copy.deepcopy(list(turns))
    stored_images = iter(images)
    for turn in filled:
        for part in turn["content"]:
            if part["type"] == "image":
                part["image"] = decode_image(next(stored_images))
    return filled


def system_turns(system: str | None) -> list[Message]:
    """Returns the turns that a conversation starts with."""
    return [make_turn("system", system)] if system else []


def read_words(words: Sequence[str]) -> tuple[list[Path], str | None]:
    """Reads the images of a command line (files or folders), and the question or None.

    The last word may be the question. Raises ValueError if it is empty, or if another word is not a
    file or folder.
    """
    images = [Path(word).expanduser() for word in words]
    question = None
    if words:
        last_word = words[-1]
        is_path = last_word.strip() and os.path.exists(images[-1])  # "" would be this folder
        # A missing `kite.png` is an image, but `What is in kite.png?` is a question.
        names_an_image = last_word.lower().endswith(SUFFIXES) and " " not in last_word.strip()
        if not is_path and not names_an_image:
            question = last_word
            images.pop()
    for image in images:
        if not os.path.exists(image):
            raise ValueError(
                f"File {image} does not exist. Check the path of the image; the question comes "
                "last, in quotes."
            )
    if question is not None and not question.strip():
        raise ValueError("The question is empty. Write one, in quotes.")
    return images, question


def question_about(images: Sequence[Path], text: str, system: str | None) -> Question:
    """Returns one question about all of the images."""
    image_names = ", ".join(image.name for image in images)
    turns = system_turns(system)
    turns.append(user_turn(text, [None] * len(images)))
    stored_images = [{"path": str(image), "bytes": None} for image in images]
    return Question(image_names or "the question", turns, stored_images)


def read_questions_of_words(
    images: Sequence[Path], text: str | None, system: str | None
) -> list[Question]:
    """Reads the questions of a command line: one, or the same about each image in a folder.

    Args:
        images: Images of the question, or a folder. The folders in it are read, too.
        text: The question. None is for a conversation: it has no questions yet.
        system: System turn, or None.

    Raises:
        ValueError: A folder has no image, its question is missing, or other images are given too.
    """
    if not images or not images[0].is_dir():
        return [] if text is None else [question_about(images, text, system)]
    folder = images[0]
    if text is None:
        raise ValueError(
            f"{folder} is a folder of images. Give the question about each, in quotes."
        )
    if len(images) > 1:
        raise ValueError(f"{folder} is a folder. To ask about its images, give no other images.")
    questions = []
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in SUFFIXES:
            question = question_about([file], text, system)
            questions.append(replace(question, name=file.relative_to(folder).as_posix()))
    if not questions:
        raise ValueError(f"{folder} has no image. Images end in {', '.join(SUFFIXES)}.")
    return questions


def label_of_data(data: str, source: DataSource) -> str:
    """Returns what results call data: a path without its folder, or a Hub id as it was given."""
    path = Path(source.path).resolve()
    if not path.exists():
        return data
    return path.name if source.split == "train" else f"{path.name}:{source.split}"


def row_name(label: str, opened: Source, origin: str, row_number: int) -> str:
    """Returns what messages call a row of data: the data's label or the row's file, and number."""
    file_name = label if origin == opened.name else Path(origin).name
    return f"{file_name}, row {row_number}"


def read_questions(
    data: str, *, image_folder: str | None, columns: str | None, system: str | None
) -> list[Question]:
    """Reads the first question of each row of data, in any form that training reads.

    Args:
        data: File, folder or Hub id, see [`DataSource.named`].
        image_folder: Folder of the images, see [`DataSource.named`].
        columns: Which columns have image, question and answer, see [`DataSource.named`].
        system: System turn of rows without one.

    Raises:
        ValueError: The data cannot be read or has no rows, or a row cannot be asked.
    """
    source = DataSource.named(data, image_folder=image_folder, columns=columns)
    opened = open_source(source, streaming=False)
    path = Path(source.path)
    label = path.resolve().name if path.exists() else source.path
    questions = []
    for origin, row_number, stored_row in opened:
        question_name = row_name(label, opened, origin, row_number)
        try:
            questions.append(_require_question(question_name, stored_row, opened, system))
        except ValueError as error:
            raise ValueError(f"{question_name} cannot be asked: {error}.") from error
    if not questions:
        raise ValueError(f"{data} has no rows.")
    return questions


def check_images(questions: Sequence[Question]) -> None:
    """Decodes the images of each question. Raises ValueError that names the question of a bad one.

    Shows a bar if there are many questions.
    """
    for question in track(questions, "checking images", disable=len(questions) < 100):
        for image in question.images:
            try:
                decode_image(image, kept_side=1)
            except ValueError as error:
                raise ValueError(f"{question.name} cannot be used: {error}.") from error


def _require_question(name: str, stored_row: Any, opened: Source, system: str | None) -> Question:
    """Returns the question of a row. Raises ValueError if it has none, or an image that is bad."""
    row = read_row_with_proposal(stored_row)
    images = [opened.rules.image(image) for image in row.images]
    problem = open_and_find_problem(images, opened.rules, decode=False)
    if problem:
        raise ValueError(problem[1])
    turns = []
    truth = None
    for message in row.messages:
        if message["role"] == "assistant":
            truth = text_of(message)
            break
        content = []
        for part in message["content"]:
            if part["type"] == "image":
                content.append({"type": "image"})
            else:
                content.append({"type": "text", "text": part.get("text") or ""})
        turns.append({"role": message["role"], "content": content})
    if not turns or turns[-1]["role"] != "user" or not text_of(turns[-1]):
        raise ValueError("it has no question")
    turn_count = len(turns)
    if turns[0]["role"] != "system":
        turns = [*system_turns(system), *turns]
    # Images are in the order of the turns: later ones belong to turns that are not asked.
    image_count = sum(part["type"] == "image" for turn in turns for part in turn["content"])
    return Question(
        name=name,
        turns=turns,
        images=images[:image_count],
        truth=truth,
        further_turns=len(row.messages[turn_count + 1 :]),  # after the answer
    )
