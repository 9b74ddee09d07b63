# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign ask`: one question about one image, and the answer as it is generated."""

from pathlib import Path
from typing import Any

from transformers import TextStreamer

from ..assembly.adapter import open_adapter
from ..checkpoint.names import ADAPTER_CONFIG
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

    An adapter's folder may be given too: it is put on its base as in training, whatever `loading` says. Raises
    ValueError before weights are loaded if there is no such model or image, or the image cannot be read.
    """
    sample = Sample(image.name, question, {"path": str(image), "bytes": None})
    sample.image  # noqa: B018  (decoded for its errors)
    if (Path(model) / ADAPTER_CONFIG).is_file():
        adapter = open_adapter(Path(model))
        answering, processor = adapter.load(), adapter.processor
    else:
        found = find(model, trust_remote_code=trust_remote_code)
        if (processor := found.processor) is None:
            raise ValueError(f"{found.name} is a {found.kind}, which answers no questions about images.")
        answering = load(found, **loading)
    (inputs,) = batches(processor, [sample], 1)
    device, dtype = answering.device, answering.dtype
    inputs = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}
    streamer = _Answer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    answering.generate(**inputs, **greedy, max_new_tokens=max_new_tokens, streamer=streamer)
