# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""MMStar: the options are in the question's text."""

import re
from collections import defaultdict

from datasets import Dataset

from normalign_llava.evaluate.tasks.documents import ASK_FOR_LETTER, checked, is_right


# "Options: A: a dog, B: a cat" and "Choices:\n(A) a dog\n(B) a cat".
OPTION = re.compile(r"(?:^|[\s,])\(?([A-D])[:.)]\s*(.*?)(?=\s+\(?[A-D][:.)]|$)", re.DOTALL)


def documents(split: Dataset) -> Dataset:
    return checked(split, "mmstar", ["image", "question", "answer", "l2_category"])


def text(document: dict) -> str:
    question = document["question"].strip().replace(" Please answer yes or no.", "")
    return f"<image>{question}\n{ASK_FOR_LETTER.removesuffix('.')}"


def results(document: dict, answers: list[str]) -> dict:
    right = is_right(answers[0], _options(document["question"]), document["answer"].strip().upper())
    return {"acc_by_category": (document["l2_category"], right), "acc": right}


def mean_of_categories(rows: list[tuple[str, float]]) -> float:
    """Mean over the 18 fine categories of the share of right answers."""
    of_category = defaultdict(list)
    for category, right in rows:
        of_category[category].append(right)
    return sum(sum(each) / len(each) for each in of_category.values()) / len(of_category)


def _options(question: str) -> dict[str, str]:
    listed = re.split(r"\b(?:Options|Choices):", question)[-1]
    return dict.fromkeys("ABCD", "") | {letter: text.strip() for letter, text in OPTION.findall(listed.strip())}
