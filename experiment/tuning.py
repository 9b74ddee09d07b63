# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Learning rates of arms that are compared each at its best, from the runs that tried them."""

from typing import Any

from ..checkpoint.files import read_json
from .plan import TUNING, Plan, Run


Rates = tuple[dict[str, Any], dict[str, Any]]


def learning_rates(plan: Plan, run: Run) -> Rates | None:
    """The learning rates that tuning found for a run's arm and both stages; none if it is not tuned.

    Returns:
        Options of both stages; None if tuning is not finished.

    Raises:
        ValueError: All tries failed.
    """
    if not run.tuned or plan.tuning is None:
        return {}, {}
    found: list[dict[str, Any]] = []
    for name in ("stage1", "stage2"):
        if run.group == TUNING and name == "stage2":
            return found[0], {}
        losses = {}
        for each in plan.runs():
            if each.group == TUNING and each.variant.arm == run.variant.arm and f"-{name}-" in each.key:
                result = read_json(plan.result_file(each))
                if result is None:
                    return None
                if "failed" not in result:
                    losses[getattr(each.variant, name)["learning_rate"]] = final_loss(result["curves"][name])
        if not losses:
            raise ValueError(
                f"All tries of {name} with arm {run.variant.arm} failed: remove their results, and run again."
            )
        found.append({"learning_rate": min(losses, key=lambda rate: losses[rate])})
    return found[0], found[1]


def final_loss(curve: dict[str, list]) -> float:
    """Mean loss of the last quarter of the logged steps, of rows that were not trained on before."""
    losses = curve["loss"]
    last = losses[-max(len(losses) // 4, 1) :]
    return sum(last) / len(last)
