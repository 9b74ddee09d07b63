# SPDX-License-Identifier: Apache-2.0
"""Rows as a model sees them, with what is learned marked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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
    """The examples; what is learned is underlined, or in double brackets without a terminal."""
    text = Text()
    for number, example in enumerate(examples):
        text.append("\n\n" if number else "")
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
    """The text of a row in pieces that are learned or not, by its ids and labels, `(N,)` each."""
    found = list[tuple[str, bool]]()
    tokens = zip(ids.tolist(), (labels >= 0).tolist(), strict=True)
    image = processor.image_token_id
    for (is_image, learned), group in groupby(tokens, lambda token: (token[0] == image, token[1])):
        own = [token for token, _ in group]
        text = processor.tokenizer.decode(own)
        if is_image:
            text = f"{processor.image_token} x {len(own)}"
        found.append((text, learned))
    return found


def batch_examples(batch: Mapping[str, Any], processor: LlavaProcessor) -> list[Example]:
    """The rows of a batch of training, without padding; with `padding_free`, each by itself."""
    examples = list[Example]()
    for row, ids in enumerate(batch["input_ids"]):
        labels = batch["labels"][row]
        if "attention_mask" in batch:
            real = batch["attention_mask"][row].bool()
            ids, labels = ids[real], labels[real]
        starts = [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            own = pieces(ids[start:end], labels[start:end], processor)
            examples.append(Example(f"Row {len(examples) + 1} of the first batch", own))
    return examples
