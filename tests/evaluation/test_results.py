"""Results in their file and on the terminal, and what the harness returned, by hand."""

import json
import math
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from normalign_llava.evaluation import engine
from normalign_llava.evaluation.engine import _metrics, _protocol, chosen_tasks, task_version
from normalign_llava.evaluation.results import (
    Answer,
    Evaluation,
    Metric,
    files_hash,
    read_answers,
    read_evaluations,
)
from normalign_llava.evaluation.run import Evaluated


def result(task="pope", samples=5, total=5, **metric):
    metrics = [Metric(**{"name": "acc", "value": 0.5, **metric})]
    return Evaluation(task, "A title", metrics, samples, total, ["Greedy."])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"value": math.nan}, "acc"),
        ({"stderr": math.inf}, "acc"),
        ({"references": {"blank image": math.nan}}, "acc"),
        ({"value": "0.5"}, "acc"),
        ({"value": True}, "acc"),
        ({"total": math.inf}, "samples"),
        ({"samples": math.nan}, "samples"),
    ],
)
def test_what_is_no_finite_number_is_no_result(change, named):
    with pytest.raises(ValueError, match=f"in pope, {named} is .*not finite numbers"):
        result(**change)


@pytest.mark.parametrize(
    ("samples", "total", "partial"), [(4, 5, True), (5, 5, False), (0, 0, True)]
)
def test_a_result_is_partial_if_samples_were_left_out(samples, total, partial):
    assert result(samples=samples, total=total).partial == partial


def test_results_are_stored_by_task_over_earlier_ones(tmp_path):
    assert read_evaluations(tmp_path) == []
    for task, value in (("pope", 0.1), ("pope", 0.3), ("ai2d", 0.2)):
        result(task, value=value, stderr=0.1, references={"blank image": 0.5}).write(tmp_path)
    stored = read_evaluations(tmp_path)
    assert [(kept.task, kept.metrics[0].value) for kept in stored] == [("ai2d", 0.2), ("pope", 0.3)]
    assert stored[0] == result("ai2d", value=0.2, stderr=0.1, references={"blank image": 0.5})
    file = tmp_path / "evaluation" / "summary.json"
    content = json.loads(file.read_text())
    changes = [{"schema_version": 1}, {"evaluations": [{"task": "pope"}]}, {"evaluations": 3}]
    (kept, *_) = content["evaluations"]
    (metric,) = kept["metrics"]
    changes.append({"evaluations": [kept | {"metrics": [metric | {"references": []}]}]})
    for change in changes:
        file.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match="summary.json is not valid: .*Evaluate again"):
            read_evaluations(tmp_path)


def test_answers_are_read_in_their_order(tmp_path):
    assert read_answers(tmp_path) == []
    texts = ("kite", "bird\u2028")  # not a line break in JSON
    rows = [
        {"doc": {"prompt": f"{text}?", "answers": [text, "it"]}, "filtered_resps": [text, "white"]}
        for text in texts
    ]
    for row, name in zip(rows, ("samples_a.jsonl", "samples_b.jsonl"), strict=True):
        line = json.dumps(row, ensure_ascii=False)  # as the harness writes it
        (tmp_path / name).write_text(f"{line}\n", encoding="utf-8")
    (tmp_path / "results.json").write_text("{}")
    assert read_answers(tmp_path) == [Answer(f"{text}?", text, [text, "it"]) for text in texts]


def test_a_hash_is_of_names_and_contents_of_the_files_that_match(tmp_path):
    def hashed(*patterns, **files):
        for old in tmp_path.iterdir():
            old.unlink()
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        return files_hash(tmp_path, *patterns)

    both = hashed("a*", a1="x", a2="y")
    assert hashed("a1", "a*", a2="y", a1="x", b="z") == both  # of files that match, each once
    others = [hashed("a*", a1="y", a2="x"), hashed("a*", a1="x", a3="y"), hashed("a*", a1="x")]
    assert len({both, *others}) == 4
    (tmp_path / "a9").mkdir()
    assert files_hash(tmp_path, "a*") == others[-1]


def cells(table):
    columns = ([str(column.header), *map(str, column.cells)] for column in table.columns)
    return list(map(list, zip(*columns, strict=True)))


def test_the_table_has_the_metrics_of_whole_tasks(tmp_path):
    metrics = [
        Metric("acc", 0.5, 0.25, {"blank image": 0.125}, samples=4),
        Metric("acc", 0.75, subset="colour", samples=2),
    ]
    several = Evaluation("pope", "POPE", metrics, 1000, 1000, [])
    other = Evaluation("f1", "F1", [Metric("f1", 0.0)], 1000, 2000, [])
    made = Evaluated(tmp_path / "summary.json", [several, other], {}).table()
    assert made.caption == "partial"
    assert cells(made) == [
        ["task", "metric", "value", "±", "blank image", "n"],
        ["pope", "acc", "0.500", "0.250", "0.125", "4"],
        ["f1", "f1", "0.000", "", "", "1,000"],
    ]
    assert Evaluated(tmp_path / "summary.json", [several], {}).table().caption is None


def test_the_first_answers_to_own_questions_are_shown(tmp_path):
    folder = tmp_path / "own_mine"
    folder.mkdir()
    rows = []
    for number, said in enumerate(("kite", "", "a " * 300, "fourth")):
        document = {"prompt": f"[red]{number}?", "answers": ["kite", "bird"]}
        rows.append(json.dumps({"doc": document, "filtered_resps": [said]}))
    (folder / "samples_own_mine.jsonl").write_text("\n".join(rows))
    results = [result("pope"), result("own_other"), result("own_mine")]
    (table,) = Evaluated(tmp_path / "summary.json", results, {}).read_examples()
    _, *shown = cells(table)
    assert "own_mine" in table.title and len(shown) == 3
    expected = [["[red]0?", "kite", "kite or bird"], ["[red]1?", "(nothing)", "kite or bird"]]
    assert shown[:2] == expected  # as text, and not as markup of the terminal's
    assert all(isinstance(cell, Text) for cell in table.columns[0].cells)
    assert len(shown[2][1]) <= 200
    with (console := Console(width=200)).capture() as captured:
        console.print(Evaluated(tmp_path / "summary.json", results, {}).renderable())
    assert "own_other" in captured.get() and "kite or bird" in captured.get()


def sample(*metrics, rule="none"):
    return {"metrics": [*metrics], "filter": rule}


def test_metrics_of_a_task_have_their_errors_references_and_counts():
    scores = {
        "alias": "mine", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_colour,none": 0.25,
        "blank,none": 0.2, "commonest,none": 0.3, "blank_colour,none": 0.4,
        "contains,loose": 1, "contains_stderr,loose": "N/A", "blank_contains,loose": 0.6,
        "sample_len": 3,
    }  # fmt: skip
    samples = [sample("acc"), sample("acc", "acc_colour"), sample("contains", rule="loose")]
    samples.append(sample("acc", rule="loose"))
    raw = {"results": {"mine": scores}, "samples": {"mine": samples}}
    assert _metrics(raw, "mine") == [
        Metric("acc", 0.5, 0.1, {"blank image": 0.2, "commonest answer": 0.3}, None, 2),
        Metric("acc_colour", 0.25, None, {"blank image": 0.4}, None, 1),
        Metric("contains, loose", 1.0, None, {"blank image": 0.6}, None, 1),
    ]


def test_of_a_group_the_whole_comes_first_and_its_parts_are_subsets():
    parts = {" - anatomy": "a_part", " - law": "part"}
    results = {task: {"alias": alias, "acc,none": 0.5} for alias, task in parts.items()}
    results["group"] = {"alias": "group", "acc,none": 0.75, "acc_stderr,none": 0.05}
    samples = dict.fromkeys(parts.values(), [sample("acc")])
    assert _metrics({"results": results, "samples": samples}, "group") == [
        Metric("acc", 0.75, 0.05, {}, None, None),
        Metric("acc", 0.5, None, {}, "anatomy", 1),
        Metric("acc", 0.5, None, {}, "law", 1),
    ]


def test_a_part_of_a_group_without_a_title_is_called_by_its_task():
    raw = {"results": {"part": {"acc,none": 0.5}}, "samples": {"part": [sample("acc")]}}
    assert _metrics(raw, "group") == [Metric("acc", 0.5, None, {}, "part", 1)]


def said(chat=True, quantization=None, samples=None, **config):
    about = {"task": "mine", "dataset_path": "somebody/data", "dataset_name": "en"}
    about |= {"output_type": "generate_until", "generation_kwargs": {"max_gen_toks": 9}}
    asked = {"mine": [{"arguments": [["<image>Who is ä?", {}]]}, {"arguments": []}]}
    raw = {"samples": asked if samples is None else samples}
    return " ".join(_protocol(raw, about | config, chat, quantization))


def test_the_protocol_says_what_results_depend_on(tmp_path):
    text = said(description="Be brief.", metric_list=[{"metric": "acc"}, {"metric": "blank"}])
    facts = ["task mine on somebody/data en.", '"max_gen_toks": 9', "no penalty", "chat template"]
    facts += ["after 0 examples", '"Be brief."', "Blank image:", "Commonest", "<image>Who is ä?"]
    assert [fact for fact in facts if fact not in text] == []
    assert "quantized" not in text
    chosen = said(chat=False, output_type="multiple_choice", num_fewshot=5, metric_list=[])
    for fact in ("chosen by multiple_choice", "as plain text", "after 5 examples"):
        assert fact in chosen
    for absent in ("no penalty", "system prompt", "Blank image", "chat template"):
        assert absent not in chosen
    assert "first prompt" not in said(output_type="loglikelihood_rolling")
    own = said(metadata={"rule": "Exact."}, dataset_path=str(tmp_path), dataset_name=None)
    assert "Exact." in own and "Who" not in own  # a question of own data is nobody else's
    assert f" {tmp_path.name}." in own and str(tmp_path) not in own
    assert "first prompt" not in said(samples={})
    prompt = said(samples={"mine": [{"arguments": [["word " * 300, {}]]}]}).partition("prompt is ")
    assert prompt[2].endswith(" ...") and 500 < len(prompt[2]) <= 600
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert "no others, are quantized: 4-bit NF4" in said(quantization=nf4)


def test_tasks_come_in_the_order_of_suites_and_names_and_once(tmp_path):
    chosen, manager = chosen_tasks(["offline"], ["pope", "offline_emoji"], None, 5)
    assert chosen == ["offline_easy_vqa", "offline_emoji", "offline_perplexity", "pope"]
    assert set(chosen) <= set(manager.all_tasks)
    assert engine.SUITES["paper"] == engine.SUITES["vision"] + engine.SUITES["text"]
    for limit in (1, 5):
        with pytest.raises(ValueError, match="mmbench_en_dev .*Leave out the limit"):
            chosen_tasks([], ["mmbench_en_dev"], None, limit)
    assert chosen_tasks([], ["mmbench_en_dev"], None, None)[0] == ["mmbench_en_dev"]
    with pytest.raises(ValueError, match="Suite 'papers' does not.*offline"):
        chosen_tasks(["offline", "papers"], [], None, None)


TASK_FILES = {
    "one": "task: one\nmetadata: {version: 2.5}\n",
    "two": "task: two\n",
    "three": "task: three\nmetadata: {other: 1}\n",
    "four": "task: four\nmetadata: null\n",
    "five": "task: five\nclass: !function own.Task\nmetadata: {version: 7}\n",
    "all": "group: all\ntask: [one, two]\nmetadata: {version: 9}\n",
}


def test_the_version_of_a_task_is_the_one_in_its_file(tmp_path):
    for name, text in TASK_FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "own.py").write_text("class Task: pass\n")
    _, manager = chosen_tasks([], ["one"], tmp_path, None)
    (tmp_path / "pope.yaml").write_text("task: pope\nmetadata: {version: own}\n")
    _, own = chosen_tasks([], ["pope"], tmp_path, None)
    assert task_version("pope", own) == "own"  # in place of the package's
    versions = {name: task_version(name, manager) for name in TASK_FILES}
    none = dict.fromkeys(("two", "three", "four", "all"))  # of a group its tasks have versions
    assert versions == none | {"one": "2.5", "five": "7"}


def test_the_harness_s_own_tasks_are_read_where_a_task_is_none_of_ours(tmp_path, monkeypatch):
    """Its files take half a minute to read: two names stand for them here."""
    real = engine.TaskManager
    read = []

    def manager(include_path, include_defaults=True):
        read.append(include_defaults)
        if include_defaults:
            return SimpleNamespace(all_tasks=["mmlu", "pope"])
        return real(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(engine, "TaskManager", manager)
    for names, expected in ((["pope"], [False]), (["mmlu", "pope"], [False, True])):
        read.clear()
        assert chosen_tasks([], names, None, None)[0] == names and read == expected
    with pytest.raises(ValueError, match="Task 'mmlv' does not exist"):
        chosen_tasks([], ["mmlu", "mmlv"], None, None)
