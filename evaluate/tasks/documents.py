# SPDX-License-Identifier: Apache-2.0
"""What the task files share: the check of the columns, the image, and the list of options."""

from collections.abc import Callable, Collection, Mapping

import datasets
from datasets import Dataset
from PIL import Image

from normalign_llava.data.rows.images import decode_image
from normalign_llava.data.sources.arguments import DataArguments


ASK_FOR_LETTER = "Answer with the option's letter from the given choices directly."


def checked(*columns: str, **values: Collection[str]) -> Callable[[Dataset], Dataset]:
    """A function that returns a split whose images are opened as those of training data are.

    It raises ValueError if `image`, one of `columns` or of the columns `values` is missing, or if a column holds
    something else than its `values`, in upper or lower case.
    """

    def documents(split: Dataset) -> Dataset:
        if missing := [name for name in ("image", *columns, *values) if name not in split.column_names]:
            there = ", ".join(split.column_names)
            raise ValueError(f"The data set has changed: it has no column {', '.join(missing)}. It has {there}.")
        for column, known in values.items():
            expected = {value.lower() for value in known}
            if unknown := [value for value in split.unique(column) if str(value).strip().lower() not in expected]:
                raise ValueError(
                    f"The data set has changed: column {column} has {unknown}, not only {', '.join(known)}."
                )
        # `datasets` would let Pillow open any format.
        undecoded = split.cast_column("image", datasets.Image(decode=False))
        return undecoded.with_transform(_decoded, columns=["image"], output_all_columns=True)

    return documents


def image(document: dict) -> list[Image.Image]:
    """The image of a document in RGB, in a list; an empty list if it has none."""
    return [document["image"].convert("RGB")] if document["image"] else []


def _decoded(batch: dict[str, list]) -> dict[str, list]:
    return {"image": [image and decode_image(image, DataArguments.max_image_pixels) for image in batch["image"]]}


def listed(options: Mapping[str, str]) -> str:
    """The options as lines, "A. a dog"."""
    return "\n".join(f"{letter}. {text}" for letter, text in options.items())
