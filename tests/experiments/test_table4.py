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
from matplotlib.figure import Figure
from paths import DOCS, ROOT
from PIL import Image
from plan import read_plan
from report import write_report
from scipy import stats
from scores import (
    NAMES,
    PAPER_COLUMNS,
    Line,
    _scores,
    lines_of,
    main_result,
    paper_average,
    sections,
)
from step import random_checkpoint, write_rows
from torch.utils.flop_counter import FlopCounterMode

from normalign_llava.evaluation.results import Evaluation, Metric
from normalign_llava.train.memory import largest_batch
from normalign_llava.train.modules.model import base_model
from normalign_llava.train.parsing import parse
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
    file = tmp_path / "plan.yaml"
    work = tmp_path / "work"
    results = tmp_path / "results"
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
    low = fmean(apart) - half_interval(apart)
    high = fmean(apart) + half_interval(apart)
    assert row[4] == f"{low:+.3f} to {high:+.3f}"
    reports = work.glob("tiny-gwc-seed*/stage2/diagnostics/report.json")
    entry = fmean(json.loads(file.read_text())["report"]["interface"]["ratio"] for file in reports)
    assert re.search(rf"^\| norm and GWC \| .* \| {entry:.3f} ± ", page, flags=re.M)
    with Image.open(results / "scores.png") as figure:
        assert figure.width > 500


def result(arm, seed, right, average, gain):
    """Of 8 questions of MMBench, `right` are; all of 10 of POPE are."""
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


SEEDS = (42, 43, 44)


def resampled(differences, share):
    """The quantile of the mean of as many drawn questions, exactly: a multinomial convolution.

    `differences` are of questions, in steps of 1/3 (the mean of three seeds of 0 or 1).
    """
    steps = [round(3 * value) for value in differences]
    count = len(steps)
    sums = {0: 1.0}
    for _ in range(count):
        following = {}
        for total, chance in sums.items():
            for step in steps:
                following[total + step] = following.get(total + step, 0.0) + chance / count
        sums = following
    below = 0.0
    for total in sorted(sums):
        below += sums[total]
        if below >= share:
            return total / 3 / count
    raise AssertionError("shares sum to 1")


def test_the_report_is_that_of_a_computation_by_hand(tmp_path):
    """Intervals of 2 benchmarks are at 97.5 % (Bonferroni), that of the average at 95 %."""
    group = {"question": "Is it?", "paper": "Qwen2.5-7B", "seeds": list(SEEDS)}
    group["variants"] = {"none": {"arm": "none"}, "gwc": {"arm": "gwc"}}
    content = {"commands": True, "bf16": None, "tasks": ["mmbench_en_dev", "pope"]}
    content |= {"stage1": {"recipe": "align-qwen2.5-7b"}, "stage2": {"recipe": "tune-qwen2.5-7b"}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**content, "groups": {"qwen": group}}))
    plan = read_plan(tmp_path / "plan.yaml", tmp_path)
    none = [1.0, 0, 0, 0, 0, 0, 0, 0]
    better = {42: [1.0, 1, 1, 0, 0, 0, 0, 0], 43: [1.0, 1, 1, 1, 0, 0, 0, 0]}
    better[44] = [1.0, 1, 0, 0, 0, 0, 0, 0]
    averages = {"none": (60.0, 61.0, 60.5), "gwc": (60.5, 61.7, 61.1)}
    gains = {"none": (None,) * 3, "gwc": (0.03, 0.05, 0.04)}
    for run in plan.runs():
        place = SEEDS.index(run.seed)
        right = none if run.name == "none" else better[run.seed]
        measured = right, averages[run.name][place], gains[run.name][place]
        options = dict(zip(("stage1", "stage2"), plan.options(run), strict=True))
        stored = {**result(run.name, run.seed, *measured), "options": options}
        (tmp_path / f"{run.key}.json").write_text(json.dumps(stored))
    page = write_report(plan).read_text()

    by_seed = [100 * (fmean(better[seed]) - fmean(none)) for seed in SEEDS]
    half = half_interval(by_seed, 0.975)
    assert half > 1.3 * half_interval(by_seed, 0.95)  # the level can be told
    over_seeds = f"{25 - half:+.2f} to {25 + half:+.2f}"
    differences = [
        fmean(better[seed][number] - none[number] for seed in SEEDS) for number in range(8)
    ]
    ends = [100 * resampled(differences, share) for share in (0.0125, 0.9875)]
    at_95 = [100 * resampled(differences, share) for share in (0.025, 0.975)]
    assert ends != at_95
    over_questions = f"{ends[0]:+.2f} to {ends[1]:+.2f}"
    few = "too few questions to tell"
    if 2 * half >= ends[1] - ends[0]:
        few = "too few seeds to tell"
    # The paper: 77.66 - 76.80 and 69.41 - 68.49.
    assert f"| MMBench-EN | +25.00 | +0.86 | {over_questions} | {over_seeds} | {few} |" in page
    alike = "all seeds differ by the same: too few to tell"
    assert f"| POPE | +0.00 | +0.36 |  |  | {alike} |" in page
    half = half_interval([0.5, 0.7, 0.6], 0.95)
    interval = f"{0.6 - half:+.2f} to {0.6 + half:+.2f}"
    assert f"| average | +0.60 | +0.92 |  | {interval} | the paper's +0.92 is outside |" not in page
    assert (
        f"| average | +0.60 | +0.92 |  | {interval} | same sign, the paper's +0.92 is outside |"
        in page
    )
    assert "**The paper's main result holds.**" in page
    average = f"61.10 ± {half_interval([60.5, 61.7, 61.1], 0.95):.2f}"
    right = f"{37.5:.2f} ± {half_interval([37.5, 50, 25], 0.95):.2f}"
    assert f"| norm and GWC | 3 | {right} | 100.00 | {average} |" in page
    assert "| the paper's norm and GWC | 1 | 77.66 | 87.87 | 69.41 |" in page
    gain = f"2.000 ± {half_interval([1.5, 2.5, 2.0], 0.95):.3f}"
    entry = f"45.000 ± {half_interval([44, 45, 46], 0.95):.3f}"
    assert f"| norm and GWC | {entry} | 0.500 | {gain} |" in page


def half_interval(values, confidence=0.95):
    """Half the t interval of the mean of some values."""
    quantile = stats.t.ppf((1 + confidence) / 2, len(values) - 1)
    return quantile * stdev(values) / math.sqrt(len(values))


def of_average(low, high):
    """Lines of a group whose average's interval is this."""
    line = Line("average", (low + high) / 2, 0.0, 0.9, None, (low, high))
    other = Line("POPE", 1.0, 0.0, 0.3, (-9.0, -8.0), (-9.0, -8.0))
    return {"gwc": [other, line], "aligned": [Line("average", 1.0, 0.0, 0.9, None, (-5.0, -4.0))]}


@pytest.mark.parametrize(
    ("intervals", "said"),
    [
        ([(0.1, 0.9), (0.2, 1.0)], "holds"),
        ([(0.1, 0.9), (-0.2, 1.0)], "is not shown"),  # of one of two models
        ([(-0.1, 0.9), (0.2, 1.0)], "is not shown"),
        ([(0.1, 0.9)], "is not shown"),  # the other was not run
        ([(0.1, 0.9), (-0.9, -0.1)], "does not hold"),
        ([(-0.1, 0.9), (-0.9, -0.1)], "does not hold"),
    ],
)
def test_the_main_result_needs_both_models(intervals, said):
    by_group = {str(number): of_average(*ends) for number, ends in enumerate(intervals)}
    assert main_result(by_group, 2) == said


def test_intervals_of_nine_benchmarks_are_wider_than_those_of_one():
    """Bonferroni: each is at 1 - 0.05 / 9; the average's stays at 95 %."""
    changes = (0.5, 0.7, 0.6)
    scored = {"none": [60.0, 61.0, 60.5], "gwc": [60.5, 61.7, 61.1]}
    right = {"none": ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1])}
    right["gwc"] = ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1])
    arms = {
        arm: {
            seed: {
                "answers": {"pope acc": {"asked": "same", "scores": right[arm][seed]}},
                "columns": {"average": scored[arm][seed]},
            }
            for seed in range(3)
        }
        for arm in scored
    }
    by_seed = [100 * (fmean(right["gwc"][seed]) - fmean(right["none"][seed])) for seed in range(3)]
    for benchmarks in (1, 9):
        pope, average = lines_of(arms, None, benchmarks)["gwc"]
        half = half_interval(by_seed, 1 - 0.05 / benchmarks)
        expected = fmean(by_seed) - half, fmean(by_seed) + half
        assert pope.over_seeds == pytest.approx(expected)
        half = half_interval(changes, 0.95)
        assert average.over_seeds == pytest.approx((0.6 - half, 0.6 + half))


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
        # Ends of an interval are in it; without one over questions, or as wide a one, seeds count.
        ((0.25, 0.75), None, 0.75, "the paper's +0.75 is inside"),
        ((0.25, 0.75), None, 0.25, "the paper's +0.25 is inside"),
        ((0.0, 1.0), None, None, "not shown"),
        ((-2.0, 3.0), None, 1.0, "too few seeds to tell"),
        ((-2.0, 3.0), (-2.0, 3.0), 1.0, "too few seeds to tell"),
    ],
)
def test_a_difference_is_put_into_words_by_the_rule(over_seeds, over_questions, paper, sentence):
    assert Line("a task", 1.5, 1.0, paper, over_questions, over_seeds).sentence == sentence


def test_a_score_below_that_without_the_norm_is_lower():
    assert Line("a task", 1.0, 1.5, None, None, (-0.75, -0.25)).sentence == "lower"


def seeds_of(answers, averages=(), benchmark="pope acc"):
    """Results by seed: right and wrong answers, and averages, if they are known."""
    seeds = {}
    for seed, right in enumerate(answers):
        columns = {"average": averages[seed]} if averages else {}
        asked = {benchmark: {"asked": "same", "scores": right}}
        seeds[seed] = {"answers": asked, "columns": columns}
    return seeds


def test_of_one_seed_too_little_is_known_and_of_none_nothing():
    arms = {"none": seeds_of([[0, 0, 1]], [60.0]), "gwc": seeds_of([[1, 0, 1]], [61.0])}
    lines = lines_of(arms, None, 1)["gwc"]
    assert [line.benchmark for line in lines] == ["POPE", "average"]
    assert [line.sentence for line in lines] == ["too few seeds to tell"] * 2
    arms["gwc"] = {7: arms["gwc"][0]}  # another seed
    assert lines_of(arms, None, 1) == {} == lines_of({"gwc": arms["gwc"]}, None, 1)


def test_scores_of_ocrbench_are_shares_of_its_questions():
    arms = {name: seeds_of([[0, 1, 1, 1]], benchmark="ocrbench total") for name in ("none", "gwc")}
    (line,) = lines_of(arms, None, 1)["gwc"]
    assert (line.benchmark, line.score, line.reference) == ("OCRBench", 75.0, 75.0)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, in place of their files."""
    figures = []

    def keep(figure, file, **options):
        figures.append(figure)
        file.touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def two_groups(tmp_path, *papers):
    """A plan of commands, whose groups are of these models of the paper."""
    content = {"commands": True, "bf16": None, "tasks": ["mmbench_en_dev", "pope"]}
    content |= {"stage1": {"recipe": "align-qwen2.5-7b"}, "stage2": {"recipe": "tune-qwen2.5-7b"}}
    groups = {}
    for number, paper in enumerate(papers):
        variants = {"none": {"arm": "none"}, "gwc": {"arm": "gwc"}}
        groups[f"g{number}"] = {"question": "?", "seeds": [42], "variants": variants}
        groups[f"g{number}"] |= {"paper": paper} if paper else {}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**content, "groups": groups}))
    return read_plan(tmp_path / "plan.yaml", tmp_path)


def of_two_seeds(arm):
    """With an average that is 1 higher, or 1.1, with norm and GWC."""
    gain = 0.0 if arm == "none" else 0.03
    results = {}
    for seed, average in ((42, 60.0), (43, 61.0)):
        average += gain and 1.0 + (seed == 43) / 10
        results[seed] = result(arm, seed, [1.0] * 4 + [0.0] * 4, average, gain or None)
        results[seed]["dynamics"].append({"step": 50, "visual": [0.8, 0.6], "text": [0.4, 0.4]})
    return results


@pytest.mark.parametrize(
    ("papers", "measured", "said"),
    [
        (("Qwen2.5-7B", "Llama-3.2-3B"), 1, "main result is not shown"),  # of one of two models
        (("Qwen2.5-7B", None), 1, "main result is not shown"),
        (("Qwen2.5-7B", None), 2, "main result holds"),
        ((None, None), 2, None),
    ],
)
def test_the_main_result_is_told_of_all_models_if_the_paper_has_any(
    tmp_path, drawn, papers, measured, said
):
    plan = two_groups(tmp_path, *papers)
    arms = {name: of_two_seeds(name) for name in ("none", "gwc")}
    results = {f"g{n}/{name}": arms[name] for n in range(measured) for name in arms}
    text = "\n".join(sections(plan, results))
    assert said in text if said else "main result" not in text


def test_a_column_that_the_paper_lacks_is_empty_in_its_row():
    page = "\n".join(_scores({"gwc": seeds_of([[1, 0]], [60.0], "own acc")}, "Qwen2.5-7B"))
    assert "| norm and GWC | 1 | 0.50 | 60.00 |" in page
    assert "| the paper's norm and GWC | 1 |  | 69.41 |" in page


def test_the_figure_shows_differences_and_cosines_by_step(tmp_path, drawn):
    plan = two_groups(tmp_path, "Qwen2.5-7B")
    results = {f"g0/{name}": of_two_seeds(name) for name in ("none", "gwc")}
    sections(plan, results)
    (figure,) = drawn
    above, below = figure.axes
    assert [text.get_text() for text in above.get_legend().get_texts()] == [
        *("norm and GWC", "the paper's"),
    ]
    differences = [line.get_ydata()[0] for line in above.lines if line.get_marker() == "o"]
    assert differences == pytest.approx([0.0, 0.0, 1.05])
    assert all(list(line.get_xdata()) == [0, 50] for line in below.lines)
    curves = {line.get_label(): list(line.get_ydata()) for line in below.lines}
    assert len(curves) == 4
    for arm in ("none", "gwc"):
        assert curves[f"{NAMES[arm]}, visual tokens"] == pytest.approx([0.8, 0.7])
        assert curves[f"{NAMES[arm]}, text tokens"] == pytest.approx([0.5, 0.4])


def test_nothing_is_said_of_seeds_or_questions_that_all_differ_alike():
    """Two seeds with the same difference do not make it certain."""
    alike = {"none": ([0, 0, 1], [0, 1, 0]), "gwc": ([1, 0, 1], [0, 1, 1])}
    unlike = {"none": ([0, 0], [0, 0], [0, 0]), "gwc": ([0, 0], [1, 1], [1, 1])}
    for scores, sentence in (
        (alike, "all seeds differ by the same: too few to tell"),
        (unlike, "all questions differ by the same: too few to tell"),
    ):
        arms = {}
        for arm, of_seeds in scores.items():
            arms[arm] = {}
            for seed, right in enumerate(of_seeds):
                answers = {"pope acc": {"asked": "same", "scores": right}}
                arms[arm][seed] = {"answers": answers, "columns": {}}
        (line,) = lines_of(arms, None, 1)["gwc"]
        assert line.sentence == sentence and line.interval is None


METHODS = {"align": "--stage align", "all": "--stage tune"}
METHODS["adapters"] = "--stage tune --use_peft --lora_r 4"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", pytest.param("false", marks=NIGHTLY)])
@pytest.mark.parametrize(
    "method", [*(pytest.param(name, marks=NIGHTLY) for name in ("align", "all")), "adapters"]
)
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
        operations = row_flops(trainer, text)
        assert operations.total() == pytest.approx(counted, rel=0.03)
        few = row_flops(trainer, text, scored=1)
        several = row_flops(trainer, text, images=3)
        tokens = batch["input_ids"].shape[1]
        assert few == operations | {"head": operations["head"] / tokens}
        for part in ("vision tower", "projector"):
            assert several[part] == pytest.approx(3 * operations[part])


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
        align = costs["stage1"]
        tune = costs["stage2"]
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
