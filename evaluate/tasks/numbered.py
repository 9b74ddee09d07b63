# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""AI2D and ScienceQA: a list of options, and the number of the right one."""

from string import ascii_uppercase

from datasets import Dataset

from normalign_llava.evaluate.tasks.documents import ASK_FOR_LETTER, checked, is_right, listed


def ai2d(split: Dataset) -> Dataset:
    """The rows of AI2D, once their columns are checked."""
    return checked(split, "ai2d", ["image", "question", "options", "answer"])


def scienceqa(split: Dataset) -> Dataset:
    """The rows of ScienceQA, once their columns are checked. Some have no image, some a hint."""
    return checked(split, "scienceqa", ["image", "question", "choices", "answer", "hint"])


def text(document: dict) -> str:
    image = "<image>" if document["image"] else ""
    hint = f"Context: {document['hint']}\n" if document.get("hint") else ""
    return f"{image}{hint}{document['question']}\n{listed(_options(document))}\n{ASK_FOR_LETTER}"


def target(document: dict) -> str:
    return ascii_uppercase[int(document["answer"])]


def results(document: dict, answers: list[str]) -> dict:
    return {"acc": is_right(answers[0], _options(document), target(document))}


def _options(document: dict) -> dict[str, str]:
    return dict(zip(ascii_uppercase, document.get("options") or document["choices"], strict=False))
