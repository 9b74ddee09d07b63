"""Which results `normalign evaluate` keeps, and when it runs a task again; without the harness."""

import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import stored
import suite_tasks
import tiny_parts as parts
import torch
import yaml
from adapters import make_adapter
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.errors import NotWritable
from normalign_llava.evaluation import engine, run as run_module
from normalign_llava.evaluation.engine import MultimodalLM, chosen_tasks, run_task
from normalign_llava.evaluation.results import Evaluation, Metric, read_evaluations
from normalign_llava.evaluation.run import evaluate


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return parts.language(tmp_path_factory.mktemp("language") / "model")


@pytest.fixture
def model_folder(tmp_path, language):
    return shutil.copytree(language, tmp_path / "model")


@pytest.fixture
def tasks(tmp_path):
    """Task files: of two versions, and one that does not say its version."""
    folder = tmp_path / "tasks"
    suite_tasks.write(folder)
    task = yaml.safe_load((folder / "tiny_choosing.yaml").read_text())
    task["task"] = "tiny_silent"
    del task["metadata"]
    (folder / "tiny_silent.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture
def tasks_run(monkeypatch):
    """The names of the tasks that were run; each has 5 samples, and the files of the harness."""
    task_names = []

    def finish(lm, task, manager, folder, weights, settings):
        task_name = task
        if not isinstance(task, str):
            task_name = task.config.task
        task_names.append(task_name)
        run_number = len(task_names)
        (folder / f"results_{run_number}.json").write_text("{}")
        (folder / f"samples_{task_name}_{run_number}.jsonl").write_text("{}")
        return Evaluation(
            task=task_name,
            title=task_name,
            metrics=[Metric("acc", 0.5)],
            samples=min(settings["limit"] or 5, 5),
            total=5,
            protocol=[],
            date=None,
            versions={
                "lm_eval": version("lm_eval"),
                "normalign_llava": version("normalign_llava"),
                task_name: str(run_module.task_version(task, manager)),
            },
            weights=weights,
            settings=settings,
        )

    monkeypatch.setattr(run_module, "run_task", finish)
    monkeypatch.setattr(run_module, "as_lm", lambda handle, batch_size: None)
    return task_names


def evaluate_tasks(model_folder, tasks, *task_names, **options):
    return evaluate(str(model_folder), tasks=task_names, include_path=tasks, **options)


def change_file(path):
    """Adds a line, also to a file that does not exist."""
    path.parent.mkdir(exist_ok=True)
    text = ""
    if path.exists():
        text = path.read_text()
    path.write_text(f"{text}\n")


@pytest.mark.parametrize(
    "file_name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    ],
)
def test_a_task_is_run_again_if_a_file_of_the_model_changes(
    model_folder, tasks, tasks_run, file_name
):
    evaluate_tasks(model_folder, tasks, "tiny_choosing")
    change_file(model_folder / file_name)
    evaluate_tasks(model_folder, tasks, "tiny_choosing")
    assert len(tasks_run) == 2


@pytest.mark.parametrize(
    "file_name",
    [
        "own.yml",
        "own.py",
        "sub/own.yaml",
        "sub/own.py",
    ],
)
def test_a_task_is_run_again_if_a_file_of_its_folder_changes(
    model_folder, tasks, tasks_run, file_name
):
    evaluate_tasks(model_folder, tasks, "tiny_choosing")
    change_file(tasks / file_name)
    evaluate_tasks(model_folder, tasks, "tiny_choosing")
    assert len(tasks_run) == 2


def test_a_result_is_kept_if_another_file_changes(model_folder, tasks, tasks_run):
    evaluate_tasks(model_folder, tasks, "tiny_choosing")
    change_file(tasks.parent / "notes.txt")
    evaluate_tasks(model_folder, tasks, "tiny_choosing")
    assert len(tasks_run) == 1


@pytest.mark.parametrize("change", [{"limit": 3}, {"batch_size": 2}, {"dtype": "bfloat16"}])
def test_a_task_is_run_again_if_a_setting_changes(
    model_folder, tasks, tasks_run, processor, change
):
    processor(1.0)
    settings = {"limit": 2, "dtype": "float32"}
    evaluate_tasks(model_folder, tasks, "tiny_choosing", **settings)
    evaluate_tasks(model_folder, tasks, "tiny_choosing", **settings)
    assert len(tasks_run) == 1

    evaluate_tasks(model_folder, tasks, "tiny_choosing", **{**settings, **change})
    assert len(tasks_run) == 2


def test_results_of_other_tasks_stay_and_one_of_a_task_without_a_version_is_kept(
    model_folder, tasks, tasks_run
):
    for task_names in (["tiny_silent"], ["tiny_choosing", "tiny_silent"], ["tiny_silent"]):
        results = evaluate_tasks(model_folder, tasks, *task_names).results
        assert [result.task for result in results] == task_names
    assert tasks_run == ["tiny_silent", "tiny_choosing"]
    stored_tasks = [result.task for result in read_evaluations(model_folder)]
    assert stored_tasks == ["tiny_choosing", "tiny_silent"]


def test_a_limit_as_large_as_a_task_makes_a_whole_result_that_is_kept(
    model_folder, tasks, tasks_run, monkeypatch
):
    """If all tasks were done before, the model is not loaded."""
    loaded = []

    def load(handle, batch_size):
        loaded.append((batch_size, handle.options.dtype, handle.options.load_in_4bit))

    monkeypatch.setattr(run_module, "as_lm", load)
    options = {"limit": 5, "dtype": "float32"}
    (first_result,) = evaluate_tasks(model_folder, tasks, "tiny_choosing", **options).results
    (kept_result,) = evaluate_tasks(model_folder, tasks, "tiny_choosing", **options).results
    assert not first_result.partial
    assert not kept_result.partial
    assert tasks_run == ["tiny_choosing"]
    assert loaded == [(1, "float32", False)]


def test_without_a_suite_a_task_or_data_nothing_is_evaluated(model_folder):
    with pytest.raises(ValueError, match="Name a suite .*offline.*, tasks or data"):
        evaluate(str(model_folder))


def test_own_data_are_read_with_the_columns_and_images_that_are_named(
    model_folder, tmp_path, tasks_run
):
    table_path = tmp_path / "mine.csv"
    table_path.write_text("asked,label\nwhat?,kite\n")
    evaluate(str(model_folder), data=str(table_path), columns="question=asked,answer=label")
    assert tasks_run == ["own_mine.csv"]


@pytest.mark.usefixtures("tasks_run")
def test_results_of_a_model_of_the_hub_are_written_where_the_command_is_run(
    model_folder, tasks, tmp_path, monkeypatch
):
    handle = run_module.resolve_model(str(model_folder))
    checkpoint = replace(handle.checkpoint, name="bea/model", revision="c" * 40)
    vars(checkpoint)["fetched_weight_bytes"] = 9
    hub_handle = replace(handle, name="bea/model", checkpoint=checkpoint)
    monkeypatch.setattr(run_module, "resolve_model", lambda *args, **options: hub_handle)
    monkeypatch.chdir(tmp_path)

    evaluated = evaluate_tasks("bea/model", tasks, "tiny_choosing", dtype="float32")
    assert evaluated.file == Path("evaluations/bea--model/evaluation/summary.json")
    (result,) = read_evaluations(tmp_path / "evaluations" / "bea--model")
    assert result.weights == f"bea/model@{'c' * 40}"
    assert result.settings["files"] is None


@pytest.mark.usefixtures("tasks_run")
def test_results_are_written_to_a_folder_in_the_home_folder(
    model_folder, tasks, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tasks)
    evaluated = evaluate_tasks(model_folder, tasks, "tiny_choosing", output="~/results")
    assert evaluated.file == tmp_path / "results" / "evaluation" / "summary.json"
    assert not (tasks / "~").exists()


def test_what_opens_the_model_is_told_of_code_and_of_the_base(monkeypatch):
    received_options = {}

    def stop(model, given):
        received_options.update({name: getattr(given, name) for name in options})
        raise ValueError("so far")

    monkeypatch.setattr(run_module, "resolve_model", stop)
    options = {
        "trust_remote_code": True,
        "base": "there",
        "base_quantization": "none",
    }
    with pytest.raises(ValueError, match="so far"):
        evaluate("m", tasks=["pope"], **options)
    assert received_options == options


def test_a_result_of_an_adapter_depends_on_its_base_and_its_quantization(
    checkpoint, tasks, tasks_run, tmp_path
):
    base = shutil.copytree(checkpoint, tmp_path / "base")
    adapter = tmp_path / "adapter"
    make_adapter(base, adapter)
    (adapter / "training.json").unlink()
    in_four_bits = {"base": str(base), "base_quantization": "nf4"}
    whole = {"base": str(base), "base_quantization": "none"}

    evaluate_tasks(adapter, tasks, "tiny_choosing", **in_four_bits)
    assert len(tasks_run) == 1
    evaluate_tasks(adapter, tasks, "tiny_choosing", **whole)
    assert len(tasks_run) == 2
    evaluate_tasks(adapter, tasks, "tiny_choosing", **whole)
    assert len(tasks_run) == 2

    weights = stored.weights(base)
    weights["model.multi_modal_projector.norm.weight"] += 1
    stored.store(base, weights)
    evaluate_tasks(adapter, tasks, "tiny_choosing", **whole)
    assert len(tasks_run) == 3


@pytest.mark.usefixtures("tasks_run")
def test_a_result_of_an_adapter_on_a_base_of_the_hub_has_the_base_s_commit(
    checkpoint, tasks, tmp_path, monkeypatch
):
    make_adapter(checkpoint, tmp_path / "adapter")
    handle = run_module.resolve_model(str(tmp_path / "adapter"))
    base = replace(handle.adapter.base, name="bea/base", revision="c" * 40)
    hub_handle = replace(handle, adapter=replace(handle.adapter, base=base))
    monkeypatch.setattr(run_module, "resolve_model", lambda *args, **options: hub_handle)

    evaluate_tasks(tmp_path / "adapter", tasks, "tiny_choosing")
    (result,) = read_evaluations(tmp_path / "adapter")
    assert result.settings["base"] == "c" * 40
    assert result.settings["quantization"] is None


@pytest.fixture
def fail_with(tasks_run, monkeypatch):
    """Lets every task fail with an error."""

    def fail_with_error(error):
        def fail(*args):
            raise error

        monkeypatch.setattr(run_module, "run_task", fail)

    return fail_with_error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            "Lower batch_size, or use load_in_4bit.",
        ),
        (ValueError("no\n  rows"), "ValueError: no rows"),
        (ValueError("word " * 200), "ValueError: word word"),
    ],
)
def test_the_reason_why_a_task_could_not_be_run_is_a_line(
    model_folder, tasks, fail_with, error, reason
):
    fail_with(error)
    failed = evaluate_tasks(model_folder, tasks, "tiny_choosing").failed
    shown_reason = failed["tiny_choosing"]
    assert reason in shown_reason
    assert "\n" not in shown_reason
    assert len(shown_reason) < 500


def test_a_folder_that_cannot_be_written_to_ends_the_evaluation(model_folder, tasks, fail_with):
    fail_with(NotWritable("the disk is full"))
    with pytest.raises(NotWritable, match="the disk is full"):
        evaluate_tasks(model_folder, tasks, "tiny_choosing")


def test_a_head_that_an_adapter_brought_stays_apart_from_the_embeddings(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    assert model.lm_head.weight is model.get_input_embeddings().weight

    own_weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.lm_head.weight = own_weight
    lm = MultimodalLM(model, AutoProcessor.from_pretrained(checkpoint), 1)
    assert lm.model.lm_head.weight is own_weight
    assert lm.model.get_input_embeddings().weight is not own_weight


class Asked(Exception):
    """Raised where the harness would ask."""


@pytest.mark.parametrize(
    ("task", "lm_class", "template", "with_chat"),
    [
        ("tiny_looking", MultimodalLM, None, True),
        ("tiny_looking", engine.HFLM, "{{ messages }}", True),
        ("tiny_looking", engine.HFLM, None, False),
        ("tiny_choosing", MultimodalLM, "{{ messages }}", False),
        ("tiny_both", MultimodalLM, "{{ messages }}", False),
    ],
)
def test_answers_are_generated_through_a_chat_template_and_likelihoods_are_of_plain_text(
    tasks, monkeypatch, task, lm_class, template, with_chat
):
    (tasks / "both.yaml").write_text("group: tiny_both\ntask: [tiny_looking, tiny_choosing]\n")
    _, manager = chosen_tasks([], [task], tasks, None)
    lm = object.__new__(lm_class)
    lm.tokenizer = parts.tokenizer(template)

    def stop(lm, *, apply_chat_template, limit, **options):
        assert limit == 3
        raise Asked(apply_chat_template)

    monkeypatch.setattr(engine, "simple_evaluate", stop)
    with pytest.raises(Asked) as asked:
        run_task(lm, task, manager, tasks, "", {"limit": 3})
    assert asked.value.args == (with_chat,)
