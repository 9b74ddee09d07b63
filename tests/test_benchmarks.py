"""The scripts of benchmarks/ run, and their figures become the table of docs/method.md. Nothing is timed here."""

import json
import re

import pytest
from paths import ROOT


FOLDER = ROOT / "benchmarks"
SMALLEST = {
    "norm": ["--tokens", "8", "--widths", "32", "64", "--rounds", "2", "--no-compile"],
    "generate": ["--shape", "tiny", "--text", "2", "--tokens", "2", "--rounds", "2", "--bf16"],
    "probe": ["--batches", "1", "--rounds", "2"],
    "memory": ["--shapes", "tiny", "--methods", "full"],
}
"""Without startup.py, step.py and packing.py, whose shortest runs take longest."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["norm", "generate", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("probe", "memory"))]
)
def test_a_script_writes_its_machine_options_rows_and_figures(tmp_path, prepared, archives, script):
    output = tmp_path / "figures.json"
    done = prepared.run([FOLDER / f"{script}.py", *SMALLEST[script], "--output", output])
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(output.read_text())
    assert {"processor", "cores", "accelerator", "torch", "transformers", "trl"} == set(result["machine"])
    assert result["options"]["device"] == "cpu" and result["options"]["bf16"] is (script == "generate")
    for row in result["rows"]:
        assert len(row) == 3 and all(isinstance(cell, str) for cell in row)
        assert "|" not in "".join(row)
        assert re.match(r"\d+(\.\d+)?(%| |,|$)", row[2])
