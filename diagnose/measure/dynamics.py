# SPDX-License-Identifier: Apache-2.0
"""Reading what training recorded in its output folder (appendix F, figure 5)."""

from pathlib import Path

from ...checkpoint.names import DYNAMICS
from ...checkpoint.untrusted import json_object
from ..report import DynamicsStep


def read_dynamics(folder: str | Path) -> list[DynamicsStep]:
    """Inter-layer cosines of one fixed batch at each step measured, in order; empty without any.

    Raises:
        ValueError: The file is not as training writes it.
    """
    file, steps = Path(folder) / DYNAMICS, []
    try:
        for line in file.read_bytes().splitlines() if file.is_file() else []:
            record = json_object(line, "it")
            visual, text = ([float(value) for value in record[kind]] for kind in ("visual", "text"))
            steps.append(DynamicsStep(step=int(record["step"]), visual=visual, text=text))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} is not as training writes it ({type(error).__name__}: {error}). Remove it, or "
            "copy it again from where the model was trained."
        ) from error
    return steps
