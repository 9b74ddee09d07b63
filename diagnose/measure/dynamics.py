# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What training recorded of itself, read back from the folder it left (appendix F, figure 5)."""

from pathlib import Path

from ...checkpoint.names import DYNAMICS, STATE
from ...checkpoint.untrusted import json_object
from ..report import DynamicsStep


TrainingLog = dict[str, list[tuple[int, float]]]
"""What was logged, by name: pairs of optimizer step and value, in order."""


def read_dynamics(folder: str | Path) -> list[DynamicsStep]:
    """Inter-layer cosines by step, as they were measured on one fixed batch during training.

    Args:
        folder: What `normalign train` or `normalign merge` wrote.

    Returns:
        A record for each step measured, in order; none, if nothing was recorded.

    Raises:
        ValueError: A line is no such record; it is named.
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
                f"Line {number} of {file} is no record of a step, its visual and its text cosines "
                f"({type(error).__name__}: {error}). Remove the line or the file."
            ) from error
    return steps


def read_training_log(folder: str | Path) -> TrainingLog:
    """Every number that was logged during training, over optimizer steps: `norm/visual`, `gain/mean_abs`, `loss`, ...

    `cosine/visual` and `cosine/text` are means over the layers; `read_dynamics` has the layers, and every step.

    Args:
        folder: What `normalign train` or `normalign merge` wrote.

    Returns:
        The curves, `TrainingLog`; values may be NaN or infinite where training was. Empty, if there is no log.

    Raises:
        ValueError: The file is no state of the Trainer.
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
            f"{file} is no state of the Trainer with a log_history ({type(error).__name__}: {error}). Remove it, or "
            "bring it whole from where the model was trained."
        ) from error
    return curves
