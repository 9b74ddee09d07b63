# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""SEED-Bench-2-Plus: charts, maps and web pages, with options in columns choice_A to choice_D."""

from datasets import Dataset

from normalign_llava.evaluate.tasks.documents import ASK_FOR_LETTER, checked, is_right, listed


COLUMNS = ["image", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "question_image_type"]
KINDS = ("chart", "map", "web")


def documents(split: Dataset) -> Dataset:
    return checked(split, "seedbench_2_plus", COLUMNS, {"question_image_type": KINDS})


def text(document: dict) -> str:
    return f"<image>{document['question']}\n{listed(_options(document))}\n{ASK_FOR_LETTER}"


def results(document: dict, answers: list[str]) -> dict:
    right = is_right(answers[0], _options(document), document["answer"].strip().upper())
    return {"acc": right, f"acc_{document['question_image_type'].strip().lower()}": right}


def _options(document: dict) -> dict[str, str]:
    return {letter: document[f"choice_{letter}"] for letter in "ABCD"}
