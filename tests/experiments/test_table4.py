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
from normalign_llava.train.options import parse
from normalign_llava.train.run import make_trainer


NIGHTLY = pytest.mark.nightly

STEPS = {
    "global_batch_size": 2,
    "per_device_train_batch_size": 2,
    "probe_steps": [0, 2],
}
NO_ADAPTERS = {
    "use_peft": None,
    "lora_dropout": None,
    "lora_target_modules": None,
}
TINY = """
commands: true
bf16: false
tasks: [offline_perplexity]
feature_layer: -2
diagnosed: 2
evaluate: {batch-size: 16}
groups:
  wrong:
    question: What is refused?
    seeds: [5]
    variants:
      aligned: {arm: aligned, stage1: {learning_rate: -1}}
  tiny:
    question: Which?
    seeds: [5, 6]
    variants:
      none: {arm: none}
      gwc: {arm: gwc}
"""


def write_tiny_plan(folder):
    plan_content = yaml.safe_load(TINY)
    plan_content["vision"] = tiny_parts.vision(folder / "vision", "dinov2")
    plan_content["language"] = tiny_parts.language(folder / "language")
    plan_content["stage1"] = {
        **STEPS,
        "recipe": "quickstart-align",
        "max_steps": 2,
        "save_steps": 2,
    }
    plan_content["stage2"] = {
        **STEPS,
        **NO_ADAPTERS,
        "recipe": "quickstart-tune",
        "max_steps": 3,
        "save_steps": 1,
    }
    plan_path = folder / "plan.yaml"
    plan_path.write_text(yaml.safe_dump(plan_content))
    return plan_path


def run_until_a_checkpoint_and_kill(command, stage_folder):
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None:
        if list(stage_folder.glob("checkpoint-*/trainer_state.json")):
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # with the command that it runs
    return process.wait()


def mean_bits_per_byte(work, arm, seed):
    stage_folder = work / f"tiny-{arm}-seed{seed}" / "stage2"
    task_folder = stage_folder / "evaluation" / "offline_perplexity"
    (samples_path,) = task_folder.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in samples_path.read_text().splitlines()]
    return fmean(sample["bits_per_byte"] for sample in samples)


def mean_entry_ratio(work, arm):
    ratios = []
    for report_path in work.glob(f"tiny-{arm}-seed*/stage2/diagnostics/report.json"):
        report = json.loads(report_path.read_text())["report"]
        ratios.append(report["interface"]["ratio"])
    return fmean(ratios)


@pytest.mark.nightly
def test_a_plan_of_commands_is_killed_resumed_and_reported(archives, tmp_path):
    plan_path = write_tiny_plan(tmp_path)
    work = tmp_path / "work"
    results_folder = tmp_path / "results"
    command = [sys.executable, ROOT / "experiments", "run", plan_path]
    command += ["--work", work, "--results", results_folder]
    run_folder = work / "tiny-gwc-seed6"
    first_record = run_folder / "stage1" / "training.json"

    status = run_until_a_checkpoint_and_kill(
        [*command, "--only", "tiny/gwc/6"],
        run_folder / "stage2",
    )
    assert status
    assert not list(results_folder.glob("*.json"))
    first_stage_ended = first_record.stat().st_mtime_ns

    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "Failed: wrong/aligned/5." in ended.stderr
    assert "5 failed. ValueError: it ended with status 1: normalign train" in ended.stdout
    assert first_record.stat().st_mtime_ns == first_stage_ended
    assert len(list(results_folder.glob("*.json"))) == 4
    assert not list(work.rglob("checkpoint-*"))
    report_text = (results_folder / "report.md").read_text()
    assert "4 of 5 runs are finished" in report_text

    differences = []
    for seed in (5, 6):
        with_norm = mean_bits_per_byte(work, "gwc", seed)
        without_norm = mean_bits_per_byte(work, "none", seed)
        differences.append(with_norm - without_norm)
    mean_difference = fmean(differences)
    half_width = half_interval(differences)
    low = mean_difference - half_width
    high = mean_difference + half_width
    perplexity_row = re.search(
        r"^\| perplexity bits per byte \| .*",
        report_text,
        re.MULTILINE,
    )
    cells = perplexity_row[0].split(" | ")
    assert cells[1] == f"{mean_difference:+.3f}"
    assert cells[4] == f"{low:+.3f} to {high:+.3f}"

    entry_ratio = mean_entry_ratio(work, "gwc")
    entry_row = rf"^\| norm and GWC \| .* \| {entry_ratio:.3f} ± "
    assert re.search(entry_row, report_text, flags=re.M)
    with Image.open(results_folder / "scores.png") as figure:
        assert figure.width > 500


def half_interval(values, confidence=0.95):
    """Returns half the t interval of the mean of some values."""
    quantile = stats.t.ppf((1 + confidence) / 2, len(values) - 1)
    return quantile * stdev(values) / math.sqrt(len(values))


def run_result(arm, seed, mmbench_scores, average, gain=None):
    """Returns what a run stores. Its 10 answers to POPE are right."""
    diagnosis = {
        "entry": 2.0 + seed,
        "rotation": 0.5,
        "gain": None,
    }
    if gain is not None:
        diagnosis["gain"] = {"mean_abs": gain, "start": 0.02}

    answers = {}
    for benchmark, scores in (
        ("mmbench_en_dev acc_circular", mmbench_scores),
        ("pope acc", [1.0] * 10),
    ):
        answers[benchmark] = {"asked": benchmark, "scores": scores}

    return {
        "group": "qwen",
        "variant": arm,
        "seed": seed,
        "settings": {"arm": arm},
        "bf16": None,
        "minutes": 30.0,
        "answers": answers,
        "columns": {"average": average},
        "diagnosis": {"stage1": diagnosis, "stage2": diagnosis},
        "dynamics": [{"step": 0, "visual": [0.9, 0.7], "text": [0.5, 0.5]}],
    }


SEEDS = (42, 43, 44)


def chances_of_sums(question_steps) -> dict:
    """Returns how likely each sum of as many drawn questions is."""
    count = len(question_steps)
    chances = {0: 1.0}
    for _ in range(count):
        next_chances = {}
        for total, chance in chances.items():
            for step in question_steps:
                before = next_chances.get(total + step, 0.0)
                next_chances[total + step] = before + chance / count
        chances = next_chances
    return chances


def resampled_quantile(differences, share):
    """Returns the quantile of the mean of as many drawn questions, by an exact convolution.

    `differences` are of questions, in steps of 1/3 (the mean of three seeds of 0 or 1).
    """
    question_steps = [round(3 * difference) for difference in differences]
    chances = chances_of_sums(question_steps)
    below = 0.0
    for total in sorted(chances):
        below += chances[total]
        if below >= share:
            return total / 3 / len(question_steps)
    raise AssertionError("shares sum to 1")


def resampled_interval(differences, low, high):
    """Returns both ends in percent."""
    return [
        100 * resampled_quantile(differences, low),
        100 * resampled_quantile(differences, high),
    ]


# Whether each of 8 questions of MMBench is answered right.
RIGHT_WITHOUT_NORM = [1.0, 0, 0, 0, 0, 0, 0, 0]
RIGHT_WITH_NORM = {
    42: [1.0, 1, 1, 0, 0, 0, 0, 0],
    43: [1.0, 1, 1, 1, 0, 0, 0, 0],
    44: [1.0, 1, 0, 0, 0, 0, 0, 0],
}
AVERAGES = {
    "none": (60.0, 61.0, 60.5),
    "gwc": (60.5, 61.7, 61.1),
}
GAINS = {
    "none": (None, None, None),
    "gwc": (0.03, 0.05, 0.04),
}


def qwen_plan(folder, groups):
    """Returns a plan of commands with the paper's recipes for Qwen."""
    plan_content = {
        "commands": True,
        "bf16": None,
        "tasks": ["mmbench_en_dev", "pope"],
        "stage1": {"recipe": "align-qwen2.5-7b"},
        "stage2": {"recipe": "tune-qwen2.5-7b"},
        "groups": groups,
    }
    plan_path = folder / "plan.yaml"
    plan_path.write_text(yaml.safe_dump(plan_content))
    return read_plan(plan_path, folder)


@pytest.fixture(scope="module")
def report_text(tmp_path_factory):
    """The report of six runs."""
    folder = tmp_path_factory.mktemp("reported")
    group = {
        "question": "Is it?",
        "paper": "Qwen2.5-7B",
        "seeds": list(SEEDS),
        "variants": {"none": {"arm": "none"}, "gwc": {"arm": "gwc"}},
    }
    plan = qwen_plan(folder, {"qwen": group})
    for run in plan.runs():
        mmbench_scores = RIGHT_WITHOUT_NORM
        if run.name == "gwc":
            mmbench_scores = RIGHT_WITH_NORM[run.seed]
        place = SEEDS.index(run.seed)
        stored = run_result(
            run.name,
            run.seed,
            mmbench_scores,
            AVERAGES[run.name][place],
            GAINS[run.name][place],
        )
        first_options, second_options = plan.options(run)
        stored["options"] = {"stage1": first_options, "stage2": second_options}
        (folder / f"{run.key}.json").write_text(json.dumps(stored))
    return write_report(plan).read_text()


def test_intervals_of_two_benchmarks_in_the_report_are_at_97_5_percent(report_text):
    """By Bonferroni."""
    by_seed = []
    for seed in SEEDS:
        by_seed.append(100 * (fmean(RIGHT_WITH_NORM[seed]) - fmean(RIGHT_WITHOUT_NORM)))
    half_width = half_interval(by_seed, 0.975)
    assert half_width > 1.3 * half_interval(by_seed, 0.95)  # the level can be told
    over_seeds = f"{25 - half_width:+.2f} to {25 + half_width:+.2f}"

    differences = []
    for number in range(8):
        of_question = [RIGHT_WITH_NORM[seed][number] - RIGHT_WITHOUT_NORM[number] for seed in SEEDS]
        differences.append(fmean(of_question))
    low, high = resampled_interval(differences, 0.0125, 0.9875)
    assert [low, high] != resampled_interval(differences, 0.025, 0.975)
    over_questions = f"{low:+.2f} to {high:+.2f}"

    too_few = "too few questions to tell"
    if 2 * half_width >= high - low:
        too_few = "too few seeds to tell"
    # The paper: 77.66 - 76.80.
    expected = f"| MMBench-EN | +25.00 | +0.86 | {over_questions} | {over_seeds} | {too_few} |"
    assert expected in report_text


def test_a_benchmark_whose_seeds_are_alike_has_no_interval_in_the_report(report_text):
    alike = "all seeds differ by the same: too few to tell"
    assert f"| POPE | +0.00 | +0.36 |  |  | {alike} |" in report_text


def test_the_interval_of_the_average_in_the_report_is_at_95_percent(report_text):
    half_width = half_interval([0.5, 0.7, 0.6], 0.95)
    interval = f"{0.6 - half_width:+.2f} to {0.6 + half_width:+.2f}"
    # The paper: 69.41 - 68.49.
    differences = f"| average | +0.60 | +0.92 |  | {interval}"
    assert f"{differences} | the paper's +0.92 is outside |" not in report_text
    assert f"{differences} | same sign, the paper's +0.92 is outside |" in report_text
    assert "**The paper's main result holds.**" in report_text


def test_scores_in_the_report_are_means_of_seeds_beside_the_paper_s(report_text):
    average = f"61.10 ± {half_interval([60.5, 61.7, 61.1], 0.95):.2f}"
    mmbench = f"{37.5:.2f} ± {half_interval([37.5, 50, 25], 0.95):.2f}"
    assert f"| norm and GWC | 3 | {mmbench} | 100.00 | {average} |" in report_text
    assert "| the paper's norm and GWC | 1 | 77.66 | 87.87 | 69.41 |" in report_text


def test_gain_and_entry_in_the_report_are_means_of_seeds(report_text):
    gain = f"2.000 ± {half_interval([1.5, 2.5, 2.0], 0.95):.3f}"
    entry = f"45.000 ± {half_interval([44, 45, 46], 0.95):.3f}"
    assert f"| norm and GWC | {entry} | 0.500 | {gain} |" in report_text


def lines_with_average_interval(low, high):
    """Returns lines of a group. Only the average of `gwc` decides."""
    average = Line("average", (low + high) / 2, 0.0, 0.9, None, (low, high))
    pope = Line("POPE", 1.0, 0.0, 0.3, (-9.0, -8.0), (-9.0, -8.0))
    average_of_aligned = Line("average", 1.0, 0.0, 0.9, None, (-5.0, -4.0))
    return {
        "gwc": [pope, average],
        "aligned": [average_of_aligned],
    }


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        pytest.param([(0.1, 0.9), (0.2, 1.0)], "holds", id="both-above"),
        pytest.param([(0.1, 0.9), (-0.2, 1.0)], "is not shown", id="only-the-first-above"),
        pytest.param([(-0.1, 0.9), (0.2, 1.0)], "is not shown", id="only-the-second-above"),
        pytest.param([(0.1, 0.9)], "is not shown", id="the-other-was-not-run"),
        pytest.param([(0.1, 0.9), (-0.9, -0.1)], "does not hold", id="above-and-below"),
        pytest.param([(-0.1, 0.9), (-0.9, -0.1)], "does not hold", id="around-and-below"),
    ],
)
def test_the_main_result_needs_both_models(intervals, expected):
    by_group = {}
    for number, (low, high) in enumerate(intervals):
        by_group[str(number)] = lines_with_average_interval(low, high)
    assert main_result(by_group, 2) == expected


def results_of_seeds(answers, averages=(), benchmark="pope acc"):
    """Returns results by seed: right and wrong answers, and averages if they are known."""
    by_seed = {}
    for seed, scores in enumerate(answers):
        columns = {}
        if averages:
            columns["average"] = averages[seed]
        by_seed[seed] = {
            "answers": {benchmark: {"asked": "same", "scores": scores}},
            "columns": columns,
        }
    return by_seed


ANSWERS_WITHOUT_NORM = [
    [0, 0, 0, 0],
    [0, 0, 0, 0],
    [0, 0, 0, 1],
]
ANSWERS_WITH_NORM = [
    [1, 0, 0, 0],
    [1, 1, 0, 0],
    [1, 1, 1, 1],
]


def assert_interval(line, mean, half_width):
    expected = (mean - half_width, mean + half_width)
    assert line.over_seeds == pytest.approx(expected)


@pytest.mark.parametrize("benchmark_count", [1, 9])
def test_intervals_of_benchmarks_are_wider_the_more_there_are(benchmark_count):
    """Bonferroni: each of nine is at 1 - 0.05 / 9; the average's interval stays at 95 %."""
    by_arm = {
        "none": results_of_seeds(ANSWERS_WITHOUT_NORM, [60.0, 61.0, 60.5]),
        "gwc": results_of_seeds(ANSWERS_WITH_NORM, [60.5, 61.7, 61.1]),
    }
    by_seed = []
    for with_norm, without_norm in zip(ANSWERS_WITH_NORM, ANSWERS_WITHOUT_NORM, strict=True):
        by_seed.append(100 * (fmean(with_norm) - fmean(without_norm)))

    pope, average = lines_of(by_arm, None, benchmark_count)["gwc"]
    pope_half_width = half_interval(by_seed, 1 - 0.05 / benchmark_count)
    assert_interval(pope, fmean(by_seed), pope_half_width)
    assert_interval(average, 0.6, half_interval((0.5, 0.7, 0.6), 0.95))


def evaluations_of_paper_columns():
    """Returns evaluations of the paper's nine columns, with 10, 20, ... 90 percent."""
    evaluations = []
    for number, (task, metric_name, _) in enumerate(PAPER_COLUMNS.values(), 1):
        score = number * 0.1
        if task == "ocrbench":
            score = number * 100  # it counts answers, of 1000
        metrics = [
            Metric("other", 7.0),
            Metric(metric_name, score),
            Metric(metric_name, 7.0, subset="part"),
        ]
        evaluations.append(Evaluation(task, task, metrics, 9, 9, []))
    return evaluations


def test_the_average_is_over_the_papers_nine_columns():
    evaluations = evaluations_of_paper_columns()
    assert paper_average(evaluations) == {"average": pytest.approx(50.0)}
    assert paper_average(evaluations[1:]) == {}


def test_there_is_no_average_if_a_task_was_only_partly_evaluated():
    evaluations = evaluations_of_paper_columns()
    partly_evaluated = replace(evaluations[0], samples=4)
    assert paper_average([*evaluations[1:], partly_evaluated]) == {}


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
        # The ends of an interval belong to it.
        ((0.25, 0.75), None, 0.75, "the paper's +0.75 is inside"),
        ((0.25, 0.75), None, 0.25, "the paper's +0.25 is inside"),
        ((0.0, 1.0), None, None, "not shown"),
        # Seeds count if there is no interval over questions, or one as wide.
        ((-2.0, 3.0), None, 1.0, "too few seeds to tell"),
        ((-2.0, 3.0), (-2.0, 3.0), 1.0, "too few seeds to tell"),
    ],
)
def test_a_difference_is_put_into_words_by_the_rule(over_seeds, over_questions, paper, sentence):
    line = Line("a task", 1.5, 1.0, paper, over_questions, over_seeds)
    assert line.sentence == sentence


def test_a_score_below_the_reference_is_lower():
    line = Line("a task", 1.0, 1.5, None, None, (-0.75, -0.25))
    assert line.sentence == "lower"


def test_too_little_is_known_of_one_seed():
    by_arm = {
        "none": results_of_seeds([[0, 0, 1]], [60.0]),
        "gwc": results_of_seeds([[1, 0, 1]], [61.0]),
    }
    pope, average = lines_of(by_arm, None, 1)["gwc"]
    assert pope.benchmark == "POPE"
    assert pope.sentence == "too few seeds to tell"
    assert average.benchmark == "average"
    assert average.sentence == "too few seeds to tell"


def test_nothing_is_compared_without_a_run_of_the_same_seed():
    without_norm = results_of_seeds([[0, 0, 1]], [60.0])
    with_norm = results_of_seeds([[1, 0, 1]], [61.0])
    of_another_seed = {7: with_norm[0]}
    assert lines_of({"none": without_norm, "gwc": of_another_seed}, None, 1) == {}
    assert lines_of({"gwc": of_another_seed}, None, 1) == {}


def test_scores_of_ocrbench_are_shares_of_its_questions():
    by_arm = {
        "none": results_of_seeds([[0, 1, 1, 1]], benchmark="ocrbench total"),
        "gwc": results_of_seeds([[0, 1, 1, 1]], benchmark="ocrbench total"),
    }
    (line,) = lines_of(by_arm, None, 1)["gwc"]
    assert line.benchmark == "OCRBench"
    assert line.score == 75.0
    assert line.reference == 75.0


def plan_of_groups(folder, *papers):
    """Returns a plan with a group for each of these models of the paper."""
    groups = {}
    for number, paper in enumerate(papers):
        group = {
            "question": "?",
            "seeds": [42],
            "variants": {"none": {"arm": "none"}, "gwc": {"arm": "gwc"}},
        }
        if paper:
            group["paper"] = paper
        groups[f"g{number}"] = group
    return qwen_plan(folder, groups)


def run_results_of_two_seeds(arm):
    """Returns results whose averages are 1 and 1.1 higher with norm and GWC."""
    averages = {42: 60.0, 43: 61.0}
    gain = None
    if arm == "gwc":
        averages = {42: 61.0, 43: 62.1}
        gain = 0.03

    results = {}
    for seed, average in averages.items():
        results[seed] = run_result(arm, seed, [1.0] * 4 + [0.0] * 4, average, gain)
        later_step = {"step": 50, "visual": [0.8, 0.6], "text": [0.4, 0.4]}
        results[seed]["dynamics"].append(later_step)
    return results


def results_of_groups(count):
    results = {}
    for number in range(count):
        for arm in ("none", "gwc"):
            results[f"g{number}/{arm}"] = run_results_of_two_seeds(arm)
    return results


@pytest.mark.parametrize(
    ("papers", "measured_groups", "expected"),
    [
        pytest.param(
            ("Qwen2.5-7B", "Llama-3.2-3B"), 1, "main result is not shown", id="one-of-two-models"
        ),
        pytest.param(
            ("Qwen2.5-7B", None), 1, "main result is not shown", id="the-other-not-measured"
        ),
        pytest.param(("Qwen2.5-7B", None), 2, "main result holds", id="one-is-the-paper-s"),
        pytest.param((None, None), 2, None, id="none-is-the-paper-s"),
    ],
)
def test_the_main_result_is_told_of_all_models_if_the_paper_has_any(
    tmp_path, drawn_figures, papers, measured_groups, expected
):
    plan = plan_of_groups(tmp_path, *papers)
    report_text = "\n".join(sections(plan, results_of_groups(measured_groups)))
    if expected is None:
        assert "main result" not in report_text
    else:
        assert expected in report_text


def test_a_column_that_the_paper_lacks_is_empty_in_its_row():
    by_arm = {"gwc": results_of_seeds([[1, 0]], [60.0], "own acc")}
    table = "\n".join(_scores(by_arm, "Qwen2.5-7B"))
    assert "| norm and GWC | 1 | 0.50 | 60.00 |" in table
    assert "| the paper's norm and GWC | 1 |  | 69.41 |" in table


@pytest.fixture
def figure_axes(tmp_path, drawn_figures):
    """Both axes of the figure of a group."""
    plan = plan_of_groups(tmp_path, "Qwen2.5-7B")
    sections(plan, results_of_groups(1))
    (figure,) = drawn_figures
    above, below = figure.axes
    return above, below


def test_the_figure_shows_differences_beside_the_paper_s(figure_axes):
    above, _ = figure_axes
    labels = [text.get_text() for text in above.get_legend().get_texts()]
    assert labels == ["norm and GWC", "the paper's"]
    differences = []
    for line in above.lines:
        if line.get_marker() == "o":
            differences.append(line.get_ydata()[0])
    assert differences == pytest.approx([0.0, 0.0, 1.05])


def test_the_figure_shows_cosines_by_step(figure_axes):
    _, below = figure_axes
    cosines = {}
    for line in below.lines:
        assert list(line.get_xdata()) == [0, 50]
        cosines[line.get_label()] = list(line.get_ydata())
    assert len(cosines) == 4
    for arm in ("none", "gwc"):
        assert cosines[f"{NAMES[arm]}, visual tokens"] == pytest.approx([0.8, 0.7])
        assert cosines[f"{NAMES[arm]}, text tokens"] == pytest.approx([0.5, 0.4])


@pytest.mark.parametrize(
    ("without_norm", "with_norm", "sentence"),
    [
        pytest.param(
            [[0, 0, 1], [0, 1, 0]],
            [[1, 0, 1], [0, 1, 1]],
            "all seeds differ by the same: too few to tell",
            id="seeds",
        ),
        pytest.param(
            [[0, 0], [0, 0], [0, 0]],
            [[0, 0], [1, 1], [1, 1]],
            "all questions differ by the same: too few to tell",
            id="questions",
        ),
    ],
)
def test_nothing_is_said_of_seeds_or_questions_that_all_differ_alike(
    without_norm, with_norm, sentence
):
    """Two seeds with the same difference do not make it certain."""
    by_arm = {
        "none": results_of_seeds(without_norm),
        "gwc": results_of_seeds(with_norm),
    }
    (line,) = lines_of(by_arm, None, 1)["gwc"]
    assert line.sentence == sentence
    assert line.interval is None


METHODS = {
    "align": ["--stage", "align"],
    "all": ["--stage", "tune"],
    "adapters": ["--stage", "tune", "--use_peft", "--lora_r", "4"],
}


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory):
    """Random models with a row.

    Attention is a large part of the cost of the first. The second is larger and has grouped heads.
    """
    folders = []
    for shape, image_side in (("tiny", 32), ("50m", 128)):
        folder = tmp_path_factory.mktemp(shape)
        random_checkpoint(folder, shape)
        write_rows(folder, image_side, [(1, 60)])
        folders.append(folder)
    return folders


def trainer_of(folder, method, checkpointing):
    options = [
        *METHODS[method],
        *("--bf16", "false"),
        *("--attn_implementation", "eager"),
        *("--model_name_or_path", f"{folder}/checkpoint"),
        *("--dataset_name", f"{folder}/data"),
        *("--output_dir", f"{folder}/run"),
        *("--gradient_checkpointing", checkpointing),
        *("--global_batch_size", "1"),
        *("--per_device_train_batch_size", "1"),
    ]
    trainer, _ = make_trainer(*parse(options))
    return trainer


def count_operations(model, batch, labels):
    """Returns what torch counts in a forward and backward pass."""
    with FlopCounterMode(display=False) as counter:  # it misses products of TRL's own loss
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        torch.nn.functional.cross_entropy(logits, targets).backward()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", pytest.param("false", marks=NIGHTLY)])
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("align", marks=NIGHTLY),
        pytest.param("all", marks=NIGHTLY),
        "adapters",
    ],
)
def test_operations_are_those_that_torch_counts(model_folders, method, checkpointing):
    for folder in model_folders:
        trainer = trainer_of(folder, method, checkpointing)
        model = trainer.model.train()
        if checkpointing == "true":
            model.gradient_checkpointing_enable()
        batch = largest_batch(trainer.args, trainer.train_dataset, trainer.data_collator)
        labels = batch.pop("labels")
        counted = count_operations(model, batch, labels)

        token_count = batch["input_ids"].shape[1]
        text_length = token_count - base_model(model).config.image_seq_length
        operations = row_flops(trainer, text_length)
        assert operations.total() == pytest.approx(counted, rel=0.03)

        one_scored = row_flops(trainer, text_length, scored=1)
        expected = operations | {"head": operations["head"] / token_count}
        assert one_scored == expected

        three_images = row_flops(trainer, text_length, images=3)
        for part in ("vision tower", "projector"):
            assert three_images[part] == pytest.approx(3 * operations[part])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_name", "layers", "width", "inner_width", "key_width", "vocabulary"),
    [
        pytest.param("llama-3.2-3b", 28, 3072, 8192, 1024, 128_256, id="llama"),
        pytest.param("qwen2.5-7b", 28, 3584, 18_944, 512, 152_064, id="qwen"),
    ],
)
def test_the_price_of_the_papers_plan(
    model_name, layers, width, inner_width, key_width, vocabulary
):
    plan = read_plan(ROOT / "experiments" / "table4.yaml")
    train_page = (DOCS / "train.md").read_text()
    first_run = next(run for run in plan.runs() if run.group == model_name)
    costs, untrained_bytes = run_cost(plan, first_run, "80GB")
    align = costs["stage1"]
    tune = costs["stage2"]
    assert align.steps == math.ceil(558_128 / 256)
    assert tune.steps == math.ceil(779_289 / 128)
    assert align.tokens == 2181 * 256 * (729 + 60)

    # Everything trained: 6 N, and 2 N again by checkpointing but for a layer's last product; in
    # small, torch's counter says so above. The encoder is a tenth.
    attention_weights = 2 * width**2 + 2 * width * key_width
    weights = layers * (attention_weights + 3 * width * inner_width)
    computed_again = weights - layers * width * inner_width
    of_token = 6 * weights + 2 * computed_again + 6 * vocabulary * width
    language_flops = tune.tokens * of_token
    assert 1.03 < tune.flops / language_flops < 1.25

    gibibytes = tune.memory(1) / 2**30
    assert re.search(rf"`tune-{model_name}`.*{gibibytes:.1f} GiB", train_page)
    divided_bytes = 4 * tune.kept * (1 - 1 / 8)  # float32 weights, gradients and two states
    assert tune.memory(8) == pytest.approx(tune.memory(1) - divided_bytes, rel=0.02)
    assert untrained_bytes == pytest.approx(tune.kept / 2, rel=0.01)
