"""Scripts of benchmarks/ run on tiny models. Nothing is timed here."""

import argparse
import json
import re

import pytest
import step
from paths import DOCS, ROOT


pytestmark = pytest.mark.slow

FOLDER = ROOT / "benchmarks"


NORM = "norm.py --tokens 8 --widths 32 64 --rounds 2 --no-compile"


@pytest.mark.nightly
@pytest.mark.parametrize("words", [NORM, "memory.py --shapes tiny --methods full"])
def test_figures_are_written(prepared, tmp_path, words):
    done = prepared.run([*f"{FOLDER}/{words} --output".split(), tmp_path / "figures.json"])
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads((tmp_path / "figures.json").read_text())
    assert " ".join(written["machine"]) == "processor cores accelerator torch transformers trl"
    assert all(re.match(r"\d+(\.\d+)?(%| |,|$)", row[2]) for row in written["rows"])


@pytest.mark.nightly
def test_the_checks_of_a_gpu_run_on_a_cpu(prepared, tmp_path):
    """All of them but tests, and those that train for minutes."""
    pytest.importorskip("bitsandbytes")
    only = "^(norm|recipe qlora|merge|ask in 4 bits)$"
    output = tmp_path / "checks.json"
    words = ["--device", "cpu", "--only", only, "--output", output]
    done = prepared.run([FOLDER / "check_gpu.py", *words])
    checks = json.loads(output.read_text())["checks"]
    states = {row["check"]: row["status"] for row in checks}
    assert done.returncode == 0, checks
    assert states.keys() >= {"norm", "recipe qlora", "merge", "ask in 4 bits"}
    assert {*states.values()} == {"ok"}, checks


@pytest.mark.nightly
def test_the_recipes_take_at_true_size_what_the_page_says(prepared):
    said = {}
    for words in ([], ["--recipes", "align-qwen2.5-7b", "--load_in_4bit", "true"]):
        done = prepared.run([FOLDER / "dry_runs.py", *words])
        assert done.returncode == 0, done.stderr[-3000:]
        for run in done.stdout.split("\n== ")[1:]:
            said[run.splitlines()[0]] = re.search(r"(?:Fits|Does not fit): ([\d.]+) GiB", run)[1]
    page = (DOCS / "train.md").read_text()
    stage_1 = said["align-qwen2.5-7b"]
    in_4_bits = said.pop("align-qwen2.5-7b --load_in_4bit true")
    assert f"{stage_1} GiB; with `--load_in_4bit` {in_4_bits} GiB |" in page
    assert all(re.search(rf"\[`{recipe}`\].* {size} GiB", page) for recipe, size in said.items())
    assert float(stage_1) <= 19 and float(in_4_bits) <= 12 and float(said["qlora"]) < 10


def test_a_step_that_scores_all_positions_is_taken_on_a_cpu(tmp_path):
    """The adapters' B is 0 before the first step."""
    step.random_checkpoint(tmp_path, "tiny")
    step.write_rows(tmp_path, 32, [(1, 9)] * 2)
    options = argparse.Namespace(batch=1, bf16=False, device="cpu")
    for variant in (step.ALL_SCORED, step.OURS):
        trainer = step.make_trainer(variant, tmp_path, options, 1)
        trainer.train()
        assert trainer.model.get_base_model().only_answers == (variant == step.OURS)
        weights = dict(trainer.model.named_parameters())
        moved = [value.any().item() for name, value in weights.items() if "lora_B" in name]
        assert moved and all(moved)
