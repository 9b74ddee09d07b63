# SPDX-License-Identifier: Apache-2.0
"""The whole quickstart on the real parts, a few steps long: killed, started again, and scored."""

import os
import re
import shlex
import signal
import time
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path

import pytest
import stored
import torch
import training
from json_files import read_json
from paths import DOCS, HELPERS
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.evaluation.results import read_evaluations
from normalign_llava.fetched.easy_vqa import OVERALL, QUESTION_KINDS
from normalign_llava.hub_cards.card.metadata import is_ours
from normalign_llava.quickstart.results import METRICS, print_results, read_report
from normalign_llava.quickstart.run import Settings, run_quickstart
from normalign_llava.quickstart.train import stage, train_stage, words
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow

STEPS = {
    "max_steps": 2,
    "global_batch_size": 2,
    "per_device_train_batch_size": 2,
    "save_steps": 1,
}
SHORT = Settings(
    stage1=stage("quickstart-align", **STEPS),
    stage2=stage("quickstart-tune", **STEPS, lora_r=2),
    asked=6,
    asked_before=3,
    shown_per_kind=1,
    diagnosed=2,
)
TASKS = {task for task, _ in METRICS.values()}
START = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_quickstart_run import SHORT, run_quickstart
run_quickstart(Path({output!r}), SHORT)
"""


@dataclass
class Resumed:
    """A quickstart that was killed in stage 1, and then run to its end."""

    folder: Path
    killed_output: str
    seconds_before: dict[str, float]
    results: dict
    changed_files: list[Path]
    """Files of the untrained model that the second run wrote again."""

    output: str


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder of the run that all tests here share."""
    return tmp_path_factory.mktemp("run") / "quickstart"


def kill_in_stage_1(prepared, output) -> str:
    """Starts a quickstart and kills it; returns what it printed."""
    test_folders = [str(HELPERS), str(Path(__file__).parent)]
    code = START.format(tests=test_folders, output=str(output))
    process = prepared.start(["-c", code])
    while process.poll() is None and not list(output.glob("stage1-trainer/*/trainer_state.json")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    killed = process.wait()
    assert not (output / "stage1").exists()
    assert not (output / "results.json").exists()
    return killed.stdout + killed.stderr


def modification_times(folder) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.fixture(scope="module")
def resumed(archives, prepared, output):
    killed_output = kill_in_stage_1(prepared, output)
    seconds_before = read_json(output / "journal.json")["seconds"]
    times_before = modification_times(output / "untrained")
    with pytest.MonkeyPatch.context() as monkeypatch:
        printed = StringIO()
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr("sys.stdout", printed)
        results = run_quickstart(output, SHORT)

    times_after = modification_times(output / "untrained")
    changed_files = [path for path in times_before if times_after[path] != times_before[path]]
    return Resumed(
        output,
        killed_output,
        seconds_before,
        results,
        changed_files,
        printed.getvalue(),
    )


def test_a_killed_quickstart_is_resumed(resumed):
    assert "stage 1" in resumed.killed_output
    assert "Resuming" not in resumed.killed_output
    assert "convert, finished" in resumed.output
    assert resumed.changed_files == []


def test_what_was_done_before_keeps_its_time(resumed):
    assert list(resumed.seconds_before) == ["fetch", "convert", "build"]
    seconds = resumed.results["seconds"]
    assert resumed.seconds_before.items() <= seconds.items()
    assert list(seconds)[:4] == ["fetch", "convert", "build", "stage 1"]


def test_the_results_are_stored_as_those_of_the_docs_are(resumed):
    results = resumed.results
    assert results == read_json(resumed.folder / "results.json")
    assert results["reloaded_alike"]
    results_in_docs = read_json(DOCS / "quickstart" / "results.json")
    assert results_in_docs.keys() == results.keys()
    assert results_in_docs["settings"].keys() == asdict(SHORT).keys()


EXPECTED_COUNTS = {
    **dict.fromkeys(QUESTION_KINDS, 2),
    OVERALL: 6,
    "emoji": 6,
}


def test_the_results_count_questions_of_every_kind(resumed):
    assert resumed.results["count"] == EXPECTED_COUNTS
    expected_before = {kind: count // 2 for kind, count in EXPECTED_COUNTS.items()}
    assert resumed.results["before"]["count"] == expected_before


def test_a_finished_quickstart_leaves_its_folders_and_files(resumed):
    names = {path.name for path in resumed.folder.iterdir()}
    assert names == {
        "untrained",
        "data",
        "stage1",
        "stage2",
        "model",
        "journal.json",
        "images.png",
        "results.json",
    }
    assert not list(resumed.folder.glob("*/checkpoint-*"))


def test_the_model_records_its_training_and_its_parts_licenses(resumed):
    model_folder = resumed.folder / "model"
    assert read_json(model_folder / "training.json")["options"]["max_steps"] == 2
    licenses = read_json(model_folder / "build.json")["licenses"]
    assert licenses["vision"]["license"] == "mit"
    assert licenses["language"]["license"] == "apache-2.0"


def test_the_evaluations_agree_with_the_results(resumed):
    """Accuracies, blank images and the commonest answers are the trained model's."""
    results = resumed.results
    evaluations = {result.task: result for result in read_evaluations(resumed.folder / "model")}
    assert evaluations.keys() == TASKS
    for evaluation in evaluations.values():
        assert evaluation.partial

    for kind, (task, metric_name) in METRICS.items():
        metrics = [metric for metric in evaluations[task].metrics if metric.name == metric_name]
        (metric,) = metrics
        assert metric.value == results["after"]["accuracy"][kind]
        assert metric.samples == EXPECTED_COUNTS[kind]
        assert metric.references == {
            "blank image": results["after"]["blank"][kind],
            "commonest answer": results["majority"][kind],
        }


def test_the_card_names_the_tasks(resumed):
    card = (resumed.folder / "model" / "README.md").read_text(encoding="utf-8")
    assert is_ours(card)
    for task in TASKS:
        assert task in card


def test_the_picture_has_a_row_of_four(resumed):
    with Image.open(resumed.folder / "images.png") as picture:
        assert picture.width > 1000
        assert picture.height > 150


@pytest.mark.parametrize("expected", [*QUESTION_KINDS, "same logits", "report.html"])
def test_the_results_are_printed(resumed, expected):
    assert expected in resumed.output


def test_the_printed_command_asks_the_model(resumed):
    prefix = "Ask it: normalign "
    (line,) = [line for line in resumed.output.splitlines() if line.startswith(prefix)]
    result = CliRunner().invoke(app, shlex.split(line.removeprefix(prefix)))
    assert result.exit_code == 0, result.output


def test_the_diagnosis_is_of_the_model_by_itself(resumed):
    report = read_report(resumed.folder / "model")
    assert report["against"] is None
    assert resumed.results["verdicts"] == {"model": report["verdict"]}


def test_a_quickstart_with_another_seed_is_not_resumed(resumed):
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        run_quickstart(resumed.folder, replace(SHORT, seed=1))


@pytest.mark.parametrize("kind", METRICS)
def test_the_page_shows_the_stored_results(kind):
    """The table of docs/quickstart.md, kind by kind, from results.json."""
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    results = read_json(DOCS / "quickstart" / "results.json")
    printed_name = kind
    if kind == "easy-VQA":
        printed_name = "easy-VQA, all three"
    line = re.search(rf"^\| {printed_name} \| (\d+) \|(.+)\|$", page, re.MULTILINE)
    assert int(line[1]) == results["count"][kind]

    cells = [float(cell.strip(" *")) for cell in line[2].split("|")]
    shares = [
        results["before"]["accuracy"][kind],
        results["after"]["accuracy"][kind],
        results["after"]["blank"][kind],
        results["majority"][kind],
    ]
    assert cells == [round(share, 2) for share in shares]


def test_the_report_beside_the_page_has_the_stored_verdict():
    results = read_json(DOCS / "quickstart" / "results.json")
    report = read_json(DOCS / "quickstart" / "report.json")
    if results["baseline"]:
        assert results["verdicts"]["model"] == report["verdict"]


def test_the_printed_time_is_without_the_downloads(tmp_path):
    shares = dict.fromkeys(METRICS, 0.5)
    results = {
        "before": {"accuracy": shares},
        "after": {"accuracy": shares, "blank": shares},
        "majority": shares,
        "count": dict.fromkeys(METRICS, 3),
        "baseline": None,
        "seconds": {"fetch": 500.0, "build": 20.0, "stage 1": 31.0},
        "reloaded_alike": True,
        "verdicts": {},
    }
    console = Console(file=StringIO(), width=160)
    print_results(console, results, tmp_path, [])
    assert re.findall(r"(\d+) seconds", console.file.getvalue()) == ["51"]


@pytest.mark.parametrize(
    ("file_name", "named"),
    [
        (".git/HEAD", ".git"),
        ("journal.json", "journal.json"),
    ],
)
def test_a_folder_with_anything_else_in_it_is_refused(tmp_path, file_name, named):
    folder = tmp_path / "mine"
    own_file = folder / file_name
    own_file.parent.mkdir(parents=True)
    own_file.write_text("{}")
    with pytest.raises(ValueError, match=f"mine holds {named}, not from a quickstart"):
        run_quickstart(folder, SHORT)
    assert [path for path in folder.rglob("*") if path.is_file()] == [own_file]


def test_a_stage_that_was_killed_while_its_result_was_moved_is_finished(checkpoint, tmp_path):
    options = stage("quickstart-align", **STEPS)
    data_folder = tmp_path / "data"
    training.rows(4).select_columns(["images", "messages"]).save_to_disk(data_folder)
    run_folder = tmp_path / "killed-trainer"
    run_options = {
        **options,
        "model_name_or_path": checkpoint,
        "dataset_name": data_folder,
        "output_dir": run_folder,
        "bf16": False,
    }
    main(words(run_options))
    run_folder.rename(tmp_path / "straight")

    train_stage(options, checkpoint, data_folder, tmp_path / "killed")
    expected = stored.weights(tmp_path / "straight")
    tensors = stored.weights(tmp_path / "killed")
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


@pytest.mark.nightly
def test_a_finished_quickstart_goes_on_to_the_baseline(archives, output, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    seconds_before = run_quickstart(output, SHORT)["seconds"]
    results = run_quickstart(output, SHORT, full_baseline=True)
    assert "without the norm" in capsys.readouterr().out
    assert seconds_before.items() <= results["seconds"].items()
    assert results["baseline"]["accuracy"].keys() == results["after"]["accuracy"].keys()

    assert read_report(output / "model")["against"]["model"] == "quickstart-no-norm"
    stage1 = read_report(output / "stage1")
    assert stage1["report"]["model"] == "quickstart-stage1"
    assert stage1["against"]["model"] == "quickstart-no-norm-stage1"
    assert stage1["report"]["norm"] == "layer_norm"
    assert stage1["against"]["norm"] == "none"
    assert stage1["report"]["interface"]["ratio"] == pytest.approx(1.0, abs=0.1)
    # The recipe measures every so many steps, more than there are.
    assert [step["step"] for step in stage1["report"]["dynamics"]] == [0]

    evaluations = read_evaluations(output / "baseline" / "model")
    assert [result.task for result in evaluations] == sorted(TASKS)
    assert run_quickstart(output, SHORT)["baseline"] == results["baseline"]
