# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Results of evaluations: `evaluation/TASK.json` in a checkpoint folder, one file per task."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...checkpoint.untrusted import json_object


FOLDER = "evaluation"
"""The folder within a checkpoint that holds its evaluations."""

SCHEMA_VERSION = 1
"""Of `evaluation/TASK.json`; raised when a field is renamed, removed or changes its meaning."""


@dataclass(frozen=True)
class Metric:
    """One result of a task, with its error and references.

    Attributes:
        name: Such as "accuracy".
        value: A share as 0.98, not 98.
        stderr: Standard error over samples; None if not computed.
        references: Results to compare with, by name: `{"blank image": 0.24, "commonest answer": 0.40}`.
        subset: Part of the task, such as "colour"; None for the whole.
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
        task: Short name, also of the file.
        title: Full name.
        metrics: The results.
        samples, total: How many samples were evaluated, of how many. Fewer than all, or none, is a partial run.
        protocol: Prompt, decoding and scoring, one sentence each.
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
        ValueError: A file has another schema or none, or a result is not a finite number.
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
        raise ValueError(f"{file} is not a valid evaluation: {error}. Evaluate again, or remove it.") from error


def _check(evaluation: Evaluation) -> None:
    if not (_is_count(evaluation.samples) and _is_count(evaluation.total) and evaluation.samples <= evaluation.total):
        raise ValueError(f"{evaluation.samples!r} of {evaluation.total!r} samples is impossible")
    for metric in evaluation.metrics:
        for name, value in {"": metric.value, **metric.references}.items():
            if not _is_finite(value):
                raise ValueError(
                    f"the value of {metric.name} {name and f'for {name} '}is {value!r}, not a finite number"
                )
        if metric.stderr is not None and not (_is_finite(metric.stderr) and metric.stderr >= 0):
            raise ValueError(
                f"the standard error of {metric.name} is {metric.stderr!r}, not a finite number from 0 up"
            )
        if metric.samples is not None and not _is_count(metric.samples):
            raise ValueError(f"the number of samples of {metric.name} is {metric.samples!r}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
