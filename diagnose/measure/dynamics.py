# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Reading what training recorded in its output folder (appendix F, figure 5)."""

from pathlib import Path

from ...checkpoint.names import DYNAMICS, STATE
from ...checkpoint.untrusted import json_object
from ..report import DynamicsStep


TrainingLog = dict[str, list[tuple[int, float]]]
"""Logged values by name: pairs of optimizer step and value, in order."""


def read_dynamics(folder: str | Path) -> list[DynamicsStep]:
    """Inter-layer cosines by step, measured on one fixed batch during training.

    Args:
        folder: Output of `normalign train` or `normalign merge`.

    Returns:
        A record for each step measured, in order; empty if nothing was recorded.

    Raises:
        ValueError: A line is not such a record.
    """
    file = Path(folder) / DYNAMICS
    if not file.is_file():
        return []
    steps = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json_object(line.encode(), "it")
            visual, text = ([float(value) for value in record[kind]] for kind in ("visual", "text"))
            steps.append(DynamicsStep(step=int(record["step"]), visual=visual, text=text))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"Line {number} of {file} is not a record of step, visual and text cosines "
                f"({type(error).__name__}: {error}). Remove the line or the file."
            ) from error
    return steps


def read_training_log(folder: str | Path) -> TrainingLog:
    """Every number logged during training, over optimizer steps: `norm/visual`, `gain/mean_abs`, `loss`, ...

    `cosine/visual` and `cosine/text` are means over the layers; `read_dynamics` has each layer.

    Args:
        folder: Output of `normalign train` or `normalign merge`.

    Returns:
        The curves; values may be NaN or infinite. Empty if there is no log.

    Raises:
        ValueError: The file is not a state of the Trainer.
    """
    file = Path(folder) / STATE
    if not file.is_file():
        return {}
    curves: TrainingLog = {}
    try:
        for entry in json_object(file.read_bytes(), str(file))["log_history"]:
            step = entry["step"]
            for name, value in entry.items():
                if isinstance(value, int | float) and name not in ("step", "epoch"):
                    curves.setdefault(name, []).append((step, float(value)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} is not a state of the Trainer with a log_history ({type(error).__name__}: {error}). Remove it "
            "or copy it again from where the model was trained."
        ) from error
    return curves
