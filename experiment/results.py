# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Stored results of runs, and the options of a run, which for tuned ones follow from the results of tuning."""

import json
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..checkpoint.files import finished_file, read_json
from .plan import TUNING, Plan, Run, Variant


Result = dict[str, Any]


def read_result(plan: Plan, run: Run) -> Result | None:
    """The stored result of a run; None if there is none yet.

    The learning rates of a tuned run are not compared while results of its tries are missing.

    Raises:
        ValueError: It cannot be read, or is of a run with other settings.
    """
    file = plan.result_file(run)
    if not file.exists():
        return None
    result = read_json(file)
    if result is None:
        raise ValueError(f"{file} cannot be read. Remove it to make the run again.")
    same = Variant(**result["settings"]) == run.variant
    if same and "failed" not in result and not waits(plan, run):
        options = options_of(plan, run)
        same = tuple(result["options"][stage] for stage in ("stage1", "stage2")) == options
    if not same:
        raise ValueError(
            f"{file} is of a run with other settings than {plan.name} has now. Remove it to make the run again, or "
            "keep the results of the changed plan elsewhere with --results."
        )
    return result


def write(file: Path, content: dict[str, Any]) -> None:
    """Writes JSON, atomically, with one line for each key."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    with finished_file(file) as partial:
        partial.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def waits(plan: Plan, run: Run) -> bool:
    """Whether a run waits for tries of learning rates that are not finished."""
    return any(not plan.result_file(each).exists() for each in _tries(plan, run))


def options_of(plan: Plan, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of both stages; with the learning rates of the least final loss, if it is a tuned run.

    Raises:
        FloatingPointError: All tries with its arm diverged.
    """
    variant, tries = run.variant, []
    for each in _tries(plan, run):
        result = read_result(plan, each)
        if result and "failed" not in result:
            tries.append((final_loss(result), each.variant))
    if tries:
        _, best = min(tries, key=itemgetter(0))
        variant = replace(variant, stage1={**best.stage1, **variant.stage1}, stage2={**best.stage2, **variant.stage2})
    elif run.tuned:
        raise FloatingPointError(f"no try with arm {run.variant.arm} succeeded")
    return plan.options(variant, run.seed)


def final_loss(result: Result) -> float:
    """Mean loss of the last quarter of the logged steps of stage 2."""
    losses = result["curves"]["stage2"]["loss"]
    last = losses[-max(len(losses) // 4, 1) :]
    return sum(last) / len(last)


def _tries(plan: Plan, run: Run) -> list[Run]:
    """The runs that try learning rates with the arm of a tuned run."""
    if not run.tuned:
        return []
    return [each for each in plan.runs() if each.group == TUNING and each.variant.arm == run.variant.arm]
