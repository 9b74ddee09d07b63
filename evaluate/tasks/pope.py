# SPDX-License-Identifier: Apache-2.0
"""POPE: is an object in the image? For each object that is there, one that is not: random, popular or adversarial."""

from normalign_llava.evaluate.answers import yes_or_no
from normalign_llava.evaluate.tasks.documents import checked


documents = checked("question", category=("random", "popular", "adversarial"), answer=("yes", "no"))


def text(document: dict) -> str:
    """The prompt, which asks for a single word."""
    return f"<image>{document['question'].strip()}\nAnswer the question using a single word or phrase."


def results(document: dict, answers: list[str]) -> dict:
    """The scores over all questions and over those of the setting. What is neither yes nor no finds no object."""
    said, is_there = yes_or_no(answers[0]), document["answer"].strip().lower() == "yes"
    says_yes = said == "yes"
    scores = {"acc": float(said == ("yes" if is_there else "no")), "precision": (says_yes, is_there)}
    scores |= {"recall": float(says_yes)} if is_there else {}
    scores |= {"f1": (says_yes, is_there), "yes_ratio": float(says_yes)}
    setting = document["category"].strip().lower()
    return scores | {f"{name}_{setting}": score for name, score in scores.items()}


def precision(pairs: list[tuple[bool, bool]]) -> float:
    """Share of right ones among the answers "yes", from whether it is said and whether it is true; 0 without any."""
    of_yes = [is_there for says_yes, is_there in pairs if says_yes]
    return sum(of_yes) / len(of_yes) if of_yes else 0.0


def f1(pairs: list[tuple[bool, bool]]) -> float:
    """Harmonic mean of precision and recall; 0 if both are 0."""
    right = sum(says_yes and is_there for says_yes, is_there in pairs)
    return 2 * right / sum(map(sum, pairs)) if right else 0.0
