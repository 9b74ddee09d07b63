# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What an evaluation found: `evaluation/TASK.json` in a checkpoint folder, one file for each task."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...checkpoint.untrusted import json_object


FOLDER = "evaluation"
"""The folder within a checkpoint that holds its evaluations."""

SCHEMA_VERSION = 1
"""Of `evaluation/TASK.json`; it grows when a field is renamed, removed or given another meaning."""


@dataclass(frozen=True)
class Metric:
    """A result: `value`, its standard error (None where it was not computed), and what chance or a baseline gives.

    Attributes:
        name: Such as "accuracy".
        value: As a share where it is one: 0.98, not 98.
        stderr: Standard error over samples.
        references: What to hold it against, by name: `{"blank image": 0.24, "commonest answer": 0.40}`.
        subset: The part of the task it belongs to, such as "colour"; None for the whole.
        samples: How many samples it is over.
    """

    name: str
    value: float
    stderr: float | None = None
    references: dict[str, float] = field(default_factory=dict)
    subset: str | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """One task's results, and exactly how they came about.

    Attributes:
        task: Short name, that of the file.
        title: As people call it.
        metrics: What was found.
        samples, total: How many samples were asked, of how many; fewer than all, or none, is a partial run, which a
            card shows as such.
        protocol: How it was asked and scored, one sentence each: prompt, decoding, what counts as right.
        date: ISO 8601.
        versions: Of the packages that evaluated.
    """

    task: str
    title: str
    metrics: list[Metric]
    samples: int
    total: int
    protocol: list[str]
    date: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        return self.samples < self.total or self.samples == 0

    def write(self, checkpoint: Path) -> Path:
        """Writes `evaluation/TASK.json` into a checkpoint folder."""
        file = checkpoint / FOLDER / f"{self.task}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2) + "\n", "utf-8")
        return file


def read_evaluations(checkpoint: Path) -> list[Evaluation]:
    """The evaluations in a checkpoint folder, by name of task.

    Raises:
        ValueError: A file there is of another schema or none, or a result in it is no finite number.
    """
    return [_read(file) for file in sorted((checkpoint / FOLDER).glob("*.json"))]


def _read(file: Path) -> Evaluation:
    try:
        content = json_object(file.read_bytes(), str(file))
        if (version := content.pop("schema_version")) != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}, not {SCHEMA_VERSION}")
        if unknown := content.keys() - {each.name for each in fields(Evaluation)}:
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
        content["metrics"] = [Metric(**metric) for metric in content["metrics"]]
        evaluation = Evaluation(**content)
        _check(evaluation)
        return evaluation
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no evaluation that can be read: {error}. Evaluate anew, or remove it.") from error


def _check(evaluation: Evaluation) -> None:
    if not (_is_count(evaluation.samples) and _is_count(evaluation.total) and evaluation.samples <= evaluation.total):
        raise ValueError(f"{evaluation.samples!r} of {evaluation.total!r} samples cannot be")
    for metric in evaluation.metrics:
        for name, value in {"": metric.value, **metric.references}.items():
            if not _is_finite(value):
                raise ValueError(f"the value of {metric.name} {name and f'for {name} '}is {value!r}, no finite number")
        if metric.stderr is not None and not (_is_finite(metric.stderr) and metric.stderr >= 0):
            raise ValueError(f"the standard error of {metric.name} is {metric.stderr!r}, no finite number from 0 up")
        if metric.samples is not None and not _is_count(metric.samples):
            raise ValueError(f"the number of samples of {metric.name} is {metric.samples!r}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
