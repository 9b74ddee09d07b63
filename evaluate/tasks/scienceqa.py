# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""ScienceQA: a list of choices, the number of the right one, and a hint that may be empty."""

from datasets import Dataset

from normalign_llava.evaluate.tasks.documents import ASK_FOR_LETTER, by_letter, checked, is_right, listed


COLUMNS = ["image", "question", "choices", "answer", "hint"]


def documents(split: Dataset) -> Dataset:
    """The rows, once their columns are checked."""
    return checked(split, "scienceqa", COLUMNS)


def documents_with_image(split: Dataset) -> Dataset:
    """The rows that have an image, once their columns are checked."""
    return checked(split, "scienceqa_img", COLUMNS)


def text(document: dict) -> str:
    """The prompt for a row."""
    image = "<image>" if document["image"] else ""
    hint = f"Context: {document['hint']}\n" if document["hint"] else ""
    return f"{image}{hint}{document['question']}\n{listed(by_letter(document['choices']))}\n{ASK_FOR_LETTER}"


def target(document: dict) -> str:
    """The right answer to a row."""
    return "ABCDEFGH"[document["answer"]]


def results(document: dict, answers: list[str]) -> dict:
    """The scores of an answer, by metric, as the harness aggregates them."""
    return {"acc": is_right(answers[0], by_letter(document["choices"]), target(document))}
