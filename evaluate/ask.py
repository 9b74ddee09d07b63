# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign ask`: one question about one image, and the answer as it is generated."""

from pathlib import Path
from typing import Any

from transformers import BatchFeature, TextStreamer

from ..data.rows.questions import Sample
from ..diagnose.data import batches
from ..diagnose.load import find, load
from ..errors import escaped


class _Answer(TextStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(escaped(text), stream_end)  # it cannot control the terminal


def ask(
    model: str, image: Path, question: str, *, max_new_tokens: int, trust_remote_code: bool = False, **loading: Any
) -> None:
    """Prints the greedy answer of a model to a question about an image, word by word; `loading` is of [`load`].

    Raises ValueError, before weights are loaded, if the model, the image or the question cannot be used.
    """
    sample = Sample(image.name, question, {"path": str(image), "bytes": None})
    sample.image  # noqa: B018  (decoded for its errors)
    found = find(model, trust_remote_code=trust_remote_code)
    if (processor := found.processor) is None or found.config is None:
        raise ValueError(f"{found.name} is a {found.kind}, which answers no questions about images.")
    if (token := getattr(processor, "image_token", None)) and token in question:
        raise ValueError(f"The question has {token}. Leave it out: the image is shown before the question.")
    (inputs,) = batches(processor, [sample], 1)
    most = getattr(found.config.get_text_config(), "max_position_embeddings", None)
    if most and (tokens := inputs["input_ids"].shape[1]) > most:
        raise ValueError(f"Image and question have {tokens:,} tokens, and {found.name} takes {most:,}. Ask shorter.")
    answering = load(found, **loading)
    asked = BatchFeature(inputs).to(answering.device, answering.dtype)
    streamer = _Answer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    answering.generate(**asked, **greedy, max_new_tokens=max_new_tokens, streamer=streamer)
