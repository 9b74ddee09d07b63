# SPDX-License-Identifier: Apache-2.0
"""What a generated answer says: the option that it chooses, yes or no, or one of some words.

No language model judges answers. `chosen_option` and `yes_or_no` follow VLMEvalKit 0.2 without its
judge (`can_infer`, `YOrN_Extraction`). lmms-eval 0.7 has a rule per benchmark, mostly stricter.
"""

import re
from collections.abc import Collection, Mapping

from ..data.rows.values import plain


_UNABLE = r"sorry|unable to|I can(?: ?not|['’]t)|cannot determine"
_REFUSAL = re.compile(rf"\W*(?:I['’]m |I am )?(?:{_UNABLE})\b", re.I)
_MARKS = r"[\W_]*?"
_GAP = rf"{_MARKS}(?:option\s)?{_MARKS}"
_INTRODUCTION = rf"\b(?:answer|option|choice)(?:\s+is)?{_GAP}"
_CONJUNCTION = rf"{_MARKS}(?:,|/|&|\bor\b|\band\b){_GAP}"  # as in "A or B"
# Before and after the letter of an option. A letter or digit beside it makes it part of a word; a
# Chinese character does not: "答案是B".
_BEFORE = r"(?<![A-Za-z0-9°])(?<![A-Za-z]-)(?<!\bnot )"
_ARTICLE = r"(?<=[Aa])[ \t]+(?!(?:is|or|and|nor|because|since)\b)\w"
_AFTER = rf"(?![A-Za-z0-9]|['’-][A-Za-z]|{_ARTICLE})"


def chosen_option(answer: str, options: Mapping[str, str]) -> str | None:
    """Returns the option that an answer to a multiple-choice question chooses, or None.

    Rules 3 to 5 are VLMEvalKit's, but there "A dog" and "The answer is A or B" are A, "not B" is B,
    "cat" is in "category", and letters in lower case or at the start of a long answer are not seen.

    Args:
        answer: What the model generated.
        options: Texts of the options, by their letters.
    """
    answer = answer.strip()
    capitals = "".join(options)
    small = capitals.lower()
    # 1. An answer that is a letter: "B", "b", "(B)", "**B**", "B."
    whole_letter = re.fullmatch(rf"[\W_]*([{capitals}{small}])[\W_]*", answer)
    if whole_letter:
        return whole_letter[1].upper()
    # 2. An answer that is the full text of an option.
    words = plain(answer)
    same = [letter for letter, option in options.items() if words and plain(option) == words]
    if len(same) == 1:
        return same[0]
    if _REFUSAL.match(answer):
        return None
    by_itself = rf"{_BEFORE}([{capitals}]){_AFTER}"
    # 3. A letter after "answer", "option" or "choice": "The answer is B", "option b".
    matches = list(re.finditer(_INTRODUCTION + by_itself, answer, re.I))
    if matches:
        second_letter = re.compile(rf"{_CONJUNCTION}[{capitals}]{_AFTER}", re.I)
        if any(second_letter.match(answer, match.end()) for match in matches):
            return None
        letters = {match[1].upper() for match in matches}
        return letters.pop() if len(letters) == 1 else None
    # 4. The only capital letter by itself, at the start or among the last four words, or one in
    # lower case as in "b)", or as in "b. " at the start.
    in_lower_case = rf"{_BEFORE}([{small}])(?:\)|(?<=^.)[.:](?=\s))"
    matches = [*re.finditer(by_itself, answer), *re.finditer(in_lower_case, answer)]
    letters = {match[1].upper() for match in matches}
    if len(letters) > 1:
        return None
    if any(_is_near_an_end(match) for match in matches):
        return letters.pop()
    return _option_within(words, options)


def _is_near_an_end(match: re.Match) -> bool:
    """Returns whether no word stands before a match, or fewer than four after it."""
    before = match.string[: match.start()]
    after = match.string[match.end() :]
    return not re.search(r"\w", before) or len(re.findall(r"\w+", after)) < 4


def _option_within(words: str, options: Mapping[str, str]) -> str | None:
    """Returns the only option whose text is in an answer, or None. This is rule 5.

    An answer that is more than twice as long as all options together chooses none.
    """
    total_length = 0
    contained = []
    for letter, option in options.items():
        text = plain(option)
        total_length += len(text)
        if text and re.search(rf"(?<![A-Za-z0-9]){re.escape(text)}(?![A-Za-z0-9])", words):
            contained.append(letter)
    if len(contained) != 1 or len(words) > 2 * total_length:
        return None
    return contained[0]


def yes_or_no(answer: str) -> str | None:
    """Returns which of "yes" and "no" is in the answer, or None for neither or both.

    This is VLMEvalKit's rule. lmms-eval counts only the bare word. POPE's authors take an answer
    without "no" or "not" for a yes.
    """
    words = {"yes", "no"} & set(re.findall(r"\w+", answer.lower()))
    return words.pop() if len(words) == 1 else None


def named(answer: str, choices: Collection[str]) -> str | None:
    """Returns which of some words in lower case the answer names, or None for none or several.

    What follows the last comma counts, as in "red circle, not blue, no", or else the whole answer.
    """
    after_last_comma = answer.rpartition(",")[2]
    for part in (after_last_comma, answer):
        words = set(re.findall(r"\w+", part.lower())) & set(choices)
        if len(words) == 1:
            return words.pop()
    return None
