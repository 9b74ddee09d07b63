"""`normalign evaluate` on local tasks: what is written, kept, skipped, and said of what cannot be run."""

import json

import pytest
import tiny_parts as parts
import training
import yaml
from datasets import Dataset, Features, Image, Value

from normalign_llava.evaluate.results import read_evaluations, weights_hash
from normalign_llava.evaluate.run import evaluate, render


pytestmark = pytest.mark.slow


COLOURS = ["red", "green", "blue", "red", "blue"]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A checkpoint, and a folder with tasks: one with images, one of likelihoods, one whose data are missing."""
    folder = tmp_path_factory.mktemp("room")
    training.checkpoint(folder)
    rows = [
        {"image": {"bytes": training.image(number), "path": None}, "question": "what colour?", "answer": colour}
        for number, colour in enumerate(COLOURS)
    ]
    features = Features({"image": Image(), "question": Value("string"), "answer": Value("string")})
    Dataset.from_list(rows, features=features).to_parquet(folder / "rows.parquet")
    tasks = folder / "tasks"
    tasks.mkdir()
    shared = {
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.parquet")}},
        "test_split": "test",
        "metadata": {"version": 3},
    }
    looking = {
        **shared,
        "task": "tiny_colours",
        "output_type": "generate_until",
        "doc_to_image": ["image"],
        "doc_to_text": "<image>\n{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    choosing = {
        **shared,
        "task": "tiny_choice",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["red", "green", "blue"],
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    missing = {**choosing, "task": "tiny_missing", "dataset_kwargs": {"data_files": str(folder / "none.parquet")}}
    for task in (looking, choosing, missing):
        (tasks / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


def run(room, output, *tasks, model=None, **options):
    return evaluate(str(model or room / "model"), tasks=tasks, include_path=room / "tasks", output=output, **options)


def test_results_are_kept_in_the_harness_s_form_and_in_a_summary(room, tmp_path):
    done = run(room, tmp_path, "tiny_colours", "tiny_choice", batch_size=2)
    assert not done.failed and done.file == tmp_path / "evaluation" / "summary.json"
    choice, colours = read_evaluations(tmp_path)
    assert [colours, choice] == done.results
    assert (colours.samples, colours.total, colours.partial) == (5, 5, False)
    assert colours.weights == weights_hash(room / "model") and colours.settings["batch_size"] == 2
    assert colours.versions["tiny_colours"] == "3" and "lm_eval" in colours.versions
    assert any("max_gen_toks" in sentence for sentence in colours.protocol)
    (samples,) = (tmp_path / "evaluation" / "tiny_choice").glob("samples_tiny_choice_*.jsonl")
    answered = [json.loads(line) for line in samples.read_text().splitlines()]
    right = sum(sample["acc"] for sample in answered)
    assert len(answered) == 5 and choice.metrics[0].value == right / 5
    (raw,) = (tmp_path / "evaluation" / "tiny_choice").glob("results_*.json")
    assert json.loads(raw.read_text())["results"]["tiny_choice"]["acc,none"] == right / 5
    assert render(done).row_count == 2


def test_a_finished_task_is_skipped_until_weights_or_settings_change(room, tmp_path, capsys):
    for expected, options in ((0, {}), (1, {}), (0, {"limit": 2}), (1, {"limit": 2})):
        done = run(room, tmp_path, "tiny_choice", **options)
        assert capsys.readouterr().err.count("done before") == expected
    assert done.results[0].partial and done.results[0].samples == 2 and done.results[0].total == 5
    other = training.checkpoint(tmp_path / "other", arm="none")
    run(room, tmp_path, "tiny_choice", model=other, limit=2)
    assert "done before" not in capsys.readouterr().err


def test_a_task_without_data_is_named_and_the_others_are_run(room, tmp_path):
    done = run(room, tmp_path, "tiny_missing", "tiny_choice")
    assert [each.task for each in done.results] == ["tiny_choice"] and list(done.failed) == ["tiny_missing"]
    assert "none.parquet" in done.failed["tiny_missing"]


def test_a_language_model_alone_is_evaluated_on_text(room, tmp_path):
    language = parts.language(tmp_path / "language")
    done = run(room, tmp_path, "tiny_choice", model=language)
    assert done.results[0].samples == 5


def test_unknown_names_are_refused_with_the_nearest(room, tmp_path):
    with pytest.raises(ValueError, match="There is no task 'tiny_colors'. Did you mean tiny_colours?"):
        run(room, tmp_path, "tiny_colors")
    with pytest.raises(ValueError, match="There is no suite 'papers'"):
        evaluate(str(room / "model"), suites=["papers"])
    with pytest.raises(ValueError, match="Name a suite"):
        evaluate(str(room / "model"))
    vision = parts.vision(tmp_path / "vision", "clip")
    with pytest.raises(ValueError, match="is a vision encoder"):
        run(room, tmp_path, "tiny_choice", model=vision)
