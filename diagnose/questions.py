# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A question about a picture, from a row of any known data format."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ..train.arguments import DataArguments
from ..train.pictures import open_picture
from ..train.rows import MARKER, ROLES, picture_name, printable


PLAIN_QUESTION = "Describe the picture."
"""What is asked about pictures that come without questions."""

QUESTIONS = ("question", "messages", "conversations", "prompt", "text")
"""The columns that a question is looked for in, in this order; of a list of turns it is the first user turn."""


@dataclass(frozen=True)
class Sample:
    """A question about a picture.

    Attributes:
        name: Where it comes from: data, row and file, without the folders above the data.
        question: The question.
        image: The picture's `path` or its `bytes`, as `datasets` has them.
    """

    name: str
    question: str
    image: Mapping[str, Any]

    @property
    def picture(self) -> Image.Image:
        """The picture, decoded anew each time, upright and in RGB.

        Raises:
            ValueError: It cannot be decoded; the text names the sample.
        """
        try:
            return open_picture(dict(self.image), DataArguments.max_image_pixels)
        except ValueError as error:
            raise ValueError(f"The picture of {self.name} cannot be used: {error}") from error


def sample_of_row(raw: Any, name: str, folder: str | None) -> Sample | None:
    """The first picture of a row and the question about it; None if the row has no picture.

    Args:
        raw: The row, pictures not decoded.
        name: Where it comes from, for the sample's name and for errors.
        folder: What relative picture paths start from.

    Raises:
        ValueError: The row is no mapping, its picture is of no known form, or it has no question.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{name} is no mapping from column to value, but a {type(raw).__name__}.")
    pictures = raw.get("images") or raw.get("image")
    picture = (pictures or [None])[0] if isinstance(pictures, (list, tuple)) else pictures
    if not picture:
        return None
    file = _file(raw, folder)
    name += f" ({file})" if file else ""
    return Sample(name, _question(raw, name), _image(picture, name, folder))


def _image(picture: Any, name: str, folder: str | None) -> dict[str, Any]:
    path, content = (picture, None) if isinstance(picture, str) else (None, None)
    if isinstance(picture, Mapping):
        path, content = picture.get("path"), picture.get("bytes")
    if isinstance(content, bytes):
        return {"path": None, "bytes": content}
    if not isinstance(path, str) or not path:
        raise ValueError(f"The picture of {name} is neither a path nor a mapping with path or bytes.")
    return {"path": path if "://" in path else os.path.join(folder or "", path), "bytes": None}


def _file(raw: Mapping, folder: str | None) -> str | None:
    path = picture_name(raw)
    if path is not None and "://" in path:
        return path.rpartition("/")[2]
    if path is None or not os.path.isabs(path):
        return path
    inside = os.path.relpath(path, folder) if folder else ".."
    return os.path.basename(path) if inside.startswith("..") else inside


def _question(raw: Mapping, name: str) -> str:
    if not raw.keys() - {"image", "images", "label"}:
        return PLAIN_QUESTION
    for column in QUESTIONS:
        value = raw.get(column)
        text = _first_user_turn(value) if isinstance(value, (list, tuple)) else value
        if isinstance(text, str) and (text := printable(text.replace(MARKER, "")).strip()):
            return _multiple_choice(raw, text)
    raise ValueError(
        f"{name} has no question. It has the columns {', '.join(sorted(map(str, raw)))}; a question is looked for in "
        f"{', '.join(QUESTIONS)}."
    )


def _first_user_turn(turns: Sequence[Any]) -> str | None:
    for turn in turns:
        if isinstance(turn, Mapping) and ROLES.get(str(turn.get("role") or turn.get("from"))) == "user":
            content = turn.get("content") or turn.get("value")
            if isinstance(content, (list, tuple)):
                texts = [part.get("text") for part in content if isinstance(part, Mapping)]
                content = " ".join(text for text in texts if text)
            return content
    return None


def _multiple_choice(raw: Mapping, question: str) -> str:
    """MMBench keeps a hint and the options in columns of their own, with "nan" where there is none."""
    given = {name: raw[name] for name in ("hint", *"ABCD") if isinstance(raw.get(name), str) and raw[name] != "nan"}
    options = [f"{letter}. {given[letter]}" for letter in "ABCD" if letter in given]
    return "\n".join([*([given["hint"]] if "hint" in given and options else []), question, *options])
