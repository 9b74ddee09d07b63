# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the task files share: the check of the columns, the image, and multiple-choice questions."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

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
    """`documents`, with images that are opened as those of training data are.

    Raises ValueError, which names the task and its data set, if one of `columns` is missing, or if a column holds
    something else than its `values`, in upper or lower case.
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
            raise ValueError(f"{changed}: column {column} has {unknown}, not only {', '.join(known)}.")
    # `datasets` would let Pillow open any format.
    undecoded = documents.cast_column("image", datasets.Image(decode=False))
    return undecoded.with_transform(_decoded, columns=["image"], output_all_columns=True)


def image(document: dict) -> list[Image.Image]:
    """The image of a document in RGB, in a list; an empty list if it has none."""
    return [document["image"].convert("RGB")] if document["image"] else []


def _decoded(batch: dict[str, list]) -> dict[str, list]:
    return {"image": [each and decode_image(each, DataArguments.max_image_pixels) for each in batch["image"]]}


def listed(options: Mapping[str, str]) -> str:
    """The options as lines, "A. a dog"."""
    return "\n".join(f"{letter}. {text}" for letter, text in options.items())


def is_right(answer: str, options: Mapping[str, str], right: str) -> float:
    """1 if the answer chooses the option `right`, else 0."""
    return float(chosen_option(answer, options) == right)
