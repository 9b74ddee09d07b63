# SPDX-License-Identifier: Apache-2.0
"""The known forms of rows and how they are read, which docs/data.md shows by examples; and what was left unread."""

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


MARKER = "<image>"
"""The placeholder of an image in the texts of LLaVA's data, whatever the tokenizer's image token is."""

PROMPT = "Describe the image."
"""The question about images that come with a caption, or with nothing."""

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
"""Columns of question and answer. A row has the first form that it has both of, else the first with its question.

Those alone are lists of turns with both; others are text or lists of turns. Without a question column the row has an
image, and the question is [`PROMPT`]. Rows without an answer can be measured, but not trained on.
"""

QUESTION_COLUMNS = {"hint", "input", "choices", "answers", "answer_index", *LETTERS}
"""Further columns of the form `question`, `answer`."""

COLUMNS = {column for form in FORMS for column in form if column} | {"image", "images", "system", *QUESTION_COLUMNS}
"""Columns that are read."""

ALIASES = {
    "conversation": "conversations",
    "options": "choices",
    "correct_choice_idx": "answer_index",
    "direct_answers": "answers",
    **{f"{word}_{letter.lower()}": letter for word in ("choice", "option") for letter in LETTERS},
}
"""Other names of some columns in public data sets."""

# Of ms-swift's objects, and of LLaMA-Factory's videos and sounds. A tag of HTML is within a sentence, or closed.
_OTHER_MARKERS = re.compile(r"<ref-object>|<bbox>|(?:^|\n)[ \t]*<(video|audio)>(?!.*</\1>)", re.S)


class UnknownForm(ValueError):
    """A row has none of the known forms."""


def read_row(raw: Any) -> Row:
    """Reads a row of any known form; ValueError, perhaps an [`UnknownForm`], if it cannot be read.

    In a user's string, `<image>` and `<img>path</img>` become image parts, without a line break on either side. If
    there are none, the images come at the start of the first user turn, as in TRL.
    """
    if isinstance(raw, bytes):
        raise ValueError(f"the line is not valid JSON, or nested too deeply: {short(raw)}")
    if not isinstance(raw, Mapping):
        raise ValueError(f"a row must be a mapping from column to value, got {short(raw)}")
    names = {ALIASES[name]: name for name in raw if name in ALIASES and is_empty(raw.get(ALIASES[name]))}
    named = {**raw, **{own: raw[name] for own, name in names.items()}}
    images = _images(named)
    asks, answers = _form(named, bool(images))
    row, read = Row(asks or answers or "image"), {asks, answers, "image", "images", "system"}
    asked, answer = (named[asks] if asks else PROMPT), named.get(answers)
    if asks == "question":
        asked, answer = read_question(named, row, read)
    turns = read_turns(asked, asks or "", "user" if answers or not asks else None, row.left_out)
    if answers:
        turns = [replace(turn, learned=False) for turn in turns]  # an answer in a prompt is not learned
    if accepted := accepted_answers(answer):
        row.accepted = accepted
        answer = Counter(accepted).most_common(1)[0][0]  # the first of equals
    if answer is not None:
        turns += read_turns(answer, str(answers), "assistant", row.left_out)
    leave_out(row.left_out, raw, read | {name for own, name in names.items() if own in read})
    _check_meaning(named, turns, bool(images), asks, answers)
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
    return ", ".join(sorted(str(column)[:80] for column, value in raw.items() if value is not None)) or "none"


def _form(raw: Mapping, has_images: bool) -> tuple[str | None, str | None]:
    present = {column for column, value in raw.items() if not (is_empty(value) and value != "")}
    present |= {"answer"} if "answers" in present or "answer_index" in present else set()
    for asks, answers in FORMS:  # a question with its answer comes before another question
        if asks in present and (answers is None or answers in present):
            return asks, answers
    for asks, answers in FORMS:
        # A row of an image alone has no other columns: one of them may be a question that is not read.
        shown = has_images and (answers in present if answers else present <= {"image", "images", "label"})
        if asks in present if asks else shown:
            return asks, answers
    raise UnknownForm(
        f"its form is not known. It has the columns: {columns(raw)}; known are conversations, messages, texts, prompt "
        "with completion, question with answer, and caption or text with image"
    )


def _images(raw: Mapping) -> list[Any]:
    present = [column for column in ("image", "images") if not is_empty(raw.get(column))]
    if len(present) > 1:
        raise ValueError("it has images in both image and images; use one of them")
    if not present:
        return []
    images = parsed(raw[present[0]])
    images = list(images) if isinstance(images, (list, tuple)) else [images]
    if (empty := next((number for number, image in enumerate(images) if is_empty(image)), None)) is not None:
        raise ValueError(f"{present[0]} has nothing in place of image {empty}; leave it out of the list")
    return images


def _with_system(turns: list[Turn], system: Any) -> list[Turn]:
    """The turns after the text in the column `system`."""
    if is_empty(system):
        return turns
    first = Turn("system", [{"type": "text", "text": system}])
    if not isinstance(system, str) or turns and turns[0].role == "system" and turns[0].content != first.content:
        raise ValueError("its column system is no text, or differs from its system turn; leave one of them out")
    return turns if turns and turns[0].role == "system" else [first, *turns]


def _check_meaning(raw: Mapping, turns: list[Turn], has_images: bool, asks: str | None, answers: str | None) -> None:
    """Raises ValueError if there is more to it than images, or what is learned is no answer."""
    for column in ("videos", "audios", *(() if has_images else ("video", "audio"))):
        if not is_empty(raw.get(column)):
            raise ValueError(f"it has {column}, and only images are read; leave such rows out")
    for text in (part.get("text") for turn in turns for part in turn.content):
        if isinstance(text, str) and "<" in text and (marker := _OTHER_MARKERS.search(text)):
            raise ValueError(f"it has {marker[0].strip()} in a text, and such marks are not filled in")
    if not asks and answers and isinstance(content := parsed(raw[answers]), Mapping):
        raise ValueError(f"its {answers} is no caption but JSON with {', '.join(map(str, content))}")
    if not asks and answers == "text" and "question_id" in raw and not isinstance(raw.get("label"), str):
        raise ValueError(
            "its text, with question_id beside it, is read as a question with --columns question=text, and as a "
            "caption with --columns caption=text"
        )
    for column in ("label", "kto_tag"):
        if raw.get(column) is False and answers != column:
            raise ValueError(f"its answer is marked as unwanted ({column} false), as KTO learns it: see docs/trl.md")


_QUESTIONS = (
    "question", "query", "instruction", "problem", "prefix", "human", "user", "prompt", "input", "inputs", "text",
)  # fmt: skip
_ANSWERS = (
    "answer", "response", "output", "outputs", "solution", "suffix", "assistant", "gpt", "completion", "label",
    "target", "ground_truth", "chosen",
)  # fmt: skip
_CAPTIONS = ("captions", "description", "caption_str", "sentences", "re_caption", "raw", "ground_truth", "summary")
_IMAGES = (
    "image_path", "img_path", "image_file", "image_file_name", "image_filename", "file_name", "filename", "filepath",
    "image_name", "img_name", "image_base64_str", "img", "picture", "photo", "path",
)  # fmt: skip
_PREFERENCES = ({"chosen", "rejected"}, {"preferred_output", "non_preferred_output"})
_ABOUT = re.compile(
    r"(.*[_.-])?(ids?|uu?id|idx|index|key|hash|md5|sha256|ur[li]s?|links?|sources?|origin|dataset|split|subset|types?|"
    r"category|categories|topic|subject|field|domain|task|skill|grade|difficulty|lang|language|scores?|ratings?|rank|"
    r"similarity|p?watermark|p?unsafe|nsfw|width|height|size|shape|licen[cs]e|author|date|time(stamp)?|version|status|"
    r"error_message|exif|model|meta(data)?|name)_*|\(no name\)|unnamed: ?\d+|__index_level_\d+__",
    re.I,
)
_LIKE_A_MARKER = re.compile(
    r"(?-i:(?!<image>))<\|?(?:start_of_)?(?:image|img)[ _-]?(?:\d+|start|pad|here|placeholder|context|patch)? ?/?\|?>"
    r"|(?<!!)\[(?:image|img)\](?!\()",
    re.I,
)
_LIKE_AN_IMAGE_COLUMN = re.compile(r"(?:^|[ _-])(?i:image|img|picture|pic|photo|frame)s?(?:$|[ _\-A-Z\d])")


def known_row(raw: Any) -> Row:
    """[`read_row`], with `columns` in the error if the row's form is not known and they would help."""
    try:
        return read_row(raw)
    except UnknownForm as error:
        raise ValueError(f"{error}{proposal(raw)}") from None


def is_about(name: str) -> bool:
    """Whether a column, by its name, tells about the row, as ids, addresses and scores do, and is not part of it."""
    return _ABOUT.fullmatch(name) is not None


def unread_image(raw: Any, messages: list[dict[str, Any]]) -> str | None:
    """What looks like an image in a row without any, `column img` or `text <image_1>`; or None."""
    if not isinstance(raw, Mapping) or raw.get("image") or raw.get("images"):
        return None
    for column, value in raw.items():
        named = _LIKE_AN_IMAGE_COLUMN.search(str(column)) and value and not is_empty(value)
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
    """`columns` with which a row has a question and an answer, as the end of an error; empty if there are none."""
    if not isinstance(raw, Mapping):
        return ""
    names = (column for column in raw if isinstance(column, str) and not is_empty(raw[column]))
    present = {column.strip().lower(): column for column in names}
    image = [] if {"image", "images"} & {*present.values()} else [("image", name) for name in ("image", *_IMAGES)]
    image = [(own, present[name]) for own, name in image if name in present][:1]
    tried: list[list[tuple[str, str]]] = []
    for asks, answers in product(_QUESTIONS, _ANSWERS):
        if asks in present and answers in present:
            tried.append([("question", present[asks]), ("answer", present[answers])])
    tried += [[("caption", present[name])] for name in _CAPTIONS if name in present]
    for name in ("chosen", "preferred_output", *present):
        if name in present and name not in ("rejected", "non_preferred_output", "history"):
            tried += [[("messages", present[name])]] if isinstance(parsed(raw[present[name]]), (list, Mapping)) else []
    options = ([(own, name) for own, name in image + columns if own != name] for columns in tried)
    reading = next((columns for columns in options if columns and _is_read(renamed(raw, dict(columns)))), None)
    option = "--columns " + shlex.quote(",".join(f"{own}={name}" for own, name in reading)) if reading else ""
    if any(columns <= present.keys() for columns in _PREFERENCES):
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
