# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""AI2D: diagrams, with a list of options and the number of the right one."""

from datasets import Dataset

from normalign_llava.evaluate.tasks.documents import ASK_FOR_LETTER, by_letter, checked, is_right, listed


def documents(split: Dataset) -> Dataset:
    """The rows, once their columns are checked."""
    return checked(split, "ai2d", ["image", "question", "options", "answer"])


def text(document: dict) -> str:
    """The prompt for a row."""
    return f"<image>{document['question']}\n{listed(by_letter(document['options']))}\n{ASK_FOR_LETTER}"


def target(document: dict) -> str:
    """The right answer to a row."""
    return "ABCDEFGH"[int(document["answer"])]


def results(document: dict, answers: list[str]) -> dict:
    """The scores of an answer, by metric, as the harness aggregates them."""
    return {"acc": is_right(answers[0], by_letter(document["options"]), target(document))}
