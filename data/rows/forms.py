# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The known forms of rows, and how each is read; docs/data.md has an example of each."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from .images import MAX_PATH, printable, short


MARKER = "<image>"
"""The placeholder of an image in the texts of LLaVA's data, whatever the tokenizer's image token is."""

PROMPT = "Describe the image."
"""The question about images that come with a caption, or with nothing."""

FORMS: tuple[tuple[str | None, str | None], ...] = (
    ("conversations", None),
    ("messages", None),
    ("prompt", "completion"),
    ("question", "answer"),
    (None, "caption"),
    (None, "text"),
    (None, None),
)
"""Columns of question and answer. A row has the first form whose question column it has.

`conversations` and `messages` are lists of turns with both; other columns are text or lists of turns. Without a
question column the row has an image, and the question is [`PROMPT`]. Rows without an answer can be measured, but not
trained on.
"""

COLUMNS = {column for form in FORMS for column in form if column} | {"image", "images", "hint", "choices", *"ABCD"}
"""Columns that are read; `choices` by `normalign evaluate` alone."""

MAX_CHARACTERS, MAX_TURNS = 2**22, 10_000
"""Limits of a text and of a conversation, beyond what any model takes, so that no row fills the memory."""

ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm")
"""Suffixes of image files."""

# LLaVA's marker, or Qwen's with the path in it. LLaVA's data have a line break beside it, prompts at inference do not.
_MARKERS = re.compile(r"(?:\r?\n)?(?:<image>|<img>([^<>\n]+)</img>)(?:\r?\n)?")
_LIKE_A_MARKER = re.compile(r"(?!<image>)<\|?(?:image|img)[ _-]?(?:\d+|start|pad|here|placeholder)?\|?>", re.I)
_LIKE_AN_IMAGE_COLUMN = re.compile(r"(^|[ _-])(image|img|picture|photo)s?($|[ _-])", re.I)


@dataclass
class Row:
    """A row read by its form, unchecked.

    Attributes:
        form: The column that identifies its form.
        messages: Turns with content parts, `{"type": "image"}` or `{"type": "text", "text": str}`.
        images: The image of each image part, in order, in any form that [`ImageRules.image`] takes.
        prompt_turns: Number of assistant turns at the start that belong to the prompt.
    """

    form: str
    messages: list[dict[str, Any]]
    images: list[Any]
    prompt_turns: int


def read_row(raw: Any) -> Row:
    """Reads a row of any known form.

    In a user's string, `<image>` and `<img>path</img>` become image parts, without a line break on either side. If
    there are none, the images come at the start of the first user turn, as in TRL; LLaVA's turns (`from` and `value`)
    must have one for each image.

    Args:
        raw: The row as stored.

    Raises:
        ValueError: The form is not known, a turn is malformed, or the numbers of images and places for them differ.
    """
    if isinstance(raw, bytes):
        raise ValueError(f"the line is not valid JSON, or nested too deeply: {short(raw)}")
    if not isinstance(raw, Mapping):
        raise ValueError(f"a row must be a mapping from column to value, got {short(raw)}")
    images = _images(raw)
    asks, answers = _form(raw, bool(images))
    asked = _turns(raw[asks], asks, "user" if answers else None) if asks else [("user", PROMPT, False)]
    if asks == "question":
        asked = [(role, _with_choices(raw, content), marked) for role, content, marked in asked]
    answered = _turns(raw[answers], answers, "assistant") if answers and raw.get(answers) is not None else []
    turns = asked + answered
    messages = [_message(number, role, content) for number, (role, content, _) in enumerate(turns)]
    if images and not any(marked for *_, marked in turns) and not any(_image_parts(messages)):
        first_user = next((message for message in messages if message["role"] == "user"), None)
        if first_user:
            first_user["content"] = [{"type": "image"} for _ in images] + first_user["content"]
    prompt_turns = sum(ROLES[role] == "assistant" for role, *_ in asked) if answers else 0
    return Row(asks or answers or "image", messages, _placed(messages, images), prompt_turns)


def image_name(raw: Any) -> str | None:
    """The name of the first image of a raw or parsed row, or None."""
    if not isinstance(raw, Mapping):
        return None
    images = raw.get("images") or raw.get("image")
    first = images[0] if isinstance(images, (list, tuple)) and images else images
    name = first.get("path") if isinstance(first, Mapping) else first
    return printable(name[:MAX_PATH]) if isinstance(name, str) and name and not name.startswith("data:") else None


def unread_image(raw: Any, messages: list[dict[str, Any]]) -> str | None:
    """What looks like an image in a row without images, such as `column img` or `text <image_1>`, or None."""
    if not isinstance(raw, Mapping) or raw.get("image") or raw.get("images"):
        return None
    for column, value in raw.items():
        named = _LIKE_AN_IMAGE_COLUMN.search(str(column)) and isinstance(value, (str, list, tuple, Mapping)) and value
        if named or _looks_like_an_image(value):
            return f"column {str(column)[:80]}"
    texts = (part.get("text") or "" for message in messages for part in message["content"])
    found = next(filter(None, map(_LIKE_A_MARKER.search, texts)), None)
    return f"text {found[0]}" if found else None


def columns(raw: Mapping) -> str:
    """The columns of a row that are not empty, for errors."""
    return ", ".join(sorted(str(column)[:80] for column, value in raw.items() if value is not None)) or "none"


def _form(raw: Mapping, has_images: bool) -> tuple[str | None, str | None]:
    given = {column for column, value in raw.items() if value is not None}
    for asks, answers in FORMS:
        # A row of an image alone has no other columns: one of them may be a question that is not read.
        shown = has_images and (answers in given if answers else given <= {"image", "images", "label"})
        if asks in given if asks else shown:
            return asks, answers
    raise ValueError(
        f"its form is not known. It has the columns: {columns(raw)}; known are conversations, messages, prompt with "
        "completion and question with answer, each with or without image or images, and caption or text with image"
    )


def _images(raw: Mapping) -> list[Any]:
    given = [raw[column] for column in ("image", "images") if raw.get(column) not in (None, "", [], ())]
    if len(given) > 1:
        raise ValueError("it has images in both image and images; use one of them")
    if not given:
        return []
    return list(given[0]) if isinstance(given[0], (list, tuple)) else [given[0]]


def _turns(value: Any, column: str, text_role: str | None) -> list[tuple[Any, Any, bool]]:
    """Role, content, and whether it is LLaVA's turn, whose images must have markers."""
    if isinstance(value, str) and text_role:
        return [(text_role, value, False)]
    if not isinstance(value, (list, tuple)):
        remedy = "; write the number in quotes" if text_role and isinstance(value, (int, float)) else ""
        raise ValueError(f"{column} must be {'text or ' * bool(text_role)}a list of turns, got {short(value)}{remedy}")
    if len(value) > MAX_TURNS:
        raise ValueError(f"{column} has {len(value):,} turns; {MAX_TURNS:,} are allowed")
    turns = []
    for number, turn in enumerate(value):
        role, content = ("from", "value") if isinstance(turn, Mapping) and turn.get("from") else ("role", "content")
        if not isinstance(turn, Mapping) or role not in turn:
            raise ValueError(
                f"turn {number} of {column} must have 'role' and 'content', or 'from' and 'value', got {short(turn)}"
            )
        turns.append((turn[role], turn.get(content), role == "from"))
    return turns


def _message(number: int, role: Any, content: Any) -> dict[str, Any]:
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"turn {number} has the role {short(role)}; known are {', '.join(ROLES)}")
    parts = content if isinstance(content, (list, tuple)) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    length = sum(len(text) for text in texts if isinstance(text, str))
    if length > MAX_CHARACTERS or len(parts) > MAX_TURNS:
        raise ValueError(f"turn {number} has {length:,} characters in {len(parts):,} parts, more than any model takes")
    if isinstance(content, str):
        parts = _split(content) if ROLES[role] == "user" else [{"type": "text", "text": content}]
        return {"role": ROLES[role], "content": parts}
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"the content of turn {number} must be text or a list of parts, got {short(content)}")
    return {"role": ROLES[role], "content": [_part(number, part) for part in content]}


def _part(number: int, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):  # TRL's, OpenAI's
        raise ValueError(f"turn {number} has {short(part)}, which is neither a text part nor an image part")
    own = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    return {"type": "image", "image": own["url"] if isinstance(own, Mapping) and own.get("url") else own}


def _split(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(_MARKERS.split(text)):
        if number % 2:  # the path in the marker, or None
            parts.append({"type": "image", "image": piece})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


def _image_parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (part for message in messages for part in message["content"] if part["type"] == "image")


def _placed(messages: list[dict[str, Any]], images: list[Any]) -> list[Any]:
    """The images in the order of the image parts, some of which have their own."""
    own = [part.get("image") for part in _image_parts(messages)]
    if (places := own.count(None)) != len(images):
        raise ValueError(f"it has {places} places for images ({MARKER} or image parts) and {len(images)} images")
    rest = iter(images)
    return [next(rest) if image is None else image for image in own]


def _with_choices(raw: Mapping, question: Any) -> Any:
    """Adds MMBench's columns: a hint before the question, options after it; "nan" is empty."""
    given = {name: raw[name] for name in ("hint", *"ABCD") if isinstance(raw.get(name), str) and raw[name] != "nan"}
    options = [f"{letter}. {given[letter]}" for letter in "ABCD" if letter in given]
    if not isinstance(question, str) or not options:
        return question
    return "\n".join([*([given["hint"]] if "hint" in given else []), question, *options])


def _looks_like_an_image(value: Any) -> bool:
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, str):
        return value.startswith("data:image/") or value.partition("?")[0].lower().endswith(SUFFIXES)
    return isinstance(value, (bytes, Image.Image))
