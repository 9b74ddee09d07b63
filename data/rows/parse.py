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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Features, Image, List, Value
from transformers import PreTrainedTokenizerBase

from ...errors import printable
from .forms import MARKER, columns as columns_of, known_row, markers, proposal
from .images import ImageRules
from .turns import Row


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

    def __str__(self) -> str:
        file = f" ({self.file})" if self.file and self.file not in self.reason else ""
        return f"{self.source}, row {self.row}{file}: {self.reason}"


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
        self._written = self._written or {(row.source, row.row) for row in self.read()}
        if (dropped.source, dropped.row) in self._written:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps(asdict(dropped)).encode() + b"\n")
        self._written.add((dropped.source, dropped.row))

    def read(self) -> list[DroppedRow]:
        """The dropped rows, once each, sorted by source and number; empty without a file."""
        rows: dict[tuple[str, int], DroppedRow] = {}
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            try:
                dropped = DroppedRow(**json.loads(line))
            except ValueError:  # the line that was being written when the process was killed
                continue
            rows.setdefault((dropped.source, dropped.row), dropped)
        return [rows[key] for key in sorted(rows)]


def parse_row(
    raw: Any,
    rules: ImageRules | None = None,
    *,
    image_token: str = MARKER,
    control_tokens: re.Pattern[str] | None = None,
) -> dict[str, Any]:
    """The row in parsed form, with the other attributes of [`Row`]; its files are not checked.

    White space around an answer is removed, since it would be learned. Raises ValueError with the
    reason if it cannot be trained on, as where a text has the image token or a control token.
    """
    row = known_row(raw)
    if row.form == "text" and isinstance(raw.get("label"), str) and (remedy := proposal(raw)):
        raise ValueError(f"label may be the answer{remedy}; a caption with --columns caption=text")
    images = [(rules or ImageRules()).image(image) for image in row.images]
    _check_turns(row, raw)
    _check_texts(row, image_token, control_tokens)
    if images:  # without any, they may be what should show them: see `unread_image`
        row.left_out += dict.fromkeys(f"text {marker}" for marker in markers(row.messages))
    return {**vars(row), "images": images}


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the special tokens, which the tokenizer reads as such anywhere in a text."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special.update(tokenizer.all_special_tokens)
    longest_first = sorted(special, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _check_turns(row: Row, raw: Mapping) -> None:
    roles = [message["role"] for message in row.messages]
    start = int(roles[:1] == ["system"])
    if "assistant" not in roles:
        columns = columns_of(raw)
        add = "; add a metadata.csv with file_name, question and answer" * (columns == "image")
        raise ValueError(f"it has no assistant turn{add}; its columns are {columns}{proposal(raw)}")
    for number, role in enumerate(roles[start:], start):
        if role != ("user", "assistant")[(number - start) % 2]:
            raise ValueError(f"turn {number} is the {role}'s; turns must alternate, the user first")
    if roles[-1] != "assistant":
        raise ValueError("the last turn is the user's; the conversation must end with an answer")
    if not any(row.learned):
        raise ValueError("no answer is learned: each is in the prompt, or has weight or loss 0")


def _check_texts(row: Row, image_token: str, control_tokens: re.Pattern[str] | None) -> None:
    learned = iter(row.learned)
    for number, message in enumerate(row.messages):
        role, parts = message["role"], message["content"]
        turn = f"turn {number}, the {role}'s,"
        if role != "user" and any(part["type"] == "image" for part in parts):
            raise ValueError(f"{turn} has an image; only the user shows images")
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        if printable(text) != text:
            raise ValueError(f"{turn} is not valid Unicode: half of a surrogate pair")
        for token in {MARKER, image_token}:
            if token in text:
                raise ValueError(f"{turn} has {token} where no image is")
        if control_tokens and (control := control_tokens.search(text)):
            raise ValueError(f"{turn} has {control[0]}, a control token of the tokenizer")
        if role == "assistant":
            if next(learned) and not text.strip():
                raise ValueError(f"the answer in turn {number} is empty")
            parts = [{"type": "text", "text": text.strip()}]
        parts = parts or [{"type": "text", "text": ""}]
        message["content"] = [{"type": part["type"], "text": part.get("text")} for part in parts]
