# SPDX-License-Identifier: Apache-2.0
"""The option `feature_layer`, and a processor's tokenizer that adds no tokens.

It adds none, since `processor(text)` would have them, but training, TRL, vLLM and
`tokenizer.apply_chat_template` would not. The chat template prints what the tokenizer put first.
Templates of Llama 2 and 3, Gemma and Mistral do so already. For TinyLlama, Zephyr and LLaVA 1.5, it
is added here. What the tokenizer put last is left out, since it would end a prompt.
"""

import copy
import logging
import os
from collections.abc import Sequence
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import LlavaProcessor, PreTrainedConfig, PreTrainedTokenizerBase

from ..checkpoint.prompts import fix_date
from .chat_template import check_texts, printing_first


logger = logging.getLogger(__name__)


def read_feature_layer(value: object) -> int | list[int]:
    """Returns the option `feature_layer`, with several layers as a list.

    Raises ValueError if it is neither a whole number nor a sequence of whole numbers.
    """
    layers: list[Any] = list(value) if isinstance(value, Sequence) else [value]
    if not layers or not all(type(layer) is int for layer in layers):  # bool is another type
        raise ValueError(
            "feature_layer is a whole number, such as -2, or a list of whole numbers, such as "
            f"[-2, -5], got {value!r}."
        )
    return layers if isinstance(value, Sequence) else layers[0]


def check_feature_layer(feature_layer: int | list[int], config: PreTrainedConfig) -> None:
    """Raises ValueError if the encoder has no such hidden state, or a layer is given twice.

    -1 is the last layer's output.
    """
    states = config.num_hidden_layers + 1
    if feature_layer == 0:
        raise ValueError(f"LLaVA reads feature_layer 0 as no layer. The embeddings are {-states}.")
    layers = [feature_layer] if isinstance(feature_layer, int) else feature_layer
    names_by_state: dict[int, int] = {}
    for layer in layers:
        if not -states <= layer < states:
            raise ValueError(
                f"feature_layer {layer} does not exist. Hidden states are 0 to {states - 1}, or "
                f"{-states} to -1."
            )
        state = layer % states
        if state in names_by_state:
            raise ValueError(
                f"feature_layer {layers} has hidden state {state} twice, as "
                f"{names_by_state[state]} and {layer}. Give every layer once: hidden states are 0 "
                f"to {states - 1}, or {-states} to -1."
            )
        names_by_state[state] = layer


def normalize_tokenization(processor: LlavaProcessor) -> None:
    """Makes a processor's tokenizer pad left and add no tokens, and its prompts have a fixed date.

    The chat template prints the tokens that the tokenizer put first. They are kept as `text_start`
    in `tokenizer_config.json`, for [`text_tokenizer`]. Without a chat template, only the padding
    changes. A second call changes nothing.

    Raises:
        ValueError: If a conversation's tokens would change, or if the tokenizer drops letters
            without a token.
    """
    tokenizer = processor.tokenizer
    tokenizer.padding_side = "left"  # as generating from a batch needs
    tokenizer.init_kwargs["padding_side"] = "left"  # this one is saved
    fix_date(processor)
    if tokenizer(["a\ua66eb"]).char_to_token(0, 1) is None:  # a letter of one manuscript
        raise ValueError("The tokenizer drops letters that it does not know. Give it an unk_token.")
    tokens_before, tokens_after = _added_tokens(processor)
    added = tokens_before + tokens_after
    if not processor.chat_template or not added:
        return
    if tokens_before:
        printed_before = "".join(tokens_before)
        text_start = _require_start(processor, printed_before, len(tokens_after))
        if text_start is not None:
            template = printing_first(processor.chat_template, text_start, processor.image_token)
            processor.chat_template = template
            tokenizer.chat_template = template
            if os.environ.get("RANK", "0") == "0":
                logger.warning(
                    f"The tokenizer put {printed_before!r} before a text. Now the chat template "
                    "prints it. If this checkpoint is trained already, it was trained without it."
                )
    tokenizer.add_bos_token = False
    tokenizer.add_eos_token = False
    tokenizer.init_kwargs["text_start"] = tokens_before
    if any(_added_tokens(processor)):
        raise ValueError(f"The tokenizer adds {added} to texts whatever is set. Use another.")


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Returns a tokenizer that begins texts without a chat template as the language model's did."""
    start_tokens = tokenizer.init_kwargs.get("text_start")
    if not start_tokens:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    start_ids = tokenizer.convert_tokens_to_ids(start_tokens)
    special_tokens = list(zip(start_tokens, start_ids, strict=True))
    post_processor = TemplateProcessing([*start_tokens, "$A"], special_tokens=special_tokens)
    tokenizer.backend_tokenizer.post_processor = post_processor
    return tokenizer


def _added_tokens(processor: LlavaProcessor) -> tuple[list[str], list[str]]:
    """Returns the tokens that the tokenizer puts before and after a text."""
    tokenizer = processor.tokenizer
    text_ids = tokenizer.encode(processor.image_token, add_special_tokens=False)
    all_ids = tokenizer.encode(processor.image_token)
    text_length = len(text_ids)
    positions = range(len(all_ids))
    text_position = next(
        index for index in positions if all_ids[index : index + text_length] == text_ids
    )
    tokens_before = tokenizer.convert_ids_to_tokens(all_ids[:text_position])
    tokens_after = tokenizer.convert_ids_to_tokens(all_ids[text_position + text_length :])
    return tokens_before, tokens_after


def _require_start(processor: LlavaProcessor, start: str, end_length: int) -> str | None:
    """Returns what a chat template has to print first, or None if it prints `start` already.

    Args:
        processor: A processor whose tokenizer still adds tokens.
        start: The text of the tokens that the tokenizer puts before a text.
        end_length: Number of tokens that it puts after a text.

    Raises:
        ValueError: If only some texts have `start` already, or if texts would have other tokens.
    """
    tokenizer = processor.tokenizer
    printed_texts = check_texts(processor.chat_template, tokenizer.special_tokens_map)
    is_printed = [text.lstrip().startswith(start) for text in printed_texts]
    if printed_texts and all(is_printed):
        return None
    if not any(is_printed):
        expected_ids = []
        for text in printed_texts:
            token_ids = tokenizer.encode(text)
            expected_ids.append(token_ids[: len(token_ids) - end_length])
        # Tokenizers with a space before a text have none after a special token.
        for candidate in (start, f"{start} "):
            candidate_ids = [
                tokenizer.encode(candidate + text, add_special_tokens=False)
                for text in printed_texts
            ]
            if candidate_ids == expected_ids:
                return candidate
    raise ValueError(
        f"The tokenizer puts {start!r} before a text, and the chat template prints it "
        "before some only, or the text would then have other tokens. Build the checkpoint "
        "with `normalign build --chat-template FILE`, a template that prints it before all."
    )
