# SPDX-License-Identifier: Apache-2.0
"""Reading what training recorded in its output folder (appendix F, figure 5)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...checkpoint.names import DYNAMICS, STATE
from ...checkpoint.untrusted import json_object
from ..report import DynamicsStep


def read_dynamics(folder: str | Path) -> list[DynamicsStep]:
    """Inter-layer cosines of one fixed batch at each step measured, in order; empty if nothing was recorded."""
    steps = []
    with _content(Path(folder) / DYNAMICS) as content:
        for line in content.splitlines():
            record = json_object(line, "it")
            visual, text = ([float(value) for value in record[kind]] for kind in ("visual", "text"))
            steps.append(DynamicsStep(step=int(record["step"]), visual=visual, text=text))
    return steps


def read_training_log(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Every number logged during training, over optimizer steps: `norm/visual`, `gain/mean_abs`, `loss`, ...

    Pairs of step and value, in order; values may be NaN or infinite. Empty if there is no log.
    """
    log: dict[str, list[tuple[int, float]]] = {}
    with _content(Path(folder) / STATE) as content:
        for entry in json_object(content, "it")["log_history"] if content else ():
            for name, value in entry.items():
                if isinstance(value, int | float) and name not in ("step", "epoch"):
                    log.setdefault(name, []).append((entry["step"], float(value)))
    return log


@contextmanager
def _content(file: Path) -> Iterator[bytes]:
    """The content of a file, empty without one; whatever is wrong in it raises an error that names the file."""
    try:
        yield file.read_bytes() if file.is_file() else b""
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} is not as training writes it ({type(error).__name__}: {error}). Remove it, or copy it again from "
            "where the model was trained."
        ) from error
