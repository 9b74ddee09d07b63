# SPDX-License-Identifier: Apache-2.0
"""Makes batches of parsed rows, with labels on exactly the answers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import LlavaProcessor
from trl.trainer.utils import pad

from ..assembly.processing import settle
from ..checkpoint.untrusted import loading
from ..data.rows.checks import tokens_per_image
from ..data.rows.images import decode_image
from ..data.rows.parse import BadRow, DroppedRow, DroppedRows
from .packing import without_padding


_PROBE = [
    {"role": "user", "content": [{"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A red kite."}]},
]
_IGNORED = -100


@dataclass
class ConversationCollator:
    """Opens the images of parsed rows, and labels the answers with their end-of-turn tokens.

    White space after the end-of-turn token is not labelled, nor are answers that are not `learned`. A batch without
    images has no `pixel_values`. A row that is skipped for a bad image stays in the batch, whose shape the other
    processes rely on, with a white image and no labels, so that it adds nothing to the loss.

    Otherwise the tensors are those of TRL's `DataCollatorForVisionLanguageModeling`. Image tokens are repeated after
    the answers are labelled: in the text, hundreds would be tokenized.

    Args:
        processor: Its chat template must have generation marks. It is settled, see [`settle`].
        pad_to_multiple_of, padding_free: As in `SFTConfig`; without padding, see [`without_padding`].
        bad_rows: `"stop"` raises ValueError at a bad image, `"skip"` records the row in `dropped_rows`; a share, or
            None for the default, skips as many rows as `skippable`, see [`prepare_rows`].
        skippable, share: Rows that a process may skip, and the share of its rows, if that is more.
    """

    processor: LlavaProcessor
    pad_to_multiple_of: int | None = None
    bad_rows: str | float | None = None
    dropped_rows: DroppedRows | None = None
    padding_free: bool = False
    skippable: int = 0
    share: float = 0.0

    def __post_init__(self):
        self._skipped: set[tuple[str, int]] = set()
        self._rows = 0
        settle(self.processor)
        self._tokens_per_image = tokens_per_image(self.processor)
        with loading("The chat template"):
            ((_, labels),) = self._encoded([{"messages": _PROBE}])
        if (labels == _IGNORED).all():
            raise ValueError(
                "The chat template marks no answer with {% generation %}, so nothing would be learned. "
                "`normalign build` says whether a template has marks, and takes another with --chat-template."
            )

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch of rows, padded on the right: ids, mask and labels `(rows, tokens)`, and `pixel_values`."""
        self._rows += len(examples)
        opened = [self._images(example) for example in examples]
        rows = []
        for (ids, labels), example, (_, bad) in zip(self._encoded(examples), examples, opened, strict=True):
            self._remove_labels(labels, example, bad)
            # Not torch's repeat_interleave, whose threads go on spinning while the next images are decoded.
            repeats = np.where(ids.numpy() == self.processor.image_token_id, self._tokens_per_image, 1)
            rows.append([torch.from_numpy(np.repeat(row.numpy(), repeats)) for row in (ids, labels)])
        all_ids, all_labels = zip(*rows, strict=True)
        padded = partial(pad, pad_to_multiple_of=self.pad_to_multiple_of)
        batch = {
            "input_ids": padded(all_ids, self.processor.tokenizer.pad_token_id),
            "attention_mask": padded([torch.ones_like(ids) for ids in all_ids], 0),
            "labels": padded(all_labels, _IGNORED),
        }
        if images := [image for images, _ in opened for image in images]:
            batch |= self.processor.image_processor(images, return_tensors="pt")
        return without_padding(batch) if self.padding_free else batch

    def _encoded(self, examples: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
        """Token ids and labels of each row, `(T,)`, with one image token for each image."""
        encoded = self.processor.tokenizer.apply_chat_template(
            [_messages(example) for example in examples],
            chat_template=self.processor.chat_template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        all_ids, masks = (map(torch.tensor, encoded[name]) for name in ("input_ids", "assistant_masks"))
        return [(ids, torch.where(mask == 1, ids, _IGNORED)) for ids, mask in zip(all_ids, masks, strict=True)]

    def _images(self, example: dict[str, Any]) -> tuple[list[Image.Image], bool]:
        """The row's images, white in place of bad ones, and whether there was a bad one."""
        images, bad = [], False
        for image in example["images"]:
            try:
                images.append(decode_image(image))
            except ValueError as error:
                dropped = DroppedRow(example["source"], example["row"], image["path"], str(error))
                self._skipped.add((dropped.source, dropped.row))
                if self.bad_rows != "skip" and len(self._skipped) > max(self.skippable, self.share * self._rows):
                    count = f"This process met {len(self._skipped)} bad row(s)."
                    raise BadRow(f"{dropped}. {count} Fix it, or skip such rows with --bad_rows skip.") from error
                if self.dropped_rows and not bad:
                    self.dropped_rows.add(dropped)
                images.append(Image.new("RGB", (64, 64), "white"))
                bad = True
        return images, bad

    def _remove_labels(self, labels: Tensor, example: dict[str, Any], bad: bool) -> None:
        """Removes labels that are not to be learned from one row `(T,)`, in place."""
        edges = torch.nn.functional.pad(labels != _IGNORED, (1, 1)).int().diff().nonzero().flatten().tolist()
        spans, learned = list(zip(edges[::2], edges[1::2], strict=True)), example["learned"]
        if all(learned):
            learned = [True] * len(spans)  # however many a template marks
        elif len(spans) != len(learned):
            raise ValueError(
                f"{example['source']}, row {example['row']}: the chat template marks {len(spans)} of {len(learned)} "
                "answers, so those that are not to be learned are unknown. Give rows whose answers are all learned."
            )
        for (start, stop), is_learned in zip(spans, learned, strict=True):
            keep = stop - start if is_learned and not bad else 0
            while keep and not self.processor.tokenizer.decode(labels[start + keep - 1]).strip():
                keep -= 1
            labels[start + keep : stop] = _IGNORED


def blank_image(processor: LlavaProcessor) -> Tensor:
    """An image of zeros in the shape that the vision tower reads, `(1, channels, height, width)`."""
    image = processor.image_processor(Image.new("RGB", (32, 32)), return_tensors="pt")
    return torch.zeros_like(image["pixel_values"])


def _messages(example: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages, without the empty texts that Arrow gives image parts."""
    return [
        {
            "role": message["role"],
            "content": [
                {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]}
                for part in message["content"]
            ],
        }
        for message in example["messages"]
    ]
