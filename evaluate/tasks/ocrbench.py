# SPDX-License-Identifier: Apache-2.0
"""OCRBench: text in images. An answer is right if one of the accepted texts is in it."""

from normalign_llava.evaluate.tasks.documents import checked


# The five parts, of 300, 200, 200, 200 and 100 questions.
PART_OF_TYPE = {
    "regular text recognition": "text_recognition",
    "irregular text recognition": "text_recognition",
    "artistic text recognition": "text_recognition",
    "handwriting recognition": "text_recognition",
    "digit string recognition": "text_recognition",
    "non-semantic text recognition": "text_recognition",
    "scene text-centric vqa": "scene_text_vqa",
    "doc-oriented vqa": "document_vqa",
    "key information extraction": "key_information",
    "handwritten mathematical expression recognition": "handwritten_math",
}

documents = checked("question", "answer", "dataset", question_type=PART_OF_TYPE)


def text(document: dict) -> str:
    """The prompt: the image and the question alone."""
    return f"<image>{document['question'].strip()}"


def results(document: dict, answers: list[str]) -> dict:
    """1 if an accepted answer is in the answer, else 0: for all, for the row's part, and for the mean."""
    accepted = [document["answer"]] if isinstance(document["answer"], str) else document["answer"]
    plain = _formula if document["dataset"] == "HME100k" else _lower
    right = float(any(plain(text) in plain(answers[0]) for text in accepted))
    return {"total": right, PART_OF_TYPE[document["question_type"].strip().lower()]: right, "acc": right}


def points(right: list[float]) -> float:
    """Number of right answers, as OCRBench counts: the total is out of 1000."""
    return sum(right)


def _lower(text: str) -> str:
    return text.lower().strip().replace("\n", " ")


def _formula(text: str) -> str:
    # LaTeX: spaces mean nothing, upper and lower case do.
    return text.strip().replace("\n", "").replace(" ", "")
