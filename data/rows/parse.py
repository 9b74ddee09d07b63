# SPDX-License-Identifier: Apache-2.0
"""Parses rows in any known form, or refuses them with a reason.

A parsed row has explicit content parts, with each image in the turn it belongs to:

    images       list of {"path": str | None, "bytes": bytes | None}, where one is None
    messages     list of {"role": str, "content": [{"type": "image" | "text", "text": str | None}]}
    learned      for each assistant turn, whether it has labels, as turns of a prompt have not

After an optional system turn, user and assistant take turns, the user first and the assistant last.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Features, Image, List, Value
from transformers import PreTrainedTokenizerBase

from ...console import printable
from .forms import MARKER, columns_proposal, filled_columns, markers, read_row_with_proposal
from .images import ImageRules
from .turns import Message, Row, text_part


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

ParsedRow: TypeAlias = dict[str, Any]
"""A row with at least the columns `images`, `messages` and `learned` of [`FEATURES`]."""


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
        """Identifies the row: each is recorded only once."""
        return self.source, self.row

    def __str__(self) -> str:
        description = f"{self.source}, row {self.row}"
        if self.file and self.file not in self.reason:
            description += f" ({self.file})"
        return f"{description}: {self.reason}"


class BadRow(ValueError):
    """A row that training stops at."""

    def __init__(self, text: str):
        # If a data loader's worker raised the error, torch puts the traceback before the text.
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2].rstrip())


class DroppedRows:
    """A file with a line for each dropped row. Processes and resumed runs append to it."""

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
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps(asdict(dropped)).encode() + b"\n")
        self._written.add(dropped.key)

    def read(self) -> list[DroppedRow]:
        """Returns the dropped rows, once each, sorted by source and number."""
        if not self.path.exists():
            return []
        dropped_rows: dict[tuple[str, int], DroppedRow] = {}
        for line in self.path.read_bytes().splitlines():
            try:
                dropped = DroppedRow(**json.loads(line))
            except ValueError:  # the line that was being written when the process was killed
                continue
            dropped_rows.setdefault(dropped.key, dropped)
        return [dropped_rows[key] for key in sorted(dropped_rows)]


def parse_row(
    raw: Any,
    rules: ImageRules | None = None,
    *,
    image_token: str = MARKER,
    control_tokens: re.Pattern[str] | None = None,
) -> ParsedRow:
    """Returns the row in parsed form, with the other attributes of [`Row`].

    White space around an answer is removed, since it would be learned. Files of images are not
    opened, nor looked for.

    Args:
        raw: A row in any known form.
        rules: Which files images may be. By default any local file.
        image_token: The tokenizer's image token. No text may have it.
        control_tokens: Matches other tokens that no text may have: see [`control_tokens`].

    Raises:
        ValueError: The row cannot be trained on. The message is the reason.
    """
    row = read_row_with_proposal(raw)
    if row.form == "text" and isinstance(raw.get("label"), str):
        remedy = columns_proposal(raw)
        if remedy:
            raise ValueError(
                f"label may be the answer{remedy}; a caption with --columns caption=text"
            )
    rules = rules or ImageRules()
    images = list(map(rules.image, row.images))
    _check_turns(row, raw)
    _check_texts(row, {MARKER, image_token}, control_tokens)
    messages = []  # as `MESSAGES` describes them. The parts of an answer become one part
    for message in row.messages:
        stored_parts = message["content"] or [text_part("")]
        if message["role"] == "assistant":
            stored_parts = [text_part(_text_of(message).strip())]
        stored_content = [{"type": part["type"], "text": part.get("text")} for part in stored_parts]
        messages.append({"role": message["role"], "content": stored_content})
    left_out = list(row.left_out)
    if images:  # without images, `unread_image` reports the markers
        left_out += dict.fromkeys(f"text {marker}" for marker in markers(messages))
    return {**vars(row), "messages": messages, "images": images, "left_out": left_out}


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Returns a pattern of the special tokens. The tokenizer finds them anywhere in a text."""
    added_tokens = tokenizer.added_tokens_decoder.values()
    special_tokens = [token.content for token in added_tokens if token.special]
    return any_of({*special_tokens, *tokenizer.all_special_tokens})


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of any of the texts. Without texts it never matches."""
    # In this order a text comes before its own beginnings, so that the longest one matches.
    return re.compile("|".join(map(re.escape, sorted(texts, reverse=True))) or "(?!)")


def _check_turns(row: Row, raw: Mapping) -> None:
    """Raises ValueError if no answer is learned, or user and assistant do not take turns."""
    roles = [message["role"] for message in row.messages]
    if "assistant" not in roles:
        column_names = filled_columns(raw)
        problem = "it has no assistant turn"
        if column_names == "image":
            problem += "; add a metadata.csv with file_name, question and answer"
        raise ValueError(f"{problem}; its columns are {column_names}{columns_proposal(raw)}")
    first_turn = 1 if roles[0] == "system" else 0
    expected_roles = cycle(("user", "assistant"))
    for turn_number, role in enumerate(roles[first_turn:], first_turn):
        if role != next(expected_roles):
            raise ValueError(
                f"turn {turn_number} is the {role}'s; turns must alternate, the user first"
            )
    if roles[-1] != "assistant":
        raise ValueError("the last turn is the user's; the conversation must end with an answer")
    if not any(row.learned):
        raise ValueError("no answer is learned: each is in the prompt, or has weight or loss 0")


def _check_texts(row: Row, image_tokens: set[str], control_tokens: re.Pattern[str] | None) -> None:
    """Raises ValueError if a turn has an image or a text that is not allowed there.

    That is half a surrogate pair, a token of an image or a control token, or an empty answer that
    is learned.
    """
    learned = iter(row.learned)
    for turn_number, message in enumerate(row.messages):
        role = message["role"]
        turn_name = f"turn {turn_number}, the {role}'s,"
        if role != "user" and any(part["type"] == "image" for part in message["content"]):
            raise ValueError(f"{turn_name} has an image; only the user shows images")
        turn_text = _text_of(message)
        if printable(turn_text) != turn_text:
            raise ValueError(f"{turn_name} is not valid Unicode: half of a surrogate pair")
        for token in image_tokens:
            if token in turn_text:
                raise ValueError(f"{turn_name} has {token} where no image is")
        found = control_tokens and control_tokens.search(turn_text)
        if found:
            raise ValueError(f"{turn_name} has {found[0]}, a control token of the tokenizer")
        if role == "assistant" and next(learned) and not turn_text.strip():
            raise ValueError(f"the answer in turn {turn_number} is empty")


def _text_of(message: Message) -> str:
    """Returns the text of all parts of a message."""
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")
