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
from ..data.rows.forms import columns as columns_of, image_name, known_row, unread_image
from ..data.rows.images import decode_image
from ..data.rows.turns import Row
from ..data.sources.arguments import DataSource
from ..data.sources.source import Source, open_source
from ..fetched.easy_vqa import held_out


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """A question about an image."""

    name: str  # data set, row and image file, without the folders above the data
    question: str
    stored: Mapping[str, Any]  # the image's `path` or its `bytes`, as in `datasets`

    @property
    def image(self) -> Image.Image:
        """The image, upright and in RGB. It is decoded at each access."""
        try:
            return decode_image(dict(self.stored))
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
    """Draws questions with images. All images are decoded, so that a bad one is reported at once.

    The first image and the first user turn of a row are used. Rows without an image are skipped.

    Args:
        data: Data that can be trained on, with or without answers; by default the built-in images.
        count: Number of samples. If there are fewer, all are used, with a warning.
        seed: Seed by which the samples are drawn.
        image_folder, columns: See [`DataSource`].

    Raises:
        ValueError: The data cannot be read, a row cannot be used, or no row has an image.
    """
    generator = random.Random(seed)
    candidates: Iterable[Sample]
    if data is None:
        data_name = "easy-VQA and emoji"
        candidates = _held_out_samples(generator)
    else:
        source = DataSource.named(data, image_folder=image_folder, columns=columns)
        data_path = Path(source.path)
        data_label = data_path.resolve().name if data_path.exists() else source.path
        data_name = data_label
        if not Path(data).expanduser().exists():  # a split or a configuration follows the path
            data_name = ":".join([data_label, *data.split(":")[1:]])
        opened_source = open_source(source, streaming=not data_path.exists())
        shuffled_rows = _shuffled(opened_source, max(1_000, count), generator)
        candidates = _samples_of_rows(shuffled_rows, opened_source, data_label)
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

    It is a user's turn of the chat template, with the generation prompt. Without a template, the
    text is the image token, a line break and the question.
    """
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        try:
            inputs = dict(_inputs(processor, batch))
        except Exception as error:  # processors raise anything, and never name the sample
            names = ", ".join(sample.name for sample in batch)
            raise ValueError(f"The processor fails for {names}: {error}") from error
        inputs.pop("labels", None)  # PaliGemma's processor makes them too
        yield inputs


def _inputs(processor: ProcessorMixin, batch: Sequence[Sample]) -> Mapping[str, Tensor]:
    padding = {"padding": True, "padding_side": "left"}
    if not processor.chat_template:
        texts = [f"{processor.image_token}\n{sample.question}" for sample in batch]
        images = [[sample.image] for sample in batch]
        return processor(
            text=texts,
            images=images,
            return_tensors="pt",
            **padding,
        )
    chats = []
    for sample in batch:
        image = {"type": "image", "image": sample.image}
        question = {"type": "text", "text": sample.question}
        chats.append([{"role": "user", "content": [image, question]}])
    return processor.apply_chat_template(
        chats,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=padding,
    )


def _held_out_samples(rng: random.Random) -> list[Sample]:
    """The built-in questions, in random order."""
    questions = held_out(per_kind=100)
    rng.shuffle(questions)
    samples = []
    for question in questions:
        stored = {"path": str(question.image), "bytes": None}
        sample_name = f"{question.kind} ({question.image.name})"
        samples.append(Sample(sample_name, question.text, stored))
    return samples


def _shuffled(source: Source, limit: int, rng: random.Random) -> Iterable[tuple[str, int, Any]]:
    """Returns the rows in random order. If they are a stream, these are its first `limit` rows."""
    if isinstance(source.data, Dataset):  # so that only the rows drawn are read
        row_count = len(source.data)
        order = rng.sample(range(row_count), row_count)
        return chain.from_iterable(source.rows(row, 1) for row in order)
    first_rows = islice(source, limit)
    rows = list(track(first_rows, f"reading {source.name}", total=limit))
    rng.shuffle(rows)
    return rows


def _samples_of_rows(
    rows: Iterable[tuple[str, int, Any]], source: Source, label: str
) -> Iterator[Sample]:
    """Yields the samples of the rows that have an image; `label` is the name of the data."""
    for origin, number, raw in rows:
        name = _name_of_row(raw, number, label if origin == source.name else Path(origin).name)
        sample = _sample_of_row(name, raw, source)
        if sample is not None:
            yield sample


def _name_of_row(raw: Any, number: int, label: str) -> str:
    """Names a row, and its image's file without the folders above the data."""
    row_name = f"{label}, row {number}"
    image_file = image_name(raw)
    if not image_file:
        return row_name
    if "://" in image_file or os.path.isabs(image_file):
        image_file = image_file.rpartition("/")[2]
    return f"{row_name} ({image_file})"


def _sample_of_row(name: str, raw: Any, source: Source) -> Sample | None:
    """Returns a row's first image and the question about it, or None without an image.

    Raises ValueError if the row has an image, but cannot be used.
    """
    try:
        row = known_row(raw)
        if not row.images:
            return None
        image = source.rules.image(row.images[0])
        if image["bytes"] is None:
            source.rules.check_file(image["path"])
    except ValueError as error:
        has_image = not isinstance(raw, Mapping) or raw.get("image") or raw.get("images")
        if not has_image and not unread_image(raw, []):
            return None
        raise ValueError(f"{name} cannot be used: {error}.") from error
    question = _first_question(row)
    if not question:
        raise ValueError(f"{name} has no question. It has the columns {columns_of(raw)}.")
    return Sample(name, question, image)


def _first_question(row: Row) -> str:
    """Returns the text of the first user turn, or an empty text if there is none."""
    for turn in row.messages:
        if turn["role"] == "user":
            text = "".join(part.get("text", "") for part in turn["content"])
            return printable(text).strip()
    return ""
