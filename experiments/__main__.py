# SPDX-License-Identifier: Apache-2.0
"""Makes the runs of an experiment and the report of their results, or says what the runs cost.

    python experiments run PLAN [--results FOLDER] [--work FOLDER] [--only CELL ...] [--gpus N]
                           [--print]
    python experiments report PLAN [--results FOLDER]
    python experiments cost PLAN [--gpus N] [--device_memory 80GB] [--tflops 989] [--mfu 0.4]

Finished runs are skipped and a stopped one is resumed. Several processes may share one plan.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from commands import run_commands, steps, write_own_data
from filelock import FileLock, Timeout
from files import write_text
from plan import Plan, Run, read_plan
from report import read_result, write_report
from rich.console import Console
from runs import make_run, parts


def run_plan(plan: Plan, work: Path, only: Sequence[str] = (), gpus: int = 1) -> dict[str, str]:
    """Makes all runs that are not finished and that no other process is making.

    Args:
        plan: The plan.
        work: The folder of checkpoints and data.
        only: Which runs to make, see [`Plan.runs`].
        gpus: The number of GPUs.

    Returns:
        Why runs failed, by cell. They do not stop the others.

    Raises:
        ValueError: A stored result has other settings than the plan.
    """
    runs = plan.runs(only)
    console = Console(soft_wrap=True)
    failures = {}
    locks = plan.results / ".locks"
    for folder in (locks, work):
        folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        read_result(plan, run)  # a stored result of other settings is an error now, not at the end
    for number, run in enumerate(runs, start=1):
        try:
            with FileLock(locks / f"{run.key}.lock", timeout=0):
                if read_result(plan, run) is not None:
                    continue
                console.rule(f"{run.cell}, {number} of {len(runs)}", align="left")
                vision, language = parts(plan, run.group)
                if plan.commands:
                    result = run_commands(plan, run, vision, language, work, gpus)
                else:
                    result = make_run(plan, run, Path(vision), Path(language), work)
                write_text(plan.results / f"{run.key}.json", lines_of(result))
        except Timeout:
            continue
        except Exception as error:  # whatever it is, the other runs are made
            failures[run.cell] = f"{type(error).__name__}: {error}"
            console.print(f"{run.cell} failed. {failures[run.cell]}", style="red")
    return failures


def lines_of(result: dict[str, Any]) -> str:
    """Returns a result as JSON, with a line for each key."""
    lines = []
    for key, content in result.items():
        lines.append(f"{json.dumps(key)}: {json.dumps(content)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def print_commands(plan: Plan, options: argparse.Namespace) -> None:
    """Prints the commands that unfinished runs still need. The last one stores the result."""
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    for run in plan.runs(options.only):
        if read_result(plan, run) is not None:
            continue
        print(f"# {run.cell}")
        write_own_data(plan, run, work)
        vision, language = parts(plan, run.group)
        for step in steps(plan, run, vision, language, work, options.gpus).values():
            if not step.done:
                print(f"normalign {shlex.join(step.words)}")
        print(shlex.join(["python", *stored_by(plan, run, options.plan, work)]))


def stored_by(plan: Plan, run: Run, file: Path, work: Path) -> list[str]:
    """Returns the words after `python` of the command that stores the result of a run."""
    return [
        str(Path(__file__).parent),
        "run",
        str(file),
        "--results",
        str(plan.results),
        "--work",
        str(work),
        "--only",
        run.cell,
    ]


def command_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    summary = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python experiments", description=summary)
    parser.add_argument("action", choices=["run", "report", "cost"])
    parser.add_argument("plan", type=Path, help="the plan, a YAML file")
    parser.add_argument("--results", type=Path, help="folder of results; by default results/PLAN")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("outputs/experiment"),
        help="folder of checkpoints while they are needed",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="make only these cells GROUP/VARIANT/SEED, GROUP/VARIANTs or groups",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=torch.cuda.device_count() or 1,
        help="number of GPUs; by default all that are here",
    )
    parser.add_argument("--print", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--device_memory", default="80GB", help="memory of a GPU")
    parser.add_argument(
        "--tflops",
        type=float,
        default=989,
        help="a GPU's peak in bfloat16; by default an H100's",
    )
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is reached")
    return parser


def main(words: list[str] | None = None) -> None:
    """Runs the command."""
    parser = command_parser()
    options = parser.parse_args(words)
    failures: dict[str, str] = {}
    try:
        plan = read_plan(options.plan, options.results)
        if options.action == "cost":
            from cost import print_cost

            return print_cost(plan, options)
        if options.print:
            return print_commands(plan, options)
        if options.action == "run":
            failures = run_plan(plan, options.work, options.only, options.gpus)
        print(f"Report: {write_report(plan)}")
    except ValueError as error:
        parser.exit(1, f"Error: {error}\n")
    if failures:
        parser.exit(1, f"Failed: {', '.join(failures)}. Start again to go on with them.\n")


if __name__ == "__main__":
    main()
