# SPDX-License-Identifier: Apache-2.0
"""Chat templates that read images: a language model's own after a preamble, or else Vicuna's.

A language model's template concatenates strings and fails on messages of image and text parts. The
preamble makes strings of them, so the template stays, and conversations of text render as before.
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

from ..checkpoint.prompts import has_generation_marks, with_fixed_date


Tokens = dict[str, Any]
Messages = list[dict[str, Any]]
Renderer = Callable[..., str]  # (messages, tools=None, add_generation_prompt=False) -> text

_TEMPLATES = files(__package__) / "templates"
_PREAMBLE = (_TEMPLATES / "multimodal_preamble.jinja").read_text(encoding="utf-8")
_VICUNA = (_TEMPLATES / "vicuna.jinja").read_text(encoding="utf-8")
_EDITS = yaml.safe_load((_TEMPLATES / "generation_marks.yaml").read_text(encoding="utf-8"))
_CONVERSATIONS = yaml.safe_load((_TEMPLATES / "check_conversations.yaml").read_text("utf-8"))
_STAND_INS: Tokens = {"bos_token": "<s>", "eos_token": "</s>"}
_QUESTION = {"role": "user", "content": "What is this?"}
_IMAGE = {"type": "image"}


def multimodal_chat_template(
    template: str | None, *, image_token: str = "<image>", special_tokens: Tokens = _STAND_INS
) -> tuple[str, bool]:
    """A chat template that reads images, and whether it marks what the model has to generate.

    Text-only conversations render exactly as before. Image parts become the image token; parts keep
    their order, with nothing between them. A template that prints today's date prints a fixed one:
    see [`with_fixed_date`]. Marks count only if every marked span is, up to white
    space around it, what follows the generation prompt, through the end-of-turn token.

    `template` is the language model's own; None gives Vicuna v1.1's. One that prints `image_token`
    for image parts gets no preamble. Raises ValueError if it is not valid Jinja, or renders text
    differently with the preamble.
    """
    preamble = _PREAMBLE.replace("IMAGE_TOKEN", repr(image_token))
    if template is None:
        template = preamble + _VICUNA
        return template, _marks_hold(template, special_tokens)  # not without an end-of-turn token
    fixed_date = with_fixed_date(template).removesuffix(template)
    original = partial(_render, fixed_date + template, special_tokens)
    text = _outcome(original, [_QUESTION])
    if text.startswith("TemplateSyntaxError"):
        raise ValueError(f"The chat template is not valid Jinja: {text} Correct or replace it.")
    text = _outcome(original, _as_parts([_QUESTION], _IMAGE))
    reads_images = text.count(image_token) == 1 and "What is this?" in text
    preamble = "" if reads_images else preamble
    preamble += fixed_date
    for candidate in _candidates(template):
        marked = preamble + candidate
        render = partial(_render, marked, special_tokens)
        if not _difference(render, original, reads_images) and _marks_hold(marked, special_tokens):
            return marked, True
    render = partial(_render, preamble + template, special_tokens)
    if difference := _difference(render, original, reads_images):
        raise ValueError(
            f"With the image preamble the chat template renders the conversation {difference!r} "
            "differently. Give another with `--chat-template`."
        )
    return preamble + template, False


def printing_first(template: str, text: str, image_token: str) -> str:
    """The template with `text` before all that it prints, whose white space stays as it is."""
    preamble = _PREAMBLE.replace("IMAGE_TOKEN", repr(image_token))
    preamble = preamble if template.startswith(preamble) else ""
    # A block: jinja strips the line break after it, and white space before one that begins a line.
    block = f"{{% if messages %}}{{{{ {text!r} }}}}{{% endif %}}\n"
    return preamble + block + template.removeprefix(preamble)


def without_preamble(template: str, messages: Messages, image_token: str) -> tuple[str, Messages]:
    """A template and messages that print the same as these, several times faster.

    The parts of each message are joined here, and not by the template's preamble. A template
    without a preamble, and its messages, are returned as they are.
    """
    preamble = _PREAMBLE.replace("IMAGE_TOKEN", repr(image_token))
    if not template.startswith(preamble):
        return template, messages
    joined = []
    for message in messages:
        texts = []
        for part in message["content"]:
            texts.append(image_token if part["type"] == "image" else part["text"])
        joined.append({**message, "content": "".join(texts)})
    return template.removeprefix(preamble), joined


def check_texts(template: str, special_tokens: Tokens) -> list[str]:
    """The check's conversations with an image, printed with and without generation prompt."""
    texts = []
    for chat in _CONVERSATIONS.values():
        for prompt in (False, True):
            with suppress(Exception):  # a template may refuse a conversation with any error
                messages = _as_parts(chat["messages"], _IMAGE)
                texts.append(_render(template, special_tokens, messages, chat.get("tools"), prompt))
    return texts


def _render(
    template: str, special_tokens: Tokens, messages: Messages, tools=None, prompt: bool = False
) -> str:
    options: Any = {"chat_template": template, "add_generation_prompt": prompt, **special_tokens}
    return render_jinja_template([messages], tools=tools, **options)[0][0]


def _outcome(render: Renderer, *args: Any) -> str:
    """The text, or the error as text: a template may refuse a conversation with any error."""
    try:
        return render(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _as_parts(messages: Messages, *images: dict[str, str]) -> Messages:
    """The messages with lists of parts as content; images begin the first user turn."""
    parts = []
    for message in messages:
        parts.append({**message, "content": [{"type": "text", "text": message["content"]}]})
    first_user = next(message for message in parts if message["role"] == "user")
    first_user["content"] = [*images, *first_user["content"]]
    return parts


def _difference(render: Renderer, expect: Renderer, lists: bool) -> str | None:
    """The first text-only conversation that renders differently, in `lists` of parts too."""
    for name, chat in _CONVERSATIONS.items():
        forms = [chat["messages"], _as_parts(chat["messages"])]
        for messages in forms if lists else forms[:1]:
            for prompt in (False, True):
                arguments = messages, chat.get("tools"), prompt
                if _outcome(render, *arguments) != _outcome(expect, *arguments):
                    return name
    return None


def _candidates(template: str) -> Iterator[str]:
    """Candidates for `template` with marks: its own, those of its family, TRL's."""
    if has_generation_marks(template):
        yield template
    for edits in _EDITS.values():
        for line_break in ("\n", r"\n"):
            marked = template
            for edit in edits:
                find, replace = (edit[key].replace("NL", line_break) for key in ("find", "replace"))
                if find not in template:
                    break
                marked = marked.replace(find, replace)
            else:
                yield marked
    from trl.chat_template_utils import get_training_chat_template  # takes seconds, and few need it

    # TRL needs a tokenizer, but uses only its template and special tokens.
    options = {"tokenizer_object": Tokenizer(BPE()), "chat_template": template, **_STAND_INS}
    with suppress(Exception):  # TRL does not know the template, or it refuses TRL's conversation
        if marked := get_training_chat_template(PreTrainedTokenizerFast(**options)):
            yield marked


def _marks_hold(template: str, special_tokens: Tokens) -> bool:
    """Whether the marks are what the model has to generate, wherever all answers are printed."""
    render, checked = partial(_render, template, special_tokens), False
    exchange = _as_parts([_QUESTION, {"role": "assistant", "content": "A red kite."}])
    end_of_turn = "".join(_outcome(render, exchange).rpartition("A red kite.")[2].split()[:1])
    for chat in _CONVERSATIONS.values():
        messages, tools = _as_parts(chat["messages"], _IMAGE), chat.get("tools")
        text = _outcome(render, messages, tools)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or not all(chat["messages"][at]["content"].strip() in text for at in turns):
            continue
        masked: Any = {"chat_template": template, "return_assistant_tokens_mask": True}
        spans = render_jinja_template([messages], tools=tools, **masked, **special_tokens)[1][0]
        prompts, wanted = [render(messages[:at], tools, True) for at in turns], []
        for prompt in prompts:
            stop = text.find(end_of_turn, len(prompt)) + len(end_of_turn)
            wanted.append(text[len(prompt) : stop].strip())
        marked = [text[start:stop].strip() for start, stop in spans]
        whole = all(wanted) and all(map(text.startswith, prompts))  # "" has no end
        if not end_of_turn or not whole or marked != wanted:
            return False
        checked = True
    return checked
