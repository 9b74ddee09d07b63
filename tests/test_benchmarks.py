"""The scripts of benchmarks/ run, and their figures become the table of docs/method.md. Nothing is timed here."""

import json
import re

import pytest
from paths import DOCS, ROOT


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


@pytest.mark.nightly
def test_the_recipes_take_at_true_size_what_the_page_says(prepared):
    said = {}
    for words in ([], ["--recipes", "align-qwen2.5-7b", "--load_in_4bit", "true"]):
        done = prepared.run([FOLDER / "dry_runs.py", *words])
        assert done.returncode == 0, done.stderr[-3000:]
        for run in done.stdout.split("\n== ")[1:]:
            said[run.splitlines()[0]] = re.search(r"(?:Fits|Does not fit): ([\d.]+) GiB", run)[1]
    page = (DOCS / "train.md").read_text()
    stage_1, in_4_bits = said["align-qwen2.5-7b"], said.pop("align-qwen2.5-7b --load_in_4bit true")
    assert f"{stage_1} GiB; with `--load_in_4bit` {in_4_bits} GiB |" in page
    assert all(re.search(rf"\[`{recipe}`\].* {size} GiB", page) for recipe, size in said.items())
    assert float(stage_1) <= 19 and float(in_4_bits) <= 12 and float(said["qlora"]) < 10
