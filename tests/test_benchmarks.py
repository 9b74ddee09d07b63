"""Scripts of benchmarks/ run on tiny models. Nothing is timed here."""

import argparse
import json
import re

import pytest
import step
from paths import DOCS, ROOT


pytestmark = pytest.mark.slow

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("norm.py --tokens 8 --widths 32 64 --rounds 2 --no-compile", id="norm"),
        pytest.param("memory.py --shapes tiny --methods full", id="memory"),
    ],
)
def test_figures_are_written(prepared, tmp_path, command):
    script, *options = command.split()
    output = tmp_path / "figures.json"
    ended = prepared.run([f"{BENCHMARKS}/{script}", *options, "--output", output])
    assert ended.returncode == 0, ended.stderr[-3000:]
    written = json.loads(output.read_text())
    expected = "processor cores accelerator torch transformers trl"
    assert " ".join(written["machine"]) == expected
    for table_row in written["rows"]:
        assert re.match(r"\d+(\.\d+)?(%| |,|$)", table_row[2])


@pytest.mark.nightly
def test_the_checks_of_a_gpu_run_on_a_cpu(prepared, tmp_path):
    """All of them but tests, and those that train for minutes."""
    pytest.importorskip("bitsandbytes")
    output = tmp_path / "checks.json"
    ended = prepared.run(
        [
            BENCHMARKS / "check_gpu.py",
            *("--device", "cpu"),
            *("--only", "^(norm|recipe qlora|merge|ask in 4 bits)$"),
            *("--output", output),
        ]
    )
    checks = json.loads(output.read_text())["checks"]
    assert ended.returncode == 0, checks
    statuses = {check["check"]: check["status"] for check in checks}
    assert statuses.keys() >= {"norm", "recipe qlora", "merge", "ask in 4 bits"}
    assert set(statuses.values()) == {"ok"}, checks


@pytest.fixture(scope="module")
def dry_run(prepared):
    """Runs recipes without data, and returns the memory that each takes, in GiB as it is shown."""

    def run_recipes(*options):
        ended = prepared.run([BENCHMARKS / "dry_runs.py", *options])
        assert ended.returncode == 0, ended.stderr[-3000:]
        memory = {}
        for output in ended.stdout.split("\n== ")[1:]:
            title = output.splitlines()[0]
            memory[title] = re.search(r"(?:Fits|Does not fit): ([\d.]+) GiB", output)[1]
        return memory

    return run_recipes


@pytest.mark.nightly
def test_the_recipes_take_at_true_size_what_the_page_says(dry_run):
    memory = dry_run()
    quantized_memory = dry_run("--recipes", "align-qwen2.5-7b", "--load_in_4bit", "true")
    page = (DOCS / "train.md").read_text()
    for recipe, gibibytes in memory.items():
        assert re.search(rf"\[`{recipe}`\].* {gibibytes} GiB", page)

    align = memory["align-qwen2.5-7b"]
    quantized_align = quantized_memory["align-qwen2.5-7b --load_in_4bit true"]
    assert f"{align} GiB; with `--load_in_4bit` {quantized_align} GiB |" in page
    assert float(align) <= 19
    assert float(quantized_align) <= 12
    assert float(memory["qlora"]) < 10


@pytest.mark.parametrize(
    ("variant", "only_answers"),
    [
        (step.ALL_SCORED, False),
        (step.OURS, True),
    ],
)
def test_a_step_that_scores_all_positions_is_taken_on_a_cpu(tmp_path, variant, only_answers):
    step.random_checkpoint(tmp_path, "tiny")
    step.write_rows(tmp_path, 32, [(1, 9), (1, 9)])
    options = argparse.Namespace(batch=1, bf16=False, device="cpu")
    trainer = step.make_trainer(variant, tmp_path, options, 1)
    trainer.train()
    assert trainer.model.get_base_model().only_answers == only_answers

    second_factors = []
    for parameter_name, parameter in trainer.model.named_parameters():
        if "lora_B" in parameter_name:
            second_factors.append(parameter)
    assert second_factors
    # Before the first step they are 0.
    for parameter in second_factors:
        assert parameter.any()
