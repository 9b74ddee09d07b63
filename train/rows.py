# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""One row of any known data format becomes one canonical row, or the reason why it cannot be trained on.

Known are LLaVA's `conversations` (its JSON files, and LLaVA-NeXT's parquet with pictures inside), TRL's `messages`,
and `prompt` with `completion`; pictures are in `image` or `images`. A canonical row has explicit content parts, each
picture in the turn it belongs to:

    images       list of {"path": str | None, "bytes": bytes | None}, one of which is None
    messages     list of {"role": str, "content": [{"type": "image" | "text", "text": str | None}]}
    prompt_turns number of assistant turns, from the first, that are prompt and carry no label

An optional system turn comes first; then user and assistant take turns, the user first and the assistant last.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Features, Image, List, Value


MARKER = "<image>"
"""What stands for a picture in the texts of LLaVA's data, whatever the tokenizer calls its image token."""

PART = {"type": Value("string"), "text": Value("string")}
FEATURES = Features(
    {
        "images": List(Image(decode=False)),
        "messages": List({"role": Value("string"), "content": List(PART)}),
        "prompt_turns": Value("int32"),
        "source": Value("string"),
        "row": Value("int64"),
        "image_count": Value("int32"),
        "length": Value("int32"),
    }
)
"""Columns of every data set for training: a canonical row, where it comes from, and its pictures and tokens."""
ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
# LLaVA's data sets the marker apart by a line break, which prompts at inference do not have.
_MARKER_AND_LINE_BREAKS = re.compile(r"(?:\r?\n)?<image>(?:\r?\n)?")


@dataclass(frozen=True)
class DroppedRow:
    """A row that is not trained on.

    Attributes:
        source: File or data set.
        row: Number in it, from 0.
        file: Its picture, if it has one; the one that is at fault if one is.
        reason: Why it was dropped.
        tokens: Its length, if that is the reason.
    """

    source: str
    row: int
    file: str | None
    reason: str
    tokens: int | None = None

    def __str__(self) -> str:
        picture = f" ({self.file})" if self.file and self.file not in self.reason else ""
        return f"{self.source}, row {self.row}{picture}: {self.reason}"


class DroppedRows:
    """A file with a line for each row dropped while training, which any number of processes may append to.

    It stays across a resumption. A process writes a row once however often it meets it, and a row that several
    processes wrote counts once.

    Args:
        path: The file; made with its folder at the first row.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._written: set[tuple[str, int]] = set()

    def add(self, dropped: DroppedRow) -> None:
        """Appends one line in one write, so that lines of several processes do not mix."""
        if (dropped.source, dropped.row) in self._written:
            return
        line = json.dumps(asdict(dropped)).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)
        self._written.add((dropped.source, dropped.row))

    def read(self) -> list[DroppedRow]:
        """The rows, each once, by source and number; empty if there is no file."""
        found: dict[tuple[str, int], DroppedRow] = {}
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            try:
                dropped = DroppedRow(**json.loads(line))
            except ValueError:  # the line that was being written when the process was killed
                continue
            found.setdefault((dropped.source, dropped.row), dropped)
        return [found[key] for key in sorted(found)]


def canonical_row(raw: Any, *, image_folder: str | None = None, image_token: str = MARKER) -> dict[str, Any]:
    """The row in canonical form, checked as far as that is possible without looking at the file system.

    In a user's string, `<image>` becomes the picture where it stands, and a line break on either side of it is not
    kept. Where the strings of `messages` or of a prompt have no `<image>`, pictures begin the first user turn, as in
    TRL; `conversations` must have them. White space around an answer is not kept, since it would be learned.

    Args:
        raw: The row as its file has it.
        image_folder: Folder that the paths of pictures start from and may not leave; None if there is none.
        image_token: The tokenizer's image token, which no text may contain.

    Raises:
        ValueError: The row cannot be trained on. The text is the reason; it names neither row nor file.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"a row must be a mapping from column to value, got {_short(raw)}")
    turns, prompt_turns, images_need_markers = _turns(raw)
    pictures = _pictures(raw)
    messages = [_message(number, *turn) for number, turn in enumerate(turns)]
    if pictures and not images_need_markers and not any(_image_parts(messages)):
        first_user = next((message for message in messages if message["role"] == "user"), None)
        if first_user:
            first_user["content"] = [{"type": "image"} for _ in pictures] + first_user["content"]
    images = [_image(picture, image_folder) for picture in _placed(messages, pictures)]
    _check_turns(messages, prompt_turns)
    _check_texts(messages, image_token, prompt_turns)
    for message in messages:
        message["content"] = [{"type": part["type"], "text": part.get("text")} for part in message["content"]]
    return {"images": images, "messages": messages, "prompt_turns": prompt_turns}


def picture_name(raw: Any) -> str | None:
    """The name of a raw or canonical row's first picture, if it has one with a name."""
    if not isinstance(raw, Mapping):
        return None
    pictures = raw.get("images") or raw.get("image")
    first = pictures[0] if isinstance(pictures, (list, tuple)) and pictures else pictures
    name = first.get("path") if isinstance(first, Mapping) else first
    return printable(name) if isinstance(name, str) and name else None


def printable(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which JSON can hold and a file cannot."""
    return text.encode(errors="replace").decode()


def _turns(raw: Mapping) -> tuple[list[tuple[Any, Any]], int, bool]:
    """Roles and contents, the number of assistant turns in the prompt, and whether pictures must have markers."""
    if raw.get("conversations") is not None:
        return _pairs(raw["conversations"], "conversations", "from", "value"), 0, True
    if raw.get("messages") is not None:
        return _pairs(raw["messages"], "messages", "role", "content"), 0, False
    if raw.get("prompt") is not None and raw.get("completion") is not None:
        sides = []
        for column, role in (("prompt", "user"), ("completion", "assistant")):
            value = [{"role": role, "content": raw[column]}] if isinstance(raw[column], str) else raw[column]
            sides.append(_pairs(value, column, "role", "content"))
        return sides[0] + sides[1], sum(role == "assistant" for role, _ in sides[0]), False
    found = ", ".join(sorted(str(column) for column, value in raw.items() if value is not None)) or "none"
    raise ValueError(
        f"its format is not known. It has the columns: {found}; known are conversations (LLaVA), messages (TRL), and "
        "prompt with completion, each with or without image or images"
    )


def _pairs(turns: Any, column: str, role: str, content: str) -> list[tuple[Any, Any]]:
    if not isinstance(turns, (list, tuple)):
        raise ValueError(f"{column} must be a list of turns, got {_short(turns)}")
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or role not in turn:
            raise ValueError(f"turn {number} of {column} must have {role!r} and {content!r}, got {_short(turn)}")
    return [(turn[role], turn.get(content)) for turn in turns]


def _pictures(raw: Mapping) -> list[Any]:
    given = [raw[column] for column in ("image", "images") if raw.get(column) not in (None, "", [], ())]
    if len(given) > 1:
        raise ValueError("it has pictures in both image and images; use one of them")
    if not given:
        return []
    return list(given[0]) if isinstance(given[0], (list, tuple)) else [given[0]]


def _message(number: int, role: Any, content: Any) -> dict[str, Any]:
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"turn {number} has the role {_short(role)}; known are {', '.join(ROLES)}")
    if isinstance(content, str):
        parts = _split(content) if ROLES[role] == "user" else [{"type": "text", "text": content}]
        return {"role": ROLES[role], "content": parts}
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"the content of turn {number} must be text or a list of parts, got {_short(content)}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image") or kind == "text" and not isinstance(part.get("text"), str):
            raise ValueError(f"turn {number} has {_short(part)}, which is neither a text part nor an image part")
    return {"role": ROLES[role], "content": [dict(part) for part in content]}


def _split(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(_MARKER_AND_LINE_BREAKS.split(text)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts or [{"type": "text", "text": ""}]


def _image_parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (part for message in messages for part in message["content"] if part["type"] == "image")


def _placed(messages: list[dict[str, Any]], pictures: list[Any]) -> list[Any]:
    """The pictures in the order of the image parts, some of which may hold their own."""
    own = [part.get("image") for part in _image_parts(messages)]
    if (places := own.count(None)) != len(pictures):
        raise ValueError(f"it has {places} places for pictures ({MARKER} or image parts) and {len(pictures)} pictures")
    rest = iter(pictures)
    return [next(rest) if picture is None else picture for picture in own]


def _image(picture: Any, folder: str | None) -> dict[str, Any]:
    is_struct = isinstance(picture, Mapping)
    path, content = (picture.get("path"), picture.get("bytes")) if is_struct else (picture, None)
    if content is not None and isinstance(content, bytes):
        # Not with its name: `datasets` would take a file of that name in the working directory in its place.
        return {"path": None, "bytes": content}
    if not isinstance(path, str) or not path or content is not None:
        raise ValueError(f"a picture must be a path, or a mapping with bytes or path, got {_short(picture)}")
    if printable(path) != path:
        raise ValueError(f"the path {_short(path)} is not valid Unicode")
    if is_struct and ("://" in path or (folder is None and os.path.isabs(path))):
        return {"path": path, "bytes": None}  # as `datasets` refers to files that it found itself
    if folder is None:
        raise ValueError(f"the picture {path} is a path, and there is no folder to start from; set image_folder")
    if os.path.isabs(path) and not is_struct:
        raise ValueError(f"the picture {path} has an absolute path; paths start from the image folder {folder}")
    root = os.path.abspath(folder)
    full = os.path.abspath(os.path.join(root, path))
    if os.path.commonpath([root, full]) != root:
        raise ValueError(f"the picture {path} leaves the image folder {folder}")
    return {"path": full, "bytes": None}


def _check_turns(messages: list[dict[str, Any]], prompt_turns: int) -> None:
    roles = [message["role"] for message in messages]
    start = int(roles[:1] == ["system"])
    if not any(role == "assistant" for role in roles):
        raise ValueError("it has no assistant turn, and so nothing to learn")
    if roles[start] == "assistant":
        raise ValueError("the conversation begins with the assistant; the user must speak first")
    for number, role in enumerate(roles[start:]):
        if role != ("user", "assistant")[number % 2]:
            raise ValueError(f"turn {start + number} is the {role}'s; user and assistant must take turns")
    if roles[-1] != "assistant":
        raise ValueError("the last turn is the user's; the conversation must end with an answer")
    if roles.count("assistant") <= prompt_turns:
        raise ValueError("the completion has no assistant turn, and so nothing to learn")


def _check_texts(messages: list[dict[str, Any]], image_token: str, prompt_turns: int) -> None:
    answers = 0
    for number, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        if message["role"] != "user" and any(part["type"] == "image" for part in message["content"]):
            raise ValueError(f"turn {number}, the {message['role']}'s, has a picture; only the user shows pictures")
        text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        if printable(text) != text:
            raise ValueError(f"turn {number}, the {message['role']}'s, is not valid Unicode: half of a surrogate pair")
        for token in {MARKER, image_token}:
            if token in text:
                raise ValueError(f"turn {number}, the {message['role']}'s, has {token} where no picture is")
        if is_answer:
            if answers >= prompt_turns and not text.strip():
                raise ValueError(f"the answer in turn {number} is empty")
            answers += 1
            message["content"] = [{"type": "text", "text": text.strip()}]
        elif not message["content"]:
            message["content"] = [{"type": "text", "text": ""}]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
