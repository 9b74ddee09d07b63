# SPDX-License-Identifier: Apache-2.0
"""Results of evaluations: `evaluation/summary.json` in a checkpoint folder."""

import hashlib
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.files import only_writer, write_json
from ..checkpoint.untrusted import json_object


EVALUATION = "evaluation"  # folder in a checkpoint
SUMMARY = "summary.json"  # file in it, beside what the harness writes
WEIGHT_FILES = "*.safetensors"  # of which [`files_hash`] tells whether a result is theirs
SCHEMA_VERSION = 2  # grows when a field of the summary is renamed, removed or changes its meaning


@dataclass(frozen=True)
class Metric:
    """One result of a task."""

    name: str
    value: float  # a share as 0.98, not 98
    stderr: float | None = None  # over samples
    references: dict[str, float] = field(default_factory=dict)  # {"blank image": 0.24, ...}
    subset: str | None = None  # part of the task; None for the whole
    samples: int | None = None  # how many it is computed from


@dataclass(frozen=True)
class Evaluation:
    """The results of one task, and how they were obtained."""

    task: str
    title: str
    metrics: list[Metric]
    samples: int  # evaluated, of `total`
    total: int
    protocol: list[str]  # prompt, decoding and scoring, a sentence each
    date: str | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of packages and of the task
    weights: str | None = None  # a hash of their files, or Hub id and commit
    settings: dict[str, Any] = field(default_factory=dict)  # what else the results depend on

    def __post_init__(self):
        named: list[tuple[str, list[Any]]] = [("samples", [self.samples, self.total])]
        named += [(m.name, [m.value, m.stderr or 0, *m.references.values()]) for m in self.metrics]
        for name, values in named:
            if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
                raise ValueError(f"in {self.task}, {name} is {values}, not finite numbers")

    @property
    def partial(self) -> bool:
        """Whether samples were left out."""
        return self.samples < self.total or self.samples == 0

    def write(self, checkpoint: Path) -> None:
        """Writes the results into a folder's `evaluation/summary.json`, over earlier ones."""
        with only_writer(checkpoint):
            others = [result for result in read_evaluations(checkpoint) if result.task != self.task]
            tasks = map(asdict, sorted([*others, self], key=lambda result: result.task))
            content = {"schema_version": SCHEMA_VERSION, "evaluations": [*tasks]}
            write_json(checkpoint / EVALUATION / SUMMARY, content)


def read_evaluations(checkpoint: Path) -> list[Evaluation]:
    """The evaluations in a checkpoint folder, by name of task; none without a file."""
    file = checkpoint / EVALUATION / SUMMARY
    if not file.exists():
        return []
    try:
        content = json_object(file.read_bytes(), str(file))
        if (version := content["schema_version"]) != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}, not {SCHEMA_VERSION}")
        for entry in content["evaluations"]:
            entry["metrics"] = [Metric(**metric) for metric in entry["metrics"]]
        return [Evaluation(**entry) for entry in content["evaluations"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not valid: {error}. Evaluate again, or remove it.") from error


@dataclass(frozen=True)
class Answer:
    """A question of own data, what the model answered, and what is right."""

    question: str
    text: str
    true: list[str]


def read_answers(folder: Path) -> list[Answer]:
    """The answers to own questions that the harness stored in a task's folder, in their order.

    Empty without any. White images' answers are not among them.
    """
    answers = []
    for file in sorted(folder.glob("samples_*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            sample = json_object(line.encode(), str(file))
            document = sample["doc"]
            text = str(sample["filtered_resps"][0])
            answers.append(Answer(document["prompt"], text, list(document["answers"])))
    return answers


def files_hash(folder: Path, *patterns: str) -> str:
    """SHA-256 over names and contents of the files in a folder that match one of some patterns."""
    digest = hashlib.sha256()
    matching = {file for pattern in patterns for file in folder.glob(pattern)}
    for file in sorted(filter(Path.is_file, matching)):
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
