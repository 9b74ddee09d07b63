# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Reading what training recorded in its output folder (appendix F, figure 5)."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...checkpoint.names import DYNAMICS, STATE
from ...checkpoint.untrusted import json_object
from ..report import DynamicsStep


TrainingLog = dict[str, list[tuple[int, float]]]
"""Logged values by name: pairs of optimizer step and value, in order."""

Parsed = TypeVar("Parsed")


def read_dynamics(folder: str | Path) -> list[DynamicsStep]:
    """Inter-layer cosines of one fixed batch at each step measured, in order; empty if nothing was recorded."""

    def step(line: bytes) -> DynamicsStep:
        record = json_object(line, "it")
        visual, text = ([float(value) for value in record[kind]] for kind in ("visual", "text"))
        return DynamicsStep(step=int(record["step"]), visual=visual, text=text)

    return _read(Path(folder) / DYNAMICS, lambda content: [step(line) for line in content.splitlines()], [])


def read_training_log(folder: str | Path) -> TrainingLog:
    """Every number logged during training, over optimizer steps: `norm/visual`, `gain/mean_abs`, `loss`, ...

    `cosine/visual` and `cosine/text` are means over the layers; `read_dynamics` has each layer. Values may be NaN or
    infinite. Empty if there is no log.
    """

    def curves(content: bytes) -> TrainingLog:
        found: TrainingLog = {}
        for entry in json_object(content, "it")["log_history"]:
            for name, value in entry.items():
                if isinstance(value, int | float) and name not in ("step", "epoch"):
                    found.setdefault(name, []).append((entry["step"], float(value)))
        return found

    return _read(Path(folder) / STATE, curves, {})


def _read(file: Path, parse: Callable[[bytes], Parsed], absent: Parsed) -> Parsed:
    if not file.is_file():
        return absent
    try:
        return parse(file.read_bytes())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} is not as training writes it ({type(error).__name__}: {error}). Remove it, or copy it again from "
            "where the model was trained."
        ) from error
