# SPDX-License-Identifier: Apache-2.0
"""Reads lists of turns in all known forms."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, TypeAlias

from .images import short
from .values import as_list, as_text, is_empty, parsed, transposed, unread_keys


ROLES = {
    "human": "user",
    "user": "user",
    "system": "system",
    "developer": "system",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
}
# Keys of a question and its answer that are one element of a list of turns.
PAIRS = [
    ("user", "assistant"),
    ("human", "gpt"),
    ("human", "assistant"),
    ("question", "answer"),
    ("input", "output"),
]
# Keys of a turn that say whether it is learned: OpenAI's, ms-swift's, axolotl's.
LEARNED = {"weight", "loss", "loss_scale", "train", "training", "trainable"}
_MARKERS = re.compile(r"<image>|<img>([^<>\n]+)</img>")  # LLaVA's, or Qwen's with the path in it
_FIRST_BREAK = re.compile(r"\A\r?\n")
_LAST_BREAK = re.compile(r"\r?\n\Z")
_BREAKS = ("", "\n", "\r\n")
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "source")  # the last is Anthropic's
_NO_IMAGES = {"type", "text", "index", "detail"}  # llava-instruct-mix has the number of the image
_PART_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "image": "image",
    "image_url": "image",
    "input_image": "image",
}


Part: TypeAlias = dict[str, Any]
"""A part of a turn: its `type` is "text", with `text`, or "image", perhaps with `image`."""
Message: TypeAlias = dict[str, Any]
"""A turn as chat templates read it: `role`, and parts as `content`."""


@dataclass
class Row:
    """A row read by its form, unchecked."""

    form: str  # the column that identifies its form
    messages: list[Message]
    images: list[Any]  # of the image parts, in order
    learned: list[bool]  # for each assistant turn
    options: dict[str, str]  # of a question, by letter
    accepted: list[str]  # right answers, if several
    left_out: list[str]  # columns and keys that are not read, such as `messages.tool_calls`
    changed: list[str]  # what was changed, in words


@dataclass
class Turn:
    """A turn of a row's conversation."""

    role: str
    content: list[Part]
    learned: bool = True  # otherwise an assistant's turn has no labels
    left_out: list[str] = field(default_factory=list)  # its keys that are not read


def text_part(text: Any) -> Part:
    """Returns the part of a turn that holds a text."""
    return {"type": "text", "text": text}


def read_turns(value: Any, column: str, text_role: str | None) -> list[Turn]:
    """Reads the turns in a column.

    Args:
        value: A list of turns in any form, or the text of a single turn.
        column: The column's name, for errors and for names of keys that are not read.
        text_role: The role of the turn if the value is a text or a list of parts. Such a text is
            not parsed, whatever brackets it has. None if only a list of turns is allowed.

    Raises:
        ValueError: The value or one of its turns has none of these forms.
    """
    if text_role:
        allowed_kinds = "text or a list of turns"
        elements = as_text(value)
        if isinstance(elements, str) or are_parts(elements):
            return [_read_turn(elements, text_role, 0, column)]
    else:
        allowed_kinds = "a list of turns"
        elements = transposed(parsed(value))
    if not isinstance(elements, (list, tuple)):
        raise ValueError(f"{column} must be {allowed_kinds}, got {short(elements)}")
    are_texts = all(isinstance(element, str) for element in elements)
    if are_texts and not text_role and column != "texts":  # as in PixMo
        pairs = zip(cycle(("user", "assistant")), elements, strict=False)
        elements = [{"role": role, "content": text} for role, text in pairs]
    turns = []
    for turn_number, element in enumerate(elements):
        turns += _read_element(element, turn_number, column)
    return turns


def _read_element(element: Any, turn_number: int, column: str) -> list[Turn]:
    """Reads an element of a list of turns: a turn, or a question with its answer as two turns.

    Raises ValueError if it is neither, or has an unknown role.
    """
    fields = {}
    if isinstance(element, Mapping):
        fields = {key: value for key, value in element.items() if value is not None}
    roles_by_key = _roles_by_key(fields)
    if not roles_by_key:
        raise ValueError(
            f"turn {turn_number} of {column} needs role and content, got {short(element)}"
        )
    turns = []
    for content_key, role_name in roles_by_key.items():
        role = ROLES.get(str(role_name).lower())
        if role is None:
            known_roles = ", ".join(ROLES)
            raise ValueError(
                f"turn {turn_number} has role {short(role_name)}; known are {known_roles}"
            )
        turns.append(_read_turn(fields.get(content_key), role, turn_number, column))
    if len(fields) > 2:
        return _with_other_keys(turns, fields, roles_by_key.keys(), turn_number, column)
    return turns


def _roles_by_key(fields: Mapping) -> dict[str, Any]:
    """Returns the role of each key that holds the text of a turn.

    A question with its answer has two such keys. An element that is not a turn has none.
    """
    if fields.get("from"):
        return {"value": fields["from"]}
    if "role" in fields:
        return {"content": fields["role"]}
    for question_key, answer_key in PAIRS:
        if question_key in fields and answer_key in fields:
            return {question_key: "user", answer_key: "assistant"}
    return {}


def _with_other_keys(
    turns: list[Turn], fields: Mapping, text_keys: Collection[str], turn_number: int, column: str
) -> list[Turn]:
    """Returns the turns of an element with what its other keys hold.

    Other keys hold images, the system turn of a question with its answer, or whether a turn is
    learned.

    Args:
        turns: The turns of the element, without what its other keys hold.
        fields: The element.
        text_keys: The keys of the texts that were read.
        turn_number: The number of the element in its list.
        column: The column of the list.
    """
    is_pair = len(turns) == 2
    read_keys = {"from", "role", *text_keys}
    for images_key in ("images", "image"):
        if not is_empty(fields.get(images_key)):
            images = as_list(fields[images_key])
            turns = place_images(turns[:1], images) + turns[1:]
            read_keys.add(images_key)
            break
    system = fields.get("system")
    if is_pair and turn_number == 0 and isinstance(system, str):  # XTuner's
        turns = [Turn("system", [text_part(system)]), *turns]
        read_keys.add("system")
    last_turn = turns[-1]
    is_learned = _is_learned(fields, turn_number)
    for learned_key in LEARNED:
        # The other turns are never learned, so a key that asks for it is not read.
        if last_turn.role == "assistant" or not fields.get(learned_key):
            read_keys.add(learned_key)
    left_out = last_turn.left_out + unread_keys(fields, read_keys, f"{column}.")
    return [*turns[:-1], replace(last_turn, learned=is_learned, left_out=left_out)]


def _is_learned(fields: Mapping, turn_number: int) -> bool:
    """Whether a turn is learned. Raises ValueError if one of the `LEARNED` keys is not 0 or 1."""
    learned_keys = LEARNED.intersection(fields)
    for learned_key in learned_keys:
        value = fields[learned_key]
        if value not in (0, 1):
            raise ValueError(
                f"turn {turn_number} has {learned_key} {short(value)}, neither 0 nor 1"
            )
    return all(fields[learned_key] for learned_key in learned_keys)


def _read_turn(stored_content: Any, role: str, turn_number: int, column: str) -> Turn:
    """Reads the content of a turn: a text, or a list of parts. Raises ValueError for others."""
    stored_content = as_text(stored_content)
    if isinstance(stored_content, str):
        # The assistant's texts are never parsed, since they are learned as they are written.
        if role != "user":
            return Turn(role, [text_part(stored_content)])
        stored_parts: Any = None  # that a user's text holds as JSON
        if stored_content.startswith("[{"):
            stored_parts = parsed(stored_content)
        if not are_parts(stored_parts) or "image" not in map(_part_kind, stored_parts):
            return Turn(role, _split_text(stored_content))
        stored_content = stored_parts
    if not isinstance(stored_content, (list, tuple)):
        raise ValueError(
            f"turn {turn_number} must have text or a list of parts, got {short(stored_content)}"
        )
    parts = []
    left_out = []
    for stored_part in stored_content:
        part, part_left_out = _read_part(stored_part, turn_number, f"{column}.content.")
        parts.append(part)
        left_out += part_left_out
    return Turn(role, parts, left_out=left_out)


def _part_kind(part: Any) -> str | None:
    """Returns "text" or "image" for a part of a turn, and None for anything else."""
    return _PART_KINDS.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def are_parts(value: Any) -> bool:
    """Whether a value is a list of the parts of a turn, each of a known `type`."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(map(_part_kind, value))


def _read_part(part: Any, turn_number: int, place: str) -> tuple[Part, list[str]]:
    """Reads a part of a turn. Returns it with the names of its keys that are not read.

    Raises ValueError if it is neither a text nor an image, or has keys, but none with an image.
    """
    part_kind = _part_kind(part)
    if part_kind == "text" and isinstance(part.get("text"), str):
        return text_part(part["text"]), unread_keys(part, {"type", "text", "index"}, place)
    if part_kind != "image":
        raise ValueError(f"turn {turn_number} has {short(part)}, neither a text nor an image part")
    image_key = next((key for key in _IMAGE_KEYS if part.get(key) is not None), None)
    left_out = unread_keys(part, {image_key, *_NO_IMAGES}, place)
    if image_key is None and left_out:
        raise ValueError(
            f"an image of turn {turn_number} has {', '.join(unread_keys(part, _NO_IMAGES))}, but "
            f"none of {', '.join(_IMAGE_KEYS)}"
        )
    image = part.get(image_key)
    if isinstance(image, Mapping):
        content_key = next((key for key in ("url", "data") if image.get(key)), None)
        if content_key is not None:  # OpenAI's, or Anthropic's
            read_keys = {content_key, "type", "media_type", "detail"}
            left_out += unread_keys(image, read_keys, f"{place}{image_key}.")
            image = image[content_key]
    return {"type": "image", "image": image, "index": part.get("index")}, left_out


def _split_text(text: str) -> list[Part]:
    """Splits a user's text at its markers into parts.

    In LLaVA's data, images have lines of their own at the beginning or the end of a turn. The line
    breaks beside these markers are not read, because the chat template decides what separates an
    image from its question. Texts on both sides of a marker stay as they are.
    """
    pieces = _MARKERS.split(text)
    texts = pieces[0::2]
    paths = pieces[1::2]  # in the markers; None for a marker without one
    for marker_number in range(len(paths)):  # markers at the beginning
        if texts[marker_number] not in _BREAKS:
            break
        texts[marker_number] = ""
        texts[marker_number + 1] = _FIRST_BREAK.sub("", texts[marker_number + 1])
    for marker_number in reversed(range(len(paths))):  # markers at the end
        if texts[marker_number + 1] not in _BREAKS:
            break
        texts[marker_number + 1] = ""
        texts[marker_number] = _LAST_BREAK.sub("", texts[marker_number])
    parts: list[Part] = []
    for piece_number, piece in enumerate(texts):
        if piece:
            parts.append(text_part(piece))
        if piece_number < len(paths):
            parts.append({"type": "image", "image": paths[piece_number]})
    return parts or [text_part("")]


def image_parts(turns: list[Turn]) -> list[Part]:
    """Returns the image parts of all turns, in order."""
    parts = []
    for turn in turns:
        parts += [part for part in turn.content if part["type"] == "image"]
    return parts


def place_images(turns: list[Turn], images: Sequence[Any]) -> list[Turn]:
    """Returns the turns with each image in an image part that has none yet, in order.

    Without any image parts, the images come first in the first turn of the user. Raises ValueError
    if the images do not fit the parts.
    """
    turns = [replace(turn, content=list(map(dict, turn.content))) for turn in turns]
    user_turns = [turn for turn in turns if turn.role == "user"]
    if user_turns and not image_parts(turns):
        user_turns[0].content[:0] = [{"type": "image"} for _ in images]
    empty_parts = [part for part in image_parts(turns) if part.get("image") is None]
    if len(empty_parts) != len(images):
        raise ValueError(
            f"it has {len(empty_parts)} <image> or image parts for {len(images)} images"
        )
    for image_number, part in enumerate(empty_parts):
        if part.get("index") not in (None, image_number):
            raise ValueError(f"its part for image {image_number} has the index {part['index']}")
        part["image"] = images[image_number]
    return turns


def alternating(turns: list[Turn]) -> tuple[list[Turn], list[str]]:
    """Leaves a leading answer out, and joins user turns in a row to one turn.

    A line break comes between two texts that are joined.

    Returns:
        The turns, and in words what was changed.
    """
    changes = []
    start = 0
    if turns and turns[0].role == "system":
        start = 1
    if len(turns) > start + 1 and turns[start].role == "assistant":
        turns = turns[:start] + turns[start + 1 :]
        changes.append("a leading assistant turn is left out")
    joined_turns: list[Turn] = []
    for turn in turns:
        if joined_turns and turn.role == joined_turns[-1].role == "user":
            content = joined_turns[-1].content
            adjacent_types = [part["type"] for part in content[-1:] + turn.content[:1]]
            if adjacent_types == ["text", "text"]:
                content = [*content, text_part("\n")]
            joined_turns[-1] = replace(turn, content=content + turn.content)
        else:
            joined_turns.append(turn)
    if len(joined_turns) < len(turns):
        changes.append("user turns in a row are one turn")
    return joined_turns, changes
