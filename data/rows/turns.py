# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation: lists of them in all known forms, with content in parts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from .images import short
from .values import as_text, is_empty, leave_out, parsed, transposed


ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
ROLES |= {"model": "assistant", "bot": "assistant", "chatgpt": "assistant", "developer": "system"}
PAIRS = (("user", "assistant"), ("human", "gpt"), ("human", "assistant"), ("question", "answer"), ("input", "output"))
"""Keys of a question and its answer that are one element of a list of turns."""

LEARNED = {"weight", "loss", "loss_scale", "train", "training", "trainable"}
"""Keys of a turn that say whether it is learned: OpenAI's, ms-swift's, axolotl's."""

# LLaVA's marker, or Qwen's with the path in it. LLaVA's data have a line break beside it, prompts at inference do not.
_MARKERS = re.compile(r"(?:\r?\n)?(?:<image>|<img>([^<>\n]+)</img>)(?:\r?\n)?")
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "source")  # the last is Anthropic's
_NO_IMAGES = {"type", "text", "index", "detail"}  # llava-instruct-mix has the number of the image
_PARTS = {"text": "text", "input_text": "text", "output_text": "text"}
_PARTS |= {"image": "image", "image_url": "image", "input_image": "image"}


@dataclass
class Row:
    """A row read by its form, unchecked."""

    form: str  # the column that identifies its form
    messages: list[dict[str, Any]] = field(default_factory=list)  # role and content
    images: list[Any] = field(default_factory=list)  # those of the image parts, in order
    learned: list[bool] = field(default_factory=list)  # for each assistant turn
    options: dict[str, str] = field(default_factory=dict)  # of a question, by letter
    accepted: list[str] = field(default_factory=list)  # right answers, if several
    left_out: list[str] = field(default_factory=list)  # as `messages.tool_calls`
    changed: list[str] = field(default_factory=list)  # what was changed, in words


@dataclass
class Turn:
    """A turn of parts `{"type": "image"}`, perhaps with an image, and `{"type": "text", "text": str}`."""

    role: str
    content: list[dict[str, Any]]
    learned: bool = True  # otherwise an assistant's turn has no labels


def read_turns(value: Any, column: str, text_role: str | None, left_out: list[str]) -> list[Turn]:
    """The turns in a column: a list of them in any form, or the text of a turn of `text_role`."""
    value = as_text(value) if text_role else transposed(parsed(value))
    if isinstance(value, str) and text_role:
        return [Turn(text_role, _content(left_out, 0, text_role, value, column))]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{column} must be {'text or ' * bool(text_role)}a list of turns, got {short(value)}")
    if not text_role and all(isinstance(element, str) for element in value) and column != "texts":  # PixMo's
        value = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(value)]
    return [turn for number, element in enumerate(value) for turn in _element(left_out, number, element, column)]


def _element(left_out: list[str], number: int, turn: Any, column: str) -> list[Turn]:
    """The turn that an element of a list of turns is, or the two of a question and its answer."""
    fields = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, Mapping) else {}
    role, text = ("from", "value") if fields.get("from") else ("role", "content")
    pair = () if role in fields else next((pair for pair in PAIRS if fields.keys() >= {*pair}), ())
    if not pair and role not in fields:
        raise ValueError(f"turn {number} of {column} must have 'role' and 'content' or the like, got {short(turn)}")
    said = [("user", fields[pair[0]]), ("assistant", fields[pair[1]])] if pair else [(fields[role], fields.get(text))]
    turns = []
    for name, content in said:
        if not (role_of := ROLES.get(str(name).lower())):
            raise ValueError(f"turn {number} has the role {short(name)}; known are {', '.join(ROLES)}")
        turns.append(Turn(role_of, _content(left_out, number, role_of, content, column)))
    if len(fields) > 2:
        read = {role, text, *pair}
        if key := next((key for key in ("images", "image") if not is_empty(fields.get(key))), None):
            place_images(turns[:1], fields[key] if isinstance(fields[key], (list, tuple)) else [fields[key]])
            read.add(key)
        if pair and not number and isinstance(fields.get("system"), str):  # XTuner's
            turns.insert(0, Turn("system", [{"type": "text", "text": fields["system"]}]))
            read.add("system")
        for key in fields.keys() & LEARNED:
            if fields[key] not in (0, 1):
                raise ValueError(f"turn {number} has {key} {short(fields[key])}, which is neither 0 nor 1")
            turns[-1].learned &= bool(fields[key])
        is_answer = turns[-1].role == "assistant"  # others are never learned, whatever they say
        leave_out(left_out, fields, read | {key for key in LEARNED if is_answer or not fields.get(key)}, f"{column}.")
    return turns


def _content(left_out: list[str], number: int, role: str, content: Any, column: str) -> list[dict[str, Any]]:
    """The parts of a turn's content."""
    content = as_text(content)
    if isinstance(content, str) and content.startswith("[{"):
        parts = parsed(content)
        if all(isinstance(part, Mapping) and part.get("type") in _PARTS for part in parts):
            content = parts
    if isinstance(content, str):
        return _split(content) if role == "user" else [{"type": "text", "text": content}]
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"the content of turn {number} must be text or a list of parts, got {short(content)}")
    return [_part(left_out, number, part, column) for part in content]


def _part(left_out: list[str], number: int, part: Any, column: str) -> dict[str, Any]:
    kind = _PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        leave_out(left_out, part, {"type", "text", "index"}, f"{column}.content.")
        return {"type": "text", "text": part["text"]}
    if kind != "image":
        raise ValueError(f"turn {number} has {short(part)}, which is neither a text part nor an image part")
    key = next((key for key in _IMAGE_KEYS if part.get(key) is not None), None)
    others = {name: value for name, value in part.items() if name not in _NO_IMAGES and not is_empty(value)}
    if key is None and others:
        raise ValueError(f"an image part of turn {number} has {', '.join(map(str, others))}, none of {_IMAGE_KEYS}")
    leave_out(left_out, part, {key, *_NO_IMAGES}, f"{column}.content.")
    own = part[key] if key else None
    if isinstance(own, Mapping) and (inner := next((name for name in ("url", "data") if own.get(name)), None)):
        leave_out(left_out, own, {inner, "type", "media_type", "detail"}, f"{column}.content.{key}.")
        own = own[inner]
    return {"type": "image", "image": own, "index": part.get("index")}


def _split(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(_MARKERS.split(text)):
        if number % 2:  # the path in the marker, or None
            parts.append({"type": "image", "image": piece})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


def place_images(turns: list[Turn], images: Sequence[Any]) -> list[Any]:
    """The images of all parts: parts without one get the next, or the first user turn new parts."""
    parts = [part for turn in turns for part in turn.content if part["type"] == "image"]
    asking = next((turn for turn in turns if turn.role == "user"), None)
    if not parts and asking:
        parts = [{"type": "image"} for _ in images]
        asking.content = parts + asking.content
    places = [part for part in parts if part.get("image") is None]
    if len(places) != len(images):
        raise ValueError(f"it has {len(places)} places for images (<image> or image parts) and {len(images)} images")
    for number, (place, image) in enumerate(zip(places, images, strict=True)):
        if place.get("index") not in (None, number):
            raise ValueError(f"it has a place for image {place['index']} where image {number} of the column would be")
        place["image"] = image
    return [part["image"] for part in parts]


def alternating(turns: list[Turn], changed: list[str]) -> list[Turn]:
    """The turns without a leading answer, and with user turns in a row as one."""
    start = int(bool(turns) and turns[0].role == "system")
    if len(turns) > start + 1 and turns[start].role == "assistant":
        turns = turns[:start] + turns[start + 1 :]
        changed.append("a leading assistant turn is left out")
    if any(one.role == two.role == "user" for one, two in pairwise(turns)):
        changed.append("user turns in a row are one turn")
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role == "user":
            first, second = joined[-1].content, turn.content
            texts = first and second and first[-1]["type"] == second[0]["type"] == "text"
            line_break = [{"type": "text", "text": "\n"}] if texts else []
            joined[-1] = replace(turn, content=first + line_break + second)
        else:
            joined.append(turn)
    return joined
