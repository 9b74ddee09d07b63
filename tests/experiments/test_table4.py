"""Plans of commands: the run, its price and its report, against computations by hand."""

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

from normalign_llava.evaluation.results import Evaluation, Metric
from normalign_llava.train.memory import largest_batch
from normalign_llava.train.modules.model import base_model
from normalign_llava.train.options import parse
from normalign_llava.train.run import make_trainer


NIGHTLY = pytest.mark.nightly
STEPS = {"global_batch_size": 2, "per_device_train_batch_size": 2, "probe_steps": [0, 2]}
ALL_TRAINED = STEPS | dict.fromkeys(["use_peft", "lora_dropout", "lora_target_modules"])
GROUPS = """
wrong: {question: "What is refused?", seeds: [5],
        variants: {aligned: {arm: aligned, stage1: {learning_rate: -1}}}}
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
    TINY["vision"] = tiny_parts.vision(tmp_path / "vision", "dinov2")
    TINY["language"] = tiny_parts.language(tmp_path / "language")
    file, work, results = tmp_path / "plan.yaml", tmp_path / "work", tmp_path / "results"
    file.write_text(yaml.safe_dump(TINY))
    words = [sys.executable, ROOT / "experiments", "run", file]
    words += ["--work", work, "--results", results]

    process = subprocess.Popen([*words, "--only", "tiny/gwc/6"], start_new_session=True)
    started = work / "tiny-gwc-seed6" / "stage2"
    while process.poll() is None and not list(started.glob("checkpoint-*/trainer_state.json")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # with the command that it runs
    assert process.wait() and not list(results.glob("*.json"))
    before = (started.parent / "stage1" / "training.json").stat().st_mtime_ns

    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1 and "Failed: wrong/aligned/5." in ended.stderr
    assert "5 failed. ValueError: it ended with status 1: normalign train" in ended.stdout
    assert (started.parent / "stage1" / "training.json").stat().st_mtime_ns == before
    assert len(list(results.glob("*.json"))) == 4 and not list(work.rglob("checkpoint-*"))
    assert "4 of 5 runs are finished" in (page := (results / "report.md").read_text())

    def asked(arm, seed):
        folder = work / f"tiny-{arm}-seed{seed}" / "stage2" / "evaluation" / "offline_perplexity"
        (samples,) = folder.rglob("samples_*.jsonl")
        return [json.loads(line)["bits_per_byte"] for line in samples.read_text().splitlines()]

    apart = [fmean(asked("gwc", seed)) - fmean(asked("none", seed)) for seed in (5, 6)]
    row = re.search(r"^\| perplexity bits per byte \| .*", page, re.MULTILINE)[0].split(" | ")
    assert row[1] == f"{fmean(apart):+.3f}"
    low, high = fmean(apart) - half_interval(apart), fmean(apart) + half_interval(apart)
    assert row[4] == f"{low:+.3f} to {high:+.3f}"
    reports = work.glob("tiny-gwc-seed*/stage2/diagnostics/report.json")
    entry = fmean(json.loads(file.read_text())["report"]["interface"]["ratio"] for file in reports)
    assert re.search(rf"^\| norm and GWC \| .* \| {entry:.3f} ± ", page, flags=re.M)
    with Image.open(results / "scores.png") as figure:
        assert figure.width > 500


def half_interval(pair):
    """Half the 95 % interval of the mean of two values."""
    return stats.t.ppf(0.975, 1) * stdev(pair) / math.sqrt(2)


def result(arm, seed, right, average, gain):
    """Of 4 questions of MMBench, some right; all of 10 of POPE are."""
    answers = {"mmbench_en_dev acc_circular": right, "pope acc": [1.0] * 10}
    diagnosis = {"entry": 2.0 + seed, "rotation": 0.5}
    diagnosis["gain"] = gain and {"mean_abs": gain, "start": 0.02}
    return {
        **{"group": "qwen", "variant": arm, "seed": seed, "settings": {"arm": arm}},
        **{"bf16": None, "minutes": 30.0},
        "answers": {name: {"asked": name, "scores": scores} for name, scores in answers.items()},
        "columns": {"average": average},
        "diagnosis": {"stage1": diagnosis, "stage2": diagnosis},
        "dynamics": [{"step": 0, "visual": [0.9, 0.7], "text": [0.5, 0.5]}],
    }


def test_the_report_is_that_of_a_computation_by_hand(tmp_path):
    group = {"question": "Is it?", "paper": "Qwen2.5-7B", "seeds": [42, 43]}
    group["variants"] = {"none": {"arm": "none"}, "gwc": {"arm": "gwc"}}
    content = {"commands": True, "bf16": None, "tasks": ["mmbench_en_dev", "pope"]}
    content |= {"stage1": {"recipe": "align-qwen2.5-7b"}, "stage2": {"recipe": "tune-qwen2.5-7b"}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**content, "groups": {"qwen": group}}))
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
    # By question 0, 1, 0, 0: a mean of 4 drawn has P(0) = 0.32, P(> 0.75) = 0.004 < 0.0125 and
    # P(0.75) = 0.05. Seeds agree. The paper: 77.66 - 76.80 and 69.41 - 68.49.
    few, none = "too few questions to tell", "+0.00 to +0.00"
    assert f"| MMBench-EN | +25.00 | +0.86 | +0.00 to +75.00 | +25.00 to +25.00 | {few} |" in page
    verdict = "no difference shown, the paper's +0.36 is outside"
    assert f"| POPE | +0.00 | +0.36 | {none} | {none} | {verdict} |" in page
    half = half_interval([0.5, 0.7])
    interval = f"{0.6 - half:+.2f} to {0.6 + half:+.2f}"
    assert f"| average | +0.60 | +0.92 |  | {interval} | too few seeds to tell |" in page
    assert "**The paper's main result is not shown.**" in page
    average = f"61.10 ± {half_interval([60.5, 61.7]):.2f}"
    assert f"| norm and GWC | 2 | 50.00 ± 0.00 | 100.00 ± 0.00 | {average} |" in page
    assert "| the paper's norm and GWC | 1 | 77.66 | 87.87 | 69.41 |" in page
    gain = f"2.000 ± {half_interval([1.5, 2.5]):.3f}"
    entry = f"44.500 ± {half_interval([44, 45]):.3f}"
    assert f"| norm and GWC | {entry} | 0.500 ± 0.000 | {gain} |" in page


def test_the_average_is_that_of_the_papers_nine_columns_of_whole_tasks():
    whole = []
    for number, (task, metric, _) in enumerate(PAPER_COLUMNS.values(), 1):
        share = number * (100 if task == "ocrbench" else 0.1)  # OCRBench counts answers, of 1000
        metrics = [Metric("other", 7.0), Metric(metric, share), Metric(metric, 7.0, subset="part")]
        whole.append(Evaluation(task, task, metrics, 9, 9, []))
    assert paper_average(whole) == {"average": pytest.approx(50.0)}
    partial = [*whole[1:], replace(whole[0], samples=4)]
    assert paper_average(whole[1:]) == paper_average(partial) == {}


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
        ((0.2, 0.8), (0.1, 0.9), None, "not shown"),  # 0.3 and 0.4 to a side make 0.5
    ],
)
def test_a_difference_is_put_into_words_by_the_rule(over_seeds, over_questions, paper, sentence):
    assert Line("a task", 1.5, 1.0, paper, over_questions, over_seeds).sentence == sentence


METHODS = {"align": "--stage align", "all": "--stage tune"}
METHODS["adapters"] = "--stage tune --use_peft --lora_r 4"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", pytest.param("false", marks=NIGHTLY)])
@pytest.mark.parametrize("method", [pytest.param("align", marks=NIGHTLY), "all", "adapters"])
def test_operations_are_those_that_torch_counts(models, method, checkpointing):
    for folder in models:
        options = f"{METHODS[method]} --bf16 false --attn_implementation eager"
        options += f" --model_name_or_path {folder}/checkpoint --dataset_name {folder}/data"
        options += f" --output_dir {folder}/run --gradient_checkpointing {checkpointing}"
        options += " --global_batch_size 1 --per_device_train_batch_size 1"
        trainer, _ = make_trainer(*parse(options.split()))
        model = trainer.model.train()
        batch = largest_batch(trainer.args, trainer.train_dataset, trainer.data_collator)
        if checkpointing == "true":
            model.gradient_checkpointing_enable()
        labels = batch.pop("labels")
        with FlopCounterMode(display=False) as counter:  # it misses products of TRL's own loss
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()).backward()
        text = batch["input_ids"].shape[1] - base_model(model).config.image_seq_length
        counted = counter.get_total_flops()
        assert row_flops(trainer, text).total() == pytest.approx(counted, rel=0.03)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random models with a row: one whose attention counts, and a larger one with grouped heads."""
    folders = []
    for shape, side in (("tiny", 32), ("50m", 128)):
        folders.append(tmp_path_factory.mktemp(shape))
        random_checkpoint(folders[-1], shape)
        write_rows(folders[-1], side, [(1, 60)])
    return folders


@pytest.mark.nightly
def test_the_price_of_the_papers_plan():
    plan = read_plan(ROOT / "experiments" / "table4.yaml")
    page = (DOCS / "train.md").read_text()
    for name, layers, width, inner, keys, vocabulary in (
        ("llama-3.2-3b", 28, 3072, 8192, 1024, 128_256),
        ("qwen2.5-7b", 28, 3584, 18_944, 512, 152_064),
    ):
        run = next(run for run in plan.runs() if run.group == name)
        costs, untrained = run_cost(plan, run, "80GB")
        align, tune = costs["stage1"], costs["stage2"]
        weights = layers * (2 * width**2 + 2 * width * keys + 3 * width * inner)
        assert align.steps == math.ceil(558_128 / 256) and tune.steps == math.ceil(779_289 / 128)
        assert align.tokens == 2181 * 256 * (729 + 60)
        # Everything trained: 6 N, and 2 N again by checkpointing but for a layer's last product; in
        # small, torch's counter says so above. The encoder is a tenth.
        again = weights - layers * width * inner
        language = tune.tokens * (6 * weights + 2 * again + 6 * vocabulary * width)
        assert 1.03 < tune.flops / language < 1.25
        assert re.search(rf"`tune-{name}`.*{tune.memory(1) / 2**30:.1f} GiB", page)
        divided = 4 * tune.kept * (1 - 1 / 8)  # float32 weights, gradients and two states
        assert tune.memory(8) == pytest.approx(tune.memory(1) - divided, rel=0.02)
        assert untrained == pytest.approx(tune.kept / 2, rel=0.01)
