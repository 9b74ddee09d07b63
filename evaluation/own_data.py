# SPDX-License-Identifier: Apache-2.0
"""The user's questions and answers as a task of the harness: `normalign evaluate --data DATA`."""

import json
import logging
import re
from collections import Counter
from hashlib import sha256
from string import ascii_uppercase
from typing import Any

from datasets import Dataset

from ..data.rows.checks import (
    bad_rows_message,
    check_images_are_read,
    log_unused_and_changed,
    parse_rows,
)
from ..data.rows.forms import MARKER, ONE_OF_ANSWERS, ONE_OF_CAPTIONS
from ..data.rows.images import decode_image, open_and_find_problem, short, stored_bytes
from ..data.rows.parse import DroppedRow
from ..data.rows.questions import chosen_letter
from ..data.rows.values import plain
from ..data.sources.arguments import DataSource
from ..data.sources.source import open_source
from .answers import chosen_option
from .questions import label_of_data
from .tasks.benchmarks import ASK_FOR_LETTER
from .tasks.offline import OfflineTask, blank, commonest, with_answers_for_blank


logger = logging.getLogger(__name__)

Document = dict[str, Any]
"""A question as the harness gets it.

- `row`: Number of the row that it comes from.
- `system`: The system turn, or "".
- `prompt`: The question with a marker for each image.
- `answer`: The true answer that training would learn.
- `answers`: All true answers.
- `options`: Texts of the options; empty without choices.
- `blank`: See [`with_answers_for_blank`].
"""

OWN_TASK = "own_"  # how the name of a task of own data begins
SEPARATE_QUESTIONS = "texts"  # FineVision's column of turns. They do not depend on each other.
# A letter or digit of a script that has spaces between words. In others, as in 猫, no sign shows
# where a word ends.
_LETTER = r"[^\W\u2e80-\uffff]"
# An answer may have at least so many tokens: chatty models name the answer within a sentence.
LEAST_TOKENS = 64


def own_task(
    data: str, *, image_folder: str | None = None, columns: str | None = None
) -> OfflineTask:
    """Reads data in any form that training reads, and returns a task of its questions.

    The task's version is a hash of questions, answers and images.

    Args:
        data: File, folder or Hub id, see [`DataSource.named`].
        image_folder: Folder of the images, see [`DataSource.named`].
        columns: Which columns have image, question and answer, see [`DataSource.named`].

    Raises:
        ValueError: The data cannot be read, or has rows or images that cannot be used.
    """
    source = DataSource.named(data, image_folder=image_folder, columns=columns)
    opened = open_source(source, streaming=False)
    rows = parse_rows(opened, opened.rules, None)
    documents: list[Document] = []
    refused_rows = []
    rows_with_several = 0
    for number, row in enumerate(rows):
        first_document = documents[0] if documents else None
        try:
            problem = open_and_find_problem(row["images"], opened.rules)
            if problem:
                raise ValueError(problem[1])
            row_documents = _require_documents(row, number, first_document)
        except ValueError as error:
            refused_rows.append(DroppedRow(row["source"], row["row"], row["file"], str(error)))
            continue
        rows_with_several += len(row_documents) > 1
        documents.extend(row_documents)
    if refused_rows:
        raise ValueError(bad_rows_message(opened, refused_rows, len(rows), use="evaluated"))
    if not rows:
        raise ValueError(f"{data} has no rows.")
    if rows_with_several:
        logger.warning(
            f"{opened.name}: {rows_with_several:,} of {len(rows):,} rows have several "
            "questions. Each is asked by itself, with the row's images: "
            f"{len(documents):,} questions in all."
        )
    _check_what_is_read(opened.name, rows)
    return _read_task(label_of_data(data, source), documents, [row["images"] for row in rows])


def _require_documents(row: dict, number: int, first: Document | None) -> list[Document]:
    """Returns what a row asks, a document for each question.

    In FineVision's form, the turns of a row are separate questions about its images. In other
    forms, a later turn may need the turns before it.

    Raises ValueError that says what is wrong with the row, or that it differs in kind from the
    `first` document of the data.
    """
    if row["reason"]:
        raise ValueError(row["reason"])
    turns = list(map(_turn_text, row["messages"]))
    system = ""
    if row["messages"][0]["role"] == "system":
        system = turns.pop(0)
    questions = turns[::2]
    answers = turns[1::2]
    image_markers = MARKER * row["image_count"]
    are_separate = row["form"] == SEPARATE_QUESTIONS and questions[0].startswith(image_markers)
    if len(questions) != 1 and not are_separate:
        raise ValueError(f"it has {len(questions)} questions; save each with its answer as a row")
    options = row["options"]
    if first and (bool(options) != bool(first["options"]) or system != first["system"]):
        raise ValueError(
            "its system turn, or whether it has choices, differs from the first row; use several "
            "files"
        )
    documents: list[Document] = []
    for question, answer in zip(questions, answers, strict=True):
        prompt = image_markers + question if documents else question
        learned_answer = plain(answer) or answer
        true_answers = [plain(text) or text for text in row["accepted"] or [answer]]
        if options:
            letter = chosen_letter(answer, options)
            if letter is None:
                allowed = short(list(options.values()))
                raise ValueError(f"the answer {short(answer)} is not just one of {allowed}")
            prompt = f"{prompt}\n{ASK_FOR_LETTER}"
            learned_answer = letter
            true_answers = [letter]
        # The version of the task is a hash of the documents, in this order.
        document = {
            "row": number,
            "system": system,
            "prompt": prompt,
            "answer": learned_answer,
            "answers": true_answers,
            "options": list(options.values()),
        }
        documents.append(document)
    return documents


def _turn_text(message: dict) -> str:
    """Returns the text of a turn, with a marker for each image: a part whose text is None."""
    turn_text = ""
    for part in message["content"]:
        turn_text += MARKER if part["text"] is None else part["text"]
    return turn_text


def _check_what_is_read(name: str, rows: list[dict]) -> None:
    """Logs the columns that are not used, and what is changed in rows.

    Raises ValueError if no image is read where most rows seem to have one.
    """
    unused_columns = Counter[str]()
    changes = Counter[str]()
    for row in rows:
        unused_columns.update(row["left_out"])
        changes.update(row["changed"])
    for note in (ONE_OF_ANSWERS, ONE_OF_CAPTIONS):  # here each of them is right
        changes.pop(note, None)
    log_unused_and_changed(logger, name, unused_columns, changes)
    image_count = sum(row["image_count"] for row in rows)
    unread_images = Counter(row["unread"] for row in rows if row["unread"])
    check_images_are_read(name, len(rows), image_count, unread_images)


def _read_task(label: str, documents: list[Document], images: list[list[dict]]) -> OfflineTask:
    """Returns the task that asks the documents. Reads the images, for the version of the task.

    Args:
        label: Name of the data.
        documents: The questions. Their `row` is an index into `images`.
        images: For each row its images, with `path` or `bytes`.
    """
    rule = (
        "An answer is an exact match if it is a true one, but for case, spaces and punctuation at "
        "its ends. It contains a true one if that stands in it as whole words, but for case."
    )
    aggregations: dict[str, Any] = {
        "exact_match": "mean",
        "contains": "mean",
        "blank": blank,
        "blank_contains": blank,
        "commonest": commonest,
    }
    if documents[0]["options"]:
        rule = "An answer is right if it chooses the true option, by its letter or its text."
        aggregations = {"acc": "mean", "blank": blank, "commonest": commonest}
    metrics = [
        {"metric": name, "aggregation": aggregation, "higher_is_better": aggregation == "mean"}
        for name, aggregation in aggregations.items()
    ]
    image_hashes = []
    for row_images in images:
        image_hashes.append([sha256(stored_bytes(image)).hexdigest() for image in row_images])
    content = json.dumps([documents, image_hashes])
    version = sha256(content.encode()).hexdigest()[:16]
    truths = [document["answers"] for document in documents]
    questions = with_answers_for_blank(documents, "prompt", truths)
    data_size = f"{len(images):,} rows"
    if len(questions) != len(images):
        data_size += f", {len(questions):,} questions"
    most_tokens = LEAST_TOKENS
    for document in documents:
        for text in (*document["answers"], *document["options"]):
            most_tokens = max(most_tokens, len(text.encode()) + 2)  # a token has a byte or more
    config = {
        "task": OWN_TASK + re.sub(r"[^\w.-]+", "-", label),
        "dataset_path": f"{label}, own data of {data_size} (SHA-256 {version}...)",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(questions)},
        "test_split": "test",
        "description": documents[0]["system"],
        "doc_to_text": lambda row: row["prompt"],
        "doc_to_image": lambda row: [decode_image(image) for image in images[row["row"]]],
        "doc_to_target": "answer",
        "process_results": _scores,
        "output_type": "generate_until",
        "num_fewshot": 0,
        "generation_kwargs": {
            "until": [],
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": most_tokens,
        },
        "metric_list": metrics,
        "metadata": {"version": version, "title": f"{label} (own data)", "rule": rule},
    }
    return OfflineTask(config)


def _scores(document: Document, answers: list[str]) -> dict:
    """Returns the scores of an answer, and what the metrics of the white image need.

    Args:
        document: A question. If `blank` is not empty, it was also asked with a white image.
        answers: The answer with the image, then the one with the white image.
    """
    options = dict(zip(ascii_uppercase, document["options"], strict=False))
    if options:
        metric_name = "acc"
        compared: list[Any] = [chosen_option(answer, options) for answer in answers]
    else:
        metric_name = "exact_match"
        compared = [plain(answer) or answer.strip() for answer in answers]
    scores = {
        "commonest": document["answer"],
        metric_name: float(compared[0] in document["answers"]),
    }
    accepted_for_blank = document["blank"]
    if accepted_for_blank:
        right_count = sum(compared[1] in accepted for accepted in accepted_for_blank)
        scores["blank"] = [right_count, len(accepted_for_blank)]
    if options:
        return scores
    scores["contains"] = float(contains_any(compared[0], document["answers"]))
    if accepted_for_blank:
        right_count = sum(contains_any(compared[1], accepted) for accepted in accepted_for_blank)
        scores["blank_contains"] = [right_count, len(accepted_for_blank)]
    return scores


def contains_any(answer: str, texts: list[str]) -> bool:
    """Returns whether an answer has one of the texts as whole words, in any case.

    Empty texts do not count. "5" stands neither in "-5" nor in "5.2", and "brown" not in
    "red-brown".
    """
    before = rf"(?<!{_LETTER})(?<!\d[.,])(?<!-)"
    after = rf"(?!{_LETTER})(?![.,]\d)(?!-{_LETTER})"
    return any(
        text and re.search(before + re.escape(text.lower()) + after, answer.lower())
        for text in texts
    )
