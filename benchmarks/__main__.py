# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts of this folder in turn, and writes their figures as a table into docs/method.md.

    python benchmarks [norm step ...] [--output results.json]

The table is written only if all scripts have run. A script that fails is named, in the file too,
and the others run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console


HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "method.md"
START = "<!-- written by `make benchmark` -->"
END = "<!-- to here -->"

OPTIONS: dict[str, list[str]] = {
    "norm": ["--tokens", "23328", "--rounds", "6"],
    "step": ["--steps", "18", "--batch", "3"],
    "frozen": ["--steps", "18"],
    "packing": ["--steps", "3", "--rows_per_step", "12", "--rows_per_pass", "4"],
    "feed": ["--images", "64", "--rounds", "3"],
    "memory": [],
}
"""The scripts, with options that keep all of them together under 20 minutes on 2 cores."""


def run(script: str, options: list[str], folder: Path) -> dict[str, Any] | None:
    """Runs a script. Returns what it wrote, with its minutes, or None if it failed."""
    output = folder / f"{script}.json"
    start_time = time.monotonic()
    command = [sys.executable, str(HERE / f"{script}.py"), *options, "--output", str(output)]
    completed = subprocess.run(command)
    if completed.returncode or not output.exists():
        return None
    result = json.loads(output.read_text())
    result["minutes"] = (time.monotonic() - start_time) / 60
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the rows of all scripts as Markdown, below the machine that they ran on."""
    first_result, *other_results = results.values()
    machine = first_result["machine"]
    for result in other_results:
        assert result["machine"] == machine, "the scripts ran on different machines"
    minutes = 0.0
    table_lines = []
    for result in results.values():
        minutes += result["minutes"]
        for table_row in result["rows"]:
            table_lines.append(f"| {' | '.join(table_row)} |")
    versions = []
    for package in ("torch", "transformers", "trl"):
        versions.append(f"{package} {machine[package]}")
    device = f"{machine['cores']} cores of {machine['processor']}"
    lines = [
        f"{device}; {', '.join(versions)}; {date.today()}, {minutes:.0f} minutes. "
        "Medians, in brackets the outer quartiles.",
        "",
        "| | measured | figure |",
        "|---|---|---|",
        *table_lines,
    ]
    return "\n".join(lines)


def write_table(text: str, page: Path) -> None:
    """Writes the table between the marks of a page, in place of the one that is there."""
    content = page.read_text(encoding="utf-8")
    before, _, rest = content.partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Runs the scripts, then writes the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    names = ", ".join(OPTIONS)
    parser.add_argument(
        "scripts",
        nargs="*",
        default=list(OPTIONS),
        metavar="script",
        help=f"some of {names}; all by default",
    )
    parser.add_argument("--output", type=Path, help="also write all figures to this JSON file")
    options = parser.parse_args()
    unknown = sorted(set(options.scripts) - set(OPTIONS))
    if unknown:
        parser.error(f"unknown scripts {', '.join(unknown)}; choose from {names}")
    console = Console()
    results: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for script in options.scripts:
            result = run(script, OPTIONS[script], Path(temporary))
            if result is None:
                failed.append(script)
            else:
                results[script] = result
            if options.output:  # each time: a later script may take the machine down
                content = json.dumps({"failed": failed, **results}, indent=2)
                options.output.write_text(content + "\n", encoding="utf-8")
    for script, result in results.items():
        console.print(f"{script}: {result['minutes']:.1f} minutes")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")
    if set(results) == set(OPTIONS):
        write_table(table(results), PAGE)
        console.print(f"Written to {PAGE}.")


if __name__ == "__main__":
    main()
