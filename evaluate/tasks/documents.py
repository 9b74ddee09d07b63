# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the task files share: the check of the columns, the image, and multiple-choice questions."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase

import datasets
from datasets import Dataset
from PIL import Image

from normalign_llava.data.rows.images import decode_image
from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.evaluate.answers import chosen_option


ASK_FOR_LETTER = "Answer with the option's letter from the given choices directly."


def checked(
    documents: Dataset, task: str, columns: Collection[str], values: Mapping[str, Collection[str]] | None = None
) -> Dataset:
    """`documents`, if they have what the task reads; their column `image` is decoded as that of training data is.

    Args:
        documents: The split that the task reads.
        task: Name of the task and of its file.
        columns: Columns that the task reads.
        values: All values that may be in a column, in upper or lower case.

    Raises:
        ValueError: Columns are missing, or hold a value that the task does not know. Names the task and the data set.
    """
    source = re.search(r"^dataset_path: (\S+)", Path(__file__).with_name(f"{task}.yaml").read_text(), re.MULTILINE)
    changed = f"task {task}: the data set {source[1] if source else ''} has changed"
    if missing := [column for column in columns if column not in documents.column_names]:
        raise ValueError(
            f"{changed}: it has no column {', '.join(missing)}. It has {', '.join(documents.column_names)}."
        )
    for column, known in (values or {}).items():
        expected = {each.lower() for each in known}
        if unknown := [each for each in documents.unique(column) if str(each).strip().lower() not in expected]:
            raise ValueError(f"{changed}: column {column} has {unknown}, beside {', '.join(known)}.")
    # `datasets` would let Pillow open any format.
    undecoded = documents.cast_column("image", datasets.Image(decode=False))
    return undecoded.with_transform(_decoded, columns=["image"], output_all_columns=True)


def image(document: dict) -> list[Image.Image]:
    """The image of a document in RGB, in a list; an empty list if it has none."""
    return [document["image"].convert("RGB")] if document["image"] else []


def _decoded(batch: dict[str, list]) -> dict[str, list]:
    return {"image": [each and decode_image(each, DataArguments.max_image_pixels) for each in batch["image"]]}


def by_letter(choices: Sequence[str]) -> dict[str, str]:
    """Text of each option by its letter, from A."""
    return dict(zip(ascii_uppercase, choices, strict=False))


def listed(options: Mapping[str, str]) -> str:
    """The options as lines, "A. a dog"."""
    return "\n".join(f"{letter}. {text}" for letter, text in options.items())


def is_right(answer: str, options: Mapping[str, str], right: str) -> float:
    """1 if the answer chooses the option `right`, else 0."""
    return float(chosen_option(answer, options) == right)
