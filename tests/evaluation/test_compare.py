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


def evaluated(folder, task, metrics, rows, **settings):
    """A folder as `normalign evaluate` leaves it; `rows` are fields of samples, numbered from 0."""
    Evaluation(task, task, metrics, len(rows), len(rows), [], settings=settings).write(folder)
    file = folder / "evaluation" / task / f"samples_{task}_2026-01-01T00-00-00.jsonl"
    file.parent.mkdir()
    usual = {"metrics": ["acc"], "filter": "none", "target_hash": "yes"}
    rows = [{"doc_id": number, **usual, **row} for number, row in enumerate(rows)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def scored(folder, answers, task="pope", truth="y", first=0, **settings):
    """The same, of answers, right, 1, or wrong, 0, to questions with true answers by turns."""
    rows = [
        {"doc_id": number, "target_hash": truth[number % len(truth)], "acc": right}
        for number, right in enumerate(answers, first)
    ]
    return evaluated(folder, task, [Metric("acc", float(np.mean(answers)))], rows, **settings)


def answers(share, seed, count=200):
    return (np.random.default_rng(seed).random(count) < share).astype(int).tolist()


def test_two_models_over_the_same_questions(tmp_path):
    theirs = answers(0.5, 1)
    ours = answers(0.7, 2)
    folders = scored(tmp_path / "base", theirs), scored(tmp_path / "model", ours)
    (difference,) = compare_models([*map(read_scores, folders)]).differences
    assert (difference.model, difference.against, difference.questions) == ("model", "base", 200)
    value = np.mean(ours) - np.mean(theirs)
    assert difference.value == pytest.approx(value) and difference.over_seeds is None
    assert difference.mcnemar == mcnemar(np.array(ours), np.array(theirs))
    # Of a mean of 200 differences: 1.96 standard errors.
    error = 1.96 * np.std(np.subtract(ours, theirs)) / 200**0.5
    assert difference.over_questions == pytest.approx((value - error, value + error), abs=0.01)


@pytest.mark.parametrize(
    ("metric", "rows", "expected"),
    [
        # Two questions in two rotations; the second is right in one; a rotation without its first.
        ("circular", [(7, 1), (1_000_007, 1), (9, 1), (1_000_009, 0), (1_000_011, 1)], [1, 0]),
        # Three rows of one category and one of another: 4 / (2 * 3) and 4 / (2 * 1).
        ("by_category", [("a", 1), ("a", 0), ("a", 0), ("b", 1)], [2 / 3, 0, 0, 2]),
    ],
)
def test_scores_of_questions_have_the_benchmarks_own_mean(tmp_path, metric, rows, expected):
    name = f"acc_{metric}"
    metrics = [Metric(name, float(np.mean(expected))), Metric("acc", 0.5)]
    samples = [{"metrics": [name, "acc"], name: row, "acc": row[1]} for row in rows]
    evaluated(tmp_path, "task", metrics, samples)
    ((task, scores),) = read_scores(str(tmp_path)).runs[0].items()
    assert task == f"task {name}" and list(scores.values()) == pytest.approx(expected)


def test_scores_of_two_quantizations_are_not_compared(tmp_path):
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    settings = {"whole": {"load_in_4bit": False}, "old": {}}
    settings["8"] = {"quantization": {"load_in_8bit": True}}
    for name in ("bfloat16", "float16"):
        settings[name] = {"quantization": nf4 | {"bnb_4bit_compute_dtype": name}}
    arms = {
        name: read_scores(scored(tmp_path / name, [1], **how)) for name, how in settings.items()
    }
    for alike in (("whole", "old"), ("bfloat16", "float16")):
        assert len(compare_models([arms[name] for name in alike]).differences) == 1
    for other in (("whole", "8"), ("whole", "float16"), ("8", "float16")):
        with pytest.raises(ValueError, match=r"No task is common .*pope acc.*pope acc.* quantized"):
            compare_models([arms[name] for name in other])


def test_mcnemar_by_hand():
    # 8 questions right in ours alone, 1 in theirs alone: 2 (C(9,0) + C(9,1)) / 2^9 = 20 / 512.
    ours = np.array([1] * 8 + [0] + [1] * 5)
    theirs = np.array([0] * 8 + [1] + [1] * 5)
    assert mcnemar(ours, theirs) == pytest.approx(20 / 512)
    assert mcnemar(ours, ours) == 1.0


def test_interval_over_seeds_by_hand():
    # Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3); t, 2 degrees: 4.3027.
    ends = over_seeds(np.array([0.6, 0.8, 0.7]), np.array([0.5, 0.6, 0.4]))
    half = 4.3027 * 0.1 / 3**0.5
    assert ends == pytest.approx((0.2 - half, 0.2 + half), abs=1e-4)
    assert over_seeds(np.array([0.6]), np.array([0.5, 0.6])) is None


def test_interval_over_other_numbers_of_seeds_is_welch_s():
    """By hand: 4 runs of variance 1/600 and 2 of 1/50; Student's pooled interval is another."""
    scores = np.array([0.65, 0.7, 0.75, 0.7])
    reference = np.array([0.4, 0.6])
    parts = np.array([scores.var(ddof=1) / 4, reference.var(ddof=1) / 2])
    assert parts == pytest.approx([1 / 2400, 1 / 100])
    degrees = parts.sum() ** 2 / (parts**2 / [3, 1]).sum()
    half = stats.t.ppf(0.975, degrees) * parts.sum() ** 0.5
    assert over_seeds(scores, reference) == pytest.approx((0.2 - half, 0.2 + half))
    pooled = ((3 / 600 + 1 / 50) / 4 * (1 / 4 + 1 / 2)) ** 0.5
    assert half > 2 * stats.t.ppf(0.975, 4) * pooled


@pytest.mark.parametrize(
    ("scores", "reference"),
    [
        ([0.9, 0.8], [0.88, 0.78]),  # 0.02 each, but for rounding
        ([0.6, 0.7], [0.5, 0.6]),
        ([0.1 + 0.2, 0.5], [0.1, 0.3]),
        ([61.0, 61.0, 61.0], [60.0, 60.0]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([0.1 + 0.2, 0.3], [0.0, 0.0]),  # rounding is that of the larger numbers
        ([-0.3, -(0.1 + 0.2)], [-1.0, -1.0]),
    ],
)
def test_runs_that_all_differ_alike_have_no_interval(scores, reference):
    assert over_seeds(np.array(scores), np.array(reference)) is None


def test_what_differs_by_more_than_rounding_has_an_interval():
    low, high = over_seeds(np.array([0.9, 0.8]), np.array([0.88, 0.78 - 1e-3]))
    assert low < 0.02 < high
    for scores in ([0.5, 0.5, 0.52], [0.5, 0.5, 0.5]):
        low, high = over_seeds(np.array(scores), np.array([0.4, 0.41]))
        assert low < 0.1 < high


def test_questions_that_all_differ_alike_have_no_interval():
    ones = np.ones(10)
    zeros = np.zeros(10)
    assert over_questions(ones, zeros) is over_questions(ones, ones) is None
    assert over_questions(np.array([1.0]), np.array([0.0])) is None
    low, high = over_questions(np.array([1.0] * 9 + [0.0]), zeros)
    assert low < 0.9 < high


def test_the_interval_over_questions_is_a_percentile_of_ten_thousand_draws():
    scores = np.random.default_rng(4).normal(size=20)
    known = {"n_resamples": 10_000, "method": "percentile", "rng": 0}
    drawn = stats.bootstrap((scores,), np.mean, confidence_level=0.95, **known)
    expected = tuple(drawn.confidence_interval)
    assert over_questions(scores, np.zeros(20)) == pytest.approx(expected, abs=1e-12)


def test_a_comparison_says_that_runs_or_questions_are_alike(tmp_path):
    arms = []
    for name, right in (("none", 0), ("gwc", 1)):
        folders = [scored(tmp_path / f"{name}-{seed}", [right] * 5) for seed in range(2)]
        arms.append(f"{name}={','.join(folders)}")
    command = ["compare", *arms, "--output", str(tmp_path)]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "160"}).output
    row = next(line for line in shown.splitlines() if "pope acc" in line)
    assert row.split()[-3:] == ["alike", "alike", "-"]
    assert "'alike': all differ by the same" in " ".join(shown.split())
    (kept,) = json.loads((tmp_path / "comparison.json").read_text())
    assert kept["over_seeds"] is kept["over_questions"] is None and kept["several_runs"]


def test_what_alike_means_is_told_if_only_the_first_row_has_it(tmp_path):
    right = {"none": [0] * 20, "all": [1] * 20, "half": [0, 1] * 10}
    folders = [scored(tmp_path / name, answers) for name, answers in right.items()]
    command = ["compare", *folders, "--output", str(tmp_path)]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "160"}).output
    first, last = (line.split()[2:] for line in shown.splitlines() if "pope acc" in line)
    assert (first[0], last[0]) == ("all", "half") and "alike" in first and "alike" not in last
    assert "'alike': all differ by the same" in " ".join(shown.split())


@pytest.mark.parametrize(("confidence", "named"), [(0.95, "95 %"), (0.995, "99.5 %")])
def test_the_table_names_the_confidence_of_its_intervals(tmp_path, confidence, named):
    models = [read_scores(scored(tmp_path / name, [1, 0])) for name in ("base", "ours")]
    assert f", {named} intervals" in compare_models(models, confidence).renderable().caption


def test_the_table_has_a_row_for_each_difference():
    kept = [
        Difference("pope acc", "ours", "base", 1200, 0.75, 0.5, (0.1, 0.4), None, 0.03),
        Difference("one", "ours", "base", 1, 0.5, 0.75, None, (-0.3, -0.2), None, True),
        Difference("same", "ours", "base", 5, 1.0, 0.5, None, None, None, True),
    ]
    table = Comparison([ModelScores("base", []), ModelScores("ours", [])], kept).renderable()
    titles = ["task", "model", "n", "score", "base", "difference", "over questions", "over seeds"]
    assert [column.header for column in table.columns] == [*titles, "p"]
    assert list(zip(*(column.cells for column in table.columns), strict=True)) == [
        ("pope acc", "ours", "1,200", "0.750", "0.500", "+0.250", "+0.100 +0.400", "-", "0.030"),
        ("one", "ours", "1", "0.500", "0.750", "-0.250", "-", "-0.300 -0.200", "-"),
        ("same", "ours", "5", "1.000", "0.500", "+0.500", "alike", "alike", "-"),
    ]


def test_intervals_are_the_same_again_and_wider_at_more_confidence(tmp_path):
    arms = []
    for name, share in (("none", 0.5), ("gwc", 0.6)):
        folders = [scored(tmp_path / f"{name}-{seed}", answers(share, seed)) for seed in range(3)]
        arms.append(read_scores(f"{name}={','.join(folders)}"))
    ends = {}
    for confidence in (0.5, 0.95, 0.99):
        (row,) = compare_models(arms, confidence).differences
        (again,) = compare_models(arms, confidence).differences
        assert row == again and row.several_runs
        ends[confidence] = [row.over_questions, row.over_seeds]
    for low, middle, high in zip(*ends.values(), strict=True):
        assert high[0] < middle[0] < low[0] < row.value < low[1] < middle[1] < high[1]


def test_one_run_against_several_has_no_p_value_and_no_interval_over_seeds(tmp_path):
    folders = [scored(tmp_path / f"ours-{seed}", answers(0.6, seed)) for seed in range(2)]
    ours = f"ours={','.join(folders)}"
    base = scored(tmp_path / "base", answers(0.5, 9))
    for arms in ([base, ours], [ours, base]):
        (row,) = compare_models([*map(read_scores, arms)]).differences
        assert row.mcnemar is row.over_seeds is None and not row.several_runs


def test_scores_that_are_not_right_or_wrong_have_no_p_value(tmp_path):
    folders = [scored(tmp_path / "base", [0, 1, 1]), scored(tmp_path / "ours", [0.5, 1, 1])]
    arms = [*map(read_scores, folders)]
    for pair, value in ((arms, 1 / 6), (arms[::-1], -1 / 6)):
        (row,) = compare_models(pair).differences
        assert row.mcnemar is None and row.value == pytest.approx(value)


def test_the_first_metric_that_every_question_has_is_compared(tmp_path):
    metrics = [Metric("acc_shape", 1.0), Metric("acc", 0.5)]
    rows = [{"metrics": ["acc", "acc_shape"], "acc": 1, "acc_shape": 1}, {"acc": 0}]
    ((task, scores),) = read_scores(evaluated(tmp_path, "mine", metrics, rows)).runs[0].items()
    assert (task, [*scores.values()]) == ("mine acc", [1.0, 0.0])


@pytest.mark.parametrize("said", ["red", [True, False]])
def test_a_metric_whose_samples_are_no_numbers_is_not_compared(tmp_path, said):
    """Words, or the pairs of which F1 is made."""
    metrics = [Metric("f1", 1.0), Metric("acc", 0.5)]
    rows = [{"metrics": ["f1", "acc"], "f1": said, "acc": right} for right in (1, 0)]
    ((task, scores),) = read_scores(evaluated(tmp_path, "mine", metrics, rows)).runs[0].items()
    assert (task, [*scores.values()]) == ("mine acc", [1.0, 0.0])


def test_an_arm_is_named_after_its_folder_wherever_it_is_called_from(tmp_path, monkeypatch):
    whole = scored(tmp_path / "base", [1, 0])
    monkeypatch.chdir(whole)
    here = read_scores(".")
    assert here.name == "base"
    with pytest.raises(ValueError, match="none twice"):  # the same folder by another path
        compare_models([here, read_scores(f"other={whole}")])


def test_tasks_and_arms_that_are_not_compared_are_named_once_and_in_order():
    known = {task: {(task, 0, ""): 1.0} for task in "fbdace"}
    left_out = Comparison(
        [ModelScores("whole", [known]), ModelScores("none", [{}, {}])], []
    ).left_out()
    expected = [f"Left out: {task} (not evaluated on it: none)." for task in "abcdef"]
    assert left_out == expected


def test_parts_of_a_group_number_their_questions_each_from_the_start(tmp_path):
    """So a part whose questions are others does not hide behind one whose are the same."""
    folders = []
    for name, truth in (("a", "y"), ("b", "n")):
        folders.append(scored(tmp_path / name, [1, 0, 1], task="my_group"))
        samples = next((tmp_path / name).rglob("samples_*.jsonl"))
        other = samples.read_text().replace('"target_hash": "y"', f'"target_hash": "{truth}"')
        (samples.parent / "samples_my_other_2026-01-01T00-00-00.jsonl").write_text(other)
    ((_, scores),) = read_scores(folders[0]).runs[0].items()
    assert len(scores) == 6
    with pytest.raises(ValueError, match="my_group acc asked the models different questions"):
        compare_models([*map(read_scores, folders)])


def test_answers_to_another_version_of_a_task_are_not_compared(tmp_path):
    folders = []
    for version in ("1.0", "2.0"):
        folders.append(scored(tmp_path / version, [1, 0, 1]))
        result = Evaluation("pope", "POPE", [Metric("acc", 0.5)], 3, 3, [], None, {"pope": version})
        result.write(tmp_path / version)
    with pytest.raises(ValueError, match="pope acc asked the models different questions"):
        compare_models([*map(read_scores, folders)])


def test_several_seeds_of_two_arms(tmp_path):
    arms = []
    for name, share in (("none", 0.5), ("gwc", 0.6)):
        folders = [scored(tmp_path / f"{name}-{seed}", answers(share, seed)) for seed in range(3)]
        arms.append(read_scores(f"{name}={','.join(folders)}"))
    (difference,) = compare_models(arms).differences
    assert (difference.model, difference.against) == ("gwc", "none") and difference.mcnemar is None
    assert difference.over_seeds[0] < difference.value < difference.over_seeds[1]


def test_models_are_compared_on_the_questions_that_all_were_asked(tmp_path):
    right = {"untrained": [0] * 60, "model": [1, 0, 1, 1] * 10, "whole": [0, 1, 1, 0, 1] * 40}
    arms = [read_scores(scored(tmp_path / name, answers)) for name, answers in right.items()]
    compared = {row.model: (row.questions, row.score) for row in compare_models(arms).differences}
    assert compared == {name: (40, np.mean(right[name][:40])) for name in ("model", "whole")}


def test_a_task_that_is_not_compared_is_named(tmp_path):
    one, other = (scored(tmp_path / name, answers(0.5, 1)) for name in ("a=b,c", "d"))
    scored(tmp_path / "a=b,c", answers(0.5, 1), task="mmstar")
    scored(tmp_path / "d", answers(0.5, 1), task="ai2d")
    for folder in (one, other):
        Evaluation("mine", "mine", [Metric("f1", 0.5)], 9, 9, []).write(tmp_path / folder)
    command = ["compare", one, other, "--output", str(tmp_path)]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    (kept,) = json.loads((tmp_path / "comparison.json").read_text())
    assert "pope acc" in shown.output and kept["questions"] == 200
    assert "Left out: mine f1 (no score per question: a=b,c, d)." in shown.output
    assert "Left out: mmstar acc (not evaluated on it: d)." in shown.output
    assert "Left out: ai2d acc (not evaluated on it: a=b,c)." in shown.output


def test_the_first_filter_of_the_summary_is_compared(tmp_path):
    metrics = [Metric("acc, strict", 1.0), Metric("acc, loose", 0.5)]
    loose = {"filter": "loose", "acc": 0.5}
    strict = {"filter": "strict", "acc": 1.0, "doc_id": 0}
    folder = evaluated(tmp_path, "math", metrics, [loose, strict])
    ((task, scores),) = read_scores(folder).runs[0].items()
    assert (task, [*scores.values()]) == ("math acc, strict", [1.0])


def test_what_cannot_be_compared_is_refused(tmp_path):
    whole, other = (scored(tmp_path / name / "a", answers(0.5, 1)) for name in "12")
    twice = ([f"x={whole}", f"y={whole}"], [f"x={whole},{whole}", f"y={other}"])
    for arguments in ([whole], [whole, other], *twice):
        with pytest.raises(ValueError, match="two or more models, as NAME=FOLDER, and none twice"):
            compare_models([*map(read_scores, arguments)])
    with pytest.raises(ValueError, match="No task is common to all"):
        compare_models(
            [
                read_scores(whole),
                read_scores(scored(tmp_path / "b", [0, 1], task="mmstar")),
            ]
        )
    for name, change in (("c", {"first": 200}), ("d", {"truth": "n"}), ("e", {"truth": "yn"})):
        arm = read_scores(scored(tmp_path / name, answers(0.5, 1), **change))
        with pytest.raises(ValueError, match="pope acc asked the models different questions"):
            compare_models([read_scores(whole), arm])
    with pytest.raises(ValueError, match="has no evaluation/"):
        read_scores(str(tmp_path / "none"))
