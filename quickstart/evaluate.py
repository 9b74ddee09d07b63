# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Asks a checkpoint the held-out questions, with their images and with a blank one."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.progress import track
from transformers import PreTrainedModel, ProcessorMixin

from ..checkpoint.files import finished_file
from ..data.easy_vqa import KINDS, OVERALL, Question, load_image, prompt


BATCH_SIZE = 128
MAX_NEW_TOKENS = 10
BLANK = Image.new("RGB", (64, 64), "white")


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    asked: Sequence[tuple[str, Image.Image]],
    *,
    label: str = "answering",
    bf16: bool = False,
) -> list[str]:
    """Answers questions about images, greedily.

    Args:
        model: The model.
        processor: Its processor.
        asked: Pairs of a question and an image.
        label: Shown beside the progress bar.
        bf16: Whether to multiply in bfloat16.

    Returns:
        The answers, without surrounding white space.
    """
    model.eval()
    answers = [""] * len(asked)
    order = sorted(range(len(asked)), key=lambda number: len(asked[number][0]))  # less padding
    for start in track(range(0, len(order), BATCH_SIZE), description=label):
        numbers = order[start : start + BATCH_SIZE]
        inputs = processor.apply_chat_template(
            [prompt(*asked[number]) for number in numbers],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        ).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for number, text in zip(numbers, texts, strict=True):
            answers[number] = text.strip()
    return answers


def evaluate(
    model: PreTrainedModel, processor: ProcessorMixin, questions: Sequence[Question], *, bf16: bool = False
) -> dict[str, Any]:
    """Answers `questions` with their images and with a blank one, and scores both by kind.

    An answer is right if its part after the last comma is the true one, letter case aside. The blank image shows what
    the question alone tells: its answer depends on the wording only, so each wording is asked once.

    Returns:
        `"accuracy"`, `"blank"` and `"majority"` (the share of the commonest true answer), each by kind; `"count"` by
        kind; and `"answers"`, one per question.
    """
    images = [(question.text, load_image(question.image)) for question in questions]
    wordings = sorted({question.text for question in questions})
    answers = answer(model, processor, images, label="held-out images", bf16=bf16)
    of_blank = answer(model, processor, [(text, BLANK) for text in wordings], label="blank image", bf16=bf16)
    blind = dict(zip(wordings, of_blank, strict=True))
    return {
        "accuracy": score(questions, answers),
        "blank": score(questions, [blind[question.text] for question in questions]),
        "majority": majority(questions),
        "count": {kind: len(numbers) for kind, numbers in positions(questions).items()},
        "answers": answers,
    }


def positions(questions: Sequence[Question]) -> dict[str, list[int]]:
    """Positions of the questions of each kind, and of all easy-VQA questions together."""
    numbers = defaultdict(list)
    for number, question in enumerate(questions):
        numbers[question.kind].append(number)
        if question.kind in KINDS:
            numbers[OVERALL].append(number)
    return dict(numbers)


def score(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    """Share of right answers by kind."""
    right = [is_right(question, given) for question, given in zip(questions, answers, strict=True)]
    return {kind: sum(right[n] for n in numbers) / len(numbers) for kind, numbers in positions(questions).items()}


def is_right(question: Question, given: str) -> bool:
    """Whether the part of `given` after its last comma is the true answer."""
    return given.lower().rsplit(", ", 1)[-1] == question.answer


def majority(questions: Sequence[Question]) -> dict[str, float]:
    """Share of the commonest true answer by kind, which is the accuracy of always giving it."""
    truths = {kind: Counter(questions[n].answer for n in numbers) for kind, numbers in positions(questions).items()}
    return {kind: max(counts.values()) / counts.total() for kind, counts in truths.items()}


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path` atomically."""
    with finished_file(path) as partial:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
