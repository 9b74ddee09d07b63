# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model: loaded, and answering token by token."""

from collections.abc import Generator
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, StoppingCriteriaList
from transformers.generation import BaseStreamer


ATTENTION = {"text_config": "eager"}
"""The only implementation that gives attention maps. Switching to it for one user's question would switch for all."""


def load(source: str, revision: str | None = None) -> tuple[Any, Any]:
    """Loads the model, in eval mode, and its processor from a folder or Hub id, with the code that comes with them.

    It is on a GPU in the checkpoint's own precision, without one in float32.
    """
    gpu = torch.cuda.is_available()
    pinned = {"revision": revision, "code_revision": revision} if revision else {}
    dtype = "auto" if gpu else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(
        source, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=True, **pinned
    )
    processor = AutoProcessor.from_pretrained(source, trust_remote_code=True, **pinned)
    return model.to("cuda" if gpu else "cpu").eval(), processor


def stream(model: Any, inputs: dict[str, Tensor], max_new_tokens: int) -> Generator[int, None, None]:
    """The ids of the greedy answer, at most `max_new_tokens` and as many as the context has room for.

    A thread generates them, which ends at the next token once the generator is closed.
    """
    tokens, stopped = _Tokens(), Event()
    context = model.config.get_text_config().max_position_embeddings
    room = min(max_new_tokens, context - inputs["input_ids"].shape[1])

    def generate() -> None:
        try:
            model.generate(
                **inputs,
                max_new_tokens=room,
                do_sample=False,
                streamer=tokens,
                stopping_criteria=StoppingCriteriaList(
                    [lambda ids, scores, **_: ids.new_full((len(ids),), stopped.is_set(), dtype=torch.bool)]
                ),
            )
        except Exception as error:  # raised again where the answer is read
            tokens.queue.put(error)

    Thread(target=generate, name="answer", daemon=True).start()
    try:
        while (item := tokens.queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stopped.set()  # also after Stop, or when the person has gone


class _Tokens(BaseStreamer):
    """Hands every generated id to another thread; None at the end."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[int | Exception | None] = SimpleQueue()
        self._at_prompt = True

    def put(self, value: Tensor) -> None:
        if not self._at_prompt:
            self.queue.put(value.item())
        self._at_prompt = False

    def end(self) -> None:
        self.queue.put(None)
