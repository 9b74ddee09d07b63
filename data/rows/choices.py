# SPDX-License-Identifier: Apache-2.0
"""Rows of one question: its text with hint, input and options, its answer, and others that are accepted."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from .images import SUFFIXES, short
from .values import as_text, is_empty, parsed, transposed


LETTERS = "ABCDEFGHIJ"
"""Columns of options, if they are not in `choices`."""


@dataclass
class Question:
    """A row with the column `question`.

    Attributes:
        asked: The text, with the hint before it, and its input and options in lines after it; or turns.
        answer: Text, a list of accepted texts, or turns. A number of an option, from 0, is its letter here.
        accepted: All right answers, if the row has them apart from `answer`.
        read: The columns that were read.
    """

    asked: Any
    answer: Any
    options: dict[str, str]
    accepted: list[str]
    read: set[str]


def read_question(raw: Mapping) -> Question:
    """Reads a row with the column `question`. Raises ValueError if options or answer are not valid."""
    options = options_of(raw)
    asked = as_text(raw["question"])
    read = {"question"} | ({*options} if is_empty(raw.get("choices")) else {"choices"})
    if isinstance(asked, str):
        hint = raw.get("hint") if options else None  # as in MMBench, which writes "nan" for none
        parts = {"hint": None if hint == "nan" else hint, "question": asked, "input": raw.get("input")}
        lines = {name: text for name, value in parts.items() if isinstance(text := as_text(value), str)}
        read |= lines.keys()
        listed = [f"{letter}. {text}" for letter, text in options.items()]
        shown = all(re.search(rf"\b{letter}\W{{1,3}}{re.escape(text)}", asked) for letter, text in options.items())
        asked = "\n".join([*filter(None, lines.values()), *([] if shown else listed)])
        if not asked.strip():
            raise ValueError(
                "its question is empty; if the answer is a caption, it is read with --columns caption=answer"
            )
    elif options:
        raise ValueError("it has options, and its question is a list of turns. Write the question as text")
    if not is_empty(index := raw.get("answer_index")):
        return Question(asked, letter_of_index(index, options), options, [], read | {"answer_index"})
    answer, several = raw.get("answer"), parsed(raw.get("answers"))
    accepted: list[str] = []
    read |= {"answer"}
    if is_empty(answer):
        answer, read = None if is_empty(several) else several, read | {"answers"}
    elif answer in accepted_answers(several):
        accepted, read = accepted_answers(several), read | {"answers"}
    if options and not is_empty(answer):
        if len(right := {*accepted_answers(answer)}) > 1:
            raise ValueError(f"it has options and several answers, {', '.join(sorted(right))}; one can be learned")
        answer = right.pop() if right else answer
        if isinstance(text := as_text(answer), str) and (letter := chosen_letter(text, options)):
            answer = letter if plain(text).isdigit() and plain(options[letter]) != plain(text) else text
    return Question(asked, answer, options, accepted, read)


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


def commonest(answers: list[str]) -> str:
    """The commonest answer, the first of equals."""
    return Counter(answers).most_common(1)[0][0]


def options_of(raw: Mapping) -> dict[str, str]:
    """The options of a row by letter: those in `choices`, or in columns `A`, `B` and so on; empty without any.

    Raises:
        ValueError: They are no texts or numbers, there is only one, or a letter is missing before another.
    """
    choices = transposed(parsed(raw.get("choices")))
    in_columns = is_empty(choices)
    if in_columns:
        choices = {letter: raw.get(letter) for letter in LETTERS}
    elif isinstance(choices, (list, tuple)):
        if all(isinstance(choice, Mapping) and "text" in choice for choice in choices):
            choices = [choice["text"] for choice in choices]
        choices = dict(zip(ascii_uppercase, choices, strict=False)) if len(choices) <= 26 else choices
    if not isinstance(choices, Mapping):
        raise ValueError(f"choices must be a list of two to 26 texts, got {short(choices)}")
    options = {str(letter).upper(): as_text(text) for letter, text in choices.items()}
    # Questions of fewer options are filled up, in MMBench with "nan".
    options = {letter: text for letter, text in options.items() if not is_empty(text) and text != "nan"}
    if in_columns and len(options) < 2:
        return {}
    wanted = list(ascii_uppercase[: len(options)])
    if [*options] != wanted:
        raise ValueError(f"its options are called {', '.join(options)}, not {', '.join(wanted)}")
    if len(options) < 2 or not all(isinstance(text, str) and text.strip() for text in options.values()):
        raise ValueError(f"choices must be a list of two to 26 texts, got {short(list(choices.values()))}")
    if any(text.lower().endswith(SUFFIXES) for text in options.values()):
        raise ValueError(f"its options are images, {short([*options.values()])}, and only the question's are read")
    if len({*map(plain, options.values())}) < len(options):
        raise ValueError(f"two of its options are alike: {short([*options.values()])}")
    bare = {letter: _without_letter(letter, text) for letter, text in options.items()}
    have_letters = all(bare[letter] != options[letter] for letter in options)
    return bare if have_letters else options


def chosen_letter(answer: Any, options: Mapping[str, str]) -> str | None:
    """The letter of the option that an answer is: by its text, its letter, or its number from 0; None if it is none.

    Raises:
        ValueError: It is two of them, such as the text of one option and the number of another, or a letter or a
            number that no option has.
    """
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


def letter_of_index(index: Any, options: Mapping[str, str]) -> str:
    """The letter of an option by its number, from 0. Raises ValueError if there is none."""
    text = str(as_text(index))
    if not options or not re.fullmatch(r"\d+(\.0)?", text) or int(float(text)) >= len(options):
        raise ValueError(
            f"answer_index must be a number from 0 of one of the {len(options)} choices, got {short(index)}"
        )
    return [*options][int(float(text))]


def _without_letter(letter: str, text: Any) -> str:
    """A text without its letter before it: "(B) dog" or "B. dog" is "dog"."""
    return re.sub(rf"^\(?{letter}[.):]\s*(?=\S)", "", text)


def plain(text: str) -> str:
    """Lower case, single spaces, without marks at its ends."""
    return re.sub(r"^[\s\"'*_.,:;!?()\[\]]+|[\s\"'*_.,:;!?()\[\]]+$", "", " ".join(text.lower().split()))
