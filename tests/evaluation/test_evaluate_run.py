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
    missing = {**choosing, "task": "tiny_missing", "dataset_path": str(folder / "missing")}
    (tasks / "tiny_missing.yaml").write_text(yaml.safe_dump(missing))
    share = {"metric": "share", "aggregation": "mean", "higher_is_better": True}
    undefined = {**choosing, "task": "tiny_undefined", "metric_list": [share]}
    (tasks / "undefined.py").write_text("share = lambda *_: {'share': float('nan')}\n")
    text = yaml.safe_dump(undefined) + "process_results: !function undefined.share\n"
    (tasks / "tiny_undefined.yaml").write_text(text)
    scripted_tasks.write_task(tasks, "pope", [{"answer": "yes", "category": "random"}])
    return folder


def words(room, output, *tasks):
    named = ["--include-path", str(room / "tasks"), "--tasks", ",".join(tasks)]
    return ["evaluate", str(room / "model"), "--output", str(output), *named]


def run(room, output, *tasks, model=None, **options):
    options = {"include_path": room / "tasks", "output": output, **options}
    return evaluate(str(model or room / "model"), tasks=tasks, **options)


def test_results_are_kept_in_the_harness_s_form_and_in_a_summary(room, tmp_path):
    evaluated = run(room, tmp_path, "tiny_looking", "tiny_choosing", batch_size=2)
    assert not evaluated.failed and evaluated.file == tmp_path / "evaluation" / "summary.json"
    choice, colours = read_evaluations(tmp_path)
    assert [colours, choice] == evaluated.results
    assert (colours.samples, colours.total, colours.partial) == (5, 5, False)
    assert len(colours.weights) == 64 and colours.settings["batch_size"] == 2
    assert date.fromisoformat(colours.date)
    assert colours.versions["tiny_looking"] == "3" and "lm_eval" in colours.versions
    sentence = "lm-evaluation-harness runs its task tiny_looking on my-questions."  # no path
    assert colours.protocol[0] == sentence and "<image>what is in 0?" in colours.protocol[-1]
    (samples,) = (tmp_path / "evaluation" / "tiny_choosing").glob("samples_tiny_choosing_*.jsonl")
    right = [json.loads(line)["acc"] for line in samples.read_text().splitlines()]
    assert len(right) == 5 and choice.metrics[0].value == sum(right) / 5
    (raw,) = (tmp_path / "evaluation" / "tiny_choosing").glob("results_*.json")
    assert json.loads(raw.read_text())["git_hash"] is None


def test_a_finished_task_is_skipped_until_weights_or_settings_change(room, tmp_path, capsys):
    own = shutil.copytree(room / "tasks", tmp_path / "own")
    model = shutil.copytree(room / "model", tmp_path / "model")

    def skipped(model=model):
        run(room, tmp_path / "out", "tiny_choosing", include_path=own, model=model)
        return "done before" in capsys.readouterr().err

    assert not skipped() and skipped()
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert not skipped()
    trained = stored.weights(model)  # in place: the other files are the same
    trained["model.multi_modal_projector.norm.weight"] += 1
    stored.store(model, trained)
    assert not skipped() and skipped()
    for file in own.glob("*.yaml"):
        file.write_text(file.read_text() + "\n")
    assert not skipped() and not skipped(model=training.checkpoint(tmp_path / "other", arm="none"))


@pytest.mark.parametrize("package", ["lm_eval", "normalign_llava", "tiny_choosing"])
def test_a_result_of_another_version_is_evaluated_again(room, tmp_path, capsys, package):
    """A result counts if the harness, this package and the task are those that made it."""
    run(room, tmp_path, "tiny_choosing")
    file = tmp_path / "evaluation" / "summary.json"
    content = json.loads(file.read_text())
    (stored,) = content["evaluations"]
    now = stored["versions"][package]
    stored["versions"][package] = "0.0.1"
    file.write_text(json.dumps(content))
    capsys.readouterr()
    run(room, tmp_path, "tiny_choosing")
    assert "done before" not in capsys.readouterr().err
    (again,) = read_evaluations(tmp_path)
    assert again.versions[package] == now
    run(room, tmp_path, "tiny_choosing")
    assert "done before" in capsys.readouterr().err


def test_a_new_commit_on_the_hub_is_evaluated_anew(hub, prepared, room, tmp_path):
    repository = hub.serve("bea/model", room / "model")

    def skipped():
        command = ["evaluate", "bea/model", *words(room, tmp_path, "tiny_choosing")[2:]]
        process = prepared.run(["-m", "normalign_llava", *command])
        assert process.returncode == 0, process.stderr
        assert read_evaluations(tmp_path)[0].weights == f"bea/model@{repository.commit}"
        return "done before" in process.stderr

    assert not skipped() and skipped()
    repository.change({"new": b""})
    assert not skipped()


WRITES = """
import sys
from pathlib import Path
from normalign_llava.evaluation.results import Evaluation, Metric

for number in range(20):
    Evaluation(f"{sys.argv[2]}{number}", "t", [Metric("acc", 1)], 1, 1, []).write(Path(sys.argv[1]))
"""


def test_evaluations_that_end_at_the_same_time_are_all_kept(prepared, tmp_path):
    started = [prepared.start(["-c", WRITES, tmp_path, name]) for name in ("a", "b", "c")]
    ended = [process.wait() for process in started]
    assert [process.returncode for process in ended] == [0, 0, 0], ended[0].stderr
    assert len(read_evaluations(tmp_path)) == 60
    assert {path.name for path in tmp_path.iterdir()} == {"evaluation"}


def test_a_limit_does_not_replace_a_whole_result(room, tmp_path):
    (result,) = run(room, tmp_path, "tiny_choosing", limit=2).results
    assert result.partial and (result.samples, result.total) == (2, 5)
    (larger,) = run(room, tmp_path, "tiny_choosing", limit=3).results
    assert larger.samples == 3
    run(room, tmp_path, "tiny_choosing")
    with pytest.raises(ValueError, match="--limit would replace results of tiny_choosing. Name a"):
        run(room, tmp_path, "tiny_choosing", limit=2)
    with pytest.raises(ValueError, match="Suite 'papers' does not exist"):
        run(room, tmp_path, suites=["papers"])


def test_tasks_that_cannot_be_run_are_named_and_the_others_are_run(room, tmp_path):
    reasons = {
        "tiny_missing": "missing",
        "tiny_undefined": "share is [nan, nan]",
        "mmstar": "Lin-Chen/MMStar",  # on the Hub, which cannot be reached
        "pope": "missing columns or new values: question",
    }
    result = CliRunner().invoke(app, words(room, tmp_path, *reasons, "tiny_choosing"))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)  # no traceback
    assert [kept.task for kept in read_evaluations(tmp_path)] == ["tiny_choosing"]
    said = " ".join(result.output.split())
    for task, reason in reasons.items():
        assert reason in said.split(f"{task} could not be run: ")[1]


def test_a_language_model_alone_is_opened_with_the_same_care(room, tmp_path):
    # With AVX512-BF16, bitsandbytes needs layers whose inputs 64 divides and whose outputs 32.
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
    language = Path(parts.language(tmp_path / "language", **sizes))
    whole = run(room, tmp_path / "whole", "tiny_choosing", model=language).results[0].settings
    quantized = {"model": language, "load_in_4bit": True}
    (result,) = run(room, tmp_path / "quantized", "tiny_choosing", **quantized).results
    settings = dict(result.settings)
    how = settings.pop("quantization")
    assert settings == whole | {"load_in_4bit": True, "dtype": how["bnb_4bit_compute_dtype"]}
    assert (how["bnb_4bit_quant_type"], how["bnb_4bit_use_double_quant"]) == ("nf4", True)
    assert how["llm_int8_skip_modules"] == ["lm_head"]
    assert "are quantized: 4-bit NF4, double quantization, products in" in result.protocol[-1]
