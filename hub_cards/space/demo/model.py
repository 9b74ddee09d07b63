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


ATTENTION = {"text_config": "eager"}
"""The only implementation that gives attention maps. Switching to it for one user's question would switch for all."""


def load(source: str, revision: str | None = None) -> tuple[Any, Any]:
    """Loads the model, in eval mode, and its processor from a folder or Hub id, with the code that comes with them.

    It is on a GPU in the checkpoint's own precision, without one in float32.
    """
    device, dtype = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", torch.float32)
    remote: dict[str, Any] = {"revision": revision, "code_revision": revision, "trust_remote_code": True}
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=dtype, attn_implementation=ATTENTION, **remote)
    return model.to(device).eval(), AutoProcessor.from_pretrained(source, **remote)


def stream(model: Any, inputs: dict[str, Tensor], max_new_tokens: int) -> Generator[int, None, None]:
    """The ids of the greedy answer, at most `max_new_tokens` and as many as the context has room for.

    A thread generates them, which ends at the next token once the generator is closed.
    """
    queue: SimpleQueue[int | Exception | None] = SimpleQueue()
    stopped = Event()
    context = model.config.get_text_config().max_position_embeddings
    room = min(max_new_tokens, context - inputs["input_ids"].shape[1])

    def after_token(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        queue.put(ids[0, -1].item())
        return ids.new_full((1,), stopped.is_set(), dtype=torch.bool)

    def generate() -> None:
        end = None
        try:
            criteria = StoppingCriteriaList([after_token])
            model.generate(**inputs, max_new_tokens=room, do_sample=False, stopping_criteria=criteria)
        except Exception as error:  # raised again where the answer is read
            end = error
        queue.put(end)

    Thread(target=generate, name="answer", daemon=True).start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stopped.set()  # also after Stop, or when the person has gone
