"""`normalign evaluate` on local tasks: what is written, kept, skipped, and said of failures."""

import json
import shutil
from datetime import date
from pathlib import Path

import pytest
import scripted_tasks
import stored
import suite_tasks
import tiny_parts as parts
import training
import yaml
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.evaluation.results import read_evaluations
from normalign_llava.evaluation.run import evaluate


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A checkpoint, and tasks: one with images, one of likelihoods, several that end badly."""
    folder = tmp_path_factory.mktemp("room")
    training.checkpoint(folder)
    tasks = folder / "tasks"
    suite_tasks.write(tasks)
    choosing = yaml.safe_load((tasks / "tiny_choosing.yaml").read_text())
    write_missing(tasks, choosing, folder / "missing")
    write_undefined(tasks, choosing)
    scripted_tasks.write_task(tasks, "pope", [{"answer": "yes", "category": "random"}])
    return folder


def write_missing(tasks, choosing, data_path):
    """A task whose data do not exist."""
    task = {**choosing, "task": "tiny_missing", "dataset_path": str(data_path)}
    (tasks / "tiny_missing.yaml").write_text(yaml.safe_dump(task))


def write_undefined(tasks, choosing):
    """A task whose score is NaN."""
    share = {"metric": "share", "aggregation": "mean", "higher_is_better": True}
    task = {**choosing, "task": "tiny_undefined", "metric_list": [share]}
    process_results = "process_results: !function undefined.share\n"
    (tasks / "tiny_undefined.yaml").write_text(yaml.safe_dump(task) + process_results)
    (tasks / "undefined.py").write_text("share = lambda *_: {'share': float('nan')}\n")


def task_words(room, output, *tasks):
    """The options of a command that evaluates tasks of the room."""
    return [
        "--output",
        str(output),
        "--include-path",
        str(room / "tasks"),
        "--tasks",
        ",".join(tasks),
    ]


def run_tasks(room, output, *tasks, **options):
    """Evaluates the room's model on tasks of the room, unless options say otherwise."""
    model = options.pop("model", room / "model")
    options = {"include_path": room / "tasks", "output": output, **options}
    return evaluate(str(model), tasks=tasks, **options)


def test_results_are_kept_in_a_summary(room, tmp_path):
    evaluated = run_tasks(room, tmp_path, "tiny_looking", "tiny_choosing", batch_size=2)
    assert not evaluated.failed
    assert evaluated.file == tmp_path / "evaluation" / "summary.json"
    choosing, looking = read_evaluations(tmp_path)
    assert evaluated.results == [looking, choosing]
    assert looking.samples == 5
    assert looking.total == 5
    assert looking.partial is False
    assert len(looking.weights) == 64
    assert looking.settings["batch_size"] == 2
    assert date.fromisoformat(looking.date)
    assert looking.versions["tiny_looking"] == "3"
    assert "lm_eval" in looking.versions
    # The data are named without their path.
    sentence = "lm-evaluation-harness runs its task tiny_looking on my-questions."
    assert looking.protocol[0] == sentence
    assert "<image>what is in 0?" in looking.protocol[-1]


def test_results_are_kept_in_the_harness_s_form(room, tmp_path):
    (result,) = run_tasks(room, tmp_path, "tiny_choosing", batch_size=2).results
    folder = tmp_path / "evaluation" / "tiny_choosing"
    (samples_path,) = folder.glob("samples_tiny_choosing_*.jsonl")
    scores = [json.loads(line)["acc"] for line in samples_path.read_text().splitlines()]
    assert len(scores) == 5
    assert result.metrics[0].value == sum(scores) / 5
    (results_path,) = folder.glob("results_*.json")
    assert json.loads(results_path.read_text())["git_hash"] is None


def test_a_finished_task_is_skipped_until_weights_or_settings_change(room, tmp_path, capsys):
    tasks = shutil.copytree(room / "tasks", tmp_path / "own")
    model = shutil.copytree(room / "model", tmp_path / "model")

    def is_skipped(model_folder):
        options = {"include_path": tasks, "model": model_folder}
        run_tasks(room, tmp_path / "out", "tiny_choosing", **options)
        return "done before" in capsys.readouterr().err

    assert not is_skipped(model)
    assert is_skipped(model)

    template_path = model / "chat_template.jinja"
    template_path.write_text(template_path.read_text() + " ")
    assert not is_skipped(model)

    # Weights change in place, so the other files are the same.
    weights = stored.weights(model)
    weights["model.multi_modal_projector.norm.weight"] += 1
    stored.store(model, weights)
    assert not is_skipped(model)
    assert is_skipped(model)

    for task_path in tasks.glob("*.yaml"):
        task_path.write_text(task_path.read_text() + "\n")
    assert not is_skipped(model)

    other_model = training.checkpoint(tmp_path / "other", arm="none")
    assert not is_skipped(other_model)


@pytest.mark.parametrize("package", ["lm_eval", "normalign_llava", "tiny_choosing"])
def test_a_result_of_another_version_is_evaluated_again(room, tmp_path, capsys, package):
    """A result counts only with the versions of harness, package and task that made it."""
    run_tasks(room, tmp_path, "tiny_choosing")
    summary_path = tmp_path / "evaluation" / "summary.json"
    content = json.loads(summary_path.read_text())
    (stored_result,) = content["evaluations"]
    version_now = stored_result["versions"][package]
    stored_result["versions"][package] = "0.0.1"
    summary_path.write_text(json.dumps(content))
    capsys.readouterr()

    run_tasks(room, tmp_path, "tiny_choosing")
    assert "done before" not in capsys.readouterr().err
    (result,) = read_evaluations(tmp_path)
    assert result.versions[package] == version_now

    run_tasks(room, tmp_path, "tiny_choosing")
    assert "done before" in capsys.readouterr().err


def test_a_new_commit_on_the_hub_is_evaluated_anew(hub, prepared, room, tmp_path):
    repository = hub.serve("bea/model", room / "model")
    command = ["evaluate", "bea/model", *task_words(room, tmp_path, "tiny_choosing")]

    def is_skipped():
        process = prepared.run(["-m", "normalign_llava", *command])
        assert process.returncode == 0, process.stderr
        assert read_evaluations(tmp_path)[0].weights == f"bea/model@{repository.commit}"
        return "done before" in process.stderr

    assert not is_skipped()
    assert is_skipped()
    repository.change({"new": b""})
    assert not is_skipped()


WRITES = """
import sys
from pathlib import Path
from normalign_llava.evaluation.results import Evaluation, Metric

for number in range(20):
    Evaluation(f"{sys.argv[2]}{number}", "t", [Metric("acc", 1)], 1, 1, []).write(Path(sys.argv[1]))
"""


def test_evaluations_that_end_at_the_same_time_are_all_kept(prepared, tmp_path):
    started = [prepared.start(["-c", WRITES, tmp_path, name]) for name in ("a", "b", "c")]
    for process in started:
        ended = process.wait()
        assert ended.returncode == 0, ended.stderr
    assert len(read_evaluations(tmp_path)) == 60
    assert {path.name for path in tmp_path.iterdir()} == {"evaluation"}


def test_a_limit_is_replaced_by_a_larger_one(room, tmp_path):
    (result,) = run_tasks(room, tmp_path, "tiny_choosing", limit=2).results
    assert result.partial
    assert result.samples == 2
    assert result.total == 5
    (larger_result,) = run_tasks(room, tmp_path, "tiny_choosing", limit=3).results
    assert larger_result.samples == 3


def test_a_limit_does_not_replace_a_whole_result(room, tmp_path):
    run_tasks(room, tmp_path, "tiny_choosing")
    with pytest.raises(ValueError, match="--limit would replace results of tiny_choosing. Name a"):
        run_tasks(room, tmp_path, "tiny_choosing", limit=2)


def test_a_suite_that_does_not_exist_is_refused(room, tmp_path):
    with pytest.raises(ValueError, match="Suite 'papers' does not exist"):
        run_tasks(room, tmp_path, suites=["papers"])


def test_tasks_that_cannot_be_run_are_named_and_the_others_are_run(room, tmp_path):
    reasons = {
        "tiny_missing": "missing",
        "tiny_undefined": "share is [nan, nan]",
        # It is on the Hub, which cannot be reached.
        "mmstar": "Lin-Chen/MMStar",
        "pope": "missing columns or new values: question",
    }
    options = task_words(room, tmp_path, *reasons, "tiny_choosing")
    outcome = CliRunner().invoke(app, ["evaluate", str(room / "model"), *options])
    assert outcome.exit_code == 1
    # There is no traceback.
    assert isinstance(outcome.exception, SystemExit)
    assert [result.task for result in read_evaluations(tmp_path)] == ["tiny_choosing"]
    shown = " ".join(outcome.output.split())
    for task, reason in reasons.items():
        _, after_task, *_ = shown.split(f"{task} could not be run: ")
        assert reason in after_task


def test_a_language_model_by_itself_is_opened_with_the_same_care(room, tmp_path):
    # With AVX512-BF16, bitsandbytes needs layers whose inputs 64 divides and whose outputs 32.
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
    model = Path(parts.language(tmp_path / "language", **sizes))
    (whole_result,) = run_tasks(
        room,
        tmp_path / "whole",
        "tiny_choosing",
        model=model,
    ).results
    (quantized_result,) = run_tasks(
        room,
        tmp_path / "quantized",
        "tiny_choosing",
        model=model,
        load_in_4bit=True,
    ).results

    settings = dict(quantized_result.settings)
    quantization = settings.pop("quantization")
    changes = {"load_in_4bit": True, "dtype": quantization["bnb_4bit_compute_dtype"]}
    assert settings == {**whole_result.settings, **changes}
    assert quantization["bnb_4bit_quant_type"] == "nf4"
    assert quantization["bnb_4bit_use_double_quant"] is True
    assert quantization["llm_int8_skip_modules"] == ["lm_head"]
    sentence = quantized_result.protocol[-1]
    assert "are quantized: 4-bit NF4, double quantization, products in" in sentence
