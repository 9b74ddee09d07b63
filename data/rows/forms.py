# SPDX-License-Identifier: Apache-2.0
"""The known forms of rows, reading them, and naming what is not read.

docs/data.md has examples of the forms.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from PIL import Image

from ...console import printable
from .images import MAX_PATH, SUFFIXES, short
from .questions import LETTERS, Question, accepted_answers, read_question
from .turns import Message, Row, Turn, alternating, image_parts, place_images, read_turns, text_part
from .values import as_list, is_empty, parsed, unread_keys


MARKER = "<image>"  # of an image in LLaVA's texts, whatever the tokenizer's image token is
PROMPT = "Describe the image."  # the question to an image with a caption, or with nothing


class Form(NamedTuple):
    """The columns of question and answer in a form of rows."""

    question: str | None
    answer: str | None


ROW_FORMS = (
    Form("conversations", None),
    Form("messages", None),
    Form("texts", None),
    Form("prompt", "completion"),
    Form("question", "answer"),
    Form(None, "caption"),
    Form(None, "text"),
    Form(None, None),
)
"""The forms of rows, in order of precedence.

A row has the first form whose columns it has. If there is none, it has the first form whose
question it has. The first three are lists of turns. The others may be texts. In a form without a
question column, a row has an image, and its question is [`PROMPT`]. A row without an answer is
measured but not trained on.
"""

# Columns that are read, including the columns of a question with options.
COLUMNS = {
    "image",
    "images",
    "system",
    "hint",
    "input",
    "choices",
    "answers",
    "answer_index",
    *LETTERS,
}
for _form_of_rows in ROW_FORMS:
    COLUMNS.update(filter(None, _form_of_rows))

ALIASES = {
    "conversation": "conversations",
    "captions": "caption",
    "options": "choices",
    "correct_choice_idx": "answer_index",
    "direct_answers": "answers",
}
"""Other names of some columns in public data sets."""
for _letter in LETTERS:
    ALIASES[f"choice_{_letter.lower()}"] = _letter
    ALIASES[f"option_{_letter.lower()}"] = _letter

# Marks of ms-swift's objects, and of LLaMA-Factory's videos and sounds. In HTML, the same tag would
# be in a sentence, or closed.
_OTHER_MARKERS = re.compile(r"<ref-object>|<bbox>|(?:^|\n)[ \t]*<(video|audio)>(?!.*</\1>)", re.S)
_QUESTIONS = [
    "question",
    "query",
    "instruction",
    "problem",
    "prefix",
    "human",
    "user",
    "prompt",
    "input",
    "inputs",
    "text",
]
_ANSWERS = [
    "answer",
    "response",
    "output",
    "outputs",
    "solution",
    "suffix",
    "assistant",
    "gpt",
    "completion",
    "label",
    "target",
    "ground_truth",
    "chosen",
]
_CAPTIONS = [
    "captions",
    "description",
    "caption_str",
    "sentences",
    "re_caption",
    "raw",
    "ground_truth",
    "summary",
]
_ANSWERS_BY_NAME = {*_ANSWERS, *_CAPTIONS, "content", "value", "texts", "conversations", "messages"}
_QUESTIONS_BY_NAME = {*_QUESTIONS, "system", "choices", "hint", "history"}
_IMAGES = [
    "image_path",
    "img_path",
    "image_file",
    "image_file_name",
    "image_filename",
    "file_name",
    "filename",
    "filepath",
    "image_name",
    "img_name",
    "image_base64_str",
    "img",
    "picture",
    "photo",
    "path",
]
_UNWANTED_TURNS = {"rejected", "non_preferred_output", "history"}
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


# Notes on rows. They are reported with the number of such rows.
ONE_OF_ANSWERS = "of several answers, the commonest is learned, or the first of equals"
ONE_OF_CAPTIONS = "of several captions, the commonest is learned, or the first of equals"
_LIST_OF_ANSWERS = (
    "an answer that is a list in a text is learned as this text; --columns answers=COLUMN reads it"
)
_LIST_OF_CAPTIONS = (
    "a caption that is a list in a text is learned as this text; --columns captions=COLUMN reads it"
)


class UnknownForm(ValueError):
    """A row has none of the [`ROW_FORMS`]."""


def read_row_with_proposal(raw: Any) -> Row:
    """Reads a row of any known form, as [`read_row`] does.

    Raises:
        ValueError: The row cannot be read. If its form is unknown, the message has the option
            `--columns` that would make it readable.
    """
    try:
        return read_row(raw)
    except UnknownForm as error:
        raise ValueError(f"{error}{columns_proposal(raw)}") from None


def read_row(raw: Any) -> Row:
    """Reads a row of any known form.

    In a user's text, `<image>` and `<img>path</img>` become image parts. At its beginning and end,
    the line break beside them is left out. Without image parts, the images start the first user
    turn, as in TRL.

    Raises:
        UnknownForm: The row has none of the forms.
        ValueError: The row has a form, but cannot be read.
    """
    if isinstance(raw, bytes):
        raise ValueError(f"the line is not valid JSON, or nested too deeply: {short(raw)}")
    if not isinstance(raw, Mapping):
        raise ValueError(f"a row must be a mapping from column to value, got {short(raw)}")
    # The row's own names of columns, by known name.
    aliases = {
        ALIASES[column]: column
        for column in raw
        if column in ALIASES and is_empty(raw.get(ALIASES[column]))
    }
    named = dict(raw)
    for known_column, alias in aliases.items():
        named[known_column] = raw[alias]
    images = _read_images(named)
    form = _form(named, has_images=bool(images))
    question = _read_question(named, form, aliases)
    answer, accepted, notes = _learned_answer(question, form)
    turns = _read_turns(question.prompt, answer, form)
    left_out = []
    for turn in turns:
        left_out += turn.left_out
    read_aliases = {aliases[column] for column in aliases.keys() & question.columns}
    left_out += unread_keys(raw, question.columns | read_aliases)
    _check_columns(named, form, has_images=bool(images))
    _check_marks(turns)
    turns, turn_changes = alternating(_with_system(turns, named.get("system")))
    turns = place_images(turns, images)
    return Row(
        form=form.question or form.answer or "image",
        messages=[{"role": turn.role, "content": turn.content} for turn in turns],
        images=[part["image"] for part in image_parts(turns)],
        learned=[turn.learned for turn in turns if turn.role == "assistant"],
        options=question.options,
        accepted=accepted,
        left_out=list(dict.fromkeys(left_out)),
        changed=notes + turn_changes,
    )


def _read_question(raw: Mapping, form: Form, aliases: Mapping[str, str]) -> Question:
    """Returns the question and answer of a row of any form, with the columns that are read."""
    columns = frozenset((*form, "image", "images", "system"))
    if form.question == "question":
        question = read_question(raw)
        return replace(question, columns=question.columns | columns)
    prompt = raw[form.question] if form.question else PROMPT
    answer = raw.get(form.answer)
    if form.answer == "caption" and "caption" in aliases:
        answer = parsed(answer)  # several, as the name says
    return Question(prompt, answer, columns=columns)


def _learned_answer(question: Question, form: Form) -> tuple[Any, list[str], list[str]]:
    """Returns the answer that is learned, the right answers if there are several, and the notes."""
    answer = question.answer
    accepted = question.accepted
    notes = []
    several_answers = accepted_answers(answer)
    if several_answers:
        accepted = several_answers
        answer = max(accepted, key=accepted.count)  # the first of equals
        if len(set(accepted)) > 1:
            notes.append(ONE_OF_ANSWERS if form.question else ONE_OF_CAPTIONS)
    elif _is_text_of_list(answer):
        notes.append(_LIST_OF_ANSWERS if form.question else _LIST_OF_CAPTIONS)
    return answer, accepted, notes


def _read_turns(prompt: Any, answer: Any, form: Form) -> list[Turn]:
    """Returns the turns of a prompt and its answer, or of a list of turns without an answer."""
    if form.question and not form.answer:
        return read_turns(prompt, form.question, None)
    prompt_turns = read_turns(prompt, form.question or "", "user")
    turns = [replace(turn, learned=False) for turn in prompt_turns]
    if answer is not None:
        turns += read_turns(answer, str(form.answer), "assistant")
    return turns


def image_name(raw: Any) -> str | None:
    """Returns the name of the first image of a raw or parsed row, or None."""
    if not isinstance(raw, Mapping):
        return None
    image: Any = raw.get("images") or raw.get("image")
    image = next(iter(as_list(image)), image)
    if isinstance(image, Mapping):
        image = image.get("path")
    is_name = isinstance(image, str) and not image.startswith("data:")
    return printable(image) if is_name and 0 < len(image) <= MAX_PATH else None


def filled_columns(raw: Mapping) -> str:
    """Returns the names of a row's columns that hold something, for errors."""
    names = [str(column)[:80] for column, value in raw.items() if value is not None]
    return ", ".join(sorted(names)) or "none"


def _form(raw: Mapping, has_images: bool) -> Form:
    """Returns the form of a row, as [`ROW_FORMS`] says. Raises [`UnknownForm`] without one."""
    present_columns = {
        column for column, value in raw.items() if value == "" or not is_empty(value)
    }
    if not present_columns.isdisjoint({"answers", "answer_index"}):
        present_columns.add("answer")
    for form in ROW_FORMS:  # a question with its answer comes before another question
        has_answer = form.answer is None or form.answer in present_columns
        if form.question in present_columns and has_answer:
            return form
    for form in ROW_FORMS:
        is_usable = form.question is not None or has_images
        if is_usable and (form.question or form.answer) in present_columns:
            return form
    # An unknown column beside the images may be an unread question.
    if has_images and present_columns <= {"image", "images", "label"}:
        return ROW_FORMS[-1]
    raise UnknownForm(
        f"its form is not known. It has the columns: {filled_columns(raw)}; known are "
        "conversations, messages, texts, prompt with completion, question with answer, caption or "
        "text with image"
    )


def _read_images(raw: Mapping) -> list[Any]:
    """Returns the images of a row, as they are stored. Raises ValueError if one is missing."""
    image_columns = [column for column in ("image", "images") if not is_empty(raw.get(column))]
    if len(image_columns) > 1:
        raise ValueError("it has images in both image and images; use one of them")
    images: list[Any] = []
    for column in image_columns:
        images += as_list(parsed(raw[column]))
        for image_number, image in enumerate(images):
            if is_empty(image):
                raise ValueError(
                    f"{column} has nothing in place of image {image_number}; leave it out"
                )
    return images


def _is_text_of_list(answer: Any) -> bool:
    """Whether an answer is a text that holds a list of texts, as tables store several answers."""
    may_be_list = isinstance(answer, str) and answer.startswith("[")
    return may_be_list and len(accepted_answers(parsed(answer))) > 0


def _with_system(turns: list[Turn], system: Any) -> list[Turn]:
    """Returns the turns with a system turn from the column `system`, if it holds anything.

    Raises ValueError if it does not hold a text, or if the turns have another system turn.
    """
    if is_empty(system):
        return turns
    system_turn = Turn("system", [text_part(system)])
    has_system = bool(turns) and turns[0].role == "system"
    has_other_system = has_system and turns[0].content != system_turn.content
    if has_other_system or not isinstance(system, str):
        raise ValueError("its column system is not text, or differs from its system turn; use one")
    return turns if has_system else [system_turn, *turns]


def _check_columns(raw: Mapping, form: Form, has_images: bool) -> None:
    """Raises ValueError if a row has videos, sounds, or an answer that is a bad example.

    It raises ValueError too if a caption is JSON, or may be a question.
    """
    media_columns = ["videos", "audios"]
    if not has_images:
        media_columns += ["video", "audio"]
    for column in media_columns:
        if not is_empty(raw.get(column)):
            raise ValueError(f"it has {column}, and only images are read; leave such rows out")
    for column in ("label", "kto_tag"):
        if raw.get(column) is False:
            raise ValueError(f"its answer is unwanted ({column} false), for KTO: see docs/trl.md")
    if form.question or not form.answer:
        return
    caption = parsed(raw[form.answer])
    if isinstance(caption, Mapping):
        raise ValueError(
            f"its {form.answer} is JSON, not a caption: {', '.join(map(str, caption))}"
        )
    if form.answer == "text" and "question_id" in raw and not isinstance(raw.get("label"), str):
        remedy = "use --columns question=text, or else --columns caption=text"
        raise ValueError(f"it has question_id, so its text may be a question; {remedy}")


def _check_marks(turns: list[Turn]) -> None:
    """Raises ValueError if a text has marks of videos, sounds or objects."""
    for turn in turns:
        for part in turn.content:
            part_text = part.get("text") or ""
            # The expression is slow in texts without any mark.
            mark = "<" in part_text and _OTHER_MARKERS.search(part_text)
            if mark:
                raise ValueError(
                    f"it has {mark[0].strip()} in a text; such marks are not filled in"
                )


def is_row_metadata(name: str) -> bool:
    """Whether a column, by its name, has information about a row, such as an id or a score."""
    return _ABOUT.fullmatch(name) is not None


def looks_like(name: str) -> str | None:
    """Returns "an image", "an answer" or "a question" for a column with such a name, or None.

    Args:
        name: A column, a key such as `messages.content`, or a text that [`markers`] finds, such as
            `text <image_1>`. Such a text looks like an image.
    """
    if name.startswith("text "):  # a marker, not a column
        return "an image"
    if is_row_metadata(name):
        return None
    bare_name = name.rpartition(".")[2].strip()
    lower_name = bare_name.lower()
    known_name = ALIASES.get(lower_name, lower_name)
    if known_name in {"image", "images", *_IMAGES} or _IMAGE_COLUMN.search(bare_name):
        return "an image"
    if known_name in _ANSWERS_BY_NAME or "answer" in known_name or "caption" in known_name:
        return "an answer"
    if known_name in _QUESTIONS_BY_NAME or "question" in known_name or "prompt" in known_name:
        return "a question"
    return None


def unread_image(raw: Any, messages: list[Message]) -> str | None:
    """Returns what looks like an image in a row without images, or None.

    That is a column by its name or by what it holds, such as `column img`, or a marker, such as
    `text <image_1>`.
    """
    if not isinstance(raw, Mapping) or raw.get("image") or raw.get("images"):
        return None
    for column, value in raw.items():
        image = next(iter(as_list(value)), value)
        if isinstance(image, Mapping):
            image = image.get("bytes") or image.get("path") or image.get("url")
        is_image = isinstance(image, (bytes, Image.Image))
        if isinstance(image, str):
            image_path = image.partition("?")[0].lower()
            is_image = image.startswith("data:image/") or image_path.endswith(SUFFIXES)
        has_name = value and not is_empty(value) and _IMAGE_COLUMN.search(str(column))
        if has_name or (is_image and column != "id"):
            return f"column {str(column)[:80]}"
    return next((f"text {marker}" for marker in markers(messages)), None)


def markers(messages: list[Message]) -> Iterator[str]:
    """Yields markers such as `<image_1>`. They are not read as images, but learned as text."""
    for message in messages:
        for part in message["content"]:
            part_text = part.get("text") or ""
            # The expression is slow in texts without any marker.
            if "<" in part_text or "[" in part_text:
                match = _LIKE_A_MARKER.search(part_text)
                if match:
                    yield match[0]


def columns_proposal(raw: Any) -> str:
    """Returns the end of an error: the option `--columns` that makes a row readable, if any."""
    if not isinstance(raw, Mapping):
        return ""
    present_columns = {
        column.strip().lower(): column
        for column, value in raw.items()
        if isinstance(column, str) and not is_empty(value)
    }
    ending = ""
    remedy = ". Read it with"
    if any(preference <= present_columns.keys() for preference in _PREFERENCES):
        ending = ". It has preferences, as DPO learns them: see docs/trl.md"
        remedy = "; read only the chosen answers with"
    stored_names = _readable_names(raw, present_columns)
    if stored_names:
        named_columns = ",".join(f"{column}={name}" for column, name in stored_names.items())
        ending += f"{remedy} --columns {shlex.quote(named_columns)}"
    return ending


def _readable_names(raw: Mapping, present_columns: Mapping[str, str]) -> dict[str, str]:
    """Returns the first names of columns that make a row readable, by known column.

    The row must then have a question, and an answer at the end. The mapping is empty if no names do
    that. `present_columns` maps the names of the row's columns in lower case to these names.
    """
    image_names = {}
    if {"image", "images"}.isdisjoint(present_columns.values()):
        image_column = next(filter(present_columns.get, ("image", *_IMAGES)), None)
        if image_column:
            image_names["image"] = present_columns[image_column]
    for text_names in _text_names(raw, present_columns):
        names = image_names | text_names
        stored_names = {column: name for column, name in names.items() if column != name}
        if not stored_names:
            continue
        try:
            messages = read_row(renamed(raw, stored_names)).messages
        except ValueError:
            continue
        roles = [message["role"] for message in messages]
        if "user" in roles and roles[-1] == "assistant":
            return stored_names
    return {}


def _text_names(raw: Mapping, present_columns: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields possible names of the columns of question and answer, of a caption, or of turns."""
    for question_name, answer_name in product(_QUESTIONS, _ANSWERS):
        if question_name in present_columns and answer_name in present_columns:
            stored_name = present_columns[answer_name]
            answer_column = "answers" if _is_text_of_list(raw[stored_name]) else "answer"
            yield {"question": present_columns[question_name], answer_column: stored_name}
    for caption_name in _CAPTIONS:
        if caption_name in present_columns:
            stored_name = present_columns[caption_name]
            answer_column = "captions" if _is_text_of_list(raw[stored_name]) else "caption"
            yield {answer_column: stored_name}
    for turns_name in ("chosen", "preferred_output", *present_columns):
        if turns_name in present_columns and turns_name not in _UNWANTED_TURNS:
            stored_name = present_columns[turns_name]
            if isinstance(parsed(raw[stored_name]), (list, Mapping)):
                yield {"messages": stored_name}


def renamed(raw: Mapping, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns a row with known columns.

    Args:
        raw: A row.
        names: The row's name of each known column. Other columns of these names are left out.
    """
    replaced_columns = {*names, *names.values()}
    other_columns = {name: raw[name] for name in raw if name not in replaced_columns}
    known_columns = {column: raw[name] for column, name in names.items() if name in raw}
    return other_columns | known_columns
