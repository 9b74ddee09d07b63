# SPDX-License-Identifier: Apache-2.0
"""What rows hold: lists of turns in all known forms, questions with options, values of tables."""

import ast
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from string import ascii_uppercase
from typing import Any

from ...errors import printable
from .images import SUFFIXES, short


ROLES = dict.fromkeys(("human", "user"), "user") | dict.fromkeys(("system", "developer"), "system")
ROLES |= dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt"), "assistant")
# Keys of a question and its answer that are one element of a list of turns.
PAIRS = [("user", "assistant"), ("human", "gpt"), ("human", "assistant")]
PAIRS += [("question", "answer"), ("input", "output")]
# Keys of a turn that say whether it is learned: OpenAI's, ms-swift's, axolotl's.
LEARNED = {"weight", "loss", "loss_scale", "train", "training", "trainable"}
LETTERS = "ABCDEFGHIJ"  # columns of options, if they are not in `choices`
_MARKERS = re.compile(r"<image>|<img>([^<>\n]+)</img>")  # LLaVA's, or Qwen's with the path in it
_FIRST_BREAK = re.compile(r"\A\r?\n")
_LAST_BREAK = re.compile(r"\r?\n\Z")
_BREAKS = ("", "\n", "\r\n")
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "source")  # the last is Anthropic's
_NO_IMAGES = {"type", "text", "index", "detail"}  # llava-instruct-mix has the number of the image
_PARTS = {"text": "text", "input_text": "text", "output_text": "text"}
_PARTS |= {"image": "image", "image_url": "image", "input_image": "image"}
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
# A list of texts as numpy prints it, without commas.
_NUMPY_TEXTS = re.compile(rf"\[\s*(?:{_QUOTED})(?:\s+(?:{_QUOTED}))*\s*\]", re.S)


@dataclass
class Row:
    """A row read by its form, unchecked."""

    form: str  # the column that identifies its form
    messages: list[dict[str, Any]] = field(default_factory=list)  # role and content
    images: list[Any] = field(default_factory=list)  # those of the image parts, in order
    learned: list[bool] = field(default_factory=list)  # for each assistant turn
    options: dict[str, str] = field(default_factory=dict)  # of a question, by letter
    accepted: list[str] = field(default_factory=list)  # right answers, if several
    left_out: list[str] = field(default_factory=list)  # as `messages.tool_calls`
    changed: list[str] = field(default_factory=list)  # what was changed, in words


@dataclass
class Turn:
    """A turn; the `type` of a part is "image", perhaps with `image`, or "text", with `text`."""

    role: str
    content: list[dict[str, Any]]
    learned: bool = True  # otherwise an assistant's turn has no labels


def read_turns(value: Any, column: str, text_role: str | None, left_out: list[str]) -> list[Turn]:
    """The turns in a column: a list of them in any form, or the text of a turn of `text_role`.

    With a `text_role` a text is not parsed, whatever brackets it has. Parts of a turn are one turn.
    """
    value = as_text(value) if text_role else transposed(parsed(value))
    if text_role and (isinstance(value, str) or _are_parts(value)):
        return [Turn(text_role, _content(left_out, 0, text_role, value, column))]
    if not isinstance(value, (list, tuple)):
        kinds = "text or a list of turns" if text_role else "a list of turns"
        raise ValueError(f"{column} must be {kinds}, got {short(value)}")
    if not text_role and column != "texts" and all(isinstance(text, str) for text in value):
        roles = ("user", "assistant") * len(value)  # PixMo's
        value = [{"role": role, "content": text} for role, text in zip(roles, value, strict=False)]
    turns = (_element(left_out, number, element, column) for number, element in enumerate(value))
    return list(chain.from_iterable(turns))


def _element(left_out: list[str], number: int, turn: Any, column: str) -> list[Turn]:
    """The turn that an element of a list of turns is, or the two of a question and its answer."""
    stored = turn if isinstance(turn, Mapping) else {}
    fields = {key: value for key, value in stored.items() if value is not None}
    role, text = ("from", "value") if fields.get("from") else ("role", "content")
    pair = () if role in fields else next((pair for pair in PAIRS if fields.keys() >= {*pair}), ())
    if not pair and role not in fields:
        raise ValueError(f"turn {number} of {column} needs role and content, got {short(turn)}")
    sides = [("user", pair[0]), ("assistant", pair[1])] if pair else [(fields[role], text)]
    turns = []
    for name, entry in sides:
        if not (speaker := ROLES.get(str(name).lower())):
            raise ValueError(f"turn {number} has role {short(name)}; known are {', '.join(ROLES)}")
        turns.append(Turn(speaker, _content(left_out, number, speaker, fields.get(entry), column)))
    if len(fields) > 2:
        read = {role, text, *pair}
        if key := next((key for key in ("images", "image") if not is_empty(fields.get(key))), None):
            images = fields[key]
            place_images(turns[:1], images if isinstance(images, (list, tuple)) else [images])
            read.add(key)
        if pair and not number and isinstance(fields.get("system"), str):  # XTuner's
            turns.insert(0, Turn("system", [{"type": "text", "text": fields["system"]}]))
            read.add("system")
        for key in fields.keys() & LEARNED:
            if fields[key] not in (0, 1):
                raise ValueError(f"turn {number} has {key} {short(fields[key])}, neither 0 nor 1")
            turns[-1].learned &= bool(fields[key])
        is_answer = turns[-1].role == "assistant"  # others are never learned, whatever they say
        read |= {key for key in LEARNED if is_answer or not fields.get(key)}
        leave_out(left_out, fields, read, f"{column}.")
    return turns


def _content(left_out: list[str], number: int, role: str, content: Any, column: str) -> list[dict]:
    """The parts of a turn. Only the user's may be JSON in a text, and only if they show an image.

    What the assistant says is learned as it is written, whatever it looks like.
    """
    content = as_text(content)
    if role == "user" and isinstance(content, str) and content.startswith("[{"):
        parts = parsed(content)
        if _are_parts(parts) and any(_PARTS[part["type"]] == "image" for part in parts):
            content = parts
    if isinstance(content, str):
        return _split(content) if role == "user" else [{"type": "text", "text": content}]
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"turn {number} must have text or a list of parts, got {short(content)}")
    return [_part(left_out, number, part, column) for part in content]


def _are_parts(value: Any) -> bool:
    """Whether a value is a list of the parts of a turn, each of a known `type`."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(part, Mapping) and part.get("type") in _PARTS for part in value)


def _part(left_out: list[str], number: int, part: Any, column: str) -> dict[str, Any]:
    kind = _PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        leave_out(left_out, part, {"type", "text", "index"}, f"{column}.content.")
        return {"type": "text", "text": part["text"]}
    if kind != "image":
        raise ValueError(f"turn {number} has {short(part)}, neither a text nor an image part")
    key = next((key for key in _IMAGE_KEYS if part.get(key) is not None), None)
    others = [str(name) for name in part if name not in _NO_IMAGES and not is_empty(part[name])]
    if key is None and others:
        keys = ", ".join(_IMAGE_KEYS)
        raise ValueError(f"an image of turn {number} has {', '.join(others)}, but none of {keys}")
    leave_out(left_out, part, {key, *_NO_IMAGES}, f"{column}.content.")
    image = part[key] if key else None
    if isinstance(image, Mapping) and (image.get("url") or image.get("data")):
        name, place = "url" if image.get("url") else "data", f"{column}.content.{key}."
        leave_out(left_out, image, {name, "type", "media_type", "detail"}, place)
        image = image[name]
    return {"type": "image", "image": image, "index": part.get("index")}


def _split(text: str) -> list[dict[str, Any]]:
    """The parts of a user's text with markers.

    In LLaVA's data, images have lines of their own at the beginning or the end of a turn. What
    stands between an image and its question is for the chat template to say, in training as when
    the model is asked. So the line breaks beside these markers are not read. A marker between two
    texts leaves both as they are.
    """
    pieces = _MARKERS.split(text)
    texts = pieces[0::2]
    paths = pieces[1::2]  # those in the markers, or None
    for number in range(len(paths)):  # markers at the beginning
        if texts[number] not in _BREAKS:
            break
        texts[number] = ""
        texts[number + 1] = _FIRST_BREAK.sub("", texts[number + 1])
    for number in reversed(range(len(paths))):  # markers at the end
        if texts[number + 1] not in _BREAKS:
            break
        texts[number + 1] = ""
        texts[number] = _LAST_BREAK.sub("", texts[number])
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(texts):
        if piece:
            parts.append({"type": "text", "text": piece})
        if number < len(paths):
            parts.append({"type": "image", "image": paths[number]})
    return parts or [{"type": "text", "text": ""}]


def place_images(turns: list[Turn], images: Sequence[Any]) -> list[Any]:
    """The images of all parts: parts without one get the next, or the first user turn new parts."""
    parts = [part for turn in turns for part in turn.content if part["type"] == "image"]
    asking = next((turn for turn in turns if turn.role == "user"), None)
    if not parts and asking:
        parts = [{"type": "image"} for _ in images]
        asking.content = parts + asking.content
    places = [part for part in parts if part.get("image") is None]
    if len(places) != len(images):
        raise ValueError(f"it has {len(places)} <image> or image parts for {len(images)} images")
    for number, (place, image) in enumerate(zip(places, images, strict=True)):
        if place.get("index") not in (None, number):
            raise ValueError(f"its part for image {number} has the index {place['index']}")
        place["image"] = image
    return [part["image"] for part in parts]


def alternating(turns: list[Turn], changed: list[str]) -> list[Turn]:
    """The turns without a leading answer, and with user turns in a row as one."""
    start = int(bool(turns) and turns[0].role == "system")
    if len(turns) > start + 1 and turns[start].role == "assistant":
        turns = turns[:start] + turns[start + 1 :]
        changed.append("a leading assistant turn is left out")
    if any(turn.role == following.role == "user" for turn, following in pairwise(turns)):
        changed.append("user turns in a row are one turn")
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role == "user":
            first, second = joined[-1].content, turn.content
            texts = first and second and first[-1]["type"] == second[0]["type"] == "text"
            line_break = [{"type": "text", "text": "\n"}] if texts else []
            joined[-1] = replace(turn, content=first + line_break + second)
        else:
            joined.append(turn)
    return joined


def read_question(raw: Mapping, row: Row, read: set[Any]) -> tuple[Any, Any]:
    """What a row with the column `question` asks, with hint, input and options, and its answer.

    Fills in the row's options, and right answers that are apart from its answer; adds to `read`.
    """
    options = row.options = options_of(raw)
    asked = as_text(raw["question"])
    read.update(options if is_empty(raw.get("choices")) else ["choices"])
    if isinstance(asked, str):
        hint = raw.get("hint") if options and raw.get("hint") != "nan" else None  # as in MMBench
        parts = {"hint": as_text(hint), "question": asked, "input": as_text(raw.get("input"))}
        lines = {name: text for name, text in parts.items() if isinstance(text, str)}
        read.update(lines)
        patterns = (rf"\b{letter}\W{{1,3}}{re.escape(text)}" for letter, text in options.items())
        shown = all(re.search(pattern, asked) for pattern in patterns)
        listed = [] if shown else [f"{letter}. {text}" for letter, text in options.items()]
        asked = "\n".join([*filter(None, lines.values()), *listed])
        if not asked.strip():
            raise ValueError("its question is empty; read a caption with --columns caption=answer")
    elif options:
        raise ValueError("it has options, but its question is a list of turns. Write it as text")
    if not is_empty(index := raw.get("answer_index")):
        read.add("answer_index")
        number = str(as_text(index)).removesuffix(".0")
        if not number.isdecimal() or int(number) >= len(options):
            raise ValueError(f"answer_index must be a choice's number, from 0, got {short(index)}")
        return asked, [*options][int(number)]
    answer, several = raw.get("answer"), parsed(raw.get("answers"))
    read.add("answer")
    if is_empty(answer):
        answer = None if is_empty(several) else several
        read.add("answers")
    elif answer in (accepted := accepted_answers(several)):
        row.accepted = accepted
        read.add("answers")
    if options and not is_empty(answer):
        if len(right := {*accepted_answers(answer)}) > 1:
            texts = ", ".join(sorted(right))
            raise ValueError(f"it has options and several answers, {texts}; one can be learned")
        answer = right.pop() if right else answer
        if isinstance(text := as_text(answer), str) and (letter := chosen_letter(text, options)):
            by_number = plain(text).isdigit() and plain(options[letter]) != plain(text)
            answer = letter if by_number else text
    return asked, answer


def accepted_answers(value: Any) -> list[str]:
    """The texts of a list of answers, or what these have in `answer` or `text`; else empty."""
    value = transposed(value)
    if not isinstance(value, (list, tuple)) or _are_parts(value):
        return []
    texts: list[Any] = []
    for answer in value:
        if isinstance(answer, Mapping):
            answer = answer.get("answer", answer.get("text"))
        texts.append(as_text(answer))
    are_texts = all(isinstance(text, str) for text in texts)
    return [text for text in texts if text.strip()] if are_texts else []


def options_of(raw: Mapping) -> dict[str, str]:
    """The options of a row by letter: those in `choices`, or in columns `A`, `B` and so on."""
    choices = transposed(parsed(raw.get("choices")))
    if in_columns := is_empty(choices):
        choices = {letter: raw.get(letter) for letter in LETTERS}
    elif isinstance(choices, (list, tuple)) and len(choices) <= len(ascii_uppercase):
        texts = (entry.get("text") if isinstance(entry, Mapping) else entry for entry in choices)
        choices = dict(zip(ascii_uppercase, texts, strict=False))
    named = choices if isinstance(choices, Mapping) else {}
    named = {str(letter).upper(): as_text(text) for letter, text in named.items()}
    # Questions of fewer options are filled up, in the columns of MMBench with "nan".
    filling = "nan" if in_columns else None
    options = {key: text for key, text in named.items() if not is_empty(text) and text != filling}
    if in_columns and len(options) < 2:
        return {}
    if (
        [*options] != list(ascii_uppercase[: len(options)])
        or not all(isinstance(text, str) and text.strip() for text in options.values())
        or len({*map(plain, options.values())}) < max(2, len(options))
        or any(text.lower().endswith(SUFFIXES) for text in options.values())
    ):
        shown = short(options or choices)
        raise ValueError(f"its options must be 2 to 26 different texts, and no images, got {shown}")
    bare = {letter: _without_letter(letter, text) for letter, text in options.items()}
    have_letters = all(bare[letter] != options[letter] for letter in options)
    return bare if have_letters else options


def chosen_letter(answer: Any, options: Mapping[str, str]) -> str | None:
    """The letter of the option that an answer is, by text, letter or number from 0; or None."""
    text = as_text(answer)
    bare = plain(text)
    for letter in options:  # "B. dog"
        if plain(_without_letter(letter, text)) == plain(options[letter]) != bare:
            return letter
    by_text = [letter for letter in options if plain(options[letter]) == bare]
    by_name = [bare.upper()] if bare.upper() in options else []
    if bare.isascii() and bare.isdigit() and int(bare) < len(options):
        by_name = [[*options][int(bare)]]
    if len(letters := {*by_text, *by_name}) > 1:
        remedy = "; if it is a number from 0, use --columns answer_index=answer" * bare.isdigit()
        problem = "is one option's text and another's letter or number"
        raise ValueError(f"the answer {text!r} {problem}{remedy}")
    if not letters and re.fullmatch(r"[A-Za-z]|-?\d+", bare):
        choices = short([*options.values()])
        raise ValueError(f"the answer {short(answer)} is not just one of the choices {choices}")
    return letters.pop() if letters else None


def _without_letter(letter: str, text: Any) -> str:
    """A text without its letter before it: "(B) dog" or "B. dog" is "dog"."""
    return re.sub(rf"^\(?{letter}[.):]\s*(?=\S)", "", text)


def plain(text: str) -> str:
    """Lower case, single spaces, without marks at its ends."""
    return " ".join(text.lower().split()).strip(" \"'*_.,:;!?()[]")


def as_text(value: Any) -> Any:
    """A number as text, 3.0 as 3, since tables write it so; NaN as None, and others unchanged."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value) if value == value else None
    return value


def is_empty(value: Any) -> bool:
    """Whether a column holds nothing: None, NaN, an empty text, or a list or mapping of such."""
    if isinstance(value, str):  # first, since most are
        return not value
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_empty, value))
    return value is None or value == b"" or (isinstance(value, float) and math.isnan(value))


def parsed(value: Any) -> Any:
    """The list or mapping in a text, as JSON or as Python prints it; else the value."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    if len(value) > 2**16:
        return value
    text = value.strip()
    try:
        if _NUMPY_TEXTS.fullmatch(text):  # Python reads texts without commas as one
            return [ast.literal_eval(quoted) for quoted in re.findall(_QUOTED, text, re.S)]
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def transposed(value: Any) -> Any:
    """A mapping of lists of one length, as of older `datasets`, as a list; else the value."""
    columns = list(value.values()) if isinstance(value, Mapping) else []
    are_lists = all(isinstance(column, (list, tuple)) for column in columns)
    if not columns or not are_lists or len({*map(len, columns)}) > 1:
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def leave_out(left_out: list[str], values: Mapping, read: Collection[Any], place: str = "") -> None:
    """Adds to `left_out` the keys of `values` that hold something and are not in `read`."""
    keys = (key for key in values if key not in read and not is_empty(values[key]))
    names = (printable(f"{place}{key}"[:80]) or "(no name)" for key in keys)
    left_out += [name for name in names if name not in left_out]
