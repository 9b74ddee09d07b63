# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""One's own questions and answers as a task of the harness: `normalign evaluate MODEL --data FILE`."""

import hashlib
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from string import ascii_uppercase
from typing import Any

from datasets import Dataset, Features, List, Value
from PIL import Image

from ..data.rows.checks import check_images_are_read, checked_rows, reasons
from ..data.rows.forms import MARKER, lettered_options
from ..data.rows.images import decode_image, image_problem, short, stored_bytes
from ..data.rows.parse import DroppedRow
from ..data.sources.arguments import DataArguments, DataSource
from ..data.sources.files import METADATA
from ..data.sources.source import open_source
from .answers import chosen_option, plain
from .tasks.documents import ASK_FOR_LETTER, listed
from .tasks.offline import OfflineTask, blank


logger = logging.getLogger(__name__)

MANY_WORDS = 10
"""Words of the median answer above which it is no label, so that hardly any answer is the same."""

RULES = {
    "exact_match": "An answer is right if it is the true one, but for case, spaces and punctuation at its ends.",
    "acc": "An answer is right if it chooses the true option, by its letter or its text.",
}
"""Metric of questions without and with options, and what it counts."""

_FEATURES = {"row": Value("int64"), "prompt": Value("string"), "answer": Value("string"), "text": Value("string")}
_FEATURES |= {"options": List(Value("string")), "blank": List(Value("string"))}


@dataclass(frozen=True)
class _Question:
    """A question; of one with options, `answer` is the letter of the true one, and `text` what it says."""

    system: str
    prompt: str
    answer: str
    text: str
    images: list[dict[str, Any]]
    options: dict[str, str] = field(default_factory=dict)


def own_task(data: str, *, image_folder: str | None = None, columns: str | None = None) -> OfflineTask:
    """A task of rows in any form that training reads; every row is checked, and every image decoded.

    A row has one question and its answer. One of the form question and answer may have options, in the column
    `choices` or in `A` to `D`: then the answer is the text or the letter of one of them. Its version is a hash of all
    questions, answers and images.

    Args:
        data: File, folder or Hub data set; `DATA:SPLIT` or `DATA:CONFIG:SPLIT` names a split other than `train`.
        image_folder: Folder or zip file that image paths start from; by default that of the data.
        columns: Names of its columns, such as `"image=image_path,answer=label"`.

    Raises:
        ValueError: The data cannot be read, have no rows, or have rows that cannot be evaluated, which are named.
    """
    source = DataSource.named(data, image_folder=image_folder, columns=columns)
    opened = open_source(source, streaming=False)
    rows = checked_rows(opened, opened.rules, None)
    if not rows:
        raise ValueError(f"{data} has no rows.")
    questions: list[_Question] = []
    bad = []
    for row in rows:
        try:
            questions.append(_question(row, questions[0] if questions else None))
        except ValueError as error:
            bad.append(DroppedRow(row["source"], row["row"], row["file"], str(error)))
    with ThreadPoolExecutor() as threads:
        limit = DataArguments.max_image_pixels
        problems = threads.map(lambda row: image_problem(row["images"], opened.rules, limit), rows)
        bad += [DroppedRow(row["source"], row["row"], *why) for row, why in zip(rows, problems, strict=True) if why]
    if bad:
        raise ValueError(
            "\n".join(["Rows that cannot be evaluated:", *reasons(bad, len(rows)), "Fix or remove them."])
        )
    unread = Counter(row["unread"] for row in rows if row["unread"])
    check_images_are_read(opened.name, len(rows), sum(row["image_count"] for row in rows), unread)
    return _task(_label(data, source), questions)


def _label(data: str, source: DataSource) -> str:
    """What to call the data, without the folders above it; metadata are called by their folder."""
    path = Path(source.path).resolve()
    if not path.exists():
        return data
    name = path.parent.name if path.stem == METADATA else path.name
    return ":".join([name, *([] if Path(data).expanduser().exists() else data.split(":")[1:])])


def _question(row: dict[str, Any], first: _Question | None) -> _Question:
    """The question of a checked row. Raises ValueError with what is not supported in it, and the remedy."""
    if row["reason"]:
        raise ValueError(row["reason"])
    turns = [
        "".join(MARKER if part["type"] == "image" else part["text"] for part in turn["content"])
        for turn in row["messages"]
    ]
    system = turns.pop(0) if row["messages"][0]["role"] == "system" else ""
    if len(turns) != 2:
        raise ValueError(f"it has {len(turns) // 2} questions; save each, with its answer, as a row of its own")
    (prompt, answer), options = turns, {}
    if row["form"] == "question" and (options := _options(row["raw"])):
        lines = [] if row["raw"].get("choices") is None else [listed(options)]  # those in A to D are in the prompt
        prompt = "\n".join([prompt, *lines, ASK_FOR_LETTER])
    text = answer
    if options:
        answer = _letter(answer, options)
        text = options[answer]
    if first and bool(options) != bool(first.options):
        one, other = ("", "none") if options else ("no ", "them")
        raise ValueError(f"it has {one}choices, and the first row has {other}; save the two kinds in two files")
    if first and system != first.system:
        raise ValueError(f"its system turn is {short(system)}, not that of the first row; save them in two files")
    return _Question(system, prompt, answer, text, row["images"], options)


def _options(raw: Mapping) -> dict[str, str]:
    """The options of a row by letter; empty without any."""
    if (choices := raw.get("choices")) is None:
        return lettered_options(raw)
    if not isinstance(choices, list) or not all(isinstance(each, str) and plain(each) for each in choices):
        raise ValueError(f"choices must be a list of texts, got {short(choices)}; in CSV, use columns A to D")
    if not 2 <= len(choices) <= len(ascii_uppercase):
        raise ValueError(f"it has {len(choices)} choices; from 2 to {len(ascii_uppercase)} are allowed")
    return dict(zip(ascii_uppercase, choices, strict=False))


def _letter(answer: str, options: Mapping[str, str]) -> str:
    """The letter of the true option, of which the answer is the text or the letter."""
    same = [letter for letter, text in options.items() if plain(text) == plain(answer)] or [
        answer.strip("(). ").upper()
    ]
    if len(same) > 1 or same[0] not in options:
        raise ValueError(f"the answer {short(answer)} is not one of the choices {short([*options.values()])}")
    return same[0]


def _task(label: str, questions: list[_Question]) -> OfflineTask:
    first, metric = questions[0], "acc" if questions[0].options else "exact_match"
    words = median(len(each.answer.split()) for each in questions)
    if words > MANY_WORDS:
        logger.warning(
            f"The answers of {label} have {words:,.0f} words (median). exact_match counts answers that are the same "
            "word for word, and says little of captions and explanations: read the answers in evaluation/, too."
        )
    alike = defaultdict(list)
    for each in questions:
        alike[each.prompt].append(each.answer)
    digest = hashlib.sha256()
    rows = []
    for number, each in enumerate(questions):
        images = [hashlib.sha256(stored_bytes(image)).hexdigest() for image in each.images]
        digest.update(json.dumps([each.system, each.prompt, each.answer, images]).encode())
        row = {"row": number, "prompt": each.prompt, "answer": each.answer, "text": each.text}
        rows.append(row | {"options": [*each.options.values()], "blank": alike.pop(each.prompt, [])})
    version = digest.hexdigest()[:16]

    def images_of(document: dict) -> list[Image.Image]:
        return [decode_image(each, DataArguments.max_image_pixels) for each in questions[document["row"]].images]

    return OfflineTask(
        {
            "task": "own_" + re.sub(r"[^\w.-]+", "-", label),
            "dataset_path": f"{label}, own data of {len(rows):,} rows (SHA-256 {version}...)",
            "custom_dataset": lambda: {"test": Dataset.from_list(rows, features=Features(_FEATURES))},
            "test_split": "test",
            "output_type": "generate_until",
            "num_fewshot": 0,
            "description": first.system,
            "doc_to_text": lambda document: document["prompt"],
            "doc_to_image": images_of,
            "doc_to_target": "answer",
            "process_results": _results,
            # A token is at least a byte, so that no true answer is cut off.
            "generation_kwargs": {
                "until": [],
                "do_sample": False,
                "temperature": 0.0,
                "max_gen_toks": max(16, *(len(each.text.encode()) for each in questions)),
            },
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True},
                {"metric": "blank", "aggregation": blank, "higher_is_better": False},
                {"metric": "commonest", "aggregation": _commonest, "higher_is_better": False},
            ],
            "metadata": {"version": version, "own": {"title": f"{label} (own data)", "rule": RULES[metric]}},
        }
    )


def _results(document: dict, answers: list[str]) -> dict[str, Any]:
    """The score of the answer; of that to a blank image, how many of the questions so worded it answers rightly."""
    options = dict(zip(ascii_uppercase, document["options"], strict=False))
    said = [chosen_option(answer, options) if options else _same(answer) for answer in answers]
    true = document["answer"] if options else _same(document["answer"])
    scores: dict[str, Any] = {"acc" if options else "exact_match": float(said[0] == true)}
    if document["blank"]:
        asked = [answer if options else _same(answer) for answer in document["blank"]]
        scores["blank"] = [asked.count(said[1]), len(asked)]
    return scores | {"commonest": (true, _same(document["text"]))}


def _same(answer: str) -> str:
    """What two answers that count as the same have in common."""
    return plain(answer) or answer.strip()


def _commonest(answers: list[tuple[str, str]]) -> float:
    """Accuracy of always giving the same letter, or the same text, whichever is right more often."""
    return max(max(Counter(each).values()) for each in zip(*answers, strict=True)) / len(answers)
