# SPDX-License-Identifier: Apache-2.0
"""The whole quickstart on the real parts, a few steps long: killed, started again, and scored."""

import json
import os
import re
import shlex
import signal
import time
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
import stored
import torch
import training
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
STEPS = {"max_steps": 2, "global_batch_size": 2, "per_device_train_batch_size": 2, "save_steps": 1}
SHORT = Settings(
    stage1=stage("quickstart-align", **STEPS),
    stage2=stage("quickstart-tune", **STEPS, lora_r=2),
    **{"asked": 6, "asked_before": 3, "shown_per_kind": 1, "diagnosed": 2},
)
TASKS = {task for task, _ in METRICS.values()}
START = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_quickstart_run import SHORT, run_quickstart
run_quickstart(Path({output!r}), SHORT)
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Of one run, which each test goes on with."""
    return tmp_path_factory.mktemp("run") / "quickstart"


def test_a_killed_quickstart_is_resumed_to_its_end(archives, prepared, output, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    source = START.format(tests=[str(HELPERS), str(Path(__file__).parent)], output=str(output))
    process = prepared.start(["-c", source])
    while process.poll() is None and not [*output.glob("stage1-trainer/*/trainer_state.json")]:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    killed = process.wait()
    assert not (output / "stage1").exists() and not (output / "results.json").exists()
    before = {path: path.stat().st_mtime_ns for path in (output / "untrained").iterdir()}
    assert "stage 1" in killed.stdout and "Resuming" not in killed.stdout + killed.stderr
    seconds = json.loads((output / "journal.json").read_text())["seconds"]
    results = run_quickstart(output, SHORT)
    assert list(seconds) == ["fetch", "convert", "build"]
    assert seconds.items() <= results["seconds"].items()  # what was done before keeps its time
    assert all(path.stat().st_mtime_ns == time_ for path, time_ in before.items())
    assert results == json.loads((output / "results.json").read_text())
    assert results["reloaded_alike"]
    shown = json.loads((DOCS / "quickstart" / "results.json").read_text())
    assert shown.keys() == results.keys() and shown["settings"].keys() == asdict(SHORT).keys()
    count = {**dict.fromkeys(QUESTION_KINDS, 2), OVERALL: 6, "emoji": 6}
    assert results["count"] == count  # of the trained model, and so is the majority's below
    assert results["before"]["count"] == {kind: asked // 2 for kind, asked in count.items()}
    assert list(results["seconds"])[:4] == ["fetch", "convert", "build", "stage 1"]
    folders = {"untrained", "data", "stage1", "stage2", "model"}
    files = {"journal.json", "images.png", "results.json"}
    assert {path.name for path in output.iterdir()} == folders | files
    assert not [*output.glob("*/checkpoint-*")]
    assert json.loads((output / "model" / "training.json").read_text())["options"]["max_steps"] == 2
    licenses = json.loads((output / "model" / "build.json").read_text())["licenses"]
    assert (licenses["vision"]["license"], licenses["language"]["license"]) == ("mit", "apache-2.0")
    evaluations = {result.task: result for result in read_evaluations(output / "model")}
    assert evaluations.keys() == TASKS and all(result.partial for result in evaluations.values())
    after = results["after"]
    for kind, (task, name) in METRICS.items():
        (metric,) = (metric for metric in evaluations[task].metrics if metric.name == name)
        assert (metric.value, metric.samples) == (after["accuracy"][kind], count[kind])
        blank = after["blank"][kind]
        commonest = results["majority"][kind]
        assert metric.references == {"blank image": blank, "commonest answer": commonest}
    card = (output / "model" / "README.md").read_text(encoding="utf-8")
    assert is_ours(card) and all(task in card for task in TASKS)
    with Image.open(output / "images.png") as image:
        assert image.width > 1000 and image.height > 150  # a row of four
    said = capsys.readouterr().out
    words = (*QUESTION_KINDS, "same logits", "report.html", "convert, finished")
    assert all(word in said for word in words)
    (command,) = (line for line in said.splitlines() if line.startswith("Ask it: normalign "))
    asked = CliRunner().invoke(app, shlex.split(command)[3:])
    assert asked.exit_code == 0, asked.output
    alone = read_report(output / "model")
    assert alone["against"] is None and results["verdicts"] == {"model": alone["verdict"]}
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        run_quickstart(output, replace(SHORT, seed=1))


def test_the_page_shows_the_stored_results():
    """The table of docs/quickstart.md, kind by kind, from results.json and the report beside it."""
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    results = json.loads((DOCS / "quickstart" / "results.json").read_text())
    names = {"easy-VQA": "easy-VQA, all three"}
    for kind in METRICS:
        values = [results["before"]["accuracy"][kind], results["after"]["accuracy"][kind]]
        values += [results["after"]["blank"][kind], results["majority"][kind]]
        row = re.search(rf"^\| {names.get(kind, kind)} \| (\d+) \|(.+)\|$", page, re.MULTILINE)
        cells = [float(cell.strip(" *")) for cell in row[2].split("|")]
        assert int(row[1]) == results["count"][kind]
        assert cells == [round(value, 2) for value in values], kind
    report = json.loads((DOCS / "quickstart" / "report.json").read_text())
    if results["baseline"]:
        assert results["verdicts"]["model"] == report["verdict"]


def test_the_time_that_is_told_is_without_the_downloads(tmp_path):
    shares = dict.fromkeys(METRICS, 0.5)
    scores = {"before": {"accuracy": shares}, "after": {"accuracy": shares, "blank": shares}}
    results = {**scores, "majority": shares, "count": dict.fromkeys(METRICS, 3), "baseline": None}
    seconds = {"fetch": 500.0, "build": 20.0, "stage 1": 31.0}
    console = Console(file=StringIO(), width=160)
    results |= {"seconds": seconds, "reloaded_alike": True, "verdicts": {}}
    print_results(console, results, tmp_path, [])
    assert re.findall(r"(\d+) seconds", console.file.getvalue()) == ["51"]


@pytest.mark.parametrize("name", [".git/HEAD", "journal.json"])
def test_a_folder_with_anything_else_in_it_is_refused(tmp_path, name):
    output = tmp_path / "mine"
    (output / name).parent.mkdir(parents=True)
    (output / name).write_text("{}")
    with pytest.raises(ValueError, match=f"mine holds {name.partition('/')[0]}, which no"):
        run_quickstart(output, SHORT)
    assert [path for path in output.rglob("*") if path.is_file()] == [output / name]


def test_a_stage_that_was_killed_while_its_result_was_moved_is_finished(checkpoint, tmp_path):
    options = stage("quickstart-align", **STEPS)
    data = tmp_path / "data"
    training.rows(4).select_columns(["images", "messages"]).save_to_disk(data)
    run = tmp_path / "cut-trainer"
    paths = {"model_name_or_path": checkpoint, "dataset_name": data, "output_dir": run}
    main(words({**options, **paths, "bf16": False}))
    run.rename(tmp_path / "straight")
    train_stage(options, checkpoint, data, tmp_path / "cut")
    expected, got = (stored.weights(tmp_path / name) for name in ("straight", "cut"))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.nightly
def test_a_finished_quickstart_goes_on_to_the_baseline(archives, output, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    before = run_quickstart(output, SHORT)["seconds"]
    again = run_quickstart(output, SHORT, full_baseline=True)
    assert {name: again["seconds"][name] for name in before} == before
    assert again["baseline"]["accuracy"].keys() == again["after"]["accuracy"].keys()
    assert read_report(output / "model")["against"]["model"] == "quickstart-no-norm"
    stage1 = read_report(output / "stage1")
    models = [stage1["report"], stage1["against"]]
    assert [arm["model"] for arm in models] == ["quickstart-stage1", "quickstart-no-norm-stage1"]
    assert [arm["norm"] for arm in models] == ["layer_norm", "none"]
    assert stage1["report"]["interface"]["ratio"] == pytest.approx(1.0, abs=0.1)
    assert [step["step"] for step in stage1["report"]["dynamics"]] == [0]  # of the recipe's steps
    evaluations = read_evaluations(output / "baseline" / "model")
    assert [result.task for result in evaluations] == sorted(TASKS)
    assert "without the norm" in capsys.readouterr().out
    assert run_quickstart(output, SHORT)["baseline"] == again["baseline"]
