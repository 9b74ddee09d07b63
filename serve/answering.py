# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Generating answers, one at a time, in the order of the requests."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import torch
from starlette.exceptions import HTTPException
from torch import Tensor
from transformers import BatchFeature, LlavaProcessor, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from .prompt import make_prompt
from .requests import ChatRequest


MAX_REQUESTS = 16
"""Requests that may be in progress; others are refused."""
GREEDY = 1e-5
"""Temperatures below this mean greedy decoding: logits divided by them may be infinite."""


class Slot:
    """One of the `MAX_REQUESTS` slots for requests in progress."""

    answer: "Answer | None" = None


class Answering:
    """Answers requests in the order of their arrival."""

    def __init__(self, model: PreTrainedModel, processor: LlavaProcessor):
        self._model, self._processor = model, processor
        self._context = model.config.get_text_config().max_position_embeddings
        # One thread each: tokenizers are not thread-safe, and the memory is for one answer.
        self._preparing, self._generating = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._slots, self._closed = list[Slot](), False

    @property
    def requests(self) -> int:
        """Number of requests that arrive, wait or are being answered."""
        self._slots = [slot for slot in self._slots if not (slot.answer and slot.answer.work.done())]
        return len(self._slots)

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """A slot for a request, freed when the request is refused or its answer has ended.

        Raises:
            HTTPException: Too many requests are in progress (503).
        """
        if self.requests >= MAX_REQUESTS:
            raise HTTPException(503, f"The server is busy with {MAX_REQUESTS} requests. Try again later.")
        self._slots.append(slot := Slot())
        try:
            yield slot
        finally:
            if slot.answer is None:
                self._slots.remove(slot)

    async def start(self, slot: Slot, request: ChatRequest, images: list[bytes]) -> "Answer":
        """Queues a request, and returns its answer to be read while it is generated.

        Raises:
            HTTPException: As [`make_prompt`].
        """
        loop = asyncio.get_running_loop()
        prompt: BatchFeature = await loop.run_in_executor(
            self._preparing, make_prompt, request, images, self._processor, self._context
        )
        length = prompt["input_ids"].shape[1]
        answer = Answer(length, request.stop, self._ends, self._decode, loop)
        settings = _settings(request, self._context - length)
        answer.work = self._generating.submit(self._generate, prompt, settings, request.seed, answer)
        slot.answer = answer
        if self._closed:
            self.close()
        return answer

    def close(self) -> None:
        """Ends all answers with an error, including later ones."""
        self._closed = True
        for answer in [slot.answer for slot in self._slots if slot.answer]:
            answer.fail(HTTPException(503, "The server was stopped."))
            answer.cancel()

    def _generate(self, prompt: BatchFeature, settings: dict[str, Any], seed: int | None, answer: "Answer") -> None:
        try:
            _ = torch.seed() if seed is None else torch.manual_seed(seed)
            self._model.generate(
                **prompt.to(self._model.device, dtype=self._model.dtype),
                **settings,
                streamer=answer,
                stopping_criteria=StoppingCriteriaList([answer]),
            )
        except Exception as error:  # of any kind: this request gets an error, and the next one is answered
            logging.getLogger(__name__).exception("An answer failed.")
            answer.fail(HTTPException(500, f"The model failed: {type(error).__name__}: {str(error)[:300]}"))

    def _ends(self, token: int) -> bool:
        end = self._model.generation_config.eos_token_id
        return token in end if isinstance(end, list) else token == end

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids, skip_special_tokens=True)


class Answer(BaseStreamer, StoppingCriteria):
    """An answer that the generating thread writes, and the event loop reads as `async for piece in answer`.

    Args:
        prompt_tokens: Length of the prompt.
        stops: Texts before which the answer ends.
        ends: Returns whether a token ends an answer.
        decode: Returns the text of tokens.
        loop: The event loop of the reader.

    Attributes:
        work: The call of `generate`.
        prompt_tokens, tokens: Length of the prompt, and of the answer with the token that ends it.
        finish_reason: Of a complete answer: `"stop"`, or `"length"` if there was no room for more.
    """

    work: Future

    def __init__(
        self,
        prompt_tokens: int,
        stops: list[str],
        ends: Callable[[int], bool],
        decode: Callable[[list[int]], str],
        loop: asyncio.AbstractEventLoop,
    ):
        self.prompt_tokens, self.tokens, self.finish_reason = prompt_tokens, 0, "length"
        self._stops, self._ends, self._decode, self._loop = stops, ends, decode, loop
        self._queue: asyncio.Queue[str | HTTPException | None] = asyncio.Queue()
        self._stopped, self._at_prompt = Event(), True
        self._ids, self._read = list[int](), 0  # the first `_read` ids are written, and only help to decode the others
        self._held = ""

    async def __aiter__(self) -> AsyncIterator[str]:
        while (piece := await self._queue.get()) is not None:
            if isinstance(piece, HTTPException):
                raise piece
            yield piece

    def cancel(self) -> None:
        """Ends the answer at its next token, or before it begins."""
        self._stopped.set()
        self.work.cancel()

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompt, then with each token `(1,)`."""
        if self._at_prompt:
            self._at_prompt = False
            return
        self.tokens += 1
        self._ids.append(value.item())
        if self._ends(self._ids[-1]):
            self.finish_reason = "stop"
        text = self._decode_new()
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character of several tokens is incomplete
            self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
            self._write(text)

    def end(self) -> None:
        """Called by `generate` at its end."""
        self._write(self._decode_new(), last=True)
        self._send(None)

    def fail(self, error: HTTPException) -> None:
        """Ends the text with an error."""
        self._send(error)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Called by `generate` after each token: whether to stop, `(1,)`."""
        return torch.full((len(input_ids),), self._stopped.is_set(), device=input_ids.device, dtype=torch.bool)

    def _decode_new(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]

    def _write(self, text: str, *, last: bool = False) -> None:
        if self._stopped.is_set():
            return
        self._held += text
        if found := [at for stop in self._stops if (at := self._held.find(stop)) >= 0]:
            self._send(self._held[: min(found)])
            self.finish_reason = "stop"
            self._stopped.set()
            return
        # An end that may become a stop text is held back.
        starts = (stop[:length] for stop in self._stops for length in range(1, len(stop)))
        held = 0 if last else max((len(start) for start in starts if self._held.endswith(start)), default=0)
        ready = len(self._held) - held
        self._send(self._held[:ready])
        self._held = self._held[ready:]

    def _send(self, piece: str | HTTPException | None) -> None:
        if piece != "":
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)


def _settings(request: ChatRequest, room: int) -> dict[str, Any]:
    tokens = request.max_completion_tokens or request.max_tokens or room
    settings = {"max_new_tokens": int(min(tokens, room)), "num_beams": 1, "num_return_sequences": 1}
    if request.temperature is not None and request.temperature < GREEDY:
        return {**settings, "do_sample": False}
    sampling = {"temperature": request.temperature, "top_p": request.top_p}
    given = {name: value for name, value in sampling.items() if value is not None}
    return {**settings, "do_sample": True, **given} if given else settings
