# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's diagnosis, against the same model without the norm."""

import json
from pathlib import Path
from typing import Any

from ..diagnose.report import PAGE, REPORT
from ..diagnose.run import FOLDER, diagnose


OURS, BASELINE = "quickstart", "quickstart-no-norm"
"""Names of the models in the reports."""


def diagnose_once(checkpoint: Path, name: str, baseline: Path | None, baseline_name: str, samples: int) -> Path:
    """Diagnoses a checkpoint, against a baseline if one is given, unless that is done already.

    Returns:
        The page in the checkpoint's folder.
    """
    folder = checkpoint / FOLDER
    if not (folder / REPORT).exists() or (baseline is not None and read_report(checkpoint)["against"] is None):
        against = None if baseline is None else str(baseline)
        diagnose(str(checkpoint), against=against, samples=samples, name=name, against_name=baseline_name)
    return folder / PAGE


def read_report(checkpoint: Path) -> dict[str, Any]:
    """The report of a checkpoint's diagnosis."""
    return json.loads((checkpoint / FOLDER / REPORT).read_text(encoding="utf-8"))
