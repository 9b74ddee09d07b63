# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A question answered: its image and words prepared, the answer streamed, the figures drawn."""

import html
from collections.abc import Iterator
from contextlib import closing
from threading import Lock
from typing import Any

import gradio as gr
from torch import Tensor

from .figures import draw_norms, show_layer, summary
from .images import Refused, open_image, uploaded
from .measuring import Meter
from .model import stream


class Asker:
    """Answers questions, any number of them at the same time: what belongs to one is kept in its own call."""

    def __init__(self, model: Any, processor: Any, max_new_tokens: int):
        self._model, self._processor, self._max_new_tokens = model, processor, max_new_tokens
        self._preparing = Lock()  # tokenizers are not made for several threads
        self._meter = Meter(model, processor)

    def ask(self, entry: Any, question: str, layer: int) -> Iterator[tuple]:
        """Streams the answer, then the numbers, the heat map of `layer`, the chart and what was measured."""
        keep, ids = (gr.skip(),) * 4, []
        try:
            inputs = self._prepare(entry, question)
            yield "", None, None, None, None  # nothing of an earlier question stays
            with closing(stream(self._model, inputs, self._max_new_tokens)) as tokens:
                for token in tokens:
                    ids.append(token)
                    yield self._decode(ids), *keep
            answer = self._decode(ids) or "(The answer is empty.)"
            yield answer, *keep
            measured = self._meter.measure(inputs, ids)
            chart = gr.Image(draw_norms(measured), alt_text="Mean L2 norm of visual and text tokens by layer.")
            yield answer, summary(measured), show_layer(measured, layer), chart, measured
        except Refused as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from None
        except Exception as error:  # whatever it is, the page says so and stays usable
            message = f"The model failed: {type(error).__name__}: {str(error)[:300]}"
            raise gr.Error(html.escape(message), duration=None) from error  # shown until it is closed

    def _prepare(self, entry: Any, question: str) -> dict[str, Tensor]:
        if entry is None:
            raise Refused("There is no image yet. Upload one, or take an example.")
        if not (question := (question or "").strip()):
            raise Refused("There is no question yet. Type one.")
        if self._processor.image_token in question:
            raise Refused(
                f"The question holds {self._processor.image_token}, which stands for the image. Leave it out."
            )
        content = [{"type": "image", "image": open_image(uploaded(entry))}, {"type": "text", "text": question}]
        with self._preparing:
            inputs = self._processor.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        tokens, context = inputs["input_ids"].shape[1], self._model.config.get_text_config().max_position_embeddings
        if tokens >= context:
            raise Refused(
                f"The question is too long: with the image it takes {tokens:,} tokens, and the model reads "
                f"{context:,}. Shorten it."
            )
        return inputs.to(self._model.device, self._model.dtype)

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids, skip_special_tokens=True).strip()
