# SPDX-License-Identifier: Apache-2.0
"""The offline suite, from pinned archives: questions about easy-VQA's images and emoji; a text.

The first question of each wording is asked again with a white image, and holds the true answers
to all so worded: `blank` is the accuracy of the answers to the white image over them all.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import replace

from datasets import Dataset, Image as ImageFeature
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from PIL import Image

from normalign_llava.evaluation.answers import named
from normalign_llava.fetched import easy_vqa as data


BLANK = Image.new("RGB", (64, 64), "white")


class OfflineTask(ConfigurableTask):
    """A task that needs no data set of a hub, and may ask again with a white image."""

    def __init__(self, config: dict) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def construct_requests(self, doc: dict, ctx: str, **options) -> Instance | list[Instance]:
        """The question with its image, and with a white one if the document says so."""
        request = super().construct_requests(doc, ctx, **options)
        if not doc.get("blank"):
            return request
        *others, images = request.arguments
        arguments = (*others, {"visual": [BLANK] * len(images["visual"])})
        return [request, replace(request, idx=1, arguments=arguments, resps=[], filtered_resps={})]


def easy_vqa(**_: object) -> dict[str, Dataset]:
    """The quickstart's questions on easy-VQA's test images: 100 of shape, colour, and yes or no."""
    asked = data.held_out(100)
    of_kind = [
        [question for question in asked if question.kind == kind] for kind in data.QUESTION_KINDS
    ]
    mixed = [question for trio in zip(*of_kind, strict=True) for question in trio]  # kinds by turns
    parts = {kind: kind.replace("/", "_") for kind in data.QUESTION_KINDS}
    return _as_test([(asked, data.CHOICES[asked.kind], parts[asked.kind]) for asked in mixed])


def emoji(**_: object) -> dict[str, Dataset]:
    """Names of 48 pictures of the 12 emoji, by others than Google, whose drawings are learned."""
    return _as_test([(question, data.EMOJI, "") for question in data.emoji_by_others()])


def _as_test(asked: list[tuple[data.Question, Collection[str], str]]) -> dict[str, Dataset]:
    """Questions, choices and category as split `test`; a wording's first has the answers of all."""
    worded = defaultdict(list)
    for question, _, category in asked:
        worded[question.text].append({"category": category, "answer": question.answer})
    rows = []
    for question, choices, category in asked:
        image = {"bytes": data.png(question.shown()), "path": None}
        row: dict = {"image": image, "question": question.text, "answer": question.answer}
        row |= {"category": category, "choices": choices, "blank": worded.pop(question.text, [])}
        rows.append(row)
    return {"test": Dataset.from_list(rows).cast_column("image", ImageFeature())}


def passages(**_: object) -> dict[str, Dataset]:
    """32 passages of 128 words of one speech."""
    return {"test": Dataset.from_list([{"text": text} for text in data.passages(32, 128)])}


def results(document: dict, answers: list[str]) -> dict:
    """The scores of the answers with the image and with a white one, of all and of the category."""
    chosen = [named(answer, document["choices"]) for answer in answers]
    right, category = document["answer"], document["category"]
    blanks = [chosen[1] == asked["answer"] for asked in document["blank"]]
    scores: dict = {}
    for part in ("", f"_{category}") if category else ("",):
        scores |= {f"acc{part}": float(chosen[0] == right), f"commonest{part}": right}
        scores |= {f"blank{part}": [sum(blanks), len(blanks)]} if blanks else {}
    return scores


def passage_results(document: dict, likelihoods: list[float]) -> dict:
    """Bits per byte of a passage, by its log likelihood, and the weight of its words."""
    (likelihood,) = likelihoods
    return {
        "bits_per_byte": -likelihood / len(document["text"].encode()) / math.log(2),
        "word_perplexity": (likelihood, len(document["text"].split())),
    }


def blank(counts: list[list[int]]) -> float:
    """Accuracy with a white image, from how many questions of a wording are right, of how many."""
    return sum(right for right, _ in counts) / sum(asked for _, asked in counts)


def commonest(answers: list[str]) -> float:
    """Share of the commonest of the true answers, which is the accuracy of always giving it."""
    return max(Counter(answers).values()) / len(answers)
