# SPDX-License-Identifier: Apache-2.0
"""Batches of parsed rows, with labels on exactly the answers, and texts that show them."""

import fcntl
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from multiprocessing.util import Finalize
from operator import itemgetter
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from PIL import Image
from rich.text import Text
from torch import Tensor
from transformers import LlavaProcessor
from trl.trainer.utils import pad

from ..assembly.processing import normalize_tokenization
from ..checkpoint.untrusted import refuse_unreadable
from ..data.rows.checks import tokens_per_image
from ..data.rows.images import decode_image
from ..data.rows.parse import (
    BadRow,
    DroppedRow,
    DroppedRows,
    ParsedRow,
    control_tokens,
    parse_row,
)


SKIPPED_ROWS = ".skipped_rows.jsonl"
"""File in `output_dir` with the rows that [`SkippedRows`] counts."""

_PROBE = [
    {"role": "user", "content": [{"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A red kite."}]},
]
_IGNORED = -100
_PARSED = {"images", "messages", "learned", "source", "row"}  # columns of every parsed row


class SkippedRows:
    """A set of rows in a file that all processes that read rows share.

    Workers of data loaders, forked or spawned, have a copy of this object with the same path, and
    so have the processes of a run with one `output_dir`. A resumed run finds the file again.

    Args:
        path: The file. It is created with the first row. By default it is a temporary file, and is
            removed with this object.
    """

    def __init__(self, path: Path | None = None):
        if path is None:
            self.path = Path(gettempdir(), f"normalign-skipped-{uuid4().hex}.jsonl")
            # Unlike weakref's, this finalizer does nothing in a fork of this process.
            Finalize(self, self.path.unlink, kwargs={"missing_ok": True}, exitpriority=0)
        else:
            self.path = path

    def add(self, source: str, row: int, allowed: float) -> int | None:
        """Adds a row, unless more than `allowed` rows would be in the set.

        Args:
            source: The source of the row.
            row: Its number there.
            allowed: How many rows may be in the set.

        Returns:
            None if the row is in the set now. Otherwise how many rows there would be. The row is
            then left out, because a run that is resumed after a repair of the row does not skip it.
        """
        if allowed < 1:
            return 1
        line = json.dumps([source, row]).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            file.seek(0)
            stored = set(file.read().splitlines())
            count = len(stored | {line})
            if count > allowed:
                return count
            if line not in stored:
                file.write(line + b"\n")
        return None

    def clear(self) -> None:
        """Removes all rows. Other processes must not add any before."""
        self.path.unlink(missing_ok=True)


@dataclass
class ConversationCollator:
    """Opens the images of parsed rows, and labels the answers with their end-of-turn tokens.

    White space after the end-of-turn token is not labelled, nor are answers that are not `learned`.
    A batch without images has no `pixel_values`. A skipped row with a bad image stays in the batch,
    because other processes rely on its shape. It has a white image and no labels.

    Otherwise the tensors are as in TRL's `DataCollatorForVisionLanguageModeling`. Image tokens are
    repeated after the answers are labelled: in the text, hundreds would be tokenized.

    Args:
        processor: Its chat template must have generation marks. [`normalize_tokenization`] changes
            its tokenizer.
        pad_to_multiple_of: As in `SFTConfig`.
        bad_rows: `"stop"` raises ValueError at a bad image, `"skip"` records the row in
            `dropped_rows`, a share or None skips `skippable` rows, see [`prepare_rows`].
        dropped_rows: The file of rows that were skipped.
        padding_free: As in `SFTConfig`: see [`without_padding`].
        skippable: Different rows that all epochs, processes and their workers together may skip.
        share: For a stream, the share of the rows read so far that may be skipped, if it is more.
        skipped_rows: Where these rows are counted. By default, copies of this collator share them.

    Raises:
        ValueError: The chat template or the processor cannot be used.
    """

    processor: LlavaProcessor
    pad_to_multiple_of: int | None = None
    bad_rows: str | float | None = None
    dropped_rows: DroppedRows | None = None
    padding_free: bool = False
    skippable: int = 0
    share: float = 0.0
    skipped_rows: SkippedRows = field(default_factory=SkippedRows)

    def __post_init__(self):
        self._last_rows = {}  # the highest number of a row read of each source
        normalize_tokenization(self.processor)
        self._tokens_per_image = tokens_per_image(self.processor)
        with refuse_unreadable("The chat template"):
            ((_, labels),) = self._encoded([{"messages": _PROBE}])
        if (labels == _IGNORED).all():
            raise ValueError(
                "The chat template marks no answer with {% generation %}, so nothing is learned. "
                "Build the checkpoint with `normalign build --chat-template FILE`."
            )

    def __call__(self, examples: list[ParsedRow]) -> dict[str, Tensor]:
        """Returns ids, mask and labels `(rows, tokens)`, padded on the right, and `pixel_values`.

        Rows may have any form of docs/data.md, also with PIL images. The trainer's are parsed.

        Raises:
            BadRow: A row cannot be trained on. It is a ValueError.
        """
        examples = [self._parsed(example, number) for number, example in enumerate(examples)]
        if self.share:
            # Rows are numbered, and every process reads the stream in the same order and takes its
            # part. So the highest number shows how many rows all of them have read, in any epoch.
            for example in examples:
                last_row = self._last_rows.get(example["source"], 0)
                self._last_rows[example["source"]] = max(example["row"], last_row)
        all_images = []
        all_ids = []
        all_labels = []
        for example, (ids, labels) in zip(examples, self._encoded(examples), strict=True):
            images, has_bad_image = self._opened_images(example)
            self._remove_labels(labels, example, has_bad_image)
            all_images += images
            # An image token is repeated for each of its patches. Threads of torch's
            # repeat_interleave would spin while the next images are decoded.
            is_image = ids.numpy() == self.processor.image_token_id
            counts = np.where(is_image, self._tokens_per_image, 1)
            all_ids.append(torch.from_numpy(np.repeat(ids.numpy(), counts)))
            all_labels.append(torch.from_numpy(np.repeat(labels.numpy(), counts)))
        padded = partial(pad, pad_to_multiple_of=self.pad_to_multiple_of)
        batch = {
            "input_ids": padded(all_ids, self.processor.tokenizer.pad_token_id),
            "attention_mask": padded([torch.ones_like(ids) for ids in all_ids], 0),
            "labels": padded(all_labels, _IGNORED),
        }
        if all_images:
            batch |= self.processor.image_processor(all_images, return_tensors="pt")
        if self.padding_free:
            batch = without_padding(batch)
        return batch

    def _parsed(self, example: dict[str, Any], number: int) -> ParsedRow:
        """Returns a row in parsed form. Errors name its `number` in the batch."""
        if example.keys() >= _PARSED:
            return example
        name = "a row given to the collator"
        image_token = self.processor.image_token
        control = control_tokens(self.processor.tokenizer)
        try:
            row = parse_row(example, image_token=image_token, control_tokens=control)
        except ValueError as error:
            raise BadRow(f"{name}, row {number} of its batch: {error}") from error
        return {**row, "source": name, "row": number}

    def _encoded(self, examples: list[ParsedRow]) -> list[tuple[Tensor, Tensor]]:
        """Returns ids and labels `(T,)` of each row, with one image token for each image."""
        encoded = self.processor.tokenizer.apply_chat_template(
            [_messages(example) for example in examples],
            chat_template=self.processor.chat_template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        rows = []
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            ids = torch.tensor(ids)
            rows.append((ids, torch.where(torch.tensor(mask) == 1, ids, _IGNORED)))
        return rows

    def _opened_images(self, example: ParsedRow) -> tuple[list[Image.Image], bool]:
        """Opens the row's images. Returns them, white for bad ones, and whether one was bad.

        Counts a row with a bad image. Raises BadRow if more are bad than may be skipped.
        """
        images = []
        has_bad_image = False
        for image in example["images"]:
            try:
                images.append(decode_image(image))
            except ValueError as error:
                dropped = DroppedRow(example["source"], example["row"], image["path"], str(error))
                rows_read = sum(last_row + 1 for last_row in self._last_rows.values())
                allowed = max(self.skippable, self.share * rows_read)
                count = None
                if self.bad_rows != "skip":
                    count = self.skipped_rows.add(dropped.source, dropped.row, allowed)
                if count is not None:
                    raise BadRow(
                        f"{dropped}. Training met {count:,} bad row(s), and {int(allowed):,} may "
                        "be skipped. Fix it, or use `normalign train --bad_rows skip`."
                    ) from error
                if self.dropped_rows and not has_bad_image:
                    self.dropped_rows.add(dropped)
                images.append(Image.new("RGB", (64, 64), "white"))
                has_bad_image = True
        return images, has_bad_image

    def _remove_labels(self, labels: Tensor, example: ParsedRow, has_bad_image: bool) -> None:
        """Removes labels that are not to be learned from one row `(T,)`, in place.

        Raises ValueError if it is not known which labels these are.
        """
        is_label = torch.nn.functional.pad(labels != _IGNORED, (1, 1)).int()
        edges = is_label.diff().nonzero().flatten().tolist()
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        learned = example["learned"]
        if all(learned):
            learned = [True] * len(spans)  # however many a template marks
        elif len(spans) != len(learned):
            raise ValueError(
                f"{example['source']}, row {example['row']}: the chat template marks {len(spans)} "
                f"of {len(learned)} answers, so those that are not to be learned are unknown. Give "
                "rows whose answers are all learned."
            )
        decode = self.processor.tokenizer.decode
        for (start, stop), is_learned in zip(spans, learned, strict=True):
            end = start
            if is_learned and not has_bad_image:
                end = stop
                while end > start and not decode(labels[end - 1]).strip():  # white space
                    end -= 1
            labels[end:stop] = _IGNORED


def blank_image(processor: LlavaProcessor) -> Tensor:
    """Returns zeros in the shape that the vision tower reads, `(1, channels, height, width)`."""
    processed = processor.image_processor(Image.new("RGB", (32, 32)), return_tensors="pt")
    return torch.zeros_like(processed["pixel_values"])


def _messages(example: ParsedRow) -> list[dict[str, Any]]:
    """Returns the messages, without the empty texts that Arrow gives image parts."""
    messages = []
    for message in example["messages"]:
        content = []
        for part in message["content"]:
            if part["type"] == "image":
                part = {"type": "image"}
            content.append(part)
        messages.append({"role": message["role"], "content": content})
    return messages


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """Joins a padded batch of B rows into one sequence of N tokens. Position ids keep rows apart.

    transformers builds the mask of such a sequence, for every implementation of attention, from
    position ids that start again, without an attention mask and a cache. `input_ids`, `labels` and
    `position_ids` are `(1, N)`. A row's first label is masked: the token before is another row's.
    """
    is_real = batch.pop("attention_mask").bool()
    batch["labels"][torch.arange(len(is_real)), is_real.int().argmax(1)] = _IGNORED
    positions = is_real.long().cumsum(1) - 1
    sequence = {
        "input_ids": batch.pop("input_ids")[is_real][None],
        "labels": batch.pop("labels")[is_real][None],
        "position_ids": positions[is_real][None],
    }
    return {**sequence, **batch}


def count_rows_with_labels(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns how many rows of a batch have labels, and how many have none."""
    is_label = batch["labels"] != _IGNORED
    if "attention_mask" not in batch and "position_ids" in batch:
        starts = batch["position_ids"][0] == 0
        row_of_token = starts.cumsum(0) - 1
        labels_of_row = torch.zeros_like(starts, dtype=torch.long)
        labels_of_row.index_add_(0, row_of_token, is_label[0].long())
        with_labels = (labels_of_row > 0).sum()
        rows = starts.sum()
    else:
        with_labels = is_label.any(1).sum()
        rows = torch.full_like(with_labels, len(is_label))
    return with_labels, rows - with_labels


@dataclass
class Example:
    """A row as the model sees it, in pieces of text that are learned or not."""

    title: str  # such as its file, its number and its images
    pieces: list[tuple[str, bool]]


def marked(examples: Sequence[Example], terminal: bool) -> Text:
    """Returns the examples. What is learned is underlined, or in double brackets in a file."""
    text = Text()
    for number, example in enumerate(examples):
        if number:
            text.append("\n\n")
        text.append(f"{example.title}:\n\n")
        for piece, learned in example.pieces:
            style = ""
            if learned and terminal:
                style = "bold underline"
            elif learned:
                piece = f"[[{piece}]]"
            text.append(piece, style)
    return text


def pieces(ids: Tensor, labels: Tensor, processor: LlavaProcessor) -> list[tuple[str, bool]]:
    """Returns a row's text in pieces that are learned or not.

    Args:
        ids: The row's tokens, `(N,)`.
        labels: Its labels, `(N,)`, negative where nothing is learned.
        processor: Decodes them.
    """
    image_tokens = (ids == processor.image_token_id).tolist()
    learned_tokens = (labels >= 0).tolist()
    row_pieces = []
    tokens = zip(image_tokens, learned_tokens, ids.tolist(), strict=True)
    for (is_image, is_learned), group in groupby(tokens, itemgetter(0, 1)):
        token_ids = [token_id for _, _, token_id in group]
        text = processor.tokenizer.decode(token_ids)
        if is_image:
            text = f"{processor.image_token} x {len(token_ids)}"
        row_pieces.append((text, is_learned))
    return row_pieces


def batch_examples(batch: dict[str, Any], processor: LlavaProcessor) -> list[Example]:
    """Returns the rows of a training batch without padding, each by itself."""
    examples: list[Example] = []
    for line, ids in enumerate(batch["input_ids"]):
        labels = batch["labels"][line]
        if "attention_mask" in batch:
            is_real = batch["attention_mask"][line].bool()
            ids = ids[is_real]
            labels = labels[is_real]
        starts = [0]
        if "position_ids" in batch:  # several rows in a line
            starts = (batch["position_ids"][line] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], len(ids)]
        for start, end in zip(starts, ends, strict=True):
            row_pieces = pieces(ids[start:end], labels[start:end], processor)
            title = f"Row {len(examples) + 1} of the first batch"
            examples.append(Example(title, row_pieces))
    return examples
