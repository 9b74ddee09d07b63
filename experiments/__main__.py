# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Makes the runs of an experiment, and the report of their results.

    python experiments run PLAN [--results FOLDER] [--work FOLDER]
    python experiments report PLAN [--results FOLDER]

Finished runs are skipped and a stopped one is resumed. Several processes may share one plan.
"""

import argparse
import json
from pathlib import Path

from filelock import FileLock, Timeout
from plan import Plan, read_plan
from report import read_result, write_report
from rich.console import Console
from runs import make_run

from normalign_llava.checkpoint.files import atomic_write
from normalign_llava.fetched.convert import convert_language, convert_vision


def run_plan(plan: Plan, work: Path) -> None:
    """Makes all runs that are not finished and that no other process is making."""
    language = Path(plan.language or convert_language())
    vision = Path(plan.vision or convert_vision(56))
    runs, console = plan.runs(), Console()
    locks = plan.results / ".locks"
    for folder in (locks, work):
        folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        read_result(plan, run)  # a stored result of other settings is an error now, not at the end
    for number, run in enumerate(runs, 1):
        try:
            with FileLock(locks / f"{run.key}.lock", timeout=0):
                if read_result(plan, run) is not None:
                    continue
                console.rule(f"{run.key}, {number} of {len(runs)}", align="left")
                result = make_run(plan, run, vision, language, work)
                with atomic_write(plan.results / f"{run.key}.json") as partial:
                    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
                    partial.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        except Timeout:
            continue


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python experiments", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("plan", type=Path, help="the plan, a YAML file")
    parser.add_argument("--results", type=Path, help="folder of the results; by default results/PLAN")
    parser.add_argument("--work", type=Path, default=Path("outputs/experiment"), help="checkpoints while needed")
    given = parser.parse_args(words)
    try:
        plan = read_plan(given.plan, given.results)
        if given.action == "run":
            run_plan(plan, given.work)
        print(f"Report: {write_report(plan)}")
    except ValueError as error:
        parser.exit(1, f"Error: {error}\n")


if __name__ == "__main__":
    main()
