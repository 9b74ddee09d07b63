# SPDX-License-Identifier: Apache-2.0
"""Rows in any known form are parsed, or refused with a reason.

A parsed row has explicit content parts, with each image in the turn it belongs to:

    images       list of {"path": str | None, "bytes": bytes | None}, one of which is None
    messages     list of {"role": str, "content": [{"type": "image" | "text", "text": str | None}]}
    learned      for each assistant turn, whether it has labels; in a prompt it has none

After an optional system turn, user and assistant take turns, the user first and the assistant last.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from datasets import Features, Image, List, Value
from transformers import PreTrainedTokenizerBase

from ...errors import printable
from .forms import MARKER, columns as columns_of, known_row, markers, proposal
from .images import ImageRules
from .turns import Row, text_part


_TEXT = Value("string")
MESSAGES = List({"role": _TEXT, "content": List({"type": _TEXT, "text": _TEXT})})
FEATURES = Features(
    images=List(Image(decode=False)),
    messages=MESSAGES,
    learned=List(Value("bool")),
    source=_TEXT,
    row=Value("int64"),
    image_count=Value("int32"),
    length=Value("int32"),
)
"""Columns of data to train on: a parsed row, its source, and its numbers of images and tokens."""


@dataclass(frozen=True)
class DroppedRow:
    """A row that is not trained on."""

    source: str  # file or data set
    row: int  # number in it, from 0
    file: str | None  # the row's first image, or the one that is the reason
    reason: str
    tokens: int | None = None  # the row's length, if that is the reason

    @property
    def key(self) -> tuple[str, int]:
        """What is recorded once."""
        return self.source, self.row

    def __str__(self) -> str:
        place = f"{self.source}, row {self.row}"
        if self.file and self.file not in self.reason:
            place += f" ({self.file})"
        return f"{place}: {self.reason}"


class BadRow(ValueError):
    """A row that training stops at."""

    def __init__(self, text: str):
        # Of a data loader's worker, torch puts the traceback before the text.
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2].rstrip())


class DroppedRows:
    """A file with a line for each dropped row, to which processes and resumed runs append."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._written: set[tuple[str, int]] = set()

    def add(self, dropped: DroppedRow) -> None:
        """Appends a line in one write, so that lines of several processes do not mix."""
        if not self._written:
            self._written = {row.key for row in self.read()}
        if dropped.key in self._written:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(dropped)) + "\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())
        self._written.add(dropped.key)

    def read(self) -> list[DroppedRow]:
        """Returns the dropped rows, once each, sorted by source and number."""
        if not self.path.exists():
            return []
        rows: dict[tuple[str, int], DroppedRow] = {}
        for line in self.path.read_bytes().splitlines():
            try:
                dropped = DroppedRow(**json.loads(line))
            except ValueError:  # the line that was being written when the process was killed
                continue
            rows.setdefault(dropped.key, dropped)
        return [rows[key] for key in sorted(rows)]


def parse_row(
    raw: Any,
    rules: ImageRules | None = None,
    *,
    image_token: str = MARKER,
    control_tokens: re.Pattern[str] | None = None,
) -> dict[str, Any]:
    """Returns the row in parsed form, with the other attributes of [`Row`].

    White space around an answer is removed, since it would be learned. Files of images are not
    checked.

    Args:
        raw: A row in any known form.
        rules: Which files images may be; by default any local file.
        image_token: The tokenizer's image token, which no text may have.
        control_tokens: Matches what else no text may have: see [`control_tokens`].

    Raises:
        ValueError: If the row cannot be trained on, with the reason.
    """
    row = known_row(raw)
    if row.form == "text" and isinstance(raw.get("label"), str):
        remedy = proposal(raw)
        if remedy:
            caption = "a caption with --columns caption=text"
            raise ValueError(f"label may be the answer{remedy}; {caption}")
    if rules is None:
        rules = ImageRules()
    images = [rules.image(image) for image in row.images]
    _check_turns(row, raw)
    _check_texts(row, {MARKER, image_token}, control_tokens)
    messages = _stored_messages(row.messages)
    left_out = list(row.left_out)
    if images:  # without any, they may be what should show them: see `unread_image`
        left_out += dict.fromkeys(f"text {marker}" for marker in markers(messages))
    return {**vars(row), "messages": messages, "images": images, "left_out": left_out}


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the special tokens, which the tokenizer reads as such anywhere in a text."""
    special = set(tokenizer.all_special_tokens)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            special.add(token.content)
    return any_of(special)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing if there are none."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _check_turns(row: Row, raw: Mapping) -> None:
    """Raises ValueError if no answer is learned, or user and assistant do not take turns."""
    roles = [message["role"] for message in row.messages]
    if "assistant" not in roles:
        columns = columns_of(raw)
        problem = "it has no assistant turn"
        if columns == "image":
            problem += "; add a metadata.csv with file_name, question and answer"
        raise ValueError(f"{problem}; its columns are {columns}{proposal(raw)}")
    first = 1 if roles[0] == "system" else 0
    expected_roles = cycle(("user", "assistant"))
    for number in range(first, len(roles)):
        role = roles[number]
        if role != next(expected_roles):
            raise ValueError(f"turn {number} is the {role}'s; turns must alternate, the user first")
    if roles[-1] != "assistant":
        raise ValueError("the last turn is the user's; the conversation must end with an answer")
    if not any(row.learned):
        raise ValueError("no answer is learned: each is in the prompt, or has weight or loss 0")


def _text_of(message: Mapping) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def _check_texts(row: Row, image_tokens: set[str], control_tokens: re.Pattern[str] | None) -> None:
    """Raises ValueError if a turn has an image or a text that it may not have."""
    learned = iter(row.learned)
    for number, message in enumerate(row.messages):
        role = message["role"]
        turn = f"turn {number}, the {role}'s,"
        if role != "user" and any(part["type"] == "image" for part in message["content"]):
            raise ValueError(f"{turn} has an image; only the user shows images")
        text = _text_of(message)
        if printable(text) != text:
            raise ValueError(f"{turn} is not valid Unicode: half of a surrogate pair")
        for token in image_tokens:
            if token in text:
                raise ValueError(f"{turn} has {token} where no image is")
        control_token = control_tokens.search(text) if control_tokens else None
        if control_token:
            raise ValueError(f"{turn} has {control_token[0]}, a control token of the tokenizer")
        if role == "assistant" and next(learned) and not text.strip():
            raise ValueError(f"the answer in turn {number} is empty")


def _stored_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose parts have the columns of `MESSAGES`, an answer a single part."""
    stored = []
    for message in messages:
        parts = message["content"] or [text_part("")]
        if message["role"] == "assistant":
            parts = [text_part(_text_of(message).strip())]
        content = [{"type": part["type"], "text": part.get("text")} for part in parts]
        stored.append({"role": message["role"], "content": content})
    return stored
