"""Differences, intervals and tests of a comparison, against scipy and by hand."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.evaluate.compare import compare_arms, mcnemar, over_seeds, read_arm
from normalign_llava.evaluate.results import Evaluation, Metric


def evaluated(folder, task, metrics, rows, **settings):
    """A folder as `normalign evaluate` leaves it; `rows` are fields of samples, with numbers from 0."""
    Evaluation(task, task, metrics, len(rows), len(rows), [], settings=settings).write(folder)
    file = folder / "evaluation" / task / f"samples_{task}_2026-01-01T00-00-00.jsonl"
    file.parent.mkdir()
    rows = [{"doc_id": number, "filter": "none", "target_hash": "yes", **row} for number, row in enumerate(rows)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def scored(folder, answers, task="pope", truth=("yes",), first=0, **settings):
    """The same, of answers that are right, 1, or wrong, 0, to questions whose true answers come by turns."""
    rows = [
        {"metrics": ["acc"], "doc_id": first + i, "target_hash": truth[i % len(truth)], "acc": right}
        for i, right in enumerate(answers)
    ]
    return evaluated(folder, task, [Metric("acc", float(np.mean(answers)))], rows, **settings)


def answers(share, seed, count=200):
    return (np.random.default_rng(seed).random(count) < share).astype(int).tolist()


def test_two_models_over_the_same_questions(tmp_path):
    theirs, ours = answers(0.5, 1), answers(0.7, 2)
    arms = [read_arm(scored(tmp_path / name, which)) for name, which in (("base", theirs), ("model", ours))]
    (difference,) = compare_arms(arms).differences
    assert (difference.arm, difference.against, difference.questions) == ("model", "base", 200)
    assert difference.value == pytest.approx(np.mean(ours) - np.mean(theirs)) and difference.over_seeds is None
    assert difference.mcnemar == mcnemar(np.array(ours), np.array(theirs))
    # Of a mean of 200 differences: 1.96 standard errors.
    error = 1.96 * np.std(np.subtract(ours, theirs)) / 200**0.5
    assert difference.over_questions == pytest.approx((difference.value - error, difference.value + error), abs=0.01)


@pytest.mark.parametrize(
    ("task", "metric", "groups", "right", "expected"),
    [
        # Two questions in two rotations, a row each; the second is right in one; and a rotation without its question.
        ("mmbench_en_dev", "acc_circular", [7, 1_000_007, 9, 1_000_009, 1_000_011], [1, 1, 1, 0, 1], [1, 0]),
        # Three rows of one category and one of another: 4 / (2 * 3) and 4 / (2 * 1).
        ("mmstar", "acc_by_category", ["a", "a", "a", "b"], [1, 0, 0, 1], [2 / 3, 0, 0, 2]),
    ],
)
def test_scores_of_questions_have_the_benchmarks_own_mean(tmp_path, task, metric, groups, right, expected):
    metrics = [Metric(metric, float(np.mean(expected))), Metric("acc", float(np.mean(right)))]
    rows = [{"metrics": [metric, "acc"], metric: row, "acc": row[1]} for row in zip(groups, right, strict=True)]
    evaluated(tmp_path, task, metrics, rows)
    ((name, scores),) = read_arm(str(tmp_path)).runs[0].items()
    assert name == f"{task} {metric}" and list(scores.values()) == pytest.approx(expected)


def test_scores_of_two_quantizations_are_not_compared(tmp_path):
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    settings = {"whole": {"load_in_4bit": False}, "old": {}, "8": {"quantization": {"load_in_8bit": True}}}
    settings |= {dtype: {"quantization": nf4 | {"bnb_4bit_compute_dtype": dtype}} for dtype in ("bfloat16", "float16")}
    arms = {name: read_arm(scored(tmp_path / name, answers(0.5, 1), **how)) for name, how in settings.items()}
    for alike in (("whole", "old"), ("bfloat16", "float16")):
        assert len(compare_arms([arms[name] for name in alike]).differences) == 1
    for other in (("whole", "8"), ("whole", "float16"), ("8", "float16")):
        with pytest.raises(ValueError, match=r"No task is common to all \(.*pope acc.*pope acc.* quantized alike"):
            compare_arms([arms[name] for name in other])


def test_mcnemar_by_hand():
    # 8 questions right in ours alone, 1 in theirs alone: 2 (C(9,0) + C(9,1)) / 2^9 = 20 / 512.
    ours, theirs = np.array([1] * 8 + [0] + [1] * 5), np.array([0] * 8 + [1] + [1] * 5)
    assert mcnemar(ours, theirs) == pytest.approx(20 / 512)
    assert mcnemar(ours, ours) == 1.0


def test_interval_over_seeds_by_hand():
    # Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), t of 2 degrees of freedom 4.3027.
    ends = over_seeds(np.array([0.6, 0.8, 0.7]), np.array([0.5, 0.6, 0.4]))
    assert ends == pytest.approx((0.2 - 4.3027 * 0.1 / 3**0.5, 0.2 + 4.3027 * 0.1 / 3**0.5), abs=1e-4)
    assert over_seeds(np.array([0.6]), np.array([0.5, 0.6])) is None
    assert over_seeds(np.array([0.6, 0.7]), np.array([0.5, 0.6])) == pytest.approx((0.1, 0.1))


def test_several_seeds_of_two_arms(tmp_path):
    arms = []
    for name, share in (("none", 0.5), ("gwc", 0.6)):
        folders = [scored(tmp_path / f"{name}-{seed}", answers(share, seed)) for seed in range(3)]
        arms.append(read_arm(f"{name}={','.join(folders)}"))
    (difference,) = compare_arms(arms).differences
    assert (difference.arm, difference.against) == ("gwc", "none") and difference.mcnemar is None
    assert difference.over_seeds is not None and difference.over_seeds[0] < difference.value < difference.over_seeds[1]


def test_models_are_compared_on_the_questions_that_all_were_asked(tmp_path):
    few, many, part = [1, 0, 1, 1] * 10, [0, 1, 1, 0, 1] * 40, [0] * 60
    arms = [
        read_arm(scored(tmp_path / name, right))
        for name, right in (("untrained", part), ("model", few), ("whole", many))
    ]
    for difference, right in zip(compare_arms(arms).differences, (few, many), strict=True):
        assert (difference.questions, difference.score) == (40, np.mean(right[:40]))


def test_a_task_that_is_not_compared_is_named(tmp_path):
    one, other = (scored(tmp_path / name, answers(0.5, 1)) for name in ("a=b,c", "d"))
    scored(tmp_path / "a=b,c", answers(0.5, 1), task="mmstar")
    for folder in (one, other):
        Evaluation("mine", "mine", [Metric("f1", 0.5)], 9, 9, []).write(tmp_path / folder)
    shown = CliRunner().invoke(app, ["compare", one, other, "--output", str(tmp_path)], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    (kept,) = json.loads((tmp_path / "comparison.json").read_text())
    assert "pope acc" in shown.output and kept["questions"] == 200
    assert "Left out: mine f1 (without a score for each question: a=b,c, d)." in shown.output
    assert "Left out: mmstar acc (not evaluated on it: d)." in shown.output


def test_the_first_filter_of_the_summary_is_compared(tmp_path):
    metrics = [Metric("acc, strict", 1.0), Metric("acc, loose", 0.5)]
    rows = [{"metrics": ["acc"], "filter": rule, "acc": right} for rule, right in (("loose", 0.5), ("strict", 1.0))]
    ((task, scores),) = (
        read_arm(evaluated(tmp_path, "math", metrics, [row | {"doc_id": 0} for row in rows])).runs[0].items()
    )
    assert (task, [*scores.values()]) == ("math acc, strict", [1.0])


def test_what_cannot_be_compared_is_refused(tmp_path):
    whole, other = (scored(tmp_path / name / "a", answers(0.5, 1)) for name in "12")
    for arguments in ([whole], [whole, other], [f"x={whole}", f"y={whole}"], [f"x={whole},{whole}", f"y={other}"]):
        with pytest.raises(ValueError, match="two or more models, each name and each folder once"):
            compare_arms([read_arm(argument) for argument in arguments])
    with pytest.raises(ValueError, match="No task is common to all"):
        compare_arms([read_arm(whole), read_arm(scored(tmp_path / "b", answers(0.5, 1), task="mmstar"))])
    for name, others in (("c", dict(first=200)), ("d", dict(truth=["no"])), ("e", dict(truth=["yes", "no"]))):
        with pytest.raises(ValueError, match="pope acc asked the models other questions"):
            compare_arms([read_arm(whole), read_arm(scored(tmp_path / name, answers(0.5, 1), **others))])
    with pytest.raises(ValueError, match="has no evaluation/"):
        read_arm(str(tmp_path / "none"))
