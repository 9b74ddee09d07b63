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
from .questions import LETTERS, Question, accepted_answers, read_question
from .turns import Row, Turn, alternating, image_parts, place_images, read_turns, text_part
from .values import is_empty, parsed, unread_keys


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
}
"""Other names of some columns in public data sets."""
for _letter in LETTERS:
    ALIASES[f"choice_{_letter.lower()}"] = _letter
    ALIASES[f"option_{_letter.lower()}"] = _letter

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
    """Reads a row of any known form.

    In a user's string, `<image>` and `<img>path</img>` become image parts, those at its beginning
    and end without the line break beside them. If there are none, the images start the first user
    turn, as in TRL. Raises ValueError, perhaps an [`UnknownForm`], if the row cannot be read.
    """
    if isinstance(raw, bytes):
        raise ValueError(f"the line is not valid JSON, or nested too deeply: {short(raw)}")
    if not isinstance(raw, Mapping):
        raise ValueError(f"a row must be a mapping from column to value, got {short(raw)}")
    aliases = _aliases(raw)
    named = dict(raw)
    for column, alias in aliases.items():
        named[column] = raw[alias]
    images = _images(named)
    has_images = bool(images)
    question_column, answer_column = _form(named, has_images)
    question = _read_question(named, question_column, answer_column, aliases)
    learned_answer, accepted, notes = _learned_answer(question, question_column)
    turns = _read_turns(question.prompt, question_column, learned_answer, answer_column)
    left_out = []
    for turn in turns:
        left_out += turn.left_out
    left_out += _unread_columns(raw, question, aliases)
    _check_medium(named, turns, has_images)
    if question_column is None and answer_column is not None:
        _check_caption(named, answer_column)
    _check_is_wanted(named)
    turns, changes = alternating(_with_system(turns, named.get("system")))
    turns = place_images(turns, images)
    return Row(
        form=question_column or answer_column or "image",
        messages=[{"role": turn.role, "content": turn.content} for turn in turns],
        images=[part["image"] for part in image_parts(turns)],
        learned=[turn.learned for turn in turns if turn.role == "assistant"],
        options=question.options,
        accepted=accepted,
        left_out=list(dict.fromkeys(left_out)),
        changed=notes + changes,
    )


def _aliases(raw: Mapping) -> dict[str, str]:
    """Returns the names of columns with other names in a row, by their known names."""
    aliases = {}
    for name in raw:
        column = ALIASES.get(name)
        if column is not None and is_empty(raw.get(column)):
            aliases[column] = name
    return aliases


def _read_question(
    raw: Mapping, question_column: str | None, answer_column: str | None, aliases: Mapping[str, str]
) -> Question:
    """Returns what a row of any form asks, with the columns that are read."""
    columns = frozenset((question_column, answer_column, "image", "images", "system"))
    if question_column == "question":
        question = read_question(raw)
        return replace(question, columns=question.columns | columns)
    prompt = raw[question_column] if question_column else PROMPT
    answer = raw.get(answer_column)
    if answer_column == "caption" and "caption" in aliases:
        answer = parsed(answer)  # several, as the name says
    return Question(prompt, answer, columns=columns)


def _learned_answer(question: Question, question_column: str | None) -> tuple[Any, list, list]:
    """Returns the answer that is learned, the right answers if there are several, and notes."""
    accepted = accepted_answers(question.answer)
    if accepted:
        commonest = Counter(accepted).most_common(1)[0][0]  # the first of equals
        notes = []
        if len(set(accepted)) > 1:
            notes.append(ONE_OF_ANSWERS if question_column else ONE_OF_CAPTIONS)
        return commonest, accepted, notes
    notes = []
    if _is_text_of_list(question.answer):
        notes.append(_LIST_OF_ANSWERS if question_column else _LIST_OF_CAPTIONS)
    return question.answer, question.accepted, notes


def _read_turns(
    prompt: Any, prompt_column: str | None, answer: Any, answer_column: str | None
) -> list[Turn]:
    """Returns the turns of a prompt and its answer, or of a list of turns without an answer."""
    if prompt_column is not None and answer_column is None:
        return read_turns(prompt, prompt_column, None)
    prompt_turns = read_turns(prompt, prompt_column or "", "user")
    turns = [replace(turn, learned=False) for turn in prompt_turns]
    if answer is not None:
        turns += read_turns(answer, str(answer_column), "assistant")
    return turns


def _unread_columns(raw: Mapping, question: Question, aliases: Mapping[str, str]) -> list[str]:
    read_columns = set(question.columns)
    for column, alias in aliases.items():
        if column in question.columns:
            read_columns.add(alias)
    return unread_keys(raw, read_columns)


def image_name(raw: Any) -> str | None:
    """Returns the name of the first image of a raw or parsed row, or None."""
    if not isinstance(raw, Mapping):
        return None
    image = _first(raw.get("images") or raw.get("image"))
    if isinstance(image, Mapping):
        image = image.get("path")
    if not isinstance(image, str) or image.startswith("data:"):
        return None
    if not 0 < len(image) <= MAX_PATH:
        return None
    return printable(image)


def _first(value: Any) -> Any:
    """Returns the first element of a list that has one; else the value."""
    if isinstance(value, (list, tuple)) and value:
        return value[0]
    return value


def columns(raw: Mapping) -> str:
    """Returns the columns of a row that are not empty, for errors."""
    names = [str(column)[:80] for column, value in raw.items() if value is not None]
    return ", ".join(sorted(names)) or "none"


def _form(raw: Mapping, has_images: bool) -> tuple[str | None, str | None]:
    """Returns the columns of question and answer of the form that a row has, as in [`FORMS`]."""
    present = _present_columns(raw)
    for question_column, answer_column in FORMS:  # a question with its answer comes first
        if question_column in present and (answer_column is None or answer_column in present):
            return question_column, answer_column
    for question_column, answer_column in FORMS:
        if question_column:
            has_form = question_column in present
        elif answer_column:
            has_form = has_images and answer_column in present
        else:  # images alone, without a column that may be an unread question
            has_form = has_images and present <= {"image", "images", "label"}
        if has_form:
            return question_column, answer_column
    raise UnknownForm(
        f"its form is not known. It has the columns: {columns(raw)}; known are conversations, "
        "messages, texts, prompt with completion, question with answer, caption or text with image"
    )


def _present_columns(raw: Mapping) -> set[Any]:
    """Returns the columns that hold something or an empty text; `answer` if its text is apart."""
    present = set()
    for column, value in raw.items():
        if value == "" or not is_empty(value):
            present.add(column)
    if "answers" in present or "answer_index" in present:
        present.add("answer")
    return present


def _images(raw: Mapping) -> list[Any]:
    present = [column for column in ("image", "images") if not is_empty(raw.get(column))]
    if len(present) > 1:
        raise ValueError("it has images in both image and images; use one of them")
    if not present:
        return []
    column = present[0]
    images = parsed(raw[column])
    if not isinstance(images, (list, tuple)):
        images = [images]
    for number, image in enumerate(images):
        if is_empty(image):
            raise ValueError(f"{column} has nothing in place of image {number}; leave it out")
    return list(images)


def _is_text_of_list(answer: Any) -> bool:
    """Whether an answer is a text that holds a list of texts, as tables store several answers."""
    if not isinstance(answer, str) or not answer.startswith("["):
        return False
    return len(accepted_answers(parsed(answer))) > 0


def _with_system(turns: list[Turn], system: Any) -> list[Turn]:
    """Returns the turns after the text of the column `system`, unless they begin with it.

    Raises ValueError if the column holds no text, or if the turns have another system turn.
    """
    if is_empty(system):
        return turns
    system_turn = Turn("system", [text_part(system)])
    has_system = bool(turns) and turns[0].role == "system"
    differs = has_system and turns[0].content != system_turn.content
    if differs or not isinstance(system, str):
        raise ValueError("its column system is no text, or differs from its system turn; use one")
    return turns if has_system else [system_turn, *turns]


def _check_medium(raw: Mapping, turns: list[Turn], has_images: bool) -> None:
    """Raises ValueError if a row has more than images and text, or marks of such in its texts."""
    unread_media = ["videos", "audios"]
    if not has_images:
        unread_media += ["video", "audio"]
    for column in unread_media:
        if not is_empty(raw.get(column)):
            raise ValueError(f"it has {column}, and only images are read; leave such rows out")
    for turn in turns:
        for part in turn.content:
            text = part.get("text")
            marker = _OTHER_MARKERS.search(text) if isinstance(text, str) else None
            if marker:
                shown = marker[0].strip()
                raise ValueError(f"it has {shown} in a text; such marks are not filled in")


def _check_caption(raw: Mapping, column: str) -> None:
    """Raises ValueError if a caption is JSON, or may be a question."""
    content = parsed(raw[column])
    if isinstance(content, Mapping):
        keys = ", ".join(map(str, content))
        raise ValueError(f"its {column} is no caption but JSON: {keys}")
    if column == "text" and "question_id" in raw and not isinstance(raw.get("label"), str):
        remedy = "use --columns question=text, or else --columns caption=text"
        raise ValueError(f"it has question_id, so its text may be a question; {remedy}")


def _check_is_wanted(raw: Mapping) -> None:
    """Raises ValueError if a row says that its answer is a bad example."""
    for column in ("label", "kto_tag"):
        if raw.get(column) is False:
            raise ValueError(f"its answer is unwanted ({column} false), for KTO: see docs/trl.md")


def is_about(name: str) -> bool:
    """Whether a column, by its name, tells about the row, as ids, addresses and scores do."""
    return _ABOUT.fullmatch(name) is not None


def looks_like(name: str) -> str | None:
    """Returns what a column is by its name: "an image", "an answer", "a question", or None.

    Args:
        name: A column; a key, as `messages.content`; or a text that [`markers`] finds, as
            `text <image_1>`, which is like an image.
    """
    key = name.rpartition(".")[2].strip()
    lower = key.lower()
    known = ALIASES.get(lower, lower)
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
    """Returns what looks like an image in a row without images, or None.

    It is named as `column img` or `text <image_1>`.
    """
    if not isinstance(raw, Mapping) or raw.get("image") or raw.get("images"):
        return None
    for column, value in raw.items():
        if _is_image_column(column, value):
            return f"column {str(column)[:80]}"
    for marker in markers(messages):
        return f"text {marker}"
    return None


def _is_image_column(column: Any, value: Any) -> bool:
    """Whether a column looks like an image, by its name or by what it holds."""
    if column != "id" and _looks_like_an_image(value):
        return True
    return bool(value) and not is_empty(value) and bool(_IMAGE_COLUMN.search(str(column)))


def markers(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yields texts such as `<image_1>`, which are learned as text."""
    for message in messages:
        for part in message["content"]:
            match = _LIKE_A_MARKER.search(part.get("text") or "")
            if match:
                yield match[0]


def proposal(raw: Any) -> str:
    """Returns the end of an error: `columns` with which a row has question and answer, if any."""
    if not isinstance(raw, Mapping):
        return ""
    present = {}
    for column, value in raw.items():
        if isinstance(column, str) and not is_empty(value):
            present[column.strip().lower()] = column
    option = ""
    names = _readable_names(raw, present)
    if names:
        named = ",".join(f"{column}={name}" for column, name in names.items())
        option = f"--columns {shlex.quote(named)}"
    if any(preference <= present.keys() for preference in _PREFERENCES):
        alone = f"; the chosen answers alone are read with {option}" if option else ""
        return f". It has preferences, as DPO learns them: see docs/trl.md{alone}"
    return f". It is read with {option}" if option else ""


def _readable_names(raw: Mapping, present: Mapping[str, str]) -> dict[str, str]:
    """Returns the first names of columns with which a row is read, by known column; or none.

    `present` has the names of columns in the row by what they are in lower case.
    """
    image_names = {}
    if {"image", "images"}.isdisjoint(present.values()):
        for name in ("image", *_IMAGES):
            if name in present:
                image_names = {"image": present[name]}
                break
    for text_names in _text_names(raw, present):
        names = {}
        for column, name in (image_names | text_names).items():
            if column != name:
                names[column] = name
        if names and _is_read(renamed(raw, names)):
            return names
    return {}


def _text_names(raw: Mapping, present: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields names that columns of question and answer, caption or turns may have in a row."""
    for question, answer in product(_QUESTIONS, _ANSWERS):
        if question in present and answer in present:
            name = present[answer]
            column = "answers" if _is_text_of_list(raw[name]) else "answer"
            yield {"question": present[question], column: name}
    for caption in _CAPTIONS:
        if caption in present:
            name = present[caption]
            column = "captions" if _is_text_of_list(raw[name]) else "caption"
            yield {column: name}
    for turns in ("chosen", "preferred_output", *present):
        if turns in present and turns not in ("rejected", "non_preferred_output", "history"):
            name = present[turns]
            if isinstance(parsed(raw[name]), (list, Mapping)):
                yield {"messages": name}


def renamed(raw: Mapping, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns a row with known columns: `names` has the row's name of each known column."""
    replaced = {*names.keys(), *names.values()}
    row = {column: value for column, value in raw.items() if column not in replaced}
    for column, name in names.items():
        if name in raw:
            row[column] = raw[name]
    return row


def _is_read(raw: Mapping) -> bool:
    try:
        row = read_row(raw)
    except ValueError:
        return False
    roles = [message["role"] for message in row.messages]
    return "user" in roles and roles[-1] == "assistant"


def _looks_like_an_image(value: Any) -> bool:
    value = _first(value)
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if not isinstance(value, str):
        return isinstance(value, (bytes, Image.Image))
    path = value.partition("?")[0].lower()
    return value.startswith("data:image/") or path.endswith(SUFFIXES)
