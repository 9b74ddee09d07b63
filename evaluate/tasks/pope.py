# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""POPE: is an object in the image? For each object that is there, one that is not: random, popular or adversarial."""

from datasets import Dataset

from normalign_llava.evaluate.answers import yes_or_no
from normalign_llava.evaluate.tasks.documents import checked


# Whether the model says yes, and whether yes is right.
Pair = tuple[bool, bool]

SETTINGS = ("random", "popular", "adversarial")
METRICS = ("precision", "recall", "f1", "yes_ratio")


def documents(split: Dataset) -> Dataset:
    columns = ["image", "question", "answer", "category"]
    return checked(split, "pope", columns, {"category": SETTINGS, "answer": ("yes", "no")})


def text(document: dict) -> str:
    return f"<image>{document['question'].strip()}\nAnswer the question using a single word or phrase."


def results(document: dict, answers: list[str]) -> dict:
    said, is_there = yes_or_no(answers[0]), document["answer"].strip().lower()
    setting = document["category"].strip().lower()
    right = float(said == is_there)
    pair = (said == "yes", is_there == "yes")
    scores = {"acc": right, f"acc_{setting}": right}
    return scores | {name: pair for metric in METRICS for name in (metric, f"{metric}_{setting}")}


def precision(pairs: list[Pair]) -> float:
    """Share of right ones among the answers "yes"; 0 if there are none."""
    return _share(is_there for says_yes, is_there in pairs if says_yes)


def recall(pairs: list[Pair]) -> float:
    """Share of the objects in the images that are found. What is neither yes nor no does not find any."""
    return _share(says_yes for says_yes, is_there in pairs if is_there)


def f1(pairs: list[Pair]) -> float:
    """Harmonic mean of precision and recall; 0 if both are 0."""
    both = precision(pairs) + recall(pairs)
    return 2 * precision(pairs) * recall(pairs) / both if both else 0.0


def yes_ratio(pairs: list[Pair]) -> float:
    """Share of the answers "yes" among all."""
    return _share(says_yes for says_yes, _ in pairs)


def _share(of) -> float:
    of = list(of)
    return sum(of) / len(of) if of else 0.0
