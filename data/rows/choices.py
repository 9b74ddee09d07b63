# SPDX-License-Identifier: Apache-2.0
"""Rows of one question: its text with hint, input and options, its answer, and others that are accepted."""

import re
from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from .images import SUFFIXES, short
from .turns import Row
from .values import as_text, is_empty, parsed, transposed


LETTERS = "ABCDEFGHIJ"
"""Columns of options, if they are not in `choices`."""


def read_question(raw: Mapping, row: Row, read: set[Any]) -> tuple[Any, Any]:
    """What a row with the column `question` asks, with hint, input and options, and its answer.

    Fills in the row's options, and right answers that are apart from its answer; adds to `read`.
    """
    options = row.options = options_of(raw)
    asked = as_text(raw["question"])
    read.update(options if is_empty(raw.get("choices")) else ["choices"])
    if isinstance(asked, str):
        hint = raw.get("hint") if options else None  # as in MMBench, which writes "nan" for none
        parts = {"hint": None if hint == "nan" else hint, "question": asked, "input": raw.get("input")}
        lines = {name: text for name, value in parts.items() if isinstance(text := as_text(value), str)}
        read.update(lines)
        listed = [f"{letter}. {text}" for letter, text in options.items()]
        shown = all(re.search(rf"\b{letter}\W{{1,3}}{re.escape(text)}", asked) for letter, text in options.items())
        asked = "\n".join([*filter(None, lines.values()), *([] if shown else listed)])
        if not asked.strip():
            raise ValueError("its question is empty; a caption is read with --columns caption=answer")
    elif options:
        raise ValueError("it has options, and its question is a list of turns. Write the question as text")
    if not is_empty(index := raw.get("answer_index")):
        read.add("answer_index")
        number = str(as_text(index)).removesuffix(".0")
        if not number.isdecimal() or int(number) >= len(options):
            raise ValueError(f"answer_index must be the number of a choice, from 0, got {short(index)}")
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
            raise ValueError(f"it has options and several answers, {', '.join(sorted(right))}; one can be learned")
        answer = right.pop() if right else answer
        if isinstance(text := as_text(answer), str) and (letter := chosen_letter(text, options)):
            answer = letter if plain(text).isdigit() and plain(options[letter]) != plain(text) else text
    return asked, answer


def accepted_answers(value: Any) -> list[str]:
    """The texts of a list of answers, each of which may be in `answer` or `text`; empty if it is no such list."""
    value = transposed(value)
    if not isinstance(value, (list, tuple)):
        return []
    texts: list[Any] = []
    for answer in value:
        key = next((key for key in ("answer", "text") if key in answer), None) if isinstance(answer, Mapping) else None
        texts.append(as_text(answer[key] if key else answer))
    return [text for text in texts if text.strip()] if all(isinstance(text, str) for text in texts) else []


def options_of(raw: Mapping) -> dict[str, str]:
    """The options of a row by letter: those in `choices`, or in columns `A`, `B` and so on."""
    choices = transposed(parsed(raw.get("choices")))
    if in_columns := is_empty(choices):
        choices = {letter: raw.get(letter) for letter in LETTERS}
    elif isinstance(choices, (list, tuple)) and len(choices) <= len(ascii_uppercase):
        texts = (choice.get("text") if isinstance(choice, Mapping) else choice for choice in choices)
        choices = dict(zip(ascii_uppercase, texts, strict=False))
    options = choices if isinstance(choices, Mapping) else {}
    options = {str(letter).upper(): as_text(text) for letter, text in options.items()}
    # Questions of fewer options are filled up, in MMBench with "nan".
    options = {letter: text for letter, text in options.items() if not is_empty(text) and text != "nan"}
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
        remedy = "; if it is a number from 0, use --columns answer_index=answer" if bare.isdigit() else ""
        raise ValueError(f"the answer {text!r} is the text of an option and the letter or number of another{remedy}")
    if not letters and re.fullmatch(r"[A-Za-z]|-?\d+", bare):
        raise ValueError(f"the answer {short(answer)} is not just one of the choices {short([*options.values()])}")
    return letters.pop() if letters else None


def _without_letter(letter: str, text: Any) -> str:
    """A text without its letter before it: "(B) dog" or "B. dog" is "dog"."""
    return re.sub(rf"^\(?{letter}[.):]\s*(?=\S)", "", text)


def plain(text: str) -> str:
    """Lower case, single spaces, without marks at its ends."""
    return re.sub(r"^[\s\"'*_.,:;!?()\[\]]+|[\s\"'*_.,:;!?()\[\]]+$", "", " ".join(text.lower().split()))
