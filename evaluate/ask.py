# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign ask`: one question about one image, and the answer as it is generated."""

from pathlib import Path
from typing import Any

import torch
from transformers import ProcessorMixin, TextStreamer

from ..assembly.adapter import open_adapter
from ..checkpoint.names import ADAPTER_CONFIG
from ..data.rows.forms import SUFFIXES
from ..data.rows.questions import Sample
from ..diagnose.data import batches
from ..diagnose.load import find, load
from ..errors import escaped


_SHOWN = 10  # images in an error


class _Answer(TextStreamer):
    """Prints an answer while it is generated; it cannot control the terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(escaped(text), stream_end)


@torch.no_grad()
def ask(
    model: str,
    image: Path,
    question: str,
    *,
    max_new_tokens: int = 128,
    dtype: str = "auto",
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Prints a model's greedy answer to a question about an image, word by word.

    Args:
        model: Folder or Hub id of a vision-language model, or folder of an adapter, which is put on its base as in
            training, whatever `dtype` and `load_in_4bit` are.
        image: Its file.
        max_new_tokens: Most tokens of the answer.
        dtype, load_in_4bit, trust_remote_code: As in [`load`] and [`find`].

    Raises:
        ValueError: There is no such model or image, or the image cannot be read; no weights were loaded.
    """
    check_image(image)
    sample = Sample(image.name, question, {"path": str(image), "bytes": None})
    sample.image  # noqa: B018  (decoded for its errors)
    answering, processor = _loaded(model, dtype, load_in_4bit, trust_remote_code)
    (inputs,) = batches(processor, [sample], 1)
    placed = {
        name: value.to(answering.device, answering.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }
    streamer = _Answer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    answering.generate(**placed, **greedy, max_new_tokens=max_new_tokens, streamer=streamer)


def check_image(image: Path) -> None:
    """Raises ValueError, which names the images there are, if there is no such file."""
    if image.is_file():
        return
    folder = image if image.is_dir() else image.parent
    there = sorted(file.name for file in folder.glob("*") if file.suffix.lower() in SUFFIXES)
    more = f" and {len(there) - _SHOWN:,} more" if len(there) > _SHOWN else ""
    found = f"{folder} has {', '.join(there[:_SHOWN])}{more}" if there else f"{folder} has no images"
    raise ValueError(f"There is no image file {image}. {found if folder.is_dir() else f'There is no {folder}'}.")


def _loaded(model: str, dtype: str, load_in_4bit: bool, trust_remote_code: bool) -> tuple[Any, ProcessorMixin]:
    if (folder := Path(model).expanduser()) and (folder / ADAPTER_CONFIG).is_file():
        adapter = open_adapter(folder)
        return adapter.load(), adapter.processor
    found = find(model, trust_remote_code=trust_remote_code)
    if found.processor is None:
        raise ValueError(f"{found.name} is a {found.kind}, which answers no questions about images.")
    return load(found, dtype=dtype, load_in_4bit=load_in_4bit), found.processor
