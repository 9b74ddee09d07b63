# SPDX-License-Identifier: Apache-2.0
"""Batches of parsed rows, with labels on exactly the answers."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import LlavaProcessor
from trl.trainer.utils import pad

from ..assembly.processing import settle
from ..checkpoint.untrusted import refuse_unreadable
from ..data.rows.checks import tokens_per_image
from ..data.rows.images import decode_image
from ..data.rows.parse import BadRow, DroppedRow, DroppedRows, control_tokens, parse_row
from .keeping.skipped import SkippedRows


_PROBE = [
    {"role": "user", "content": [{"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A red kite."}]},
]
_IGNORED = -100
_PARSED = {"images", "messages", "learned", "source", "row"}  # columns that tell a parsed row


@dataclass
class ConversationCollator:
    """Opens the images of parsed rows, and labels the answers with their end-of-turn tokens.

    White space after the end-of-turn token is not labelled, nor are answers that are not `learned`.
    A batch without images has no `pixel_values`. A row with a bad image that is skipped stays in
    the batch, on whose shape other processes rely, with a white image and without labels.

    Otherwise the tensors are those of TRL's `DataCollatorForVisionLanguageModeling`. Image tokens
    are repeated after the answers are labelled: in the text, hundreds would be tokenized.

    Args:
        processor: Its chat template must have generation marks. It is settled, see [`settle`].
        pad_to_multiple_of, padding_free: As in `SFTConfig`; for the latter see [`without_padding`].
        bad_rows: `"stop"` raises ValueError at a bad image, `"skip"` records the row in
            `dropped_rows`, a share or None skips `skippable` rows, see [`prepare_rows`].
        skippable: Different rows that all epochs, processes and their workers together may skip.
        share: Of a stream, the share of the rows read so far that may be skipped, if that is more.
        skipped_rows: Where these rows are counted. By default, copies of this collator share them.
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
        self._last_rows: dict[str, int] = {}  # the highest number of a row read of each source
        settle(self.processor)
        self._tokens_per_image = tokens_per_image(self.processor)
        with refuse_unreadable("The chat template"):
            ((_, labels),) = self._encoded([{"messages": _PROBE}])
        if (labels == _IGNORED).all():
            raise ValueError(
                "The chat template marks no answer with {% generation %}, so nothing is learned. "
                "Build the checkpoint with `normalign build --chat-template FILE`."
            )

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Ids, mask and labels `(rows, tokens)`, padded on the right, and `pixel_values`.

        Rows may have any form of docs/data.md, also with PIL images; those that the trainer gives
        are parsed. Raises ValueError for a row that cannot be trained on.
        """
        examples = [self._parsed(example, number) for number, example in enumerate(examples)]
        if self.share:
            self._count_rows(examples)
        all_images: list[Image.Image] = []
        all_ids: list[Tensor] = []
        all_labels: list[Tensor] = []
        for example, (ids, labels) in zip(examples, self._encoded(examples), strict=True):
            images, has_bad_image = self._images(example)
            self._remove_labels(labels, example, has_bad_image)
            all_images += images
            all_ids.append(self._with_image_tokens(ids, ids))
            all_labels.append(self._with_image_tokens(labels, ids))
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

    def _with_image_tokens(self, values: Tensor, ids: Tensor) -> Tensor:
        """Returns a row's values with those of an image token repeated for each of its patches."""
        # Threads of torch's repeat_interleave would spin while the next images are decoded.
        is_image = ids.numpy() == self.processor.image_token_id
        counts = np.where(is_image, self._tokens_per_image, 1)
        return torch.from_numpy(np.repeat(values.numpy(), counts))

    def _parsed(self, example: dict[str, Any], number: int) -> dict[str, Any]:
        """A row in parsed form; `number` is its place in the batch, for errors."""
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

    def _encoded(self, examples: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
        """Token ids and labels of each row, `(T,)`, with one image token for each image."""
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

    def _images(self, example: dict[str, Any]) -> tuple[list[Image.Image], bool]:
        """The row's images, white in place of bad ones, and whether there was a bad one."""
        images = []
        has_bad_image = False
        for image in example["images"]:
            try:
                images.append(decode_image(image))
            except ValueError as error:
                dropped = DroppedRow(example["source"], example["row"], image["path"], str(error))
                too_many = self._too_many(dropped)
                if too_many:
                    raise BadRow(f"{dropped}. {too_many}") from error
                if self.dropped_rows and not has_bad_image:
                    self.dropped_rows.add(dropped)
                images.append(Image.new("RGB", (64, 64), "white"))
                has_bad_image = True
        return images, has_bad_image

    def _count_rows(self, examples: list[dict[str, Any]]) -> None:
        """Takes note of how far a stream was read.

        Rows are numbered, and every process reads the stream in the same order and takes its part,
        so the highest number tells how many different rows all of them read, in any epoch.
        """
        for example in examples:
            source = example["source"]
            self._last_rows[source] = max(example["row"], self._last_rows.get(source, 0))

    def _too_many(self, dropped: DroppedRow) -> str | None:
        """Counts a row with a bad image; what to do if more are bad than allowed, or None."""
        if self.bad_rows == "skip":
            return None
        rows_read = sum(last + 1 for last in self._last_rows.values())
        allowed = max(self.skippable, self.share * rows_read)
        count = self.skipped_rows.add(dropped.source, dropped.row, allowed)
        if count is None:
            return None
        met = f"Training met {count:,} bad row(s), and {int(allowed):,} may be skipped."
        return f"{met} Fix it, or use `normalign train --bad_rows skip`."

    def _remove_labels(self, labels: Tensor, example: dict[str, Any], has_bad_image: bool) -> None:
        """Removes labels that are not to be learned from one row `(T,)`, in place."""
        spans = spans_of_labels(labels)
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


def spans_of_labels(labels: Tensor) -> list[tuple[int, int]]:
    """Returns where the spans of labels in a row `(T,)` start and stop."""
    is_label = torch.nn.functional.pad(labels != _IGNORED, (1, 1)).int()
    edges = is_label.diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def blank_image(processor: LlavaProcessor) -> Tensor:
    """Zeros in the shape that the vision tower reads, `(1, channels, height, width)`."""
    image = processor.image_processor(Image.new("RGB", (32, 32)), return_tensors="pt")
    return torch.zeros_like(image["pixel_values"])


def _messages(example: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages, without the empty texts that Arrow gives image parts."""
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
    """A padded batch of B rows as one sequence of their N tokens, kept apart by their position ids.

    transformers builds the mask of such a sequence, for every implementation of attention, from
    position ids that start again, without an attention mask and a cache. `input_ids`, `labels` and
    `position_ids` are `(1, N)`. A row's first label is masked: the token before is another row's.
    """
    real = batch.pop("attention_mask").bool()
    batch["labels"][torch.arange(len(real)), real.int().argmax(1)] = _IGNORED
    positions = real.long().cumsum(1) - 1
    sequence = {
        "input_ids": batch.pop("input_ids")[real][None],
        "labels": batch.pop("labels")[real][None],
        "position_ids": positions[real][None],
    }
    return {**sequence, **batch}


def count_rows_with_labels(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Numbers of rows with labels, and of rows without, in a batch with or without padding."""
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
