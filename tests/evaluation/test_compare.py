"""Differences, intervals and tests of a comparison, against scipy and by hand."""

import json

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.evaluation.compare import (
    Comparison,
    Difference,
    ModelScores,
    compare_models,
    mcnemar,
    over_questions,
    over_seeds,
    read_scores,
)
from normalign_llava.evaluation.results import Evaluation, Metric


def write_evaluation(model_folder, task, metrics, samples, **settings):
    """Writes what `normalign evaluate` leaves; `samples` have fields to add to the usual ones."""
    count = len(samples)
    Evaluation(task, task, metrics, count, count, [], settings=settings).write(model_folder)
    lines = []
    for number, changed_fields in enumerate(samples):
        sample = {
            "doc_id": number,
            "metrics": ["acc"],
            "filter": "none",
            "target_hash": "yes",
            **changed_fields,
        }
        lines.append(json.dumps(sample))
    task_folder = model_folder / "evaluation" / task
    task_folder.mkdir()
    samples_path = task_folder / f"samples_{task}_2026-01-01T00-00-00.jsonl"
    samples_path.write_text("\n".join(lines))
    return str(model_folder)


def write_scores(model_folder, scores, task="pope", truth="y", first=0, **settings):
    """Writes an evaluation with a score for each question.

    The true answers to the questions take turns through the letters of `truth`. `first` is the
    number of the first question.
    """
    samples = []
    for number, score in enumerate(scores, first):
        target = truth[number % len(truth)]
        samples.append({"doc_id": number, "target_hash": target, "acc": score})
    metrics = [Metric("acc", float(np.mean(scores)))]
    return write_evaluation(model_folder, task, metrics, samples, **settings)


def random_scores(share, seed, count=200):
    """Scores of which about this share is right, 1, and the others wrong, 0."""
    draws = np.random.default_rng(seed).random(count)
    return (draws < share).astype(int).tolist()


def write_two_arms_of_three_seeds(tmp_path):
    arms = []
    for arm_name, share in (("none", 0.5), ("gwc", 0.6)):
        folders = []
        for seed in range(3):
            run_folder = tmp_path / f"{arm_name}-{seed}"
            folders.append(write_scores(run_folder, random_scores(share, seed)))
        arms.append(read_scores(f"{arm_name}={','.join(folders)}"))
    return arms


def only_task(model_folder):
    """The task, and the scores of its questions, of a model with one run and one task."""
    (scores_by_task,) = read_scores(str(model_folder)).runs
    ((task, scores),) = scores_by_task.items()
    return task, list(scores.values())


def show_comparison(arms, output_folder, columns=160):
    command = ["compare", *arms, "--output", str(output_folder)]
    outcome = CliRunner().invoke(app, command, env={"COLUMNS": str(columns)})
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def lines_of_pope(shown):
    return [line for line in shown.splitlines() if "pope acc" in line]


def test_two_models_over_the_same_questions(tmp_path):
    base_scores = random_scores(0.5, 1)
    model_scores = random_scores(0.7, 2)
    base_folder = write_scores(tmp_path / "base", base_scores)
    model_folder = write_scores(tmp_path / "model", model_scores)

    arms = [read_scores(base_folder), read_scores(model_folder)]
    (difference,) = compare_models(arms).differences

    assert difference.model == "model"
    assert difference.against == "base"
    assert difference.questions == 200
    expected_value = np.mean(model_scores) - np.mean(base_scores)
    assert difference.value == pytest.approx(expected_value)
    assert difference.over_seeds is None
    assert difference.mcnemar == mcnemar(np.array(model_scores), np.array(base_scores))
    # The interval of a mean of 200 differences is about 1.96 standard errors wide on each side.
    standard_error = np.std(np.subtract(model_scores, base_scores)) / 200**0.5
    low = expected_value - 1.96 * standard_error
    high = expected_value + 1.96 * standard_error
    assert difference.over_questions == pytest.approx((low, high), abs=0.01)


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        # Two questions in two rotations; the second is right in one; a rotation without its first.
        pytest.param(
            "circular",
            [(7, 1), (1_000_007, 1), (9, 1), (1_000_009, 0), (1_000_011, 1)],
            [1, 0],
            id="circular",
        ),
        # Three rows of one category and one of another: 4 / (2 * 3) and 4 / (2 * 1).
        pytest.param(
            "by_category",
            [("a", 1), ("a", 0), ("a", 0), ("b", 1)],
            [2 / 3, 0, 0, 2],
            id="by_category",
        ),
    ],
)
def test_scores_of_questions_have_the_benchmarks_own_mean(tmp_path, metric, values, expected):
    metric_name = f"acc_{metric}"
    samples = []
    for value in values:
        _, right = value
        samples.append({"metrics": [metric_name, "acc"], metric_name: value, "acc": right})
    metrics = [Metric(metric_name, float(np.mean(expected))), Metric("acc", 0.5)]
    write_evaluation(tmp_path, "task", metrics, samples)

    task, scores = only_task(tmp_path)
    assert task == f"task {metric_name}"
    assert scores == pytest.approx(expected)


NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}

QUANTIZATION_SETTINGS = {
    "whole": {"load_in_4bit": False},
    "old": {},
    "8": {"quantization": {"load_in_8bit": True}},
    "bfloat16": {"quantization": {**NF4, "bnb_4bit_compute_dtype": "bfloat16"}},
    "float16": {"quantization": {**NF4, "bnb_4bit_compute_dtype": "float16"}},
}


def quantized_arms(tmp_path, names):
    arms = []
    for name in names:
        folder = write_scores(tmp_path / name, [1], **QUANTIZATION_SETTINGS[name])
        arms.append(read_scores(folder))
    return arms


@pytest.mark.parametrize("names", [("whole", "old"), ("bfloat16", "float16")])
def test_scores_of_the_same_quantization_are_compared(tmp_path, names):
    arms = quantized_arms(tmp_path, names)
    assert len(compare_models(arms).differences) == 1


@pytest.mark.parametrize("names", [("whole", "8"), ("whole", "float16"), ("8", "float16")])
def test_scores_of_two_quantizations_are_not_compared(tmp_path, names):
    arms = quantized_arms(tmp_path, names)
    with pytest.raises(ValueError, match=r"No task is common .*pope acc.*pope acc.* quantized"):
        compare_models(arms)


def test_mcnemar_by_hand():
    # 8 questions are right only in the first, 1 only in the second:
    # 2 (C(9,0) + C(9,1)) / 2^9 = 20 / 512.
    model_scores = np.array([1] * 8 + [0] + [1] * 5)
    base_scores = np.array([0] * 8 + [1] + [1] * 5)
    assert mcnemar(model_scores, base_scores) == pytest.approx(20 / 512)


def test_mcnemar_of_equal_scores_is_one():
    scores = np.array([1] * 8 + [0] + [1] * 5)
    assert mcnemar(scores, scores) == 1.0


def test_interval_over_seeds_by_hand():
    # Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3); t, 2 degrees: 4.3027.
    model_scores = np.array([0.6, 0.8, 0.7])
    base_scores = np.array([0.5, 0.6, 0.4])
    half_width = 4.3027 * 0.1 / 3**0.5
    expected = (0.2 - half_width, 0.2 + half_width)
    assert over_seeds(model_scores, base_scores) == pytest.approx(expected, abs=1e-4)


def test_one_run_has_no_interval_over_seeds():
    assert over_seeds(np.array([0.6]), np.array([0.5, 0.6])) is None


def test_interval_over_other_numbers_of_seeds_is_welch_s():
    """By hand: 4 runs of variance 1/600 and 2 of 1/50; Student's pooled interval differs."""
    model_scores = np.array([0.65, 0.7, 0.75, 0.7])
    base_scores = np.array([0.4, 0.6])
    squared_errors = np.array([model_scores.var(ddof=1) / 4, base_scores.var(ddof=1) / 2])
    assert squared_errors == pytest.approx([1 / 2400, 1 / 100])

    degrees = squared_errors.sum() ** 2 / (squared_errors**2 / [3, 1]).sum()
    half_width = stats.t.ppf(0.975, degrees) * squared_errors.sum() ** 0.5
    expected = (0.2 - half_width, 0.2 + half_width)
    assert over_seeds(model_scores, base_scores) == pytest.approx(expected)

    pooled_error = ((3 / 600 + 1 / 50) / 4 * (1 / 4 + 1 / 2)) ** 0.5
    assert half_width > 2 * stats.t.ppf(0.975, 4) * pooled_error


@pytest.mark.parametrize(
    ("scores", "reference"),
    [
        pytest.param([0.9, 0.8], [0.88, 0.78], id="but for rounding"),
        pytest.param([0.6, 0.7], [0.5, 0.6], id="ascending"),
        pytest.param([0.1 + 0.2, 0.5], [0.1, 0.3], id="sum"),
        pytest.param([61.0, 61.0, 61.0], [60.0, 60.0], id="other numbers of runs"),
        pytest.param([0.0, 0.0], [0.0, 0.0], id="zeros"),
        pytest.param([0.1 + 0.2, 0.3], [0.0, 0.0], id="rounding of the larger numbers"),
        pytest.param([-0.3, -(0.1 + 0.2)], [-1.0, -1.0], id="negative"),
    ],
)
def test_runs_that_all_differ_alike_have_no_interval(scores, reference):
    assert over_seeds(np.array(scores), np.array(reference)) is None


@pytest.mark.parametrize(
    ("scores", "reference", "difference"),
    [
        pytest.param([0.9, 0.8], [0.88, 0.78 - 1e-3], 0.02, id="pairs"),
        pytest.param([0.5, 0.5, 0.52], [0.4, 0.41], 0.1, id="both vary"),
        pytest.param([0.5, 0.5, 0.5], [0.4, 0.41], 0.1, id="reference varies"),
    ],
)
def test_what_differs_by_more_than_rounding_has_an_interval(scores, reference, difference):
    low, high = over_seeds(np.array(scores), np.array(reference))
    assert low < difference < high


@pytest.mark.parametrize(
    ("scores", "reference"),
    [
        pytest.param(np.ones(10), np.zeros(10), id="all by one"),
        pytest.param(np.ones(10), np.ones(10), id="not at all"),
        pytest.param(np.array([1.0]), np.array([0.0]), id="one question"),
    ],
)
def test_questions_that_all_differ_alike_have_no_interval(scores, reference):
    assert over_questions(scores, reference) is None


def test_questions_of_which_one_differs_have_an_interval():
    scores = np.array([1.0] * 9 + [0.0])
    low, high = over_questions(scores, np.zeros(10))
    assert low < 0.9 < high


def test_the_interval_over_questions_is_a_percentile_of_ten_thousand_draws():
    scores = np.random.default_rng(4).normal(size=20)
    bootstrapped = stats.bootstrap(
        (scores,),
        np.mean,
        confidence_level=0.95,
        n_resamples=10_000,
        method="percentile",
        rng=0,
    )
    expected = tuple(bootstrapped.confidence_interval)
    assert over_questions(scores, np.zeros(20)) == pytest.approx(expected, abs=1e-12)


def test_a_comparison_says_that_runs_or_questions_are_alike(tmp_path):
    arms = []
    for arm_name, right in (("none", 0), ("gwc", 1)):
        first_run = write_scores(tmp_path / f"{arm_name}-0", [right] * 5)
        second_run = write_scores(tmp_path / f"{arm_name}-1", [right] * 5)
        arms.append(f"{arm_name}={first_run},{second_run}")

    shown = show_comparison(arms, tmp_path)
    (line,) = lines_of_pope(shown)
    assert line.split()[-3:] == ["alike", "alike", "-"]
    assert "'alike': all differ by the same" in " ".join(shown.split())

    (stored,) = json.loads((tmp_path / "comparison.json").read_text())
    assert stored["over_seeds"] is None
    assert stored["over_questions"] is None
    assert stored["several_runs"]


def test_what_alike_means_is_told_if_only_the_first_row_has_it(tmp_path):
    none_right = write_scores(tmp_path / "none", [0] * 20)
    all_right = write_scores(tmp_path / "all", [1] * 20)
    half_right = write_scores(tmp_path / "half", [0, 1] * 10)

    shown = show_comparison([none_right, all_right, half_right], tmp_path)
    first_line, last_line = lines_of_pope(shown)
    first_cells = first_line.split()[2:]
    last_cells = last_line.split()[2:]
    assert first_cells[0] == "all"
    assert last_cells[0] == "half"
    assert "alike" in first_cells
    assert "alike" not in last_cells
    assert "'alike': all differ by the same" in " ".join(shown.split())


@pytest.mark.parametrize(("confidence", "named"), [(0.95, "95 %"), (0.995, "99.5 %")])
def test_the_table_names_the_confidence_of_its_intervals(tmp_path, confidence, named):
    base = read_scores(write_scores(tmp_path / "base", [1, 0]))
    model = read_scores(write_scores(tmp_path / "ours", [1, 0]))
    table = compare_models([base, model], confidence).renderable()
    assert f", {named} intervals" in table.caption


def test_the_table_has_a_row_for_each_difference():
    differences = [
        Difference(
            task="pope acc",
            model="ours",
            against="base",
            questions=1200,
            score=0.75,
            reference=0.5,
            over_questions=(0.1, 0.4),
            over_seeds=None,
            mcnemar=0.03,
        ),
        Difference(
            task="one",
            model="ours",
            against="base",
            questions=1,
            score=0.5,
            reference=0.75,
            over_questions=None,
            over_seeds=(-0.3, -0.2),
            mcnemar=None,
            several_runs=True,
        ),
        Difference(
            task="same",
            model="ours",
            against="base",
            questions=5,
            score=1.0,
            reference=0.5,
            over_questions=None,
            over_seeds=None,
            mcnemar=None,
            several_runs=True,
        ),
    ]
    models = [ModelScores("base", []), ModelScores("ours", [])]
    table = Comparison(models, differences).renderable()

    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns == {
        "task": ["pope acc", "one", "same"],
        "model": ["ours", "ours", "ours"],
        "n": ["1,200", "1", "5"],
        "score": ["0.750", "0.500", "1.000"],
        "base": ["0.500", "0.750", "0.500"],
        "difference": ["+0.250", "-0.250", "+0.500"],
        "over questions": ["+0.100 +0.400", "-", "alike"],
        "over seeds": ["-", "-0.300 -0.200", "alike"],
        "p": ["0.030", "-", "-"],
    }
    assert list(columns) == [
        "task",
        "model",
        "n",
        "score",
        "base",
        "difference",
        "over questions",
        "over seeds",
        "p",
    ]
    assert len(table.columns) == 9


def test_intervals_are_the_same_again(tmp_path):
    arms = write_two_arms_of_three_seeds(tmp_path)
    for confidence in (0.5, 0.95, 0.99):
        (difference,) = compare_models(arms, confidence).differences
        (again,) = compare_models(arms, confidence).differences
        assert difference == again
        assert difference.several_runs


@pytest.mark.parametrize("interval", ["over_questions", "over_seeds"])
def test_intervals_are_wider_at_more_confidence(tmp_path, interval):
    arms = write_two_arms_of_three_seeds(tmp_path)
    lows = []
    highs = []
    for confidence in (0.5, 0.95, 0.99):
        (difference,) = compare_models(arms, confidence).differences
        low, high = getattr(difference, interval)
        lows.append(low)
        highs.append(high)
    assert lows[2] < lows[1] < lows[0] < difference.value < highs[0] < highs[1] < highs[2]


@pytest.mark.parametrize("several_runs_first", [False, True])
def test_one_run_against_several_has_no_p_value_and_no_interval_over_seeds(
    tmp_path, several_runs_first
):
    first_run = write_scores(tmp_path / "ours-0", random_scores(0.6, 0))
    second_run = write_scores(tmp_path / "ours-1", random_scores(0.6, 1))
    several_runs = read_scores(f"ours={first_run},{second_run}")
    one_run = read_scores(write_scores(tmp_path / "base", random_scores(0.5, 9)))
    arms = [one_run, several_runs]
    if several_runs_first:
        arms.reverse()

    (difference,) = compare_models(arms).differences
    assert difference.mcnemar is None
    assert difference.over_seeds is None
    assert not difference.several_runs


def test_scores_that_are_not_right_or_wrong_have_no_p_value(tmp_path):
    base = read_scores(write_scores(tmp_path / "base", [0, 1, 1]))
    model = read_scores(write_scores(tmp_path / "ours", [0.5, 1, 1]))

    (gain,) = compare_models([base, model]).differences
    assert gain.mcnemar is None
    assert gain.value == pytest.approx(1 / 6)

    (loss,) = compare_models([model, base]).differences
    assert loss.mcnemar is None
    assert loss.value == pytest.approx(-1 / 6)


def test_the_first_metric_that_every_question_has_is_compared(tmp_path):
    metrics = [Metric("acc_shape", 1.0), Metric("acc", 0.5)]
    samples = [
        {"metrics": ["acc", "acc_shape"], "acc": 1, "acc_shape": 1},
        {"acc": 0},
    ]
    write_evaluation(tmp_path, "mine", metrics, samples)
    assert only_task(tmp_path) == ("mine acc", [1.0, 0.0])


@pytest.mark.parametrize("value", ["red", [True, False]], ids=["words", "pairs of F1"])
def test_a_metric_whose_samples_are_no_numbers_is_not_compared(tmp_path, value):
    metrics = [Metric("f1", 1.0), Metric("acc", 0.5)]
    samples = [
        {"metrics": ["f1", "acc"], "f1": value, "acc": 1},
        {"metrics": ["f1", "acc"], "f1": value, "acc": 0},
    ]
    write_evaluation(tmp_path, "mine", metrics, samples)
    assert only_task(tmp_path) == ("mine acc", [1.0, 0.0])


def test_an_arm_is_named_after_its_folder_wherever_it_is_called_from(tmp_path, monkeypatch):
    model_folder = write_scores(tmp_path / "base", [1, 0])
    monkeypatch.chdir(model_folder)
    assert read_scores(".").name == "base"


def test_a_folder_is_not_compared_with_itself_by_another_path(tmp_path, monkeypatch):
    model_folder = write_scores(tmp_path / "base", [1, 0])
    monkeypatch.chdir(model_folder)
    arms = [read_scores("."), read_scores(f"other={model_folder}")]
    with pytest.raises(ValueError, match="none twice"):
        compare_models(arms)


def test_tasks_and_arms_that_are_not_compared_are_named_once_and_in_order():
    run_scores = {task: {(task, 0, ""): 1.0} for task in "fbdace"}
    evaluated = ModelScores("whole", [run_scores])
    not_evaluated = ModelScores("none", [{}, {}])
    comparison = Comparison([evaluated, not_evaluated], [])
    assert comparison.left_out() == [
        "Left out: a (not evaluated on it: none).",
        "Left out: b (not evaluated on it: none).",
        "Left out: c (not evaluated on it: none).",
        "Left out: d (not evaluated on it: none).",
        "Left out: e (not evaluated on it: none).",
        "Left out: f (not evaluated on it: none).",
    ]


def test_parts_of_a_group_number_their_questions_each_from_the_start(tmp_path):
    """So a part with other questions does not hide behind one with the same questions."""
    arms = []
    for arm_name, truth in (("a", "y"), ("b", "n")):
        folder = write_scores(tmp_path / arm_name, [1, 0, 1], task="my_group")
        (samples_path,) = (tmp_path / arm_name).rglob("samples_*.jsonl")
        first_part = samples_path.read_text()
        other_part = first_part.replace('"target_hash": "y"', f'"target_hash": "{truth}"')
        other_path = samples_path.parent / "samples_my_other_2026-01-01T00-00-00.jsonl"
        other_path.write_text(other_part)
        arms.append(read_scores(folder))

    _, scores = only_task(tmp_path / "a")
    assert len(scores) == 6
    with pytest.raises(ValueError, match="my_group acc asked the models different questions"):
        compare_models(arms)


def test_answers_to_another_version_of_a_task_are_not_compared(tmp_path):
    arms = []
    for version in ("1.0", "2.0"):
        folder = write_scores(tmp_path / version, [1, 0, 1])
        evaluation = Evaluation(
            task="pope",
            title="POPE",
            metrics=[Metric("acc", 0.5)],
            samples=3,
            total=3,
            protocol=[],
            date=None,
            versions={"pope": version},
        )
        evaluation.write(tmp_path / version)
        arms.append(read_scores(folder))
    with pytest.raises(ValueError, match="pope acc asked the models different questions"):
        compare_models(arms)


def test_several_seeds_of_two_arms(tmp_path):
    arms = write_two_arms_of_three_seeds(tmp_path)
    (difference,) = compare_models(arms).differences
    assert difference.model == "gwc"
    assert difference.against == "none"
    assert difference.mcnemar is None
    low, high = difference.over_seeds
    assert low < difference.value < high


def test_models_are_compared_on_the_questions_that_all_were_asked(tmp_path):
    scores = {
        "untrained": [0] * 60,
        "model": [1, 0, 1, 1] * 10,
        "whole": [0, 1, 1, 0, 1] * 40,
    }
    arms = []
    for arm_name, arm_scores in scores.items():
        arms.append(read_scores(write_scores(tmp_path / arm_name, arm_scores)))

    model_difference, whole_difference = compare_models(arms).differences
    assert model_difference.model == "model"
    assert model_difference.questions == 40
    assert model_difference.score == np.mean(scores["model"][:40])
    assert whole_difference.model == "whole"
    assert whole_difference.questions == 40
    assert whole_difference.score == np.mean(scores["whole"][:40])


def test_a_task_that_is_not_compared_is_named(tmp_path):
    first_path = tmp_path / "a=b,c"
    second_path = tmp_path / "d"
    unscored = Evaluation("mine", "mine", [Metric("f1", 0.5)], 9, 9, [])
    folders = []
    for model_path, own_task in ((first_path, "mmstar"), (second_path, "ai2d")):
        folders.append(write_scores(model_path, random_scores(0.5, 1)))
        write_scores(model_path, random_scores(0.5, 1), task=own_task)
        unscored.write(model_path)

    shown = show_comparison(folders, tmp_path, columns=120)
    (stored,) = json.loads((tmp_path / "comparison.json").read_text())
    assert stored["questions"] == 200
    assert "pope acc" in shown
    assert "Left out: mine f1 (no score per question: a=b,c, d)." in shown
    assert "Left out: mmstar acc (not evaluated on it: d)." in shown
    assert "Left out: ai2d acc (not evaluated on it: a=b,c)." in shown


def test_the_first_filter_of_the_summary_is_compared(tmp_path):
    metrics = [Metric("acc, strict", 1.0), Metric("acc, loose", 0.5)]
    samples = [
        {"filter": "loose", "acc": 0.5},
        {"filter": "strict", "acc": 1.0, "doc_id": 0},
    ]
    write_evaluation(tmp_path, "math", metrics, samples)
    assert only_task(tmp_path) == ("math acc, strict", [1.0])


@pytest.mark.parametrize(
    "arms",
    [
        pytest.param(["{first}"], id="one model"),
        pytest.param(["{first}", "{second}"], id="one name twice"),
        pytest.param(["x={first}", "y={first}"], id="one folder twice"),
        pytest.param(["x={first},{first}", "y={second}"], id="one run twice"),
    ],
)
def test_models_that_are_not_two_are_refused(tmp_path, arms):
    first = write_scores(tmp_path / "1" / "a", random_scores(0.5, 1))
    second = write_scores(tmp_path / "2" / "a", random_scores(0.5, 1))
    models = [read_scores(arm.format(first=first, second=second)) for arm in arms]
    with pytest.raises(ValueError, match="two or more models, as NAME=FOLDER, and none twice"):
        compare_models(models)


def test_models_without_a_common_task_are_refused(tmp_path):
    pope_scores = read_scores(write_scores(tmp_path / "a", random_scores(0.5, 1)))
    mmstar_scores = read_scores(write_scores(tmp_path / "b", [0, 1], task="mmstar"))
    with pytest.raises(ValueError, match="No task is common to all"):
        compare_models([pope_scores, mmstar_scores])


@pytest.mark.parametrize("changes", [{"first": 200}, {"truth": "n"}, {"truth": "yn"}])
def test_models_that_were_asked_different_questions_are_refused(tmp_path, changes):
    scores = random_scores(0.5, 1)
    base = read_scores(write_scores(tmp_path / "a", scores))
    model = read_scores(write_scores(tmp_path / "c", scores, **changes))
    with pytest.raises(ValueError, match="pope acc asked the models different questions"):
        compare_models([base, model])


def test_a_folder_without_an_evaluation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no evaluation/"):
        read_scores(str(tmp_path / "none"))
