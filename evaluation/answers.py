# SPDX-License-Identifier: Apache-2.0
"""What a generated answer says: the option that it chooses, or yes or no.

No language model judges answers. `chosen_option` and `yes_or_no` follow VLMEvalKit 0.2 without its
judge (`can_infer`, `YOrN_Extraction`). lmms-eval 0.7 has a rule per benchmark, mostly stricter.
"""

import re
from collections.abc import Collection, Mapping

from ..data.rows.values import plain


_UNABLE = r"sorry|unable to|I can(?: ?not|['’]t)|cannot determine"
_REFUSAL = re.compile(rf"\W*(?:I['’]m |I am )?(?:{_UNABLE})\b", re.I)


def chosen_option(answer: str, options: Mapping[str, str]) -> str | None:
    """Which option, a key of `options`, an answer to a multiple-choice question chooses, or None.

    Rules 3 to 5 are VLMEvalKit's, but there "A dog" and "The answer is A or B" are A, "not B" is B,
    "cat" is in "category", and letters in lower case or at the start of a long answer are not seen.
    """
    answer = answer.strip()
    whole, named, another, alone, in_brackets = _patterns("".join(options))
    # 1. An answer that is a letter: "B", "b", "(B)", "**B**", "B."
    if letter := whole.fullmatch(answer):
        return letter[1].upper()
    # 2. An answer that is the full text of an option.
    same = [key for key, text in options.items() if plain(text) == plain(answer) != ""]
    if len(same) == 1:
        return same[0]
    if _REFUSAL.match(answer):
        return None
    # 3. A letter after "answer", "option" or "choice": "The answer is B", "option b".
    if matches := list(named.finditer(answer)):
        several = any(another.match(answer, match.end()) for match in matches)
        letters = {match[1].upper() for match in matches}
        return letters.pop() if len(letters) == 1 and not several else None
    # 4. The one capital letter alone, at the start or among the last four words, or "b)".
    if matches := [*alone.finditer(answer), *in_brackets.finditer(answer)]:
        if len({match[1].upper() for match in matches}) > 1:
            return None
        for match in matches:
            before, after = answer[: match.start()], answer[match.end() :]
            if not re.search(r"\w", before) or len(re.findall(r"\w+", after)) < 4:
                return match[1].upper()
    # 5. The one option whose text is in an answer at most twice as long as all options together.
    words = plain(answer)
    texts = {key: bare for key, text in options.items() if (bare := plain(text))}
    if len(words) > 2 * sum(map(len, texts.values())):
        return None
    word = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])"
    within = [key for key, text in texts.items() if re.search(word.format(re.escape(text)), words)]
    return within[0] if len(within) == 1 else None


def yes_or_no(answer: str) -> str | None:
    """Which of "yes" and "no" is in the answer, as VLMEvalKit reads it; None for neither or both.

    lmms-eval counts the bare word; POPE's authors take all without "no" or "not" for a yes.
    """
    words = {"yes", "no"} & set(re.findall(r"\w+", answer.lower()))
    return words.pop() if len(words) == 1 else None


def named(answer: str, choices: Collection[str]) -> str | None:
    """Which of some words in lower case the answer names; None for none of them and for several.

    What follows the last comma counts, as in "red circle, not blue, no", or else the whole answer.
    """
    for part in (answer.rpartition(",")[2], answer):
        words = set(re.findall(r"\w+", part.lower())) & set(choices)
        if len(words) == 1:
            return words.pop()
    return None


def _patterns(letters: str) -> tuple[re.Pattern, ...]:
    either = f"[{letters}{letters.lower()}]"
    # A letter or digit beside it makes it part of a word; a Chinese character does not: "答案是B".
    before = r"(?<![A-Za-z0-9°])(?<![A-Za-z]-)(?<!\bnot )"
    article = r"(?<=[Aa])[ \t]+(?!(?:is|or|and|nor|because|since)\b)\w"
    after = rf"(?![A-Za-z0-9]|['’-][A-Za-z]|{article})"
    marks = r"[\W_]*?"
    gap = rf"{marks}(?:option\s)?{marks}"
    return (
        re.compile(rf"[\W_]*({either})[\W_]*"),
        re.compile(rf"\b(?:answer|option|choice)(?:\s+is)?{gap}{before}({either}){after}", re.I),
        re.compile(rf"{marks}(?:,|/|&|\bor\b|\band\b){gap}{either}{after}", re.I),
        re.compile(rf"{before}([{letters}]){after}"),
        re.compile(rf"{before}([{letters.lower()}])(?:\)|(?<=^.)[.:](?=\s))"),
    )
