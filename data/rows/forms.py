# SPDX-License-Identifier: Apache-2.0
"""The known forms of rows, and how each is read; docs/data.md has an example of each."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .choices import LETTERS, accepted_answers, read_question
from .images import MAX_PATH, short
from .turns import Row, Turn, alternating, place_images, read_turns
from .values import is_empty, leave_out, parsed, printable


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
