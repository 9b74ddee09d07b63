# SPDX-License-Identifier: Apache-2.0
"""The offline suite, from pinned archives: questions about easy-VQA and emoji, and a text.

The first question of each wording is asked again with a white image. `blank` is the accuracy of
this answer, over all questions of the wording.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from datasets import Dataset, Image as ImageFeature
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from PIL import Image

from normalign_llava.evaluation.answers import named
from normalign_llava.fetched import easy_vqa as data


BLANK = Image.new("RGB", (64, 64), "white")


class OfflineTask(ConfigurableTask):
    """A task without a data set on the Hub. It may ask a question again with a white image."""

    def __init__(self, config: dict) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def construct_requests(self, doc: dict, ctx: str, **options) -> Instance | list[Instance]:
        """Returns the question with its image, and with a white one if the document says so."""
        request = super().construct_requests(doc, ctx, **options)
        if not doc.get("blank"):
            return request
        *arguments, images = request.arguments
        arguments.append({"visual": [BLANK] * len(images["visual"])})
        blank_request = replace(
            request, idx=1, arguments=tuple(arguments), resps=[], filtered_resps={}
        )
        return [request, blank_request]


def easy_vqa(**_: object) -> dict[str, Dataset]:
    """Reads the quickstart's questions on easy-VQA's test images.

    100 ask for shape, 100 for colour, and 100 for yes or no, by turns.
    """
    questions = data.held_out(100)
    questions_by_kind = []
    for kind in data.QUESTION_KINDS:
        questions_by_kind.append([question for question in questions if question.kind == kind])
    return _test_split(chain.from_iterable(zip(*questions_by_kind, strict=True)))


def emoji(**_: object) -> dict[str, Dataset]:
    """Reads 48 pictures of the 12 emoji, and asks for their names.

    None is a drawing by Google: the quickstart trains on those.
    """
    return _test_split(data.emoji_by_others())


def _test_split(questions: Iterable[data.Question]) -> dict[str, Dataset]:
    """Returns questions, with their choices and category, as split `test`."""
    documents = []
    truths = []
    for question in questions:
        choices = data.CHOICES.get(question.kind, data.EMOJI)
        category = ""
        if question.kind in data.CHOICES:
            category = question.kind.replace("/", "_")
        truths.append({"category": category, "answer": question.answer})
        document = {
            "image": ImageFeature().encode_example(question.shown()),
            "question": question.text,
            "answer": question.answer,
            "category": category,
            "choices": choices,
        }
        documents.append(document)
    documents = with_answers_for_blank(documents, "question", truths)
    return {"test": Dataset.from_list(documents).cast_column("image", ImageFeature())}


def with_answers_for_blank(
    documents: Sequence[dict], wording: str, truths: Sequence[Any]
) -> list[dict]:
    """Returns documents with `blank`, the true answers to all questions of the same wording.

    Only the first document of a wording has them. It is asked with a white image for all.

    Args:
        documents: The questions.
        wording: Key of a question's text.
        truths: What `blank` says of the true answer to each question.
    """
    answers_by_wording = defaultdict(list)
    for document, truth in zip(documents, truths, strict=True):
        answers_by_wording[document[wording]].append(truth)
    completed_documents = []
    for document in documents:
        answers = answers_by_wording.pop(document[wording], [])
        completed_documents.append(document | {"blank": answers})
    return completed_documents


def passages(**_: object) -> dict[str, Dataset]:
    """Reads 32 passages of 128 words of one speech."""
    return {"test": Dataset.from_list([{"text": text} for text in data.passages(32, 128)])}


def results(document: dict, answers: list[str]) -> dict:
    """Returns the scores of the answers, for the metrics of all questions and of the category.

    Args:
        document: A question, see [`easy_vqa`].
        answers: The answer with the image and, if `blank` is not empty, the one with a white image.
    """
    chosen = [named(answer, document["choices"]) for answer in answers]
    scores = {"acc": float(chosen[0] == document["answer"]), "commonest": document["answer"]}
    true_answers = document["blank"]
    if true_answers:
        right_count = sum(chosen[1] == true_answer["answer"] for true_answer in true_answers)
        scores["blank"] = [right_count, len(true_answers)]
    category = document["category"]
    if not category:
        return scores
    return scores | {f"{metric_name}_{category}": score for metric_name, score in scores.items()}


def passage_results(document: dict, likelihoods: list[float]) -> dict:
    """Returns a passage's bits per byte, and its log likelihood with its number of words."""
    (likelihood,) = likelihoods
    return {
        "bits_per_byte": -likelihood / len(document["text"].encode()) / math.log(2),
        "word_perplexity": (likelihood, len(document["text"].split())),
    }


def blank(counts: list[list[int]]) -> float:
    """Returns the accuracy with a white image.

    The pairs are, for each wording, how many questions are right, and how many there are.
    """
    right_counts, question_counts = zip(*counts, strict=True)
    return sum(right_counts) / sum(question_counts)


def commonest(answers: list[str]) -> float:
    """Returns the share of the commonest true answer, the accuracy of always giving it."""
    return max(Counter(answers).values()) / len(answers)
