# SPDX-License-Identifier: Apache-2.0
"""Images with questions, and the model inputs made of them."""

import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from PIL import Image
from rich.progress import track
from torch import Tensor
from transformers import ProcessorMixin

from ..console import printable
from ..data.rows.forms import filled_columns, image_name, read_row_with_proposal, unread_image
from ..data.rows.images import decode_image
from ..data.sources.arguments import DataSource
from ..data.sources.source import Source, open_source
from ..evaluation.answering import model_inputs, user_turn
from ..evaluation.questions import label_of_data, row_name, text_of
from ..fetched.easy_vqa import held_out


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """A question about an image.

    Attributes:
        name: Data set, row and image file, without the folders above the data.
        question: The question.
        stored: The image's `path` or its `bytes`, as `datasets` stores them.
    """

    name: str
    question: str
    stored: dict[str, Any]

    @property
    def image(self) -> Image.Image:
        """The image, upright and in RGB. It is decoded at each access.

        Raises ValueError if it cannot be decoded.
        """
        try:
            return decode_image(self.stored)
        except ValueError as error:
            raise ValueError(f"The image of {self.name} cannot be used: {error}") from error


@dataclass(frozen=True)
class Samples:
    """Samples, and the name of the data that they were drawn from."""

    name: str
    samples: list[Sample]


def load_samples(
    data: str | None,
    count: int,
    *,
    seed: int = 0,
    image_folder: str | None = None,
    columns: str | None = None,
) -> Samples:
    """Reads questions with images. All images are decoded, so that a bad one is reported at once.

    The first image and the first user turn of a row are used. Rows without an image are skipped.

    Args:
        data: Data in any form that training reads, with or without answers. By default, the
            built-in images.
        count: Number of samples. If there are fewer, all are used, with a warning.
        seed: Seed of the random choice.
        image_folder, columns: See [`DataSource`].

    Raises:
        ValueError: The data cannot be read, a row cannot be used, or no row has an image.
    """
    generator = random.Random(seed)
    candidates: Iterable[Sample]
    if data is None:
        data_name = "easy-VQA and emoji"
        questions = held_out(per_kind=100)  # fetches their images the first time
        generator.shuffle(questions)
        candidates = [
            Sample(
                name=f"{question.kind} ({question.image.name})",
                question=question.text,
                stored={"path": str(question.image), "bytes": None},
            )
            for question in questions
        ]
    else:
        source = DataSource.named(data, image_folder=image_folder, columns=columns)
        data_name = label_of_data(data, source)
        opened = open_source(source, streaming=not Path(source.path).exists())
        shuffled_rows = _read_shuffled(opened, max(1_000, count), generator)
        candidates = _samples_of_rows(shuffled_rows, opened, data_name)
    samples = []
    for sample in track(islice(candidates, count), f"images of {data_name}", total=count):
        sample.image  # noqa: B018  (decoded for its errors)
        samples.append(sample)
    if not samples:
        raise ValueError(
            f"{data_name} has no row with an image. docs/data.md lists the forms of rows."
        )
    if len(samples) < count:
        logger.warning(
            f"{data_name} has only {len(samples):,} samples, not {count:,}. All are used."
        )
    return Samples(data_name, samples)


def batches(
    processor: ProcessorMixin, samples: Sequence[Sample], batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Yields model inputs of `samples`, in order, padded on the left: a question after its image.

    It is a user's turn of the chat template, with the prompt for an answer: see [`model_inputs`].

    Raises ValueError that names the samples if the processor fails.
    """
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        try:
            conversations = [[user_turn(sample.question, [sample.image])] for sample in batch]
            inputs = model_inputs(processor, conversations)
        except Exception as error:  # processors raise anything, and never name the sample
            names = ", ".join(sample.name for sample in batch)
            raise ValueError(f"The processor fails for {names}: {error}") from error
        yield dict(inputs)


def _read_shuffled(
    source: Source, limit: int, rng: random.Random
) -> Iterable[tuple[str, int, Any]]:
    """Returns the rows in random order. If they are a stream, reads its first `limit` rows."""
    if isinstance(source.data, Dataset):  # so that only the rows drawn are read
        row_count = len(source.data)
        order = rng.sample(range(row_count), row_count)
        return chain.from_iterable(source.rows_at([row]) for row in order)
    rows = list(track(islice(source, limit), f"reading {source.name}", total=limit))
    rng.shuffle(rows)
    return rows


def _samples_of_rows(
    rows: Iterable[tuple[str, int, Any]], source: Source, label: str
) -> Iterator[Sample]:
    """Yields the samples of the rows that have an image: the first one, and the question about it.

    `label` is the name of the data. Raises ValueError for a row whose image cannot be used, or that
    has an image without a question.
    """
    for origin, number, raw in rows:
        name = row_name(label, source, origin, number)
        image_file = image_name(raw)
        if image_file:
            if "://" in image_file or os.path.isabs(image_file):
                image_file = image_file.rpartition("/")[2]
            name = f"{name} ({image_file})"
        try:
            row = read_row_with_proposal(raw)
            if not row.images:
                continue
            image = source.rules.image(row.images[0])
            if image["bytes"] is None:
                source.rules.check_file(image["path"])
        except ValueError as error:
            has_image = not isinstance(raw, Mapping) or raw.get("image") or raw.get("images")
            if not has_image and not unread_image(raw, []):
                continue
            raise ValueError(f"{name} cannot be used: {error}.") from error
        texts = (text_of(turn) for turn in row.messages if turn["role"] == "user")
        question = printable(next(texts, ""))
        if not question:
            raise ValueError(f"{name} has no question. It has the columns {filled_columns(raw)}.")
        yield Sample(name, question, image)
