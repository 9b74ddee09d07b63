# SPDX-License-Identifier: Apache-2.0
"""One's own questions and answers as a task of the harness: `normalign evaluate --data DATA`."""

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from datasets import Dataset

from ..data.rows.checks import (
    bad_rows_message,
    check_images_are_read,
    log_not_read,
    parse_rows,
)
from ..data.rows.forms import MARKER, ONE_OF_ANSWERS, ONE_OF_CAPTIONS
from ..data.rows.images import decode_image, image_problem, short, stored_bytes
from ..data.rows.parse import DroppedRow
from ..data.rows.questions import chosen_letter
from ..data.rows.values import plain
from ..data.sources.arguments import DataSource
from ..data.sources.source import open_source
from .answers import chosen_option
from .tasks.benchmarks import ASK_FOR_LETTER
from .tasks.offline import OfflineTask, blank, commonest


logger = logging.getLogger(__name__)

OWN_TASK = "own_"  # how the name of a task of own data begins
SEPARATE_QUESTIONS = "texts"  # FineVision's column of turns, which are independent of each other
# A letter or digit of a script that has spaces between words: beside 猫 nothing parts a word.
_LETTER = r"[^\W\u2e80-\uffff]"
LEAST_TOKENS = 64  # that an answer may have: chatty models name the answer within a sentence


def own_task(
    data: str, *, image_folder: str | None = None, columns: str | None = None
) -> OfflineTask:
    """A task of rows in any form that training reads, with a question and its answer each.

    Its version is a hash of questions, answers and images. Arguments are [`DataSource.named`]'s.
    Raises ValueError that names the rows and images that cannot be used.
    """
    source = DataSource.named(data, image_folder=image_folder, columns=columns)
    opened = open_source(source, streaming=False)
    rows = parse_rows(opened, opened.rules, None)
    documents: list[dict[str, Any]] = []
    bad = []
    several = 0
    for number, row in enumerate(rows):
        try:
            if problem := image_problem(row["images"], opened.rules):
                raise ValueError(problem[1])
            first = documents[0] if documents else None
            asked = [{"row": number, **document} for document in _documents(row, first)]
            several += len(asked) > 1
            documents += asked
        except ValueError as error:
            bad.append(DroppedRow(row["source"], row["row"], row["file"], str(error)))
    if bad:
        raise ValueError(bad_rows_message(opened, bad, len(rows), use="evaluated"))
    if not rows:
        raise ValueError(f"{data} has no rows.")
    if several:
        logger.warning(
            f"{opened.name}: {several:,} of {len(rows):,} rows have several questions. Each is "
            f"asked by itself, with the row's images: {len(documents):,} questions in all."
        )
    left_out = Counter(name for row in rows for name in row["left_out"])
    changed = Counter(name for row in rows for name in row["changed"])
    for note in (ONE_OF_ANSWERS, ONE_OF_CAPTIONS):  # here each of them is right
        changed.pop(note, None)
    log_not_read(logger, opened.name, left_out, changed)
    unread = Counter(row["unread"] for row in rows if row["unread"])
    check_images_are_read(opened.name, len(rows), sum(row["image_count"] for row in rows), unread)
    path, split = Path(source.path).resolve(), "" if source.split == "train" else f":{source.split}"
    label = path.name + split if path.exists() else data
    return _task(label, documents, [row["images"] for row in rows])


def _documents(row: dict[str, Any], first: Mapping | None) -> list[dict[str, Any]]:
    """What a row asks, a document for each question.

    In FineVision's form the turns of a row are separate questions about its images. In other forms
    a later turn may need those before it. Raises ValueError with what is not supported in the row,
    and the remedy.
    """
    if row["reason"]:
        raise ValueError(row["reason"])
    texts = [[part["text"] for part in turn["content"]] for turn in row["messages"]]  # None: image
    turns = ["".join(MARKER if text is None else text for text in content) for content in texts]
    system = turns.pop(0) if row["messages"][0]["role"] == "system" else ""
    questions, answers = turns[::2], turns[1::2]
    if len(questions) == 1:
        return [_document(row, system, questions[0], answers[0], first)]
    images = MARKER * row["image_count"]
    if row["form"] != SEPARATE_QUESTIONS or not questions[0].startswith(images):
        fault = f"it has {len(questions)} questions; save each with its answer as a row"
        raise ValueError(fault)
    documents: list[dict[str, Any]] = []
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        prompt = question if number == 0 else images + question
        documents.append(_document(row, system, prompt, answer, first))
    return documents


def _document(
    row: dict[str, Any], system: str, prompt: str, answer: str, first: Mapping | None
) -> dict[str, Any]:
    """A question of a row. Raises ValueError if it differs in kind from the `first` of the data."""
    options, choices = row["options"], [*row["options"].values()]
    answers = [plain(text) or text for text in row["accepted"] or [answer]]
    if options:
        if (letter := chosen_letter(answer, options)) is None:
            raise ValueError(f"the answer {short(answer)} is not just one of {short(choices)}")
        prompt, answers = f"{prompt}\n{ASK_FOR_LETTER}", [letter]
    if first and (bool(options), system) != (bool(first["options"]), first["system"]):
        problem = "its system turn, or whether it has choices, differs from the first row"
        raise ValueError(f"{problem}; use several files")
    learned = answers[0] if options else plain(answer) or answer
    return dict(system=system, prompt=prompt, answer=learned, answers=answers, options=choices)


def _task(label: str, documents: list[dict], images: list[list[dict]]) -> OfflineTask:
    rule = (
        "An answer is an exact match if it is a true one, but for case, spaces and punctuation at "
        "its ends. It contains a true one if that stands in it as whole words, but for case."
    )
    metrics: list[tuple[str, Any]] = [("exact_match", "mean"), ("contains", "mean")]
    metrics += [("blank", blank), ("blank_contains", blank), ("commonest", commonest)]
    if documents[0]["options"]:
        rule = "An answer is right if it chooses the true option, by its letter or its text."
        metrics = [("acc", "mean"), ("blank", blank), ("commonest", commonest)]
    files = [[sha256(stored_bytes(image)).hexdigest() for image in stored] for stored in images]
    version = sha256(json.dumps([documents, files]).encode()).hexdigest()[:16]
    alike = defaultdict(list)
    for document in documents:
        alike[document["prompt"]].append(document["answers"])
    rows = [document | {"blank": alike.pop(document["prompt"], [])} for document in documents]
    texts = [text for row in rows for text in (*row["answers"], *row["options"])]
    longest = max(
        LEAST_TOKENS, *(len(text.encode()) + 2 for text in texts)
    )  # tokens, of a byte or more
    counted = f"{len(images):,} rows"
    if len(rows) != len(images):
        counted += f", {len(rows):,} questions"
    generation = {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": longest}
    config: dict[str, Any] = {
        "task": OWN_TASK + re.sub(r"[^\w.-]+", "-", label),
        "dataset_path": f"{label}, own data of {counted} (SHA-256 {version}...)",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "description": documents[0]["system"],
        "doc_to_text": lambda row: row["prompt"],
        "doc_to_image": lambda row: [decode_image(image) for image in images[row["row"]]],
        "doc_to_target": "answer",
        "process_results": _results,
        "output_type": "generate_until",
        "num_fewshot": 0,
        "generation_kwargs": generation,
        "metric_list": [
            {"metric": name, "aggregation": by, "higher_is_better": by == "mean"}
            for name, by in metrics
        ],
        "metadata": {"version": version, "title": f"{label} (own data)", "rule": rule},
    }
    return OfflineTask(config)


def _results(document: dict, answers: list[str]) -> dict[str, Any]:
    """The answer's scores, and of how many questions so worded a blank image's answer is right."""
    options = dict(zip(ascii_uppercase, document["options"], strict=False))
    if options:
        chosen = [chosen_option(text, options) for text in answers]
        rules = {"acc": lambda number, right: chosen[number] in right}
    else:
        read = [plain(text) or text.strip() for text in answers]
        rules = {
            "exact_match": lambda number, right: read[number] in right,
            "contains": lambda number, right: contains_any(read[number], right),
        }
    scores: dict[str, Any] = {"commonest": document["answer"]}
    for name, is_right in rules.items():
        scores[name] = float(is_right(0, document["answers"]))
        if document["blank"]:
            of_others = sum(is_right(1, right) for right in document["blank"])
            blank_name = "blank_contains" if name == "contains" else "blank"
            scores[blank_name] = [of_others, len(document["blank"])]
    return scores


def contains_any(answer: str, texts: list[str]) -> bool:
    """Whether one of some texts, not empty, stands in an answer as whole words, in any case.

    "5" stands neither in "-5" nor in "5.2", and "brown" not in "red-brown".
    """
    for text in texts:
        before = rf"(?<!{_LETTER})(?<!\d[.,])(?<!-)"
        after = rf"(?!{_LETTER})(?![.,]\d)(?!-{_LETTER})"
        if text and re.search(before + re.escape(text.lower()) + after, answer.lower()):
            return True
    return False
