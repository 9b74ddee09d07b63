# SPDX-License-Identifier: Apache-2.0
"""The known forms of rows, with examples in docs/data.md; how they are read; what is not read."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from PIL import Image

from ...errors import printable
from .images import MAX_PATH, SUFFIXES, short
from .turns import (
    LETTERS,
    Row,
    Turn,
    accepted_answers,
    alternating,
    is_empty,
    leave_out,
    parsed,
    place_images,
    read_question,
    read_turns,
)


MARKER = "<image>"  # of an image in LLaVA's texts, whatever the tokenizer's image token is
PROMPT = "Describe the image."  # the question to an image with a caption, or with nothing

FORMS: tuple[tuple[str | None, str | None], ...] = (
    ("conversations", None),
    ("messages", None),
    ("texts", None),
    ("prompt", "completion"),
    ("question", "answer"),
    (None, "caption"),
    (None, "text"),
    (None, None),
)
"""Columns of question and answer: a row has the first form of which it has all columns.

Otherwise it has the first whose question it has. The first three are lists of turns; the others may
be texts. Without a question column, the row has an image, and the question is [`PROMPT`]. Without
an answer, it is measured but not trained on.
"""

# Columns that are read, those of a question with options among them.
COLUMNS = {"image", "images", "system", *LETTERS}
COLUMNS |= {"hint", "input", "choices", "answers", "answer_index"}
COLUMNS |= {column for form in FORMS for column in form if column}

ALIASES = {
    "conversation": "conversations",
    "captions": "caption",
    "options": "choices",
    "correct_choice_idx": "answer_index",
    "direct_answers": "answers",
    **{f"{word}_{letter.lower()}": letter for word in ("choice", "option") for letter in LETTERS},
}
"""Other names of some columns in public data sets."""

# Ms-swift's objects, LLaMA-Factory's videos and sounds. A tag of HTML is in a sentence, or closed.
_OTHER_MARKERS = re.compile(r"<ref-object>|<bbox>|(?:^|\n)[ \t]*<(video|audio)>(?!.*</\1>)", re.S)
_QUESTIONS = ["question", "query", "instruction", "problem", "prefix", "human", "user", "prompt"]
_QUESTIONS += ["input", "inputs", "text"]
_ANSWERS = ["answer", "response", "output", "outputs", "solution", "suffix", "assistant", "gpt"]
_ANSWERS += ["completion", "label", "target", "ground_truth", "chosen"]
_CAPTIONS = ["captions", "description", "caption_str", "sentences", "re_caption", "raw"]
_CAPTIONS += ["ground_truth", "summary"]
_ANSWERS_BY_NAME = {*_ANSWERS, *_CAPTIONS, "content", "value", "texts", "conversations", "messages"}
_QUESTIONS_BY_NAME = {*_QUESTIONS, "system", "choices", "hint", "history"}
_IMAGES = ["image_path", "img_path", "image_file", "image_file_name", "image_filename"]
_IMAGES += ["file_name", "filename", "filepath", "image_name", "img_name", "image_base64_str"]
_IMAGES += ["img", "picture", "photo", "path"]
_PREFERENCES = ({"chosen", "rejected"}, {"preferred_output", "non_preferred_output"})
_ABOUT = re.compile(
    r"(.*[_.-])?(ids?|uu?id|idx|index|key|hash|md5|sha256|ur[li]s?|links?|sources?|origin|dataset|"
    r"split|subset|types?|category|categories|topic|subject|field|domain|task|skill|grade|"
    r"difficulty|lang|language|scores?|ratings?|rank|similarity|p?watermark|p?unsafe|nsfw|width|"
    r"height|size|shape|licen[cs]e|author|date|time(stamp)?|version|status|error_message|exif|"
    r"model|meta(data)?|name)_*|\(no name\)|unnamed: ?\d+|__index_level_\d+__",
    re.I,
)
_LIKE_A_MARKER = re.compile(
    r"(?-i:(?!<image>))<\|?(start_of_)?(image|img)[ _-]?"
    r"(\d+|start|pad|here|placeholder|context|patch)? ?/?\|?>|(?<!!)\[(image|img)\](?!\()",
    re.I,
)
_IMAGE_COLUMN = re.compile(r"(^|[ _-])(?i:image|img|picture|pic|photo|frame)s?($|[ _\-A-Z\d])")


# What is told of rows, with their number.
ONE_OF_ANSWERS = "of several answers, the commonest is learned, or the first of equals"
ONE_OF_CAPTIONS = "of several captions, the commonest is learned, or the first of equals"
_LIST_OF_ANSWERS = (
    "an answer that is a list in a text is learned as this text; --columns answers=COLUMN reads it"
)
_LIST_OF_CAPTIONS = (
    "a caption that is a list in a text is learned as this text; --columns captions=COLUMN reads it"
)


class UnknownForm(ValueError):
    """A row has none of the known forms."""


def known_row(raw: Any) -> Row:
    """[`read_row`], whose error for an unknown form says with which `columns` it would be read."""
    try:
        return read_row(raw)
    except UnknownForm as error:
        raise ValueError(f"{error}{proposal(raw)}") from None


def read_row(raw: Any) -> Row:
    """Reads a row of any known form; ValueError, perhaps an [`UnknownForm`], if it cannot be read.

    In a user's string, `<image>` and `<img>path</img>` become image parts, those at its beginning
    and end without the line break beside them. If there are none, the images start the first user
    turn, as in TRL.
    """
    if isinstance(raw, bytes):
        raise ValueError(f"the line is not valid JSON, or nested too deeply: {short(raw)}")
    if not isinstance(raw, Mapping):
        raise ValueError(f"a row must be a mapping from column to value, got {short(raw)}")
    aliases = [name for name in raw if name in ALIASES and is_empty(raw.get(ALIASES[name]))]
    names = {ALIASES[name]: name for name in aliases}
    named = {**raw, **{known: raw[name] for known, name in names.items()}}
    images = _images(named)
    asks, answers = _form(named, bool(images))
    row, read = Row(asks or answers or "image"), {asks, answers, "image", "images", "system"}
    asked, answer = (named[asks] if asks else PROMPT), named.get(answers)
    if answers == "caption" and "caption" in names:
        answer = parsed(answer)  # several, as the name says
    if asks == "question":
        asked, answer = read_question(named, row, read)
    turns = read_turns(asked, asks or "", "user" if answers or not asks else None, row.left_out)
    if answers:
        turns = [replace(turn, learned=False) for turn in turns]  # a prompt is not learned
    if accepted := accepted_answers(answer):
        row.accepted = accepted
        answer = Counter(accepted).most_common(1)[0][0]  # the first of equals
        if len({*accepted}) > 1:
            row.changed.append(ONE_OF_ANSWERS if asks else ONE_OF_CAPTIONS)
    elif _is_text_of_list(answer):
        row.changed.append(_LIST_OF_ANSWERS if asks else _LIST_OF_CAPTIONS)
    if answer is not None:
        turns += read_turns(answer, str(answers), "assistant", row.left_out)
    leave_out(row.left_out, raw, read | {name for known, name in names.items() if known in read})
    _check_meaning(named, turns, bool(images), None if asks else answers)
    turns = alternating(_with_system(turns, named.get("system")), row.changed)
    row.images = place_images(turns, images)
    row.messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    row.learned = [turn.learned for turn in turns if turn.role == "assistant"]
    return row


def image_name(raw: Any) -> str | None:
    """The name of the first image of a raw or parsed row, or None."""
    if not isinstance(raw, Mapping):
        return None
    images = raw.get("images") or raw.get("image")
    first = images[0] if isinstance(images, (list, tuple)) and images else images
    name = first.get("path") if isinstance(first, Mapping) else first
    if not isinstance(name, str) or not 0 < len(name) <= MAX_PATH or name.startswith("data:"):
        return None
    return printable(name)


def columns(raw: Mapping) -> str:
    """The columns of a row that are not empty, for errors."""
    names = (str(column)[:80] for column, value in raw.items() if value is not None)
    return ", ".join(sorted(names)) or "none"


def _form(raw: Mapping, has_images: bool) -> tuple[str | None, str | None]:
    present = {column for column, value in raw.items() if not (is_empty(value) and value != "")}
    present |= {"answer"} if "answers" in present or "answer_index" in present else set()
    for asks, answers in FORMS:  # a question with its answer comes before another question
        if asks in present and (answers is None or answers in present):
            return asks, answers
    is_alone = has_images and present <= {"image", "images", "label"}  # no unread question
    for asks, answers in FORMS:
        has_answer = has_images and answers in present if answers else is_alone
        if asks in present if asks else has_answer:
            return asks, answers
    raise UnknownForm(
        f"its form is not known. It has the columns: {columns(raw)}; known are conversations, "
        "messages, texts, prompt with completion, question with answer, caption or text with image"
    )


def _images(raw: Mapping) -> list[Any]:
    present = [column for column in ("image", "images") if not is_empty(raw.get(column))]
    if len(present) > 1:
        raise ValueError("it has images in both image and images; use one of them")
    if not present:
        return []
    images = parsed(raw[present[0]])
    images = list(images) if isinstance(images, (list, tuple)) else [images]
    if empty := [number for number, image in enumerate(images) if is_empty(image)]:
        raise ValueError(f"{present[0]} has nothing in place of image {empty[0]}; leave it out")
    return images


def _is_text_of_list(answer: Any) -> bool:
    """Whether an answer is a text that holds a list of texts, as tables store several answers."""
    if not isinstance(answer, str) or not answer.startswith("["):
        return False
    return len(accepted_answers(parsed(answer))) > 0


def _with_system(turns: list[Turn], system: Any) -> list[Turn]:
    if is_empty(system):
        return turns
    first = Turn("system", [{"type": "text", "text": system}])
    has_system = bool(turns) and turns[0].role == "system"
    if not isinstance(system, str) or has_system and turns[0].content != first.content:
        raise ValueError("its column system is no text, or differs from its system turn; use one")
    return turns if has_system else [first, *turns]


def _check_meaning(raw: Mapping, turns: list[Turn], has_images: bool, caption: str | None) -> None:
    """Raises ValueError if a row has more than images and text, or what is learned is no answer."""
    for column in ("videos", "audios", *(() if has_images else ("video", "audio"))):
        if not is_empty(raw.get(column)):
            raise ValueError(f"it has {column}, and only images are read; leave such rows out")
    for text in (part.get("text") for turn in turns for part in turn.content):
        if isinstance(text, str) and "<" in text and (marker := _OTHER_MARKERS.search(text)):
            raise ValueError(f"it has {marker[0].strip()} in a text; such marks are not filled in")
    if caption and isinstance(content := parsed(raw[caption]), Mapping):
        raise ValueError(f"its {caption} is no caption but JSON: {', '.join(map(str, content))}")
    if caption == "text" and "question_id" in raw and not isinstance(raw.get("label"), str):
        remedy = "use --columns question=text, or else --columns caption=text"
        raise ValueError(f"it has question_id, so its text may be a question; {remedy}")
    for column in ("label", "kto_tag"):
        if raw.get(column) is False:
            raise ValueError(f"its answer is unwanted ({column} false), for KTO: see docs/trl.md")


def is_about(name: str) -> bool:
    """Whether a column, by its name, tells about the row, as ids, addresses and scores do."""
    return _ABOUT.fullmatch(name) is not None


def looks_like(name: str) -> str | None:
    """What a column, or a key as `messages.content`, is by its name: "an image" and so on; or None.

    Texts as `text <image_1>`, which [`markers`] finds, are like images.
    """
    key = name.rpartition(".")[2].strip()
    known = ALIASES.get(key.lower(), key.lower())
    if name.startswith("text "):
        return "an image"
    if is_about(name):
        return None
    if known in {"image", "images", *_IMAGES} or _IMAGE_COLUMN.search(key):
        return "an image"
    if known in _ANSWERS_BY_NAME or "answer" in known or "caption" in known:
        return "an answer"
    if known in _QUESTIONS_BY_NAME or "question" in known or "prompt" in known:
        return "a question"
    return None


def unread_image(raw: Any, messages: list[dict[str, Any]]) -> str | None:
    """What looks like an image in a row without any, `column img` or `text <image_1>`; or None."""
    if not isinstance(raw, Mapping) or raw.get("image") or raw.get("images"):
        return None
    for column, value in raw.items():
        named = _IMAGE_COLUMN.search(str(column)) and value and not is_empty(value)
        if named or (column != "id" and _looks_like_an_image(value)):
            return f"column {str(column)[:80]}"
    marker = next(markers(messages), None)
    return f"text {marker}" if marker else None


def markers(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Texts such as `<image_1>`, which are learned as text."""
    texts = (part.get("text") or "" for message in messages for part in message["content"])
    matches = (_LIKE_A_MARKER.search(text) for text in texts if "<" in text or "[" in text)
    return (match[0] for match in matches if match)


def proposal(raw: Any) -> str:
    """The end of an error: `columns` with which a row has question and answer, if there are any."""
    if not isinstance(raw, Mapping):
        return ""
    names = (column for column in raw if isinstance(column, str) and not is_empty(raw[column]))
    present = {column.strip().lower(): column for column in names}
    names_of_images = () if {"image", "images"} & {*present.values()} else ("image", *_IMAGES)
    image = [("image", present[name]) for name in names_of_images if name in present][:1]
    tried: list[list[tuple[str, str]]] = []
    for asks, answers in product(_QUESTIONS, _ANSWERS):
        if asks in present and answers in present:
            name = present[answers]
            known = "answers" if _is_text_of_list(raw[name]) else "answer"
            tried.append([("question", present[asks]), (known, name)])
    for name in (present[name] for name in _CAPTIONS if name in present):
        known = "captions" if _is_text_of_list(raw[name]) else "caption"
        tried.append([(known, name)])
    for name in ("chosen", "preferred_output", *present):
        if name in present and name not in ("rejected", "non_preferred_output", "history"):
            is_list = isinstance(parsed(raw[present[name]]), (list, Mapping))
            tried += [[("messages", present[name])]] if is_list else []
    options = ([pair for pair in image + pairs if pair[0] != pair[1]] for pairs in tried)
    read = (pairs for pairs in options if pairs and _is_read(renamed(raw, dict(pairs))))
    named = ",".join(f"{known}={name}" for known, name in next(read, ()))
    option = f"--columns {shlex.quote(named)}" if named else ""
    if any(preference <= present.keys() for preference in _PREFERENCES):
        alone = f"; the chosen answers alone are read with {option}" if option else ""
        return f". It has preferences, as DPO learns them: see docs/trl.md{alone}"
    return f". It is read with {option}" if option else ""


def renamed(raw: Mapping, own: Mapping[str, str]) -> dict[str, Any]:
    """A row with columns of one's own names: `own` has the data's name of a known column."""
    others = raw.keys() - own.keys() - {*own.values()}
    values = {column: raw[name] for column, name in own.items() if name in raw}
    return {column: value for column, value in raw.items() if column in others} | values


def _is_read(raw: Mapping) -> bool:
    try:
        roles = [message["role"] for message in read_row(raw).messages]
    except ValueError:
        return False
    return roles[-1:] == ["assistant"] and "user" in roles


def _looks_like_an_image(value: Any) -> bool:
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, str):
        return value.startswith("data:image/") or value.partition("?")[0].lower().endswith(SUFFIXES)
    return isinstance(value, (bytes, Image.Image))
