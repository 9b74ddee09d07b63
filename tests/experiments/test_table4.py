# SPDX-License-Identifier: Apache-2.0
"""Plans that are made by commands: the run, its price and its report, against computations by hand."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import tiny_parts
import torch
import yaml
from cost import row_flops, run_cost
from dry_runs import random_checkpoint, write_rows
from paths import DOCS, ROOT
from PIL import Image
from plan import read_plan
from report import write_report
from scipy import stats
from scores import PAPER_COLUMNS, Line, paper_average
from torch.utils.flop_counter import FlopCounterMode

from normalign_llava.evaluate.results import Evaluation, Metric
from normalign_llava.train.memory import largest_batch
from normalign_llava.train.modules.model import base_model
from normalign_llava.train.options import parse
from normalign_llava.train.run import make_trainer


TABLE4 = ROOT / "experiments" / "table4.yaml"
STEPS = {"global_batch_size": 2, "per_device_train_batch_size": 2, "probe_steps": [0, 2]}
ALL_TRAINED = STEPS | dict.fromkeys(["use_peft", "lora_dropout", "lora_target_modules"])
GROUPS = """
wrong: {question: "What is refused?", seeds: [5], variants: {aligned: {arm: aligned, stage1: {learning_rate: -1}}}}
tiny: {question: "Which?", seeds: [5, 6], variants: {none: {arm: none}, gwc: {arm: gwc}}}
"""
TINY = {
    "commands": True,
    "bf16": False,
    "tasks": ["offline_perplexity"],
    "feature_layer": -2,
    "diagnosed": 2,
    "evaluate": {"batch-size": 16},
    "stage1": {"recipe": "quickstart-align", **STEPS, "max_steps": 2, "save_steps": 2},
    "stage2": {"recipe": "quickstart-tune", **ALL_TRAINED, "max_steps": 3, "save_steps": 1},
    "groups": yaml.safe_load(GROUPS),
}


@pytest.mark.nightly
def test_a_plan_of_commands_is_killed_resumed_and_reported(archives, tmp_path):
    parts = {"vision": tiny_parts.vision(tmp_path / "v", "dinov2"), "language": tiny_parts.language(tmp_path / "l")}
    file, work, results = tmp_path / "plan.yaml", tmp_path / "work", tmp_path / "results"
    file.write_text(yaml.safe_dump({**TINY, **parts}))
    words = [sys.executable, ROOT / "experiments", "run", file, "--work", work, "--results", results]

    process = subprocess.Popen([*words, "--only", "tiny/gwc/6"], start_new_session=True)
    started = work / "tiny-gwc-seed6" / "stage2"
    while process.poll() is None and not list(started.glob("checkpoint-*/trainer_state.json")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # with the command that it runs
    assert process.wait() and not list(results.glob("*.json"))
    before = (started.parent / "stage1" / "training.json").stat().st_mtime_ns

    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "Failed: wrong/aligned/5." in done.stderr
    assert "wrong/aligned/5 failed. ValueError: it ended with status 1: normalign train" in done.stdout
    assert (started.parent / "stage1" / "training.json").stat().st_mtime_ns == before
    assert len(list(results.glob("*.json"))) == 4 and not list(work.rglob("checkpoint-*"))
    assert "4 of 5 runs are finished" in (page := (results / "report.md").read_text())

    def asked(arm, seed):
        folder = work / f"tiny-{arm}-seed{seed}" / "stage2" / "evaluation" / "offline_perplexity"
        (samples,) = folder.rglob("samples_*.jsonl")
        return [json.loads(line)["bits_per_byte"] for line in samples.read_text().splitlines()]

    apart = [fmean(asked("gwc", seed)) - fmean(asked("none", seed)) for seed in (5, 6)]
    half = stats.t.ppf(1 - 0.05 / 2, 1) * stdev(apart) / 2**0.5
    row = next(line for line in page.splitlines() if line.startswith("| perplexity bits per byte | "))
    assert row.split(" | ")[1] == f"{fmean(apart):+.3f}"
    assert row.split(" | ")[4] == f"{fmean(apart) - half:+.3f} to {fmean(apart) + half:+.3f}"
    reports = [work / f"tiny-gwc-seed{seed}" / "stage2" / "diagnostics" / "report.json" for seed in (5, 6)]
    entry = fmean(json.loads(file.read_text())["report"]["interface"]["ratio"] for file in reports)
    assert re.search(rf"^\| norm and GWC \| .* \| {entry:.3f} ± ", page, flags=re.M)
    with Image.open(results / "scores.png") as figure:
        assert figure.width > 500


def result(arm, seed, right, average, gain):
    """Of 4 questions of MMBench, some right; all of 10 of POPE are."""
    answers = {"mmbench_en_dev acc_circular": right, "pope acc": [1.0] * 10}
    diagnosis = {"entry": 2.0 + seed, "rotation": 0.5, "gain": gain and {"mean_abs": gain, "start": 0.02}}
    return {
        **{"group": "qwen", "variant": arm, "seed": seed, "settings": {"arm": arm}, "bf16": None, "minutes": 30.0},
        "answers": {name: {"asked": name, "scores": scores} for name, scores in answers.items()},
        "columns": {"average": average},
        "diagnosis": {"stage1": diagnosis, "stage2": diagnosis},
        "dynamics": [{"step": 0, "visual": [0.9, 0.7], "text": [0.5, 0.5]}],
    }


def test_the_report_is_that_of_a_computation_by_hand(tmp_path):
    group = {"question": "Is it?", "paper": "Qwen2.5-7B", "seeds": [42, 43]}
    group["variants"] = {"none": {"arm": "none"}, "gwc": {"arm": "gwc"}}
    stages = {"stage1": {"recipe": "align-qwen2.5-7b"}, "stage2": {"recipe": "tune-qwen2.5-7b"}}
    content = {"commands": True, "bf16": None, "tasks": ["mmbench_en_dev", "pope"], "groups": {"qwen": group}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**content, **stages}))
    plan = read_plan(tmp_path / "plan.yaml", tmp_path)
    scored = {
        ("none", 42): ([1.0, 0, 0, 0], 60.0, None),
        ("none", 43): ([1.0, 0, 0, 0], 61.0, None),
        ("gwc", 42): ([1.0, 1, 0, 0], 60.5, 0.03),
        ("gwc", 43): ([1.0, 1, 0, 0], 61.7, 0.05),
    }
    for run in plan.runs():
        options = dict(zip(("stage1", "stage2"), plan.options(run), strict=True))
        stored = {**result(run.name, run.seed, *scored[run.name, run.seed]), "options": options}
        (tmp_path / f"{run.key}.json").write_text(json.dumps(stored))
    page = write_report(plan).read_text()
    # Per question 0, 1, 0, 0: a mean of 4 drawn has P(0) = 0.32 and P(> 0.75) = 0.004 < 0.0125, P(0.75) = 0.05. Seeds
    # agree. The paper: 77.66 - 76.80 and 69.41 - 68.49.
    assert "| MMBench-EN | +25.00 | +0.86 | +0.00 to +75.00 | +25.00 to +25.00 | too few questions to tell |" in page
    none = "+0.00 to +0.00"
    assert f"| POPE | +0.00 | +0.36 | {none} | {none} | no difference shown, the paper's +0.36 is outside |" in page
    half = stats.t.ppf(0.975, 1) * stdev([0.5, 0.7]) / math.sqrt(2)
    row = f"| average | +0.60 | +0.92 |  | {0.6 - half:+.2f} to {0.6 + half:+.2f} | too few seeds to tell |"
    assert row in page and "**The paper's main result is not shown.**" in page
    spread = stats.t.ppf(0.975, 1) * stdev([60.5, 61.7]) / math.sqrt(2)
    assert f"| norm and GWC | 2 | 50.00 ± 0.00 | 100.00 ± 0.00 | 61.10 ± {spread:.2f} |" in page
    assert "| the paper's norm and GWC | 1 | 77.66 | 87.87 | 69.41 |" in page
    of_gain = f"2.000 ± {stats.t.ppf(0.975, 1) * stdev([1.5, 2.5]) / math.sqrt(2):.3f}"
    of_entry = f"44.500 ± {stats.t.ppf(0.975, 1) * stdev([44, 45]) / math.sqrt(2):.3f}"
    assert f"| norm and GWC | {of_entry} | 0.500 ± 0.000 | {of_gain} |" in page


def test_the_average_is_that_of_the_papers_nine_columns_of_whole_tasks():
    whole = []
    for number, (task, metric, _) in enumerate(PAPER_COLUMNS.values(), 1):
        share = number * (100 if task == "ocrbench" else 0.1)  # OCRBench counts answers, of 1000
        metrics = [Metric("other", 7.0), Metric(metric, share), Metric(metric, 7.0, subset="a part")]
        whole.append(Evaluation(task, task, metrics, 9, 9, []))
    assert paper_average(whole) == {"average": pytest.approx(50.0)}
    assert paper_average(whole[1:]) == paper_average([*whole[1:], replace(whole[0], samples=4)]) == {}


@pytest.mark.parametrize(
    ("over_seeds", "over_questions", "paper", "sentence"),
    [
        (None, (0.1, 0.2), 1.0, "too few seeds to tell"),
        ((-2.0, 3.0), (0.4, 0.6), 1.0, "too few seeds to tell"),
        ((0.4, 0.6), (-2.0, 3.0), 1.0, "too few questions to tell"),
        ((0.2, 0.8), (0.4, 0.6), 0.7, "the paper's +0.70 is inside"),
        ((-0.1, 1.1), (0.4, 0.6), 1.3, "no difference shown, the paper's +1.30 is outside"),
        ((0.2, 0.8), (0.4, 0.6), 0.9, "same sign, the paper's +0.90 is outside"),
        ((0.2, 0.8), (0.4, 0.6), -0.9, "opposite sign, the paper's -0.90 is outside"),
        ((0.2, 0.8), None, None, "higher"),
        ((-0.1, 1.1), None, None, "not shown"),
        ((0.2, 0.8), (0.1, 0.9), None, "not shown"),  # 0.3 and 0.4 on a side make 0.5: each alone would leave 0 out
    ],
)
def test_a_difference_is_put_into_words_by_the_rule(over_seeds, over_questions, paper, sentence):
    assert Line("a task", 1.5, 1.0, paper, over_questions, over_seeds).sentence == sentence


METHODS = {"align": "--stage align", "all": "--stage tune", "adapters": "--stage tune --use_peft --lora_r 4"}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", pytest.param("false", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("method", [pytest.param("align", marks=pytest.mark.nightly), "all", "adapters"])
def test_operations_are_those_that_torch_counts(models, method, checkpointing):
    for folder in models:
        options = f"{METHODS[method]} --output_dir {folder}/run --attn_implementation eager --bf16 false"
        options += f" --global_batch_size 1 --model_name_or_path {folder}/checkpoint --dataset_name {folder}/data"
        options += f" --per_device_train_batch_size 1 --gradient_checkpointing {checkpointing}"
        trainer, _ = make_trainer(*parse(options.split()))
        model, batch = trainer.model.train(), largest_batch(trainer.args, trainer.train_dataset, trainer.data_collator)
        if checkpointing == "true":
            model.gradient_checkpointing_enable()
        labels = batch.pop("labels")
        with FlopCounterMode(display=False) as counter:  # TRL's own loss has products that it does not count
            logits = model(**batch).logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        text = batch["input_ids"].shape[1] - base_model(model).config.image_seq_length
        assert row_flops(trainer, text).total() == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random models with a row: one whose attention counts, and one with grouped heads and more weights."""
    folders = []
    for shape, side in (("tiny", 32), ("50m", 128)):
        folders.append(tmp_path_factory.mktemp(shape))
        random_checkpoint(folders[-1], shape)
        write_rows(folders[-1], side, [(1, 60)])
    return folders


@pytest.mark.nightly
def test_the_price_of_the_papers_plan():
    plan = read_plan(TABLE4)
    page = (DOCS / "train.md").read_text()
    for name, layers, width, inner, keys, vocabulary in (
        ("llama-3.2-3b", 28, 3072, 8192, 1024, 128_256),
        ("qwen2.5-7b", 28, 3584, 18_944, 512, 152_064),
    ):
        costs, untrained = run_cost(plan, next(run for run in plan.runs() if run.group == name), "80GB")
        weights = layers * (2 * width**2 + 2 * width * keys + 3 * width * inner)
        assert [cost.steps for cost in costs.values()] == [math.ceil(558_128 / 256), math.ceil(779_289 / 128)]
        assert costs["stage1"].tokens == 2181 * 256 * (729 + 60)
        # Everything trained: 6 N, and 2 N again by checkpointing but for a layer's last product; by torch's counter in
        # small above. The encoder is a tenth.
        again = weights - layers * width * inner
        language = costs["stage2"].tokens * (6 * weights + 2 * again + 6 * vocabulary * width)
        assert 1.03 < costs["stage2"].flops / language < 1.25
        alone = f"{costs['stage2'].memory(1) / 2**30:.1f} GiB"
        assert re.search(rf"`tune-{name}`.*{alone}", page)
        trained = costs["stage2"].kept  # in float32
        divided = 4 * trained * (1 - 1 / 8)  # weights, gradients and two states
        assert costs["stage2"].memory(8) == pytest.approx(costs["stage2"].memory(1) - divided, rel=0.02)
        assert untrained == pytest.approx(trained / 2, rel=0.01)
