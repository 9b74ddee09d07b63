# SPDX-License-Identifier: Apache-2.0
"""Chat templates that read images: a language model's own after a preamble, or else Vicuna's.

A language model's template concatenates strings and fails on messages of image and text parts. The
preamble makes strings of these. The template stays the same, and so do conversations of text.
Assistant-only losses also need `{% generation %}` marks around what the model has to generate. They
come from edits for known families or from TRL, and are kept only if rendering proves them right.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import Any

import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from ..checkpoint.prompts import has_generation_marks, marked_texts, with_fixed_date


Tokens = dict[str, Any]
Messages = list[dict[str, Any]]
Renderer = Callable[..., str]  # (messages, tools=None, add_generation_prompt=False) -> text

_TEMPLATES = files(__package__) / "templates"
_PREAMBLE = (_TEMPLATES / "multimodal_preamble.jinja").read_text("utf-8")
_VICUNA = (_TEMPLATES / "vicuna.jinja").read_text("utf-8")
_EDITS = yaml.safe_load((_TEMPLATES / "generation_marks.yaml").read_text("utf-8"))
_CONVERSATIONS = yaml.safe_load((_TEMPLATES / "check_conversations.yaml").read_text("utf-8"))
_STAND_INS: Tokens = {"bos_token": "<s>", "eos_token": "</s>"}
_QUESTION = {"role": "user", "content": "What is this?"}
_IMAGE = {"type": "image"}


def multimodal_chat_template(
    template: str | None, *, image_token: str = "<image>", special_tokens: Tokens = _STAND_INS
) -> tuple[str, bool]:
    """Makes a chat template that reads images, with marks for training where possible.

    Text-only conversations render exactly as before. Image parts become the image token. Parts keep
    their order, with nothing between them. A template that prints today's date prints a fixed one:
    see [`with_fixed_date`]. Marks are kept only if each marked span goes from the generation prompt
    through the end-of-turn token, up to white space.

    Args:
        template: The language model's own. None gives Vicuna v1.1's. One that prints `image_token`
            for image parts gets no preamble.
        image_token: What is printed for an image.
        special_tokens: The tokenizer's special tokens, by the names that templates use.

    Returns:
        The template, and whether it marks what the model has to generate.

    Raises:
        ValueError: If the template is not valid Jinja, or renders text differently with the
            preamble.
    """
    preamble = _preamble(image_token)
    if template is None:
        template = preamble + _VICUNA
        return template, _marks_hold(template, special_tokens)  # they need an end-of-turn token
    date_prefix = with_fixed_date(template).removesuffix(template)  # empty without a date
    original = partial(_render, date_prefix + template, special_tokens)
    outcome = _outcome(original, [_QUESTION])  # a text, or the name and message of an error
    if outcome.startswith("TemplateSyntaxError"):
        raise ValueError(f"The chat template is not valid Jinja: {outcome} Correct or replace it.")
    with_image = _outcome(original, _as_parts([_QUESTION], _IMAGE))
    reads_images = with_image.count(image_token) == 1 and _QUESTION["content"] in with_image
    beginning = date_prefix if reads_images else preamble + date_prefix
    for candidate in _candidates(template):
        marked = beginning + candidate
        render = partial(_render, marked, special_tokens)
        if not _changed_conversation(render, original, reads_images) and _marks_hold(
            marked, special_tokens
        ):
            return marked, True
    unmarked = beginning + template
    render = partial(_render, unmarked, special_tokens)
    difference = _changed_conversation(render, original, reads_images)
    if difference:
        raise ValueError(
            f"With the image preamble the chat template renders the conversation {difference!r} "
            "differently. Give another with `--chat-template`."
        )
    return unmarked, False


def printing_first(template: str, text: str, image_token: str) -> str:
    """Returns a template that prints `text`, and then exactly what it printed before."""
    preamble = _preamble(image_token)
    if not template.startswith(preamble):
        preamble = ""
    # Jinja strips the line break after a block, and white space before one that begins a line.
    block = f"{{% if messages %}}{{{{ {text!r} }}}}{{% endif %}}\n"
    return preamble + block + template.removeprefix(preamble)


def without_preamble(template: str, messages: Messages, image_token: str) -> tuple[str, Messages]:
    """Returns a template and messages that print the same as these, several times faster.

    The parts of each message are joined here and not by the template's preamble. If the template
    has no preamble, both are returned as they are.
    """
    preamble = _preamble(image_token)
    if not template.startswith(preamble):
        return template, messages
    joined_messages = []
    for message in messages:
        content = ""
        for part in message["content"]:
            content += image_token if part["type"] == "image" else part["text"]
        joined_messages.append({**message, "content": content})
    return template.removeprefix(preamble), joined_messages


def _preamble(image_token: str) -> str:
    return _PREAMBLE.replace("IMAGE_TOKEN", repr(image_token))


def check_texts(template: str, special_tokens: Tokens) -> list[str]:
    """Returns the check's conversations with an image, printed with and without prompt.

    A conversation that the template refuses is left out.
    """
    printed_texts = []
    for conversation in _CONVERSATIONS.values():
        messages = _as_parts(conversation["messages"], _IMAGE)
        tools = conversation.get("tools")
        for prompt in (False, True):
            with suppress(Exception):  # a template may refuse a conversation with any error
                printed_texts.append(_render(template, special_tokens, messages, tools, prompt))
    return printed_texts


def _render(
    template: str, special_tokens: Tokens, messages: Messages, tools=None, prompt: bool = False
) -> str:
    texts, _ = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=prompt,
        **special_tokens,
    )
    return texts[0]


def _outcome(render: Renderer, *args: Any) -> str:
    """Returns the text, or the error as text. A template may refuse a conversation by any error."""
    try:
        return render(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _as_parts(messages: Messages, *images: dict[str, str]) -> Messages:
    """Returns the messages with lists of parts as content. Images begin the first user turn."""
    with_parts = []
    for message in messages:
        parts = [{"type": "text", "text": message["content"]}]
        if message["role"] == "user":
            parts = [*images, *parts]
            images = ()
        with_parts.append({**message, "content": parts})
    return with_parts


def _changed_conversation(
    render: Renderer, expected_render: Renderer, with_parts: bool
) -> str | None:
    """Returns the name of the first text-only conversation that renders differently, or None.

    If `with_parts` is true, conversations with lists of parts as content are compared too.
    """
    for conversation_name, conversation in _CONVERSATIONS.items():
        message_forms = [conversation["messages"]]
        if with_parts:
            message_forms.append(_as_parts(conversation["messages"]))
        for messages in message_forms:
            for prompt in (False, True):
                arguments = (messages, conversation.get("tools"), prompt)
                if _outcome(render, *arguments) != _outcome(expected_render, *arguments):
                    return conversation_name
    return None


def _candidates(template: str) -> Iterator[str]:
    """Yields candidates for `template` with marks: its own, its family's and TRL's."""
    if has_generation_marks(template):
        yield template
    for family_edits in _EDITS.values():
        for line_break in ("\n", r"\n"):
            marked_template = _edited(template, family_edits, line_break)
            if marked_template is not None:
                yield marked_template
    # Importing it takes seconds, and few templates need it.
    from trl.chat_template_utils import get_training_chat_template

    # TRL needs a tokenizer, but uses only its template and special tokens.
    options = {"tokenizer_object": Tokenizer(BPE()), "chat_template": template, **_STAND_INS}
    marked_template = None
    with suppress(Exception):  # TRL does not know the template, or it refuses TRL's conversation
        marked_template = get_training_chat_template(PreTrainedTokenizerFast(**options))
    if marked_template:
        yield marked_template


def _edited(template: str, edits: list[dict[str, str]], line_break: str) -> str | None:
    """Returns the template after a family's edits, or None if it lacks a text that they replace."""
    for edit in edits:
        find = edit["find"].replace("NL", line_break)
        if find not in template:
            return None
        template = template.replace(find, edit["replace"].replace("NL", line_break))
    return template


def _marks_hold(template: str, special_tokens: Tokens) -> bool:
    """Whether the marks are what the model has to generate, in all conversations of the check.

    Conversations whose answers are not all printed do not count.
    """
    render = partial(_render, template, special_tokens)
    end_of_turn = _end_of_turn(render)
    if not end_of_turn:
        return False
    is_checked = False
    for conversation in _CONVERSATIONS.values():
        turns = conversation["messages"]
        messages = _as_parts(turns, _IMAGE)
        tools = conversation.get("tools")
        text = _outcome(render, messages, tools)
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        if not answers or not all(answer.strip() in text for answer in answers):
            continue
        expected = _expected_spans(render, messages, tools, text, end_of_turn)
        if expected != marked_texts(template, special_tokens, messages, tools):
            return False
        is_checked = True
    return is_checked


def _end_of_turn(render: Renderer) -> str:
    """Returns the word that a template prints behind an answer. It may be empty."""
    answer = "A red kite."
    exchange = _as_parts([_QUESTION, {"role": "assistant", "content": answer}])
    _, _, after_answer = _outcome(render, exchange).rpartition(answer)
    words = after_answer.split()
    return words[0] if words else ""


def _expected_spans(
    render: Renderer, messages: Messages, tools: Any, text: str, end_of_turn: str
) -> list[str] | None:
    """Returns what follows the generation prompts in a conversation's text, through `end_of_turn`.

    Returns None if the text does not begin with each of the prompts, or if a turn has no end.
    """
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:index], tools, True)
        end_position = text.find(end_of_turn, len(prompt))
        if end_position < 0 or not text.startswith(prompt):
            return None
        spans.append(text[len(prompt) : end_position + len(end_of_turn)].strip())
    return spans
