# SPDX-License-Identifier: Apache-2.0
"""Rows as a model sees them, with what is learned marked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.text import Text
from torch import Tensor
from transformers import LlavaProcessor


@dataclass
class Example:
    """A row as the model sees it, in pieces of text that are learned or not."""

    title: str  # such as its file, its number and its images
    pieces: list[tuple[str, bool]]


def marked(examples: Sequence[Example], terminal: bool = False) -> Text:
    """Returns the examples. What is learned is underlined, or in double brackets in a file."""
    text = Text()
    for number, example in enumerate(examples):
        if number:
            text.append("\n\n")
        text.append(f"{example.title}:\n\n")
        for piece, learned in example.pieces:
            if learned and terminal:
                text.append(piece, style="bold underline")
            elif learned:
                text.append(f"[[{piece}]]")
            else:
                text.append(piece)
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


def batch_examples(batch: Mapping[str, Any], processor: LlavaProcessor) -> list[Example]:
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
