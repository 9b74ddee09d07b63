# SPDX-License-Identifier: Apache-2.0
"""The scripts of benchmarks/ run on tiny models; an error is a row or a name. Nothing is timed here."""

import json
import re
import runpy
import sys

import pytest
from paths import DOCS, ROOT


pytestmark = [pytest.mark.slow, pytest.mark.nightly]

FOLDER = ROOT / "benchmarks"


@pytest.mark.parametrize(
    "script, tiny",
    [
        ("norm", "--tokens 8 --widths 32 64 --rounds 2 --no-compile"),
        ("memory", "--shapes tiny --methods full"),
    ],
)
def test_figures_are_written_and_a_script_that_fails_is_named(monkeypatch, tmp_path, script, tiny):
    command = runpy.run_path(str(FOLDER / "__main__.py"), run_name="benchmarks")
    options = {"absent": [], script: tiny.split()}
    monkeypatch.setitem(command["main"].__globals__, "OPTIONS", options)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--output", str(tmp_path / "all.json")])
    with pytest.raises(SystemExit, match="Failed: absent"):
        command["main"]()
    written = json.loads((tmp_path / "all.json").read_text())
    assert list(written) == ["failed", script] and written["failed"] == ["absent"]
    assert {"processor", "cores", "accelerator", "torch", "transformers", "trl"} == set(written[script]["machine"])
    assert all(re.match(r"\d+(\.\d+)?(%| |,|$)", row[2]) for row in written[script]["rows"])


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
