# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What of a row is not read: which of it is news, what looks like an image, and which `columns` would read it."""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from PIL import Image

from .forms import Row, UnknownForm, read_row
from .images import SUFFIXES
from .values import is_empty, parsed


_QUESTIONS = ("question", "query", "instruction", "problem", "prefix", "human", "user", "prompt", "input", "text")
_ANSWERS = ("response", "output", "solution", "suffix", "assistant", "gpt", "completion", "label", "target", "chosen")
_IMAGES = ("image_path", "img_path", "image_file", "file_name", "img", "picture", "photo", "path")
_ABOUT = re.compile(
    r"(.*[_.-])?(ids?|uu?id|idx|index|key|hash|md5|sha256|urls?|uri|links?|sources?|origin|dataset|split|subset|"
    r"category|categories|(l2|sub)[_-]category|types?|topic|subject|field|domain|task|skill|grade|difficulty|lang|language|"
    r"scores?|ratings?|rank|min|max|confidence|similarity|p?watermark|p?unsafe|nsfw|aesthetic|width|height|size|shape|"
    r"licen[cs]e|copyright|author|date|created(_at)?|time(stamp)?|version|status|error_message|exif|model|generator|"
    r"meta(data)?|detail|name)_*",
    re.I,
)
_LIKE_A_MARKER = re.compile(r"(?!<image>)<\|?(?:image|img)[ _-]?(?:\d+|start|pad|here|placeholder)?\|?>", re.I)
_LIKE_AN_IMAGE_COLUMN = re.compile(r"(?:^|[ _-])(?i:image|img|picture|pic|photo|frame)s?(?:$|[ _\-A-Z\d])")


def known_row(raw: Any) -> Row:
    """[`read_row`], with `columns` in the error if the row's form is not known and they would help."""
    try:
        return read_row(raw)
    except UnknownForm as error:
        raise ValueError(f"{error}{proposal(raw)}") from None


def is_about(name: str) -> bool:
    """Whether a column, by its name, tells about the row, as ids, addresses and scores do, and is not part of it."""
    return _ABOUT.fullmatch(name) is not None


def unread_image(raw: Any, messages: list[dict[str, Any]]) -> str | None:
    """What looks like an image in a row without images, such as `column img` or `text <image_1>`, or None."""
    if not isinstance(raw, Mapping) or raw.get("image") or raw.get("images"):
        return None
    for column, value in raw.items():
        named = _LIKE_AN_IMAGE_COLUMN.search(str(column)) and value and not is_empty(value)
        if named or (column != "id" and _looks_like_an_image(value)):
            return f"column {str(column)[:80]}"
    found = next(markers(messages), None)
    return f"text {found}" if found else None


def markers(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Texts such as `<image_1>`, which are learned as text."""
    texts = (part.get("text") or "" for message in messages for part in message["content"])
    return (found[0] for found in (_LIKE_A_MARKER.search(text) for text in texts if "<" in text) if found)


def proposal(raw: Any) -> str:
    """`columns` with which a row has a question and an answer, as the end of an error; empty if there are none."""
    if not isinstance(raw, Mapping):
        return ""
    given = [column for column, value in raw.items() if isinstance(column, str) and not is_empty(value)]
    image = [] if {"image", "images"} & {*given} else [("image", name) for name in _IMAGES if name in given][:1]
    turns = [[("messages", name)] for name in given if isinstance(parsed(raw[name]), (list, tuple, Mapping))]
    pairs = [
        [("question", asks)] * (asks != "question") + [("answer", answers)]
        for asks, answers in product(_QUESTIONS, _ANSWERS)
        if asks in given and answers in given
    ]
    tried = (image + each for each in turns + pairs)
    found = next((each for each in tried if _reads(renamed(raw, dict(each)))), None)
    option = "--columns " + ",".join(f"{own}={name}" for own, name in found) if found else ""
    if {"chosen", "rejected"} <= {*given}:
        alone = f"; the chosen answers alone are read with {option}" if option else ""
        return f". It has preferences, as DPO learns them: see docs/trl.md{alone}"
    return f". It is read with {option}" if option else ""


def renamed(raw: Mapping, own: Mapping[str, str]) -> dict[str, Any]:
    """A row with columns of one's own names: `own` has the data's name of a known column."""
    others = raw.keys() - own.keys() - {*own.values()}
    values = {column: raw[name] for column, name in own.items() if name in raw}
    return {column: value for column, value in raw.items() if column in others} | values


def _reads(raw: Mapping) -> bool:
    try:
        return any(message["role"] == "assistant" for message in read_row(raw).messages)
    except ValueError:
        return False


def _looks_like_an_image(value: Any) -> bool:
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, str):
        return value.startswith("data:image/") or value.partition("?")[0].lower().endswith(SUFFIXES)
    return isinstance(value, (bytes, Image.Image))
