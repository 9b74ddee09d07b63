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
def model(tmp_path, language):
    return shutil.copytree(language, tmp_path / "model")


@pytest.fixture
def tasks(tmp_path):
    """Task files: of two versions, and one that does not say its version."""
    folder = tmp_path / "tasks"
    suite_tasks.write(folder)
    silent = yaml.safe_load((folder / "tiny_choosing.yaml").read_text())
    del silent["metadata"]
    (folder / "tiny_silent.yaml").write_text(yaml.safe_dump(silent | {"task": "tiny_silent"}))
    return folder


@pytest.fixture
def ran(monkeypatch):
    """The names of the tasks that were run; each has 5 samples, and the files of the harness."""
    names = []

    def finished(lm, task, manager, folder, weights, settings):
        name = task if isinstance(task, str) else task.config.task
        names.append(name)
        for file in (f"results_{len(names)}.json", f"samples_{name}_{len(names)}.jsonl"):
            (folder / file).write_text("{}")
        versions = {package: version(package) for package in ("lm_eval", "normalign_llava")}
        versions[name] = str(run_module.task_version(task, manager))
        known = {"date": None, "versions": versions, "weights": weights, "settings": settings}
        samples = min(settings["limit"] or 5, 5)
        return Evaluation(name, name, [Metric("acc", 0.5)], samples, 5, [], **known)

    monkeypatch.setattr(run_module, "run_task", finished)
    monkeypatch.setattr(run_module, "as_lm", lambda handle, **loading: None)
    return names


def evaluated(model, tasks, *names, **options):
    return evaluate(str(model), tasks=names, include_path=tasks, **options)


MODEL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
TASK_FILES = ["own.yml", "own.py", "sub/own.yaml", "sub/own.py"]


@pytest.mark.parametrize("file", [*MODEL_FILES, *TASK_FILES, "../notes.txt"])
def test_a_result_is_that_of_the_files_of_its_model_and_of_its_tasks(model, tasks, ran, file):
    evaluated(model, tasks, "tiny_choosing")
    changed = (model if file in MODEL_FILES else tasks) / file
    changed.parent.mkdir(exist_ok=True)
    text = changed.read_text() if changed.exists() else ""
    changed.write_text(f"{text}\n")
    evaluated(model, tasks, "tiny_choosing")
    assert len(ran) == (1 if file == "../notes.txt" else 2)


@pytest.mark.parametrize("change", [{"limit": 3}, {"batch_size": 2}, {"dtype": "bfloat16"}])
def test_a_result_is_that_of_its_settings(model, tasks, ran, processor, change):
    processor(1.0)
    settings = {"limit": 2, "dtype": "float32"}
    for _ in range(2):
        evaluated(model, tasks, "tiny_choosing", **settings)
    assert len(ran) == 1
    evaluated(model, tasks, "tiny_choosing", **settings | change)
    assert len(ran) == 2


def test_results_of_other_tasks_stay_and_one_of_a_task_without_a_version_is_kept(model, tasks, ran):
    for names in (("tiny_silent",), ("tiny_choosing", "tiny_silent"), ("tiny_silent",)):
        results = evaluated(model, tasks, *names).results
        assert [result.task for result in results] == [*names]
    assert ran == ["tiny_silent", "tiny_choosing"]
    stored = [result.task for result in read_evaluations(model)]
    assert stored == ["tiny_choosing", "tiny_silent"]


def test_a_limit_as_large_as_a_task_makes_a_whole_result_that_is_kept(
    model, tasks, ran, monkeypatch
):
    """Where all tasks were done before, the model is not loaded."""
    loaded = []
    monkeypatch.setattr(run_module, "as_lm", lambda handle, **loading: loaded.append(loading))
    for _ in range(2):
        (result,) = evaluated(model, tasks, "tiny_choosing", limit=5, dtype="float32").results
        assert not result.partial
    assert ran == ["tiny_choosing"]
    assert loaded == [{"batch_size": 1, "dtype": "float32", "load_in_4bit": False}]


def test_without_a_suite_a_task_or_data_nothing_is_evaluated(model):
    with pytest.raises(ValueError, match="Name a suite .*offline.*, tasks or data"):
        evaluate(str(model))


def test_own_data_are_read_with_the_columns_and_images_that_are_named(model, tmp_path, ran):
    table = tmp_path / "mine.csv"
    table.write_text("asked,label\nwhat?,kite\n")
    evaluate(str(model), data=str(table), columns="question=asked,answer=label")
    assert ran == ["own_mine.csv"]


def test_results_of_a_model_of_the_hub_are_written_where_the_command_is_run(
    model, tasks, ran, tmp_path, monkeypatch
):
    handle = run_module.resolve_model(str(model))
    there = replace(handle.checkpoint, name="bea/model", revision="c" * 40)
    vars(there)["weight_bytes"] = 9
    there = replace(handle, name="bea/model", checkpoint=there)
    monkeypatch.setattr(run_module, "resolve_model", lambda *args, **options: there)
    monkeypatch.chdir(tmp_path)
    done = evaluated("bea/model", tasks, "tiny_choosing", dtype="float32")
    assert done.file == Path("evaluations/bea--model/evaluation/summary.json")
    (result,) = read_evaluations(tmp_path / "evaluations" / "bea--model")
    assert result.weights == f"bea/model@{'c' * 40}" and result.settings["files"] is None


def test_what_opens_the_model_is_told_of_code_and_of_the_base(monkeypatch):
    got = {}

    def stop(model, **options):
        got.update(options)
        raise ValueError("so far")

    monkeypatch.setattr(run_module, "resolve_model", stop)
    options = {"trust_remote_code": True, "base": "there", "base_quantization": "none"}
    with pytest.raises(ValueError, match="so far"):
        evaluate("m", tasks=["pope"], **options)
    assert got == options


def test_a_result_of_an_adapter_is_that_of_its_base_and_its_quantization(
    checkpoint, tasks, ran, tmp_path
):
    base = shutil.copytree(checkpoint, tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    (tmp_path / "adapter" / "training.json").unlink()

    def again(quantization):
        known = {"base": str(base), "base_quantization": quantization}
        evaluated(tmp_path / "adapter", tasks, "tiny_choosing", **known)
        return len(ran)

    assert [again(name) for name in ("nf4", "none", "none")] == [1, 2, 2]
    trained = stored.weights(base)
    trained["model.multi_modal_projector.norm.weight"] += 1
    stored.store(base, trained)
    assert again("none") == 3


def test_a_result_of_an_adapter_on_a_base_of_the_hub_is_that_of_its_commit(
    checkpoint, tasks, ran, tmp_path, monkeypatch
):
    make_adapter(checkpoint, tmp_path / "adapter")
    handle = run_module.resolve_model(str(tmp_path / "adapter"))
    base = replace(handle.adapter.base, name="bea/base", revision="c" * 40)
    there = replace(handle, adapter=replace(handle.adapter, base=base))
    monkeypatch.setattr(run_module, "resolve_model", lambda *args, **options: there)
    evaluated(tmp_path / "adapter", tasks, "tiny_choosing")
    (result,) = read_evaluations(tmp_path / "adapter")
    assert result.settings["base"] == "c" * 40 and result.settings["quantization"] is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "Lower batch_size, or use load_in_4bit."),
        (ValueError("no\n  rows"), "ValueError: no rows"),
        (ValueError("word " * 200), "ValueError: word word"),
    ],
)
def test_the_reason_why_a_task_could_not_be_run_is_a_line(
    model, tasks, ran, monkeypatch, error, reason
):
    def fail(*args):
        raise error

    monkeypatch.setattr(run_module, "run_task", fail)
    failed = evaluated(model, tasks, "tiny_choosing").failed
    assert reason in failed["tiny_choosing"] and "\n" not in failed["tiny_choosing"]
    assert len(failed["tiny_choosing"]) < 500


def test_a_folder_that_cannot_be_written_to_ends_the_evaluation(model, tasks, ran, monkeypatch):
    def fail(*args):
        raise NotWritable("the disk is full")

    monkeypatch.setattr(run_module, "run_task", fail)
    with pytest.raises(NotWritable, match="the disk is full"):
        evaluated(model, tasks, "tiny_choosing")


def test_a_head_that_an_adapter_brought_stays_apart_from_the_embeddings(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    own = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.lm_head.weight = own
    lm = MultimodalLM(model, AutoProcessor.from_pretrained(checkpoint), 1)
    assert lm.model.lm_head.weight is own
    assert lm.model.get_input_embeddings().weight is not own


class Asked(Exception):
    """Raised where the harness would ask."""


@pytest.mark.parametrize(
    ("task", "sees", "template", "chat"),
    [
        ("tiny_looking", True, None, True),
        ("tiny_looking", False, "{{ messages }}", True),
        ("tiny_looking", False, None, False),
        ("tiny_choosing", True, "{{ messages }}", False),
        ("tiny_both", True, "{{ messages }}", False),
    ],
)
def test_answers_are_generated_through_a_chat_template_and_likelihoods_are_of_plain_text(
    tasks, monkeypatch, task, sees, template, chat
):
    (tasks / "both.yaml").write_text("group: tiny_both\ntask: [tiny_looking, tiny_choosing]\n")
    _, manager = chosen_tasks([], [task], tasks, None)
    lm = object.__new__(MultimodalLM if sees else engine.HFLM)
    lm.tokenizer = parts.tokenizer(template)

    def stop(lm, *, apply_chat_template, limit, **options):
        assert limit == 3
        raise Asked(apply_chat_template)

    monkeypatch.setattr(engine, "simple_evaluate", stop)
    with pytest.raises(Asked) as asked:
        run_task(lm, task, manager, tasks, "", {"limit": 3})
    assert asked.value.args == (chat,)
