# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""MMBench: options in columns A to D, and every question asked again with the options rotated."""

from collections import defaultdict

from datasets import Dataset

from normalign_llava.evaluate.tasks.documents import ASK_FOR_LETTER, checked, is_right, listed


ROTATION = 1_000_000  # A rotated question has the index of the first plus a multiple of this.


def documents(split: Dataset) -> Dataset:
    return checked(split, "mmbench_en_dev", ["index", "image", "question", "hint", "answer", "A", "B", "C", "D"])


def text(document: dict) -> str:
    question = " ".join(part for part in (document["hint"], document["question"]) if part and part != "nan")
    return f"<image>{question} There are several options:\n{listed(_options(document))}\n\n{ASK_FOR_LETTER}"


def results(document: dict, answers: list[str]) -> dict:
    right = is_right(answers[0], _options(document), document["answer"])
    return {"acc_circular": (int(document["index"]), right), "acc": right}


def circular(rows: list[tuple[int, float]]) -> float:
    """Share of the questions that are answered rightly in every rotation, from indices of rows and their scores.

    Rotations without their first question do not count.
    """
    rotations = defaultdict(list)
    for index, right in rows:
        rotations[index % ROTATION].append((index, right))
    asked = [rows for question, rows in rotations.items() if any(index == question for index, _ in rows)]
    return sum(all(right for _, right in rows) for rows in asked) / len(asked)


def _options(document: dict) -> dict[str, str]:
    # Questions with fewer options have "nan" or nothing there.
    return {letter: document[letter] for letter in "ABCD" if document[letter] not in (None, "", "nan")}
