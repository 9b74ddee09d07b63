# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the task files share: the check of the columns, the image, and the list of options."""

from collections.abc import Collection, Mapping

import datasets
from datasets import Dataset
from PIL import Image

from normalign_llava.data.rows.images import decode_image
from normalign_llava.data.sources.arguments import DataArguments


ASK_FOR_LETTER = "Answer with the option's letter from the given choices directly."


def checked(documents: Dataset, *columns: str, **values: Collection[str]) -> Dataset:
    """`documents`, with images that are opened as those of training data are.

    Raises ValueError if `image`, one of `columns` or of the columns `values` is missing, or if a column holds
    something else than its `values`, in upper or lower case.
    """
    if missing := [name for name in ("image", *columns, *values) if name not in documents.column_names]:
        there = ", ".join(documents.column_names)
        raise ValueError(f"The data set has changed: it has no column {', '.join(missing)}. It has {there}.")
    for column, known in values.items():
        expected = {each.lower() for each in known}
        if unknown := [each for each in documents.unique(column) if str(each).strip().lower() not in expected]:
            raise ValueError(f"The data set has changed: column {column} has {unknown}, not only {', '.join(known)}.")
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
