# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: MMBench, MMStar, SEED-Bench-2-Plus, ScienceQA and AI2D."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from string import ascii_uppercase

from normalign_llava.evaluate.answers import chosen_option
from normalign_llava.evaluate.tasks.documents import ASK_FOR_LETTER, checked, listed


ROTATION = 1_000_000  # A rotated question of MMBench has the index of the first plus a multiple of this.

# MMStar: "Options: A: a dog, B: a cat" and "Choices:\n(A) a dog\n(B) a cat".
OPTION = re.compile(r"(?:^|[\s,])\(?([A-D])[:.)]\s*(.*?)(?=\s+\(?[A-D][:.)]|$)", re.DOTALL)


# The rows of each benchmark, checked.
mmbench = checked("index", "question", "hint", "answer", *"ABCD")
mmstar = checked("question", "answer", "l2_category")
seedbench = checked(
    "question", "answer", *(f"choice_{letter}" for letter in "ABCD"), question_image_type=("chart", "map", "web")
)
scienceqa = checked("question", "choices", "answer", "hint")
ai2d = checked("question", "options", "answer")


def text(document: dict) -> str:
    """The prompt of SEED-Bench-2-Plus, ScienceQA and AI2D. Some rows of ScienceQA have no image, some a hint."""
    image = "<image>" if document["image"] else ""
    hint = f"Context: {document['hint']}\n" if document.get("hint") else ""
    return f"{image}{hint}{document['question']}\n{listed(_options(document))}\n{ASK_FOR_LETTER}"


def mmbench_text(document: dict) -> str:
    """The prompt of MMBench."""
    question = " ".join(part for part in (document["hint"], document["question"]) if part and part != "nan")
    return f"<image>{question} There are several options:\n{listed(_options(document))}\n\n{ASK_FOR_LETTER}"


def mmstar_text(document: dict) -> str:
    """The prompt of MMStar."""
    question = document["question"].strip().replace(" Please answer yes or no.", "")
    return f"<image>{question}\n{ASK_FOR_LETTER.removesuffix('.')}"


def target(document: dict) -> str:
    """The letter of the right option, which ScienceQA and AI2D have as a number from 0."""
    answer = str(document["answer"]).strip().upper()
    return ascii_uppercase[int(answer)] if answer.isdigit() else answer


def results(document: dict, answers: list[str]) -> dict:
    """`acc`: 1 if the answer names the right option, else 0."""
    return {"acc": float(chosen_option(answers[0], _options(document)) == target(document))}


def mmbench_results(document: dict, answers: list[str]) -> dict:
    """Also what [`circular`] takes: the row's index and its score."""
    right = results(document, answers)
    return {"acc_circular": (int(document["index"]), right["acc"]), **right}


def mmstar_results(document: dict, answers: list[str]) -> dict:
    """Also what [`mean_of_categories`] takes: the row's category and its score."""
    right = results(document, answers)
    return {"acc_by_category": (document["l2_category"], right["acc"]), **right}


def seedbench_results(document: dict, answers: list[str]) -> dict:
    """Also the score of the kind of image: `acc_chart`, `acc_map` or `acc_web`."""
    right = results(document, answers)
    return {**right, f"acc_{document['question_image_type'].strip().lower()}": right["acc"]}


def whole_questions(rows: Sequence[tuple[int, float]]) -> dict[int, float]:
    """From indices of rows and their scores, by index, 1 if a question is answered rightly in every rotation, else 0.

    Rotations without their first question do not count.
    """
    rotations = defaultdict(list)
    for index, right in rows:
        rotations[index % ROTATION].append(right)
    return {index: float(all(rotations[index])) for index, _ in rows if index < ROTATION}


def circular(rows: list[tuple[int, float]]) -> float:
    """Share of the questions of MMBench that are answered rightly in every rotation."""
    return fmean(whole_questions(rows).values())


def by_category(rows: Sequence[tuple[str, float]]) -> list[float]:
    """The scores, from categories of rows and their scores, with weights that give each category the same in all."""
    sizes = Counter(category for category, _ in rows)
    return [right * len(rows) / (len(sizes) * sizes[category]) for category, right in rows]


def mean_of_categories(rows: list[tuple[str, float]]) -> float:
    """Mean over the 18 fine categories of MMStar of the share of right answers."""
    return fmean(by_category(rows))


def _options(document: dict) -> dict[str, str]:
    """The options by letter: of a list, of the columns A to D or choice_A to choice_D, or of the question's text."""
    if texts := document.get("options") or document.get("choices"):
        return dict(zip(ascii_uppercase, texts, strict=False))
    lettered = {letter: document.get(f"choice_{letter}", document.get(letter)) for letter in "ABCD"}
    # Questions of MMBench with fewer options have "nan" or nothing there.
    if options := {letter: text for letter, text in lettered.items() if text not in (None, "", "nan")}:
        return options
    listed = re.split(r"\b(?:Options|Choices):", document["question"])[-1]
    return dict.fromkeys("ABCD", "") | {letter: text.strip() for letter, text in OPTION.findall(listed.strip())}
