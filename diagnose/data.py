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

from ..data.rows.forms import columns as columns_of, image_name, known_row, unread_image
from ..data.rows.images import decode_image
from ..data.sources.arguments import DataSource
from ..data.sources.source import Source, open_source
from ..errors import printable
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
        """The image, upright and in RGB; decoded at each access."""
        try:
            return decode_image(dict(self.stored))
        except ValueError as error:
            raise ValueError(f"The image of {self.name} cannot be used: {error}") from error


@dataclass(frozen=True)
class Samples:
    """Samples, and what to call the data they were drawn from."""

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
    """Draws questions with images, which are decoded, so that a bad one is reported at once.

    `data` are the built-in images, or data that can be trained on, with or without answers. Of a
    row, the first image and the first user turn are used. Rows without an image are skipped.
    """
    rng = random.Random(seed)
    candidates: Iterable[Sample | None]
    if data is None:
        name, questions = "easy-VQA and emoji", held_out(per_kind=100)
        rng.shuffle(questions)
        candidates = (
            Sample(
                f"{asked.kind} ({asked.image.name})",
                asked.text,
                {"path": str(asked.image), "bytes": None},
            )
            for asked in questions
        )
    else:
        source = DataSource.named(data, image_folder=image_folder, columns=columns)
        path = Path(source.path)
        label = path.resolve().name if path.exists() else source.path
        name = ":".join([label, *([] if Path(data).expanduser().exists() else data.split(":")[1:])])
        opened = open_source(source, streaming=not path.exists())
        rows = _shuffled(opened, max(1_000, count), rng)  # of a stream: the first
        candidates = (_sample_of_row(*row, opened, label) for row in rows)
    samples = []
    for sample in track(islice(filter(None, candidates), count), f"images of {name}", total=count):
        sample.image  # noqa: B018  (decoded for its errors)
        samples.append(sample)
    if not samples:
        raise ValueError(f"{name} has no row with an image. docs/data.md lists the forms of rows.")
    if len(samples) < count:
        logger.warning(f"{name} has only {len(samples):,} samples, not {count:,}. All are used.")
    return Samples(name, samples)


def batches(
    processor: ProcessorMixin, samples: Sequence[Sample], batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Model inputs of `samples`, in order, padded on the left: a question after its image.

    It is a user's turn of the chat template, with the generation prompt; without a template, the
    text is the image token, a line break and the question.
    """
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        try:
            inputs = _inputs(processor, batch)
        except Exception as error:  # processors raise anything, and never name the sample
            names = ", ".join(sample.name for sample in batch)
            raise ValueError(f"The processor fails for {names}: {error}") from error
        # PaliGemma's makes labels too.
        yield {name: value for name, value in inputs.items() if name != "labels"}


def _inputs(processor: ProcessorMixin, batch: Sequence[Sample]) -> Mapping[str, Tensor]:
    options = {"padding": True, "padding_side": "left"}
    if processor.chat_template:
        contents = (
            [{"type": "image", "image": sample.image}, {"type": "text", "text": sample.question}]
            for sample in batch
        )
        return processor.apply_chat_template(
            [[{"role": "user", "content": content}] for content in contents],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=options,
        )
    texts = [f"{processor.image_token}\n{sample.question}" for sample in batch]
    images = [[sample.image] for sample in batch]
    return processor(text=texts, images=images, return_tensors="pt", **options)


def _shuffled(source: Source, limit: int, rng: random.Random) -> Iterable[tuple[str, int, Any]]:
    """The rows in random order; of a stream, its first `limit` rows."""
    if isinstance(source.data, Dataset):  # so that only the rows drawn are read
        order = rng.sample(range(len(source.data)), len(source.data))
        return chain.from_iterable(source.rows(row, 1) for row in order)
    rows = list(track(islice(source, limit), f"reading {source.name}", total=limit))
    rng.shuffle(rows)
    return rows


def _sample_of_row(origin: str, number: int, raw: Any, source: Source, label: str) -> Sample | None:
    """The first image of a row and the question about it; None without an image."""
    name = f"{label if origin == source.name else Path(origin).name}, row {number}"
    if file := image_name(raw):
        name += f" ({file.rpartition('/')[2] if '://' in file or os.path.isabs(file) else file})"
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
    asked = next((turn["content"] for turn in row.messages if turn["role"] == "user"), ())
    question = printable("".join(part.get("text", "") for part in asked)).strip()
    if not question:
        raise ValueError(f"{name} has no question. It has the columns {columns_of(raw)}.")
    return Sample(name, question, image)
