"""The scripts of benchmarks/ run, and their figures become the table of docs/method.md. Nothing is timed here."""

import json
import re
import runpy
import shutil

import pytest
from paths import DOCS, ROOT


FOLDER = ROOT / "benchmarks"
SMALLEST = {
    "norm": ["--tokens", "8", "--widths", "32", "64", "--rounds", "2", "--no-compile"],
    "generate": ["--shape", "tiny", "--text", "2", "--tokens", "2", "--rounds", "2", "--bf16"],
    "startup": ["--rounds", "2", "--layers", "1", "--shape", "135m"],
    "probe": ["--batches", "1", "--rounds", "2"],
}
"""Without step.py and packing.py, whose shortest runs take minutes."""


@pytest.fixture(scope="module")
def results(tmp_path_factory, prepared, archives) -> dict[str, dict]:
    found = {}
    for script, options in SMALLEST.items():
        output = tmp_path_factory.mktemp("figures") / f"{script}.json"
        done = prepared.run([FOLDER / f"{script}.py", *options, "--output", output])
        assert done.returncode == 0, done.stderr[-3000:]
        found[script] = json.loads(output.read_text())
    return found


@pytest.mark.slow
def test_each_script_writes_its_machine_options_rows_and_figures(results):
    for script, result in results.items():
        assert {"processor", "cores", "accelerator", "torch", "transformers", "trl"} == set(result["machine"])
        assert result["options"]["device"] == "cpu" and result["options"]["bf16"] is (script == "generate")
        for row in result["rows"]:
            assert len(row) == 3 and all(isinstance(cell, str) for cell in row)
            assert "|" not in "".join(row)
            assert re.match(r"\d+(\.\d+)?(%| |,|$)", row[2])


@pytest.mark.slow
def test_figures_that_are_not_times(results):
    kept = [row[2] for row in results["norm"]["rows"] if row[1].startswith("kept for backward")]
    assert kept == ["1.00, 1.00"]
    gain = results["startup"]["gain"]
    assert gain["embeddings"] == 49_152 * 576 * 2
    assert gain["embeddings"] <= gain["bytes"] < 1.01 * gain["embeddings"]
    assert gain["peak"] < 600e6


@pytest.mark.slow
def test_the_table_replaces_the_one_that_is_there(results, tmp_path):
    command = runpy.run_path(str(FOLDER / "__main__.py"), run_name="benchmarks")
    timed = {script: {**result, "minutes": 1.0} for script, result in results.items()}
    page = tmp_path / "method.md"
    shutil.copyfile(DOCS / "method.md", page)
    for _ in range(2):
        command["write_table"](command["table"](timed), page)
    before, written, after = parts(page)
    assert [before, after] == parts(DOCS / "method.md")[::2]
    assert cells(written)[2:] == [row for result in results.values() for row in result["rows"]]
    assert f"torch {results['norm']['machine']['torch']}" in written and "4 minutes" in written


def test_the_page_has_a_table_of_that_form():
    head, line, *rows = cells(parts(DOCS / "method.md")[1])
    assert head == ["", "measured", "figure"] and set(line) == {"---"}
    assert rows and all(len(row) == 3 and re.match(r"\d+(\.\d+)?(%| |,|$)", row[2]) for row in rows)


def test_a_script_that_does_not_exist_is_refused(prepared):
    done = prepared.run([FOLDER / "__main__.py", "norms"])
    assert done.returncode == 2 and "there is no script norms" in done.stderr


def parts(page) -> list[str]:
    """A page before the table, the table with its marks, and after it."""
    return re.split(r"(<!-- written by `make benchmark` -->.*<!-- to here -->)", page.read_text(), flags=re.S)


def cells(written: str) -> list[list[str]]:
    lines = [line for line in written.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
