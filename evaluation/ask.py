# SPDX-License-Identifier: Apache-2.0
"""`normalign ask`: one question about one image, and the answer as it is generated."""

from pathlib import Path
from typing import Any

from transformers import BatchFeature, TextStreamer

from ..diagnose.data import Sample, batches
from ..diagnose.load import resolve_model
from ..errors import Console, escaped


class AnswerPrinter(TextStreamer):
    """Prints the answer word by word, so that it cannot control the terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(escaped(text), stream_end)


def ask(
    model: str,
    image: Path,
    question: str,
    max_new_tokens: int,
    trust_remote_code: bool = False,
    **loading: Any,
) -> None:
    """Prints the greedy answer of a model, which `loading` is how to load, word by word.

    Raises ValueError, before weights are loaded, if model, image or question cannot be used.
    """
    if not question.strip():
        raise ValueError("The question is empty. Write one, in quotes.")
    if not image.is_file():
        raise ValueError(f"There is no file {image}. Check the path of the image.")
    sample = Sample(image.name, question, {"path": str(image), "bytes": None})
    sample.image  # noqa: B018  (decoded for its errors)
    handle = resolve_model(model, trust_remote_code=trust_remote_code)
    if (processor := handle.processor) is None:
        raise ValueError(
            f"{model} is a language model without vision. Name a vision-language model."
        )
    if (token := getattr(processor, "image_token", None)) and token in question:
        raise ValueError(f"The question has {token}. Leave it out: the image comes first.")
    (inputs,) = batches(processor, [sample], 1)
    most = getattr(handle.config.get_text_config(), "max_position_embeddings", None)
    if most and (tokens := inputs["input_ids"].shape[1]) > most:
        asked = f"Image and question have {tokens:,} tokens"
        raise ValueError(f"{asked}, and {handle.name} takes {most:,}. Ask shorter.")
    answering = handle.load(**loading)
    inputs = BatchFeature(inputs).to(answering.device, answering.dtype)
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    Console(stderr=True).print(f"Reading {image.name} ...")  # which may take minutes on a CPU
    streamer = AnswerPrinter(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    answering.generate(**inputs, **greedy, max_new_tokens=max_new_tokens, streamer=streamer)
