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
    """The question and the answer of a row, as they are stored or as texts."""

    prompt: Any
    answer: Any
    options: dict[str, str] = field(default_factory=dict)  # by letter
    accepted: list[str] = field(default_factory=list)  # right answers, if they are listed apart
    columns: frozenset[str | None] = frozenset()  # that were read


def read_question(raw: Mapping) -> Question:
    """Reads a row with the column `question`: hint, question, input and options, and the answer.

    Raises ValueError if the options or the answer cannot be read.
    """
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

    Raises:
        ValueError: The question is empty, or is a list of turns and has options.
    """
    question = as_text(raw["question"])
    if not isinstance(question, str):
        if options:
            raise ValueError(
                "it has options, but its question is a list of turns. Write it as text"
            )
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
    shows_options = all(
        re.search(rf"\b{letter}\W{{1,3}}{re.escape(option)}", question)
        for letter, option in options.items()
    )
    if not shows_options:
        for letter, option in options.items():
            lines.append(f"{letter}. {option}")
    prompt = "\n".join(filter(None, lines))
    if not prompt.strip():
        raise ValueError("its question is empty; read a caption with --columns caption=answer")
    return prompt, read_columns


def _require_letter(index: Any, options: Options) -> str:
    """Returns the letter of the option with a number from 0. Raises ValueError if there is none."""
    letters = list(options)
    index_text = str(as_text(index)).removesuffix(".0")
    if not index_text.isdecimal() or int(index_text) >= len(letters):
        raise ValueError(f"answer_index must be a choice's number, from 0, got {short(index)}")
    return letters[int(index_text)]


def _read_answer(raw: Mapping, options: Options) -> tuple[Any, list[str], set[str]]:
    """Reads the columns `answer_index`, `answer` and `answers`.

    Returns:
        The answer, perhaps a list of several. The right answers, if the answer is one of several.
        The columns that were read.

    Raises:
        ValueError: The answer is not one of the options, or there are several answers to options.
    """
    index = raw.get("answer_index")
    if not is_empty(index):
        return _require_letter(index, options), [], {"answer_index"}
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

    An answer that is none of the options is returned unchanged. Raises ValueError if there are
    several answers, or as [`chosen_letter`] does.
    """
    distinct_answers = set(accepted_answers(answer))
    if len(distinct_answers) > 1:
        raise ValueError(
            f"it has options and several answers, {', '.join(sorted(distinct_answers))}; one can "
            "be learned"
        )
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
    """Returns the texts in a list of answers: texts, or mappings with `answer` or `text`.

    The returned list is empty if the value is anything else.
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

    Letters before the texts are removed, if all texts have their own.

    Raises ValueError if they cannot be options, such as images or equal texts.
    """
    choices = transposed(parsed(raw.get("choices")))
    has_choices = not is_empty(choices)
    options = _by_letter(choices)
    if not has_choices:
        # In MMBench, "nan" fills up the columns of questions with few options.
        options = {letter: raw.get(letter) for letter in LETTERS if raw.get(letter) != "nan"}
    options = {letter: as_text(text) for letter, text in options.items() if not is_empty(text)}
    if not has_choices and len(options) < 2:
        return {}
    distinct_texts = {
        plain(option)
        for option in options.values()
        if isinstance(option, str) and option.strip() and not option.lower().endswith(SUFFIXES)
    }
    has_letters = list(options) == list(ascii_uppercase[: len(options)])
    if len(options) < 2 or not has_letters or len(distinct_texts) < len(options):
        raise ValueError(
            "its options must be 2 to 26 different texts, and no images, got "
            f"{short(options or choices)}"
        )
    bare_options = {letter: _without_letter(letter, option) for letter, option in options.items()}
    all_have_letters = options.items().isdisjoint(bare_options.items())
    return bare_options if all_have_letters else options


def _by_letter(choices: Any) -> dict[str, Any]:
    """Returns the options in a list, or in a mapping by letter. Anything else has no options."""
    if isinstance(choices, Mapping):
        return {str(letter).upper(): text for letter, text in choices.items()}
    options = {}
    if isinstance(choices, (list, tuple)) and len(choices) <= len(ascii_uppercase):
        for letter, choice in zip(ascii_uppercase, choices, strict=False):
            if isinstance(choice, Mapping):
                choice = choice.get("text")
            options[letter] = choice
    return options


def chosen_letter(answer: Any, options: Options) -> str | None:
    """Returns the letter of the option that an answer is.

    Args:
        answer: The option's text, its letter, both, or its number from 0.
        options: Texts by letter.

    Returns:
        The letter. None if the answer is none of them, such as a sentence.

    Raises:
        ValueError: The answer fits two options, or is a letter or number that no option has.
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
        raise ValueError(
            f"the answer {short(answer)} is not just one of the choices "
            f"{short([*options.values()])}"
        )
    return letters.pop() if letters else None


def _without_letter(letter: str, text: Any) -> str:
    """Returns a text without the letter before it: "(B) dog" and "B. dog" become "dog"."""
    return re.sub(rf"^\(?{letter}[.):]\s*(?=\S)", "", text)
