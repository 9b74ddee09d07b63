# SPDX-License-Identifier: Apache-2.0
"""What a chat template writes: the tokens that end an answer, and a date that does not change."""

import copy
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import date
from typing import Any

from transformers import GenerationConfig, LlavaProcessor, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template


PROMPT_DATE = date(2024, 7, 26)
"""The date in prompts, if a template asks for today's.

Llama 3's own templates print it if they have no clock. It is the same in every checkpoint, so that
models from different days can be compared.
"""

_DIRECTIVES = """\
%a Fri
%A Friday
%w 5
%u 5
%d 26
%-d 26
%e 26
%j 208
%-j 208
%b Jul
%h Jul
%B July
%m 07
%-m 7
%y 24
%Y 2024
%C 20
%g 24
%G 2024
%U 29
%W 30
%V 30
%H 00
%-H 0
%I 12
%-I 12
%p AM
%M 00
%-M 0
%S 00
%-S 0
%f 000000
%z
%Z
%s 1721952000
%c Fri Jul 26 00:00:00 2024
%x 07/26/24
%X 00:00:00
%D 07/26/24
%F 2024-07-26
%T 00:00:00
%R 00:00
%% %
"""
"""Directives of `strftime`, and what each writes of that day's first moment, in any locale."""

_TEXTS_BY_DIRECTIVE = [line.partition(" ")[::2] for line in _DIRECTIVES.splitlines()]
_FIXED_DATE = (
    "{% macro strftime_now(format) -%}"
    "{%- set written = namespace(text=format) -%}"
    f"{{%- for directive, value in {_TEXTS_BY_DIRECTIVE!r} -%}}"
    "{%- set written.text = written.text | replace(directive, value) -%}"
    "{%- endfor -%}"
    "{{- written.text -}}"
    "{%- endmacro %}\n"  # a line break that Jinja leaves out
)

_ANSWER = "A red kite."
_QUESTION = {"role": "user", "content": "What is this?"}
_EXCHANGE = [_QUESTION, {"role": "assistant", "content": _ANSWER}]


def answer_ends(tokenizer: PreTrainedTokenizerBase, template: Any = None) -> list[int]:
    """Returns the ids of the tokens that end an answer, by the tokenizer and the chat template.

    A template ends an answer with the last token that it marks for training. If it has no marks,
    this is the last token of the word that it prints after an answer. Only special and added tokens
    count, since others, such as `###` or a line break, occur in answers.

    Args:
        tokenizer: The tokenizer that training uses.
        template: The chat template, by default the tokenizer's.
    """
    ends = [tokenizer.eos_token_id]
    for end_text in end_texts(tokenizer, template):
        ends.append(_last_added_token(tokenizer, end_text))
    return [token_id for token_id in dict.fromkeys(ends) if token_id is not None]


def end_texts(tokenizer: PreTrainedTokenizerBase, template: Any = None) -> list[str]:
    """Returns what a chat template prints behind an answer, for the model to generate, stripped.

    The list is empty without a template, or if the template prints nothing there.
    """
    template = default_template(template or tokenizer.chat_template)
    if not template:
        return []
    texts = []
    for exchanges in (1, 2):
        texts += _behind_answers(template, tokenizer.special_tokens_map, _EXCHANGE * exchanges)
    return list(dict.fromkeys(filter(None, texts)))


def unrecognized_ends(tokenizer: PreTrainedTokenizerBase, template: Any = None) -> list[str]:
    """Returns the [`end_texts`] that do not end in an added token: generation cannot stop there."""
    texts = end_texts(tokenizer, template)
    return [text for text in texts if _last_added_token(tokenizer, text) is None]


def stopping_at(generation: GenerationConfig, ends: Iterable[int]) -> GenerationConfig:
    """Returns the generation configuration with more tokens that end an answer.

    It is the same object if it has all of them. Otherwise it is a copy without idle flags, since
    transformers would refuse to save these.
    """
    known_ends = generation.eos_token_id
    if known_ends is None:
        known_ends = []
    elif isinstance(known_ends, int):
        known_ends = [known_ends]
    added_ends = [token_id for token_id in ends if token_id not in known_ends]
    if not added_ends:
        return generation
    changed_config, _ = without_idle_flags(generation)
    all_ends = [*known_ends, *added_ends]
    changed_config.eos_token_id = all_ends if len(all_ends) > 1 else all_ends[0]
    return changed_config


def stop_as_trained(model: Any, processor: LlavaProcessor) -> None:
    """Makes a model's answers end where training with this processor ends them."""
    ends = answer_ends(processor.tokenizer, processor.chat_template)
    model.generation_config = stopping_at(model.generation_config, ends)


def without_idle_flags(generation: GenerationConfig) -> tuple[GenerationConfig, dict[str, Any]]:
    """Copies a configuration without idle flags, such as a temperature without `do_sample`.

    Returns:
        A copy of the configuration, and the flags that were taken out, with their values.

    Raises:
        ValueError: transformers refuses the configuration for another reason.
    """
    defaults = GenerationConfig()
    cleaned_config = copy.deepcopy(generation)
    removed_flags = dict[str, Any]()
    while True:
        try:
            cleaned_config.validate(strict=True)
        except ValueError as error:
            # transformers lists idle flags, and states other faults in a sentence.
            flag_names = re.findall(r"^- `(\w+)`: ", str(error), re.MULTILINE)
            idle_flags = [flag_name for flag_name in flag_names if flag_name not in removed_flags]
            if not idle_flags:
                raise
            for flag_name in idle_flags:
                removed_flags[flag_name] = getattr(cleaned_config, flag_name)
                setattr(cleaned_config, flag_name, getattr(defaults, flag_name))
        else:
            return cleaned_config, removed_flags


def has_generation_marks(template: str) -> bool:
    """Whether a chat template has `{% generation %}` marks."""
    return re.search(r"{%-?\s*generation\b", template) is not None


def default_template(template: Any) -> str | None:
    """Returns a chat template, or the default one if there are several by name."""
    if isinstance(template, dict):
        return template.get("default")
    return template


def asks_for_the_date(template: str) -> bool:
    """Whether a chat template prints today's date."""
    return "strftime_now" in template and not fixes_the_date(template)


def fixes_the_date(template: str | None) -> bool:
    """Whether a chat template defines a date in place of today's."""
    return re.search(r"\bmacro\s+strftime_now\b", template or "") is not None


def with_fixed_date(template: str) -> str:
    """Returns a chat template that prints [`PROMPT_DATE`] wherever it printed today's date.

    The function that it calls for the date is defined in front of it.
    """
    if asks_for_the_date(template):
        return _FIXED_DATE + template
    return template


def fix_date(processor: LlavaProcessor) -> None:
    """Makes prompts the same on any day: see [`with_fixed_date`]."""
    template = processor.chat_template
    if isinstance(template, str) and asks_for_the_date(template):
        processor.chat_template = _FIXED_DATE + template
        processor.tokenizer.chat_template = processor.chat_template


def _behind_answers(
    template: str, special_tokens: dict[str, Any], messages: list[dict[str, Any]]
) -> list[str]:
    """Returns the stripped texts that a template prints behind the answers of a conversation."""
    messages_in_parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
    # Templates that read parts do not print strings. Others print a list as Python does.
    for form in (messages, messages_in_parts):
        with suppress(Exception):  # a template may refuse a form with any error
            (text,), _ = render_jinja_template([form], chat_template=template, **special_tokens)
            if _ANSWER not in text:
                continue
            if not has_generation_marks(template):
                _, _, behind = text.rpartition(_ANSWER)
                return behind.split()[:1]
            texts = []
            for marked_text in marked_texts(template, special_tokens, form):
                _, answer, behind = marked_text.rpartition(_ANSWER)
                if answer:
                    texts.append(behind.strip())
            return texts
    return []


def marked_texts(
    template: str, special_tokens: dict[str, Any], messages: list[dict[str, Any]], tools: Any = None
) -> list[str]:
    """Returns what a chat template marks as generated in a conversation, stripped."""
    options = {"chat_template": template, "return_assistant_tokens_mask": True, **special_tokens}
    (text,), (spans,) = render_jinja_template([messages], tools=tools, **options)
    return [text[start:end].strip() for start, end in spans]


def _last_added_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Returns the id of a text's last token if it is special or added, and None otherwise."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if token_ids and token_ids[-1] in tokenizer.added_tokens_decoder:
        return token_ids[-1]
    return None
