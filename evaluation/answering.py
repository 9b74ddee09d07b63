# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of a vision-language model to conversations, whole or as they are generated.

`normalign ask`, `normalign evaluate`, answers while training and the demo share this file. A Space
gets a copy of it, so it imports nothing of this package.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
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
"""Settings of a model's own `generation_config` that greedy decoding keeps: tokens and cache."""


def make_turn(role: str, text: str, images: Sequence[Image.Image | None] = ()) -> Message:
    """Returns a turn of the role "system", "user" or "assistant": the images, then the text.

    Images that are None come later.
    """
    content = [{"type": "image", "image": image} for image in images]
    content.append({"type": "text", "text": text})
    return {"role": role, "content": content}


user_turn = partial(make_turn, "user")
"""Returns a user's turn with a text, and with images before it, see [`make_turn`]."""


def greedy_config(
    model_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> GenerationConfig:
    """Returns greedy decoding and nothing else, with the tokens of a model's configuration.

    Answers end at each `eos_token_id` of the configuration, and at the tokenizer's. Penalties,
    beams and other settings that change which token is the next are left out.
    """
    settings = {}
    for name in KEPT:
        setting = getattr(model_config, name, None)
        if setting is not None:
            settings[name] = setting
    end_ids = settings.get("eos_token_id", [])
    end_ids = list(end_ids) if isinstance(end_ids, list | tuple) else [end_ids]
    if tokenizer is not None:
        if tokenizer.eos_token_id is not None:
            end_ids.append(tokenizer.eos_token_id)
        if tokenizer.pad_token_id is not None:
            settings.setdefault("pad_token_id", tokenizer.pad_token_id)
    if end_ids:
        settings["eos_token_id"] = list(dict.fromkeys(end_ids))
    return GenerationConfig(do_sample=False, **settings)


@contextmanager
def decoding_greedily(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Makes `model.generate` greedy within the block, see [`greedy_config`]."""
    # `generate` fills what an argument leaves open from the model's own configuration.
    model_config = model.generation_config
    model.generation_config = greedy_config(model_config, tokenizer)
    try:
        yield
    finally:
        model.generation_config = model_config


def model_inputs(
    processor: ProcessorMixin, conversations: Sequence[Sequence[Message]]
) -> BatchFeature:
    """Returns the inputs of `generate`: conversations with the prompt for an answer, padded left.

    Raises ValueError if a text has the image token, or if a conversation has several turns and the
    processor no chat template. Processors may raise other errors.
    """
    check_texts(processor, conversations)
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    padding = {"padding": True, "padding_side": "left"}
    if processor.chat_template:
        inputs = processor.apply_chat_template(
            list(map(list, conversations)),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=padding,
        )
    else:
        texts = []
        images = []
        for conversation in conversations:
            if len(conversation) > 1:
                raise ValueError("This model has no chat template. It takes only one question.")
            (turn,) = conversation
            turn_images = [part["image"] for part in turn["content"] if part["type"] == "image"]
            texts.append(f"{processor.image_token}\n" * len(turn_images) + _text(turn))
            images.append(turn_images)
        inputs = processor(
            text=texts, images=images if any(images) else None, return_tensors="pt", **padding
        )
    inputs.pop("labels", None)  # PaliGemma's processor makes labels too
    return inputs


def check_texts(processor: ProcessorMixin, conversations: Sequence[Sequence[Message]]) -> None:
    """Raises ValueError if a text has the token that stands for an image."""
    token = getattr(processor, "image_token", None)
    for conversation in conversations:
        for message in conversation:
            if token and token in _text(message):
                raise ValueError(
                    f"The text has {token}. It stands for an image: leave it out. The images come "
                    "before the question."
                )


def require_answer_limit(config: Any, prompt_length: int, max_new_tokens: int) -> int:
    """Returns the most tokens of an answer: `max_new_tokens`, or the positions left if fewer.

    Raises ValueError if the prompt leaves no position for an answer.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return max_new_tokens
    if prompt_length >= positions:
        raise ValueError(
            f"Images and text have {prompt_length:,} tokens, and the model reads {positions:,}. "
            "Shorten the text, or give fewer images."
        )
    return min(max_new_tokens, positions - prompt_length)


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    conversations: Sequence[Sequence[Message]],
    max_new_tokens: int,
) -> list[str]:
    """Returns the greedy answer to each conversation, without spaces at its ends.

    The conversations are answered in one batch. Raises ValueError as [`model_inputs`] does, and if
    the model has no position left for an answer.
    """
    inputs = model_inputs(processor, conversations).to(model.device, model.dtype)
    prompt_length = inputs["input_ids"].shape[1]
    answer_limit = require_answer_limit(model.config, prompt_length, max_new_tokens)
    with decoding_greedily(model, processor.tokenizer):
        token_ids = model.generate(**inputs, max_new_tokens=answer_limit)
    answer_ids = token_ids[:, prompt_length:]
    decoded = processor.tokenizer.batch_decode(answer_ids, skip_special_tokens=True)
    return list(map(str.strip, decoded))


class AnswerStream:
    """The greedy answer to one conversation, as it is generated: iterate over its pieces of text.

    A thread generates it. If iterating ends early, by an exception or `close()` of the iterator,
    the thread stops at its next token.

    Args:
        model: Generates the answer.
        processor: Decodes it.
        inputs: From [`model_inputs`], on the model's device.
        max_new_tokens: The longest answer. If the model has fewer positions left, the answer ends
            there.

    Attributes:
        token_ids: Those of prompt and answer, `(1, tokens)`. None until the last piece was read.

    Raises:
        ValueError: The model has no position left for an answer.
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
        prompt_length = inputs["input_ids"].shape[1]
        self._answer_limit = require_answer_limit(model.config, prompt_length, max_new_tokens)
        self._stopped = Event()
        self.token_ids: Tensor | None = None

    def __iter__(self) -> Iterator[str]:
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        with ThreadPoolExecutor(1) as pool:
            generated = pool.submit(self._generate, streamer)
            generated.add_done_callback(lambda _: streamer.end())  # also after an error
            try:
                yield from filter(None, streamer)
            finally:
                self._stopped.set()
        self.token_ids = generated.result()

    @torch.no_grad()
    def _generate(self, streamer: TextIteratorStreamer) -> Tensor:
        with decoding_greedily(self._model, self._tokenizer):
            return self._model.generate(
                **self._inputs,
                max_new_tokens=self._answer_limit,
                stopping_criteria=[self._is_stopped],
                streamer=streamer,
            )

    def _is_stopped(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Returns for each sequence whether generating ends, `(batch,)`."""
        return ids.new_full((len(ids),), self._stopped.is_set(), dtype=torch.bool)


def _text(message: Message) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")
