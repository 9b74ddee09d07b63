# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of a vision-language model: to conversations with images, whole or as they come.

`normalign ask`, `normalign evaluate`, answers while training and the demo share this file. A Space
gets a copy of it, so it imports nothing of this package.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    BatchFeature,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.generation import TextIteratorStreamer


Message = dict[str, Any]
"""A turn: its `role`, and in `content` a list of parts, `{"type": "image", "image": ...}` or
`{"type": "text", "text": ...}`."""

KEPT = (
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "suppress_tokens",
    "cache_implementation",
)
"""What greedy decoding keeps of a model's own `generation_config`: tokens, and the cache."""


def system_turn(text: str) -> Message:
    """The system turn of a conversation."""
    return {"role": "system", "content": [{"type": "text", "text": text}]}


def user_turn(text: str, images: Sequence[Image.Image | None] = ()) -> Message:
    """A user's turn: the images, then the text. An image that is None is to be filled in."""
    shown = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}


def assistant_turn(text: str) -> Message:
    """An answer, as a later turn of the conversation reads it."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def greedy_config(
    own: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> GenerationConfig:
    """Greedy decoding and nothing else, with the tokens of a model's `own` configuration.

    Answers end at each of its `eos_token_id`s, and at the one of the tokenizer. Penalties, beams
    and other settings that change which token is the next are left out.
    """
    kept = {name: getattr(own, name) for name in KEPT if getattr(own, name, None) is not None}
    ends = kept.get("eos_token_id", [])
    ends = list(ends) if isinstance(ends, list | tuple) else [ends]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    if ends:
        kept["eos_token_id"] = list(dict.fromkeys(ends))
    if "pad_token_id" not in kept and tokenizer is not None and tokenizer.pad_token_id is not None:
        kept["pad_token_id"] = tokenizer.pad_token_id
    return GenerationConfig(do_sample=False, **kept)


@contextmanager
def decoding_greedily(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Within the block `model.generate` is greedy, see [`greedy_config`]."""
    # `generate` fills what an argument leaves open from the model's own configuration.
    own = model.generation_config
    model.generation_config = greedy_config(own, tokenizer)
    try:
        yield
    finally:
        model.generation_config = own


def model_inputs(
    processor: ProcessorMixin, conversations: Sequence[Sequence[Message]]
) -> BatchFeature:
    """Inputs of `generate`: each conversation with the prompt for its next answer, padded left.

    Raises ValueError if a text has the image token, or a processor without a chat template gets
    more than one user's turn.
    """
    check_texts(processor, conversations)
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"padding": True, "padding_side": "left"}
    if processor.chat_template:
        inputs = processor.apply_chat_template(
            [list(conversation) for conversation in conversations],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=options,
        )
    else:
        texts, images = [], []
        for conversation in conversations:
            if len(conversation) > 1:
                raise ValueError("This model has no chat template: it takes one question, alone.")
            shown = _images(conversation)
            text = _text(conversation[0])
            texts.append(f"{processor.image_token}\n" * len(shown) + text)
            images.append(shown)
        shown_at_all = images if any(images) else None
        inputs = processor(text=texts, images=shown_at_all, return_tensors="pt", **options)
    inputs.pop("labels", None)  # PaliGemma's processor makes labels too
    return inputs


def check_texts(processor: ProcessorMixin, conversations: Sequence[Sequence[Message]]) -> None:
    """Raises ValueError if a text has the token that stands for an image."""
    token = getattr(processor, "image_token", None)
    for conversation in conversations:
        for message in conversation:
            if token and token in _text(message):
                raise ValueError(
                    f"The text has {token}, which stands for an image. Leave it out: the images "
                    "come before the question."
                )


def free_positions(config: Any, tokens: int) -> int | None:
    """How many tokens an answer to a prompt of `tokens` may have; None if the model has no limit.

    Raises ValueError if the prompt leaves no room.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    if tokens >= positions:
        raise ValueError(
            f"Images and text have {tokens:,} tokens, and the model reads {positions:,}. Shorten "
            "the text, or give fewer images."
        )
    return positions - tokens


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    conversations: Sequence[Sequence[Message]],
    max_new_tokens: int,
) -> list[str]:
    """The greedy answer to each conversation, in one batch, without spaces at its ends."""
    inputs = model_inputs(processor, conversations).to(model.device, model.dtype)
    length = inputs["input_ids"].shape[1]
    room = free_positions(model.config, length)
    limit = max_new_tokens if room is None else min(max_new_tokens, room)
    with decoding_greedily(model, processor.tokenizer):
        ids = model.generate(**inputs, max_new_tokens=limit)
    texts = processor.tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)
    return [text.strip() for text in texts]


class AnswerStream:
    """The greedy answer to one conversation, as it is generated: iterate over its pieces of text.

    A thread generates it. If iterating ends early, by an exception or `close()` of the iterator,
    the thread stops at its next token.

    Args:
        inputs: Of [`model_inputs`], on the model's device.
        max_new_tokens: Longest answer; a smaller one if the model has fewer positions left.

    Attributes:
        ids: Token ids of prompt and answer, `(1, tokens)`; set when the last piece was read.

    Raises ValueError if the model has no position left for an answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        inputs: BatchFeature,
        max_new_tokens: int,
    ):
        self._model = model
        self._tokenizer = processor.tokenizer
        self._inputs = inputs
        room = free_positions(model.config, inputs["input_ids"].shape[1])
        self._limit = max_new_tokens if room is None else min(max_new_tokens, room)
        self._stopped = Event()
        self.ids: Tensor | None = None

    def __iter__(self) -> Iterator[str]:
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        with ThreadPoolExecutor(1) as pool:
            generated: Future[Tensor] = pool.submit(self._generate, streamer)
            generated.add_done_callback(lambda _: streamer.end())  # also after an error
            try:
                yield from filter(None, streamer)
            finally:
                self._stopped.set()
        self.ids = generated.result()

    @torch.no_grad()
    def _generate(self, streamer: TextIteratorStreamer) -> Tensor:
        def is_stopped(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return ids.new_full((len(ids),), self._stopped.is_set(), dtype=torch.bool)

        with decoding_greedily(self._model, self._tokenizer):
            return self._model.generate(
                **self._inputs,
                max_new_tokens=self._limit,
                stopping_criteria=[is_stopped],
                streamer=streamer,
            )


def _text(message: Message) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def _images(conversation: Sequence[Message]) -> list[Image.Image]:
    parts = (part for message in conversation for part in message["content"])
    return [part["image"] for part in parts if part["type"] == "image"]
