# SPDX-License-Identifier: Apache-2.0
"""Parts of a row that are not read: what looks like an image, `columns` that would read them."""

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from PIL import Image

from .forms import Row, UnknownForm, read_row
from .images import SUFFIXES
from .values import is_empty, parsed


_QUESTIONS = (
    "question", "query", "instruction", "problem", "prefix", "human", "user", "prompt", "input", "inputs", "text",
)  # fmt: skip
_ANSWERS = (
    "answer", "response", "output", "outputs", "solution", "suffix", "assistant", "gpt", "completion", "label",
    "target", "ground_truth", "chosen",
)  # fmt: skip
_CAPTIONS = ("captions", "description", "caption_str", "sentences", "re_caption", "raw", "ground_truth", "summary")
_IMAGES = (
    "image_path", "img_path", "image_file", "image_file_name", "image_filename", "file_name", "filename", "filepath",
    "image_name", "img_name", "image_base64_str", "img", "picture", "photo", "path",
)  # fmt: skip
_PREFERENCES = ({"chosen", "rejected"}, {"preferred_output", "non_preferred_output"})
_ABOUT = re.compile(
    r"(.*[_.-])?(ids?|uu?id|idx|index|key|hash|md5|sha256|ur[li]s?|links?|sources?|origin|dataset|split|subset|types?|"
    r"category|categories|topic|subject|field|domain|task|skill|grade|difficulty|lang|language|scores?|ratings?|rank|"
    r"similarity|p?watermark|p?unsafe|nsfw|width|height|size|shape|licen[cs]e|author|date|time(stamp)?|version|status|"
    r"error_message|exif|model|meta(data)?|name)_*|\(no name\)|unnamed: ?\d+|__index_level_\d+__",
    re.I,
)
_LIKE_A_MARKER = re.compile(
    r"(?-i:(?!<image>))<\|?(?:start_of_)?(?:image|img)[ _-]?(?:\d+|start|pad|here|placeholder|context|patch)? ?/?\|?>"
    r"|(?<!!)\[(?:image|img)\](?!\()",
    re.I,
)
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
    """What looks like an image in a row without any, `column img` or `text <image_1>`; or None."""
    if not isinstance(raw, Mapping) or raw.get("image") or raw.get("images"):
        return None
    for column, value in raw.items():
        named = _LIKE_AN_IMAGE_COLUMN.search(str(column)) and value and not is_empty(value)
        if named or (column != "id" and _looks_like_an_image(value)):
            return f"column {str(column)[:80]}"
    marker = next(markers(messages), None)
    return f"text {marker}" if marker else None


def markers(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Texts such as `<image_1>`, which are learned as text."""
    texts = (part.get("text") or "" for message in messages for part in message["content"])
    matches = (_LIKE_A_MARKER.search(text) for text in texts if "<" in text or "[" in text)
    return (match[0] for match in matches if match)


def proposal(raw: Any) -> str:
    """`columns` with which a row has a question and an answer, as the end of an error; empty if there are none."""
    if not isinstance(raw, Mapping):
        return ""
    names = (column for column in raw if isinstance(column, str) and not is_empty(raw[column]))
    present = {column.strip().lower(): column for column in names}
    image = [] if {"image", "images"} & {*present.values()} else [("image", name) for name in ("image", *_IMAGES)]
    image = [(own, present[name]) for own, name in image if name in present][:1]
    tried: list[list[tuple[str, str]]] = []
    for asks, answers in product(_QUESTIONS, _ANSWERS):
        if asks in present and answers in present:
            tried.append([("question", present[asks]), ("answer", present[answers])])
    tried += [[("caption", present[name])] for name in _CAPTIONS if name in present]
    for name in ("chosen", "preferred_output", *present):
        if name in present and name not in ("rejected", "non_preferred_output", "history"):
            tried += [[("messages", present[name])]] if isinstance(parsed(raw[present[name]]), (list, Mapping)) else []
    options = ([(own, name) for own, name in image + columns if own != name] for columns in tried)
    reading = next((columns for columns in options if columns and _is_read(renamed(raw, dict(columns)))), None)
    option = "--columns " + shlex.quote(",".join(f"{own}={name}" for own, name in reading)) if reading else ""
    if any(columns <= present.keys() for columns in _PREFERENCES):
        alone = f"; the chosen answers alone are read with {option}" if option else ""
        return f". It has preferences, as DPO learns them: see docs/trl.md{alone}"
    return f". It is read with {option}" if option else ""


def renamed(raw: Mapping, own: Mapping[str, str]) -> dict[str, Any]:
    """A row with columns of one's own names: `own` has the data's name of a known column."""
    others = raw.keys() - own.keys() - {*own.values()}
    values = {column: raw[name] for column, name in own.items() if name in raw}
    return {column: value for column, value in raw.items() if column in others} | values


def _is_read(raw: Mapping) -> bool:
    try:
        roles = [message["role"] for message in read_row(raw).messages]
    except ValueError:
        return False
    return roles[-1:] == ["assistant"] and "user" in roles


def _looks_like_an_image(value: Any) -> bool:
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, str):
        return value.startswith("data:image/") or value.partition("?")[0].lower().endswith(SUFFIXES)
    return isinstance(value, (bytes, Image.Image))
