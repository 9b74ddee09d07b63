# SPDX-License-Identifier: Apache-2.0
"""Questions with options, hints and several right answers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, TypeAlias

from .images import SUFFIXES, short
from .turns import are_parts
from .values import as_text, is_empty, parsed, plain, transposed


LETTERS = "ABCDEFGHIJ"  # columns of options, if they are not in `choices`

Options: TypeAlias = Mapping[str, str]
"""Texts of the options of a question, by letter."""


@dataclass(frozen=True)
class Question:
    """What a row asks, and its answer, both as they are stored or as texts."""

    prompt: Any
    answer: Any
    options: dict[str, str] = field(default_factory=dict)  # by letter
    accepted: list[str] = field(default_factory=list)  # right answers that are apart from `answer`
    columns: frozenset[str | None] = frozenset()  # that were read


def read_question(raw: Mapping) -> Question:
    """Reads a row with the column `question`: hint, question, input and options, and the answer."""
    options = options_of(raw)
    prompt, prompt_columns = _read_prompt(raw, options)
    answer, accepted, answer_columns = _read_answer(raw, options)
    option_columns = set(options)
    if not is_empty(raw.get("choices")):
        option_columns = {"choices"}
    columns = frozenset(prompt_columns | answer_columns | option_columns)
    return Question(prompt, answer, options, accepted, columns)


def _read_prompt(raw: Mapping, options: Options) -> tuple[Any, set[str]]:
    """Joins a question with its hint, its input and its options.

    Returns:
        The text, and the columns that were read. A question that is a list of turns is returned
        unchanged.
    """
    question = as_text(raw["question"])
    if not isinstance(question, str):
        if options:
            problem = "it has options, but its question is a list of turns. Write it as text"
            raise ValueError(problem)
        return question, set()
    text_columns = ["question", "input"]
    if options and raw.get("hint") != "nan":  # as in MMBench
        text_columns.insert(0, "hint")
    read_columns = set()
    lines = []
    for column in text_columns:
        column_text = as_text(raw.get(column))
        if isinstance(column_text, str):
            read_columns.add(column)
            lines.append(column_text)
    if not _shows_options(question, options):
        for letter, option in options.items():
            lines.append(f"{letter}. {option}")
    prompt = "\n".join(filter(None, lines))
    if not prompt.strip():
        raise ValueError("its question is empty; read a caption with --columns caption=answer")
    return prompt, read_columns


def _shows_options(question: str, options: Options) -> bool:
    """Whether the text of a question has all options after their letters."""
    for letter, option in options.items():
        if not re.search(rf"\b{letter}\W{{1,3}}{re.escape(option)}", question):
            return False
    return True


def _letter_by_index(index: Any, options: Options) -> str:
    letters = list(options)
    index_text = str(as_text(index)).removesuffix(".0")
    if not index_text.isdecimal() or int(index_text) >= len(letters):
        raise ValueError(f"answer_index must be a choice's number, from 0, got {short(index)}")
    return letters[int(index_text)]


def _read_answer(raw: Mapping, options: Options) -> tuple[Any, list[str], set[str]]:
    """Reads the columns `answer_index`, `answer` and `answers`.

    Returns:
        The answer, perhaps a list of several; the right answers, if the answer is one of several;
        and the columns that were read.
    """
    index = raw.get("answer_index")
    if not is_empty(index):
        return _letter_by_index(index, options), [], {"answer_index"}
    answer = raw.get("answer")
    several_answers = parsed(raw.get("answers"))
    accepted: list[str] = []
    columns = {"answer"}
    if is_empty(answer):
        columns.add("answers")
        answer = None if is_empty(several_answers) else several_answers
    elif answer in accepted_answers(several_answers):
        columns.add("answers")
        accepted = accepted_answers(several_answers)
    if options and not is_empty(answer):
        answer = _answer_among_options(answer, options)
    return answer, accepted, columns


def _answer_among_options(answer: Any, options: Options) -> Any:
    """Returns the text of an answer to a question with options, or a letter in place of a number.

    An answer that is none of the options is returned unchanged.
    """
    distinct_answers = set(accepted_answers(answer))
    if len(distinct_answers) > 1:
        shown_answers = ", ".join(sorted(distinct_answers))
        raise ValueError(f"it has options and several answers, {shown_answers}; one can be learned")
    if distinct_answers:
        answer = distinct_answers.pop()
    answer_text = as_text(answer)
    if not isinstance(answer_text, str):
        return answer
    letter = chosen_letter(answer_text, options)
    if letter is None:
        return answer
    is_number = plain(answer_text).isdigit() and plain(options[letter]) != plain(answer_text)
    return letter if is_number else answer_text


def accepted_answers(value: Any) -> list[str]:
    """Returns the texts of a list of answers, or of what they have in `answer` or `text`.

    The list is empty if the value is anything else.
    """
    answers = transposed(value)
    if not isinstance(answers, (list, tuple)) or are_parts(answers):
        return []
    answer_texts = []
    for answer in answers:
        if isinstance(answer, Mapping):
            answer = answer.get("answer", answer.get("text"))
        answer_text = as_text(answer)
        if not isinstance(answer_text, str):
            return []
        if answer_text.strip():
            answer_texts.append(answer_text)
    return answer_texts


def options_of(raw: Mapping) -> dict[str, str]:
    """Returns the options of a row by letter: those in `choices`, or in columns `A`, `B` and so on.

    Raises ValueError if they cannot be options, such as images or equal texts.
    """
    choices = transposed(parsed(raw.get("choices")))
    if is_empty(choices):
        option_columns = {letter: as_text(raw.get(letter)) for letter in LETTERS}
        options = _filled(option_columns, filling="nan")  # as in MMBench
        if len(options) < 2:
            return {}
    else:
        options = _filled(_by_letter(choices))
    if not _are_valid(options):
        shown = short(options or choices)
        raise ValueError(f"its options must be 2 to 26 different texts, and no images, got {shown}")
    return _without_letters(options)


def _by_letter(choices: Any) -> dict[str, Any]:
    """Returns the options in a list of texts or in a mapping by letter; else an empty mapping."""
    if isinstance(choices, Mapping):
        return {str(letter).upper(): as_text(text) for letter, text in choices.items()}
    options = {}
    if isinstance(choices, (list, tuple)) and len(choices) <= len(ascii_uppercase):
        for letter, choice in zip(ascii_uppercase, choices, strict=False):
            if isinstance(choice, Mapping):
                choice = choice.get("text")
            options[letter] = as_text(choice)
    return options


def _filled(options: Mapping[str, Any], filling: str | None = None) -> dict[str, Any]:
    """Returns the options that are not empty.

    In tables, questions with few options are filled up. `filling` is the text of such an option.
    """
    filled_options = {}
    for letter, option in options.items():
        if not is_empty(option) and option != filling:
            filled_options[letter] = option
    return filled_options


def _are_valid(options: Options) -> bool:
    """Whether options are at least two different texts with letters from A, and no images."""
    expected_letters = ascii_uppercase[: len(options)]
    if len(options) < 2 or list(options) != list(expected_letters):
        return False
    distinct_texts = set()
    for option in options.values():
        if not isinstance(option, str) or not option.strip():
            return False
        if option.lower().endswith(SUFFIXES):
            return False
        distinct_texts.add(plain(option))
    return len(distinct_texts) == len(options)


def _without_letters(options: dict[str, str]) -> dict[str, str]:
    """Returns the options without letters before their texts, if all of them have their own."""
    bare_options = {}
    for letter, option in options.items():
        bare_options[letter] = _without_letter(letter, option)
        if bare_options[letter] == option:
            return options
    return bare_options


def chosen_letter(answer: Any, options: Options) -> str | None:
    """Returns the letter of the option that an answer is.

    Args:
        answer: The option's text, its letter, both, or its number from 0.
        options: Texts by letter.

    Returns:
        The letter. None if the answer is neither of them, such as a sentence.

    Raises:
        ValueError: If the answer is two of the options, or a letter or number of no option.
    """
    answer_text = as_text(answer)
    bare_text = plain(answer_text)
    for letter, option in options.items():  # "B. dog"
        if plain(_without_letter(letter, answer_text)) == plain(option) != bare_text:
            return letter
    letters = {letter for letter, option in options.items() if plain(option) == bare_text}
    if bare_text.upper() in options:
        letters.add(bare_text.upper())
    if bare_text.isascii() and bare_text.isdigit() and int(bare_text) < len(options):
        letters.add(list(options)[int(bare_text)])
    if len(letters) > 1:
        problem = "is one option's text and another's letter or number"
        if bare_text.isdigit():
            problem += "; if it is a number from 0, use --columns answer_index=answer"
        raise ValueError(f"the answer {answer_text!r} {problem}")
    if not letters and re.fullmatch(r"[A-Za-z]|-?\d+", bare_text):
        choices = short([*options.values()])
        raise ValueError(f"the answer {short(answer)} is not just one of the choices {choices}")
    return letters.pop() if letters else None


def _without_letter(letter: str, text: Any) -> str:
    """Returns a text without its letter before it: "(B) dog" or "B. dog" is "dog"."""
    return re.sub(rf"^\(?{letter}[.):]\s*(?=\S)", "", text)
