# SPDX-License-Identifier: Apache-2.0
"""Results of evaluations: `evaluation/summary.json` in a checkpoint folder."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.files import lock_folder, write_json
from ..checkpoint.untrusted import json_object


EVALUATION = "evaluation"  # folder in a checkpoint
SUMMARY = "summary.json"  # file in it, beside what the harness writes
WEIGHT_FILES = "*.safetensors"  # a result belongs to the weights with the same [`files_hash`]
SCHEMA_VERSION = 2  # grows when a field of the summary is renamed, removed or changes its meaning


@dataclass(frozen=True)
class Metric:
    """One result of a task.

    Attributes:
        name: What the harness calls it, and how answers were filtered, if they were.
        value: A share as 0.98, not 98.
        stderr: Standard error over samples.
        references: Values to compare with, as `{"blank image": 0.24}`.
        subset: Name of a part of the task, or None for the whole.
        samples: How many samples it is computed from.
    """

    name: str
    value: float
    stderr: float | None = None
    references: dict[str, float] = field(default_factory=dict)
    subset: str | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """The results of one task, and how they were obtained.

    Attributes:
        task: Name of the task.
        title: What the model card calls it.
        metrics: The whole task's first, then its parts'.
        samples: How many samples were evaluated.
        total: How many the task has.
        protocol: Prompt, decoding and scoring, a sentence each.
        date: Day of the evaluation, in UTC, as `2026-01-31`.
        versions: Versions of the packages and of the task, by name.
        weights: Hash of the weight files, or Hub id and commit.
        settings: What else the results depend on.
    """

    task: str
    title: str
    metrics: list[Metric]
    samples: int
    total: int
    protocol: list[str]
    date: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    weights: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        numbers = [("samples", [self.samples, self.total])]
        for metric in self.metrics:
            stderr = 0 if metric.stderr is None else metric.stderr
            numbers.append((metric.name, [metric.value, stderr, *metric.references.values()]))
        for name, values in numbers:
            for value in values:  # from a file it may be NaN or text
                if type(value) not in (int, float) or not math.isfinite(value):
                    raise ValueError(f"in {self.task}, {name} is {values}, not finite numbers")

    @property
    def partial(self) -> bool:
        """Whether samples were left out."""
        return self.samples < self.total or self.samples == 0

    def write(self, checkpoint: Path) -> None:
        """Writes the results into a folder's `evaluation/summary.json`, over earlier ones."""
        with lock_folder(checkpoint):
            results = {result.task: result for result in read_evaluations(checkpoint)}
            results[self.task] = self
            evaluations = [asdict(results[task]) for task in sorted(results)]
            content = {"schema_version": SCHEMA_VERSION, "evaluations": evaluations}
            write_json(checkpoint / EVALUATION / SUMMARY, content)


def read_evaluations(checkpoint: Path) -> list[Evaluation]:
    """Reads the evaluations in a checkpoint folder, by task. Without a file, it is empty.

    Raises ValueError if the file is not valid.
    """
    file = checkpoint / EVALUATION / SUMMARY
    if not file.exists():
        return []
    try:
        content = json_object(file.read_bytes(), str(file))
        schema_version = content["schema_version"]
        if schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {schema_version!r}, not {SCHEMA_VERSION}")
        evaluations = []
        for entry in content["evaluations"]:
            entry["metrics"] = [Metric(**metric) for metric in entry["metrics"]]
            evaluations.append(Evaluation(**entry))
        return evaluations
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not valid: {error}. Evaluate again, or remove it.") from error


def read_samples(folder: Path) -> Iterator[tuple[str, dict]]:
    """Reads the samples that the harness stored in a folder. Yields the task and content of each.

    Raises ValueError for a line that is not a JSON object.
    """
    for samples_file in sorted(folder.glob("samples_*.jsonl")):
        task = samples_file.name.removeprefix("samples_").rpartition("_")[0]
        for line in samples_file.read_bytes().splitlines():  # a str would split at U+2028, too
            yield task, json_object(line, str(samples_file))


def files_hash(folder: Path, *patterns: str) -> str:
    """Reads the files in a folder that match a pattern, and hashes their names and contents."""
    matching_files = {file for pattern in patterns for file in folder.glob(pattern)}
    digest = hashlib.sha256()
    for file in sorted(matching_files):
        if file.is_file():
            with file.open("rb") as content:
                content_hash = hashlib.file_digest(content, "sha256")
            digest.update(file.name.encode() + content_hash.digest())
    return digest.hexdigest()
