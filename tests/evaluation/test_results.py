"""Results in their file and on the terminal, and what the harness returned, by hand."""

import json
import math
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from normalign_llava.evaluation import engine
from normalign_llava.evaluation.engine import (
    _metrics,
    _protocol_sentences,
    chosen_tasks,
    task_version,
)
from normalign_llava.evaluation.results import (
    Evaluation,
    Metric,
    files_hash,
    read_evaluations,
    read_samples,
)
from normalign_llava.evaluation.run import Evaluated


def make_result(task="pope", samples=5, total=5, **metric):
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
        make_result(**change)


@pytest.mark.parametrize(
    ("samples", "total", "partial"),
    [
        (4, 5, True),
        (5, 5, False),
        (0, 0, True),
    ],
)
def test_a_result_is_partial_if_samples_were_left_out(samples, total, partial):
    assert make_result(samples=samples, total=total).partial == partial


def test_results_are_stored_by_task_over_earlier_ones(tmp_path):
    assert read_evaluations(tmp_path) == []

    earlier_pope = make_result("pope", value=0.1, stderr=0.1, references={"blank image": 0.5})
    pope = make_result("pope", value=0.3, stderr=0.1, references={"blank image": 0.5})
    ai2d = make_result("ai2d", value=0.2, stderr=0.1, references={"blank image": 0.5})
    for evaluation in (earlier_pope, pope, ai2d):
        evaluation.write(tmp_path)
    assert read_evaluations(tmp_path) == [ai2d, pope]


def change_schema_version(content):
    content["schema_version"] = 1


def remove_fields(content):
    content["evaluations"] = [{"task": "pope"}]


def remove_evaluations(content):
    content["evaluations"] = 3


def change_references(content):
    content["evaluations"][0]["metrics"][0]["references"] = []


@pytest.mark.parametrize(
    "change",
    [
        change_schema_version,
        remove_fields,
        remove_evaluations,
        change_references,
    ],
)
def test_a_summary_of_another_form_is_refused(tmp_path, change):
    make_result("ai2d").write(tmp_path)
    summary_path = tmp_path / "evaluation" / "summary.json"
    content = json.loads(summary_path.read_text())
    change(content)
    summary_path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="summary.json is not valid: .*Evaluate again"):
        read_evaluations(tmp_path)


def write_answer(samples_path, question, accepted, answers):
    """As the harness writes it, and not only in ASCII."""
    row = {"doc": {"prompt": question, "answers": accepted}, "filtered_resps": answers}
    line = json.dumps(row, ensure_ascii=False)
    samples_path.write_text(f"{line}\n", encoding="utf-8")


def test_samples_are_read_in_their_order(tmp_path):
    assert list(read_samples(tmp_path)) == []

    write_answer(tmp_path / "samples_a.jsonl", "kite?", ["kite", "it"], ["kite", "white"])
    # This separator of lines is none in JSON.
    bird = "bird\u2028"
    write_answer(tmp_path / "samples_b.jsonl", f"{bird}?", [bird, "it"], [bird, "white"])
    (tmp_path / "results.json").write_text("{}")
    samples = [sample for _, sample in read_samples(tmp_path)]
    assert samples == [
        {
            "doc": {"prompt": "kite?", "answers": ["kite", "it"]},
            "filtered_resps": ["kite", "white"],
        },
        {
            "doc": {"prompt": f"{bird}?", "answers": [bird, "it"]},
            "filtered_resps": [bird, "white"],
        },
    ]


@pytest.fixture
def hash_of(tmp_path):
    """The hash of the files that match patterns, in a folder with only these contents."""

    def hash_of_contents(*patterns, **contents):
        for old_path in tmp_path.iterdir():
            old_path.unlink()
        for file_name, content in contents.items():
            (tmp_path / file_name).write_text(content)
        return files_hash(tmp_path, *patterns)

    return hash_of_contents


def test_a_hash_is_of_files_that_match_each_once(hash_of):
    expected = hash_of("a*", a1="x", a2="y")
    assert hash_of("a1", "a*", a2="y", a1="x", b="z") == expected


def test_a_hash_is_of_names_and_contents(hash_of):
    hashes = {
        hash_of("a*", a1="x", a2="y"),
        hash_of("a*", a1="y", a2="x"),
        hash_of("a*", a1="x", a3="y"),
        hash_of("a*", a1="x"),
    }
    assert len(hashes) == 4


def test_a_folder_does_not_count_in_a_hash(hash_of, tmp_path):
    expected = hash_of("a*", a1="x")
    (tmp_path / "a9").mkdir()
    assert files_hash(tmp_path, "a*") == expected


def table_rows(table):
    """The headers and the rows of a table, as texts."""
    columns = []
    for column in table.columns:
        columns.append([str(column.header), *[str(cell) for cell in column.cells]])
    return [list(cells) for cells in zip(*columns, strict=True)]


WHOLE_POPE = Evaluation(
    task="pope",
    title="POPE",
    metrics=[
        Metric("acc", 0.5, stderr=0.25, references={"blank image": 0.125}, samples=4),
        Metric("acc", 0.75, subset="colour", samples=2),
    ],
    samples=1000,
    total=1000,
    protocol=[],
)


def test_the_table_has_the_metrics_of_whole_tasks(tmp_path):
    partial = Evaluation("f1", "F1", [Metric("f1", 0.0)], 1000, 2000, [])
    table = Evaluated(tmp_path / "summary.json", [WHOLE_POPE, partial], {}).table()
    assert table.caption == "partial"
    assert table_rows(table) == [
        ["task", "metric", "value", "±", "blank image", "n"],
        ["pope", "acc", "0.500", "0.250", "0.125", "4"],
        ["f1", "f1", "0.000", "", "", "1,000"],
    ]


def test_the_table_of_whole_results_has_no_caption(tmp_path):
    table = Evaluated(tmp_path / "summary.json", [WHOLE_POPE], {}).table()
    assert table.caption is None


@pytest.fixture
def with_answers(tmp_path):
    """Results of three tasks, of which only own_mine has answers to show."""
    folder = tmp_path / "own_mine"
    folder.mkdir()
    sample_lines = []
    for number, answer in enumerate(["kite", "", "a " * 300, "fourth"]):
        document = {"prompt": f"[red]{number}?", "answers": ["kite", "bird"]}
        sample_lines.append(json.dumps({"doc": document, "filtered_resps": [answer, "white"]}))
    (folder / "samples_own_mine.jsonl").write_text("\n".join(sample_lines))
    results = [make_result("pope"), make_result("own_other"), make_result("own_mine")]
    return Evaluated(tmp_path / "summary.json", results, {})


def test_the_first_answers_to_own_questions_are_shown(with_answers):
    (table,) = with_answers.read_examples()
    assert "own_mine" in table.title
    _, first_row, second_row, third_row = table_rows(table)
    assert first_row == ["[red]0?", "kite", "kite or bird"]
    assert second_row == ["[red]1?", "(nothing)", "kite or bird"]
    assert len(third_row[1]) <= 200


def test_answers_are_shown_as_text_and_not_as_markup_of_the_terminal(with_answers):
    (table,) = with_answers.read_examples()
    for cell in table.columns[0].cells:
        assert isinstance(cell, Text)


def test_the_terminal_shows_results_and_answers(with_answers):
    console = Console(width=200)
    with console.capture() as captured:
        console.print(with_answers.renderable())
    assert "own_other" in captured.get()
    assert "kite or bird" in captured.get()


def make_sample(*metrics, filter_name="none"):
    return {"metrics": [*metrics], "filter": filter_name}


def test_metrics_of_a_task_have_their_errors_references_and_counts():
    scores = {
        "alias": "mine",
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "acc_colour,none": 0.25,
        "blank,none": 0.2,
        "commonest,none": 0.3,
        "blank_colour,none": 0.4,
        "contains,loose": 1,
        "contains_stderr,loose": "N/A",
        "blank_contains,loose": 0.6,
        "sample_len": 3,
    }
    samples = [
        make_sample("acc"),
        make_sample("acc", "acc_colour"),
        make_sample("contains", filter_name="loose"),
        make_sample("acc", filter_name="loose"),
    ]
    harness_results = {"results": {"mine": scores}, "samples": {"mine": samples}}
    accuracy, of_colour, contains = _metrics(harness_results, "mine")
    assert accuracy == Metric(
        name="acc",
        value=0.5,
        stderr=0.1,
        references={"blank image": 0.2, "commonest answer": 0.3},
        samples=2,
    )
    assert of_colour == Metric(
        name="acc_colour",
        value=0.25,
        references={"blank image": 0.4},
        samples=1,
    )
    assert contains == Metric(
        name="contains, loose",
        value=1.0,
        references={"blank image": 0.6},
        samples=1,
    )


def test_of_a_group_the_whole_comes_first_and_its_parts_are_subsets():
    results = {
        "a_part": {"alias": " - anatomy", "acc,none": 0.5},
        "part": {"alias": " - law", "acc,none": 0.5},
        "group": {"alias": "group", "acc,none": 0.75, "acc_stderr,none": 0.05},
    }
    samples = {
        "a_part": [make_sample("acc")],
        "part": [make_sample("acc")],
    }
    whole, anatomy, law = _metrics({"results": results, "samples": samples}, "group")
    assert whole == Metric("acc", 0.75, stderr=0.05, references={}, samples=None)
    assert anatomy == Metric("acc", 0.5, references={}, subset="anatomy", samples=1)
    assert law == Metric("acc", 0.5, references={}, subset="law", samples=1)


def test_a_part_of_a_group_without_a_title_is_called_by_its_task():
    harness_results = {
        "results": {"part": {"acc,none": 0.5}},
        "samples": {"part": [make_sample("acc")]},
    }
    (metric,) = _metrics(harness_results, "group")
    assert metric == Metric("acc", 0.5, references={}, subset="part", samples=1)


SAMPLES = [{"arguments": [["<image>Who is ä?", {}]]}, {"arguments": []}]


def protocol_of(with_chat=True, quantization=None, samples=None, **changes):
    """The protocol of a task, as one text."""
    config = {
        "task": "mine",
        "dataset_path": "somebody/data",
        "dataset_name": "en",
        "output_type": "generate_until",
        "generation_kwargs": {"max_gen_toks": 9},
        **changes,
    }
    if samples is None:
        samples = {"mine": SAMPLES}
    sentences = _protocol_sentences({"samples": samples}, config, with_chat, quantization)
    return " ".join(sentences)


@pytest.mark.parametrize(
    "fact",
    [
        "task mine on somebody/data en.",
        '"max_gen_toks": 9',
        "no penalty",
        "chat template",
        "after 0 examples",
        '"Be brief."',
        "Blank image:",
        "Commonest",
        "<image>Who is ä?",
    ],
)
def test_the_protocol_of_generated_answers_says_what_results_depend_on(fact):
    protocol = protocol_of(
        description="Be brief.",
        metric_list=[{"metric": "acc"}, {"metric": "blank"}],
    )
    assert fact in protocol
    assert "quantized" not in protocol


def test_the_protocol_of_chosen_answers_says_what_results_depend_on():
    protocol = protocol_of(
        with_chat=False,
        output_type="multiple_choice",
        num_fewshot=5,
        metric_list=[],
    )
    for fact in ("chosen by multiple_choice", "as plain text", "after 5 examples"):
        assert fact in protocol
    for absent in ("no penalty", "system prompt", "Blank image", "chat template"):
        assert absent not in protocol


def test_the_protocol_of_rolling_likelihoods_has_no_prompt():
    assert "first prompt" not in protocol_of(output_type="loglikelihood_rolling")


def test_the_protocol_without_samples_has_no_prompt():
    assert "first prompt" not in protocol_of(samples={})


def test_the_protocol_of_own_data_has_no_question_and_no_path(tmp_path):
    """A question of own data is nobody else's."""
    protocol = protocol_of(
        metadata={"rule": "Exact."},
        dataset_path=str(tmp_path),
        dataset_name=None,
    )
    assert "Exact." in protocol
    assert "Who" not in protocol
    assert f" {tmp_path.name}." in protocol
    assert str(tmp_path) not in protocol


def test_the_protocol_shortens_a_long_prompt():
    samples = {"mine": [{"arguments": [["word " * 300, {}]]}]}
    _, _, prompt = protocol_of(samples=samples).partition("prompt is ")
    assert prompt.endswith(" ...")
    assert 500 < len(prompt) <= 600


def test_the_protocol_says_how_a_model_is_quantized():
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    protocol = protocol_of(quantization=quantization)
    assert "no others, are quantized: 4-bit NF4" in protocol


def test_tasks_come_in_the_order_of_suites_and_names_and_once():
    task_names, manager = chosen_tasks(["offline"], ["pope", "offline_emoji"], None, 5)
    assert task_names == ["offline_easy_vqa", "offline_emoji", "offline_perplexity", "pope"]
    assert set(task_names) <= set(manager.all_tasks)


def test_the_suite_of_the_paper_is_vision_and_text():
    assert engine.SUITES["paper"] == engine.SUITES["vision"] + engine.SUITES["text"]


@pytest.mark.parametrize("limit", [1, 5])
def test_mmbench_is_refused_with_a_limit(limit):
    with pytest.raises(ValueError, match="mmbench_en_dev .*Leave out the limit"):
        chosen_tasks([], ["mmbench_en_dev"], None, limit)


def test_mmbench_is_taken_without_a_limit():
    task_names, _ = chosen_tasks([], ["mmbench_en_dev"], None, None)
    assert task_names == ["mmbench_en_dev"]


def test_a_suite_that_does_not_exist_is_refused():
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
    for task_name, text in TASK_FILES.items():
        (tmp_path / f"{task_name}.yaml").write_text(text)
    (tmp_path / "own.py").write_text("class Task: pass\n")
    _, manager = chosen_tasks([], ["one"], tmp_path, None)
    versions = {task_name: task_version(task_name, manager) for task_name in TASK_FILES}
    assert versions == {
        "one": "2.5",
        "two": None,
        "three": None,
        "four": None,
        "five": "7",
        # A group's tasks have versions, and it has none.
        "all": None,
    }


def test_the_version_in_an_own_file_is_in_place_of_the_package_s(tmp_path):
    (tmp_path / "pope.yaml").write_text("task: pope\nmetadata: {version: own}\n")
    _, manager = chosen_tasks([], ["pope"], tmp_path, None)
    assert task_version("pope", manager) == "own"


@pytest.fixture
def defaults_read(monkeypatch):
    """Whether the harness's own tasks were read, for each manager.

    These files take half a minute to read: two names stand for them here.
    """
    real_manager = engine.TaskManager
    calls = []

    def make_manager(include_path, include_defaults=True):
        calls.append(include_defaults)
        if include_defaults:
            return SimpleNamespace(all_tasks=["mmlu", "pope"])
        return real_manager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(engine, "TaskManager", make_manager)
    return calls


@pytest.mark.parametrize(
    ("task_names", "expected"),
    [
        (["pope"], [False]),
        (["mmlu", "pope"], [False, True]),
    ],
)
def test_the_harness_s_own_tasks_are_read_where_a_task_is_none_of_ours(
    defaults_read, task_names, expected
):
    chosen, _ = chosen_tasks([], task_names, None, None)
    assert chosen == task_names
    assert defaults_read == expected


@pytest.mark.usefixtures("defaults_read")
def test_a_task_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="Task 'mmlv' does not exist"):
        chosen_tasks([], ["mmlu", "mmlv"], None, None)
