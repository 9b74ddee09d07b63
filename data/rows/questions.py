# SPDX-License-Identifier: Apache-2.0
"""Questions about images, from rows of any known form."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ..sources.arguments import DataArguments
from .forms import columns, image_name
from .images import ImageRules, decode_image
from .unread import known_row, unread_image
from .values import printable


@dataclass(frozen=True)
class Sample:
    """A question about an image.

    Attributes:
        name: Data set, row and image file, without the folders above the data.
        question: The question.
        stored: The image's `path` or its `bytes`, as in `datasets`.
    """

    name: str
    question: str
    stored: Mapping[str, Any]

    @property
    def image(self) -> Image.Image:
        """The image, upright and in RGB; decoded at each access.

        Raises:
            ValueError: It cannot be decoded; the message names the sample.
        """
        try:
            return decode_image(dict(self.stored), DataArguments.max_image_pixels)
        except ValueError as error:
            raise ValueError(f"The image of {self.name} cannot be used: {error}") from error


def sample_of_row(raw: Any, name: str, rules: ImageRules) -> Sample | None:
    """The first image of a row and the question about it; None if the row has no image.

    The row needs no answer; `name` has its data set and number.

    Raises:
        ValueError: The row is of no known form, its image is not valid or may not be read, or it has no question.
    """
    if file := image_name(raw):
        name += f" ({file.rpartition('/')[2] if '://' in file or os.path.isabs(file) else file})"
    try:
        row = known_row(raw)
        if not row.images:
            return None
        image = rules.image(row.images[0])
        if image["bytes"] is None:
            rules.check_file(image["path"])
    except ValueError as error:
        if isinstance(raw, Mapping) and not (raw.get("image") or raw.get("images") or unread_image(raw, [])):
            return None
        raise ValueError(f"{name} cannot be used: {error}.") from error
    asked = [message["content"] for message in row.messages if message["role"] == "user"]
    question = printable("".join(part.get("text", "") for part in (asked[0] if asked else []))).strip()
    if not question:
        raise ValueError(f"{name} has no question. It has the columns {columns(raw)}.")
    return Sample(name, question, image)
