# SPDX-License-Identifier: Apache-2.0
"""The offline suite, from pinned archives: questions about easy-VQA's images and emoji; a text.

A document with an image is a question. The first of each wording is asked a second time with a white image, and holds
the true answers to all questions so worded: `blank` is the accuracy of the answers to the white image over them all.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from datasets import Dataset, Image as ImageFeature
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from PIL import Image

from normalign_llava.evaluate.answers import named
from normalign_llava.fetched.easy_vqa import (
    CHOICES,
    EMOJI,
    KINDS,
    Question,
    emoji as drawn,
    held_out,
    load_image,
    passages as read_passages,
    png,
)


BLANK = Image.new("RGB", (64, 64), "white")
SEED = 0


class OfflineTask(ConfigurableTask):
    """A task whose data need no data set of a hub, and whose documents may be asked again with a white image."""

    def __init__(self, config: dict) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict | None = None, **_: object) -> None:
        """Makes the data by the task's `custom_dataset`."""
        self.dataset = self.config.custom_dataset()

    def construct_requests(self, doc: dict, ctx: str, **options: object) -> Instance | list[Instance]:
        """The question with its image, and with a white one if the document says so."""
        request = super().construct_requests(doc, ctx, **options)
        if not doc.get("blank"):
            return request
        arguments = (*request.arguments[:2], {"visual": [BLANK] * len(request.arguments[2]["visual"])})
        return [request, replace(request, idx=1, arguments=arguments, resps=[], filtered_resps={})]


def easy_vqa() -> dict[str, Dataset]:
    """The quickstart's questions about easy-VQA's test images: 100 each of shape and colour, and yes or no."""
    asked = held_out(100, SEED)
    of_kind = [[question for question in asked if question.kind == kind] for kind in KINDS]
    return _as_test(
        _row(question, CHOICES[question.kind], question.kind.replace("/", "_"))
        for trio in zip(*of_kind, strict=True)  # so that the first few are of all kinds
        for question in trio
    )


def emoji() -> dict[str, Dataset]:
    """The names of Microsoft's drawings of the 12 emoji whose Google drawings the quickstart trains on."""
    return _as_test(_row(question, EMOJI) for question in drawn("test"))


def passages() -> dict[str, Dataset]:
    """32 passages of 128 words of one speech."""
    return {"test": Dataset.from_list([{"text": text} for text in read_passages(32, 128)])}


def text(document: dict) -> str:
    """The prompt: the image and the question alone."""
    return f"<image>{document['question']}"


def results(document: dict, answers: list[str]) -> dict:
    """The scores of the answers with the image and with a white one."""
    said = [named(answer, document["choices"]) for answer in answers]
    category, right = document["category"], document["answer"]
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for asked in document["blank"]:
        for metric in _in_category("blank", asked["category"], None):
            counts[metric][0] += said[1] == asked["answer"]
            counts[metric][1] += 1
    scores = _in_category("acc", category, float(said[0] == right)) | _in_category("commonest", category, right)
    return scores | dict(counts)


def passage_results(document: dict, likelihoods: list[float]) -> dict:
    """Bits for each byte of a passage, from its log likelihood, and what its words weigh in the perplexity."""
    (likelihood,) = likelihoods
    size = len(document["text"].encode())
    return {
        "bits_per_byte": -likelihood / size / math.log(2),
        "word_perplexity": (likelihood, len(document["text"].split())),
    }


def blank(counts: list[list[int]]) -> float:
    """Accuracy with a white image, from how many questions of each wording are answered rightly, of how many."""
    return sum(right for right, _ in counts) / sum(asked for _, asked in counts)


def commonest(answers: list[str]) -> float:
    """Share of the commonest of the true answers, which is the accuracy of always giving it."""
    return max(Counter(answers).values()) / len(answers)


def _in_category(metric: str, category: str, value: object) -> dict:
    return {metric: value} | ({f"{metric}_{category}": value} if category else {})


def _row(question: Question, choices: Collection[str], category: str = "") -> dict:
    image = {"bytes": png(load_image(question.image)), "path": None}
    row = {"image": image, "question": question.text, "answer": question.answer}
    return row | {"category": category, "choices": choices}


def _as_test(rows: Iterable[dict]) -> dict[str, Dataset]:
    """The rows as split `test`, the first of each wording with the true answers of all."""
    rows = list(rows)
    worded = defaultdict(list)
    for row in rows:
        worded[row["question"]].append({"category": row["category"], "answer": row["answer"]})
    rows = [row | {"blank": worded.pop(row["question"], [])} for row in rows]
    return {"test": Dataset.from_list(rows).cast_column("image", ImageFeature())}
