"""A run, and one that is killed and started again: it ends as if it had never stopped."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import stored
import torch
import train_data
import training
from accelerate import Accelerator
from paths import HELPERS
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.processing import arm_of
from normalign_llava.cli import app
from normalign_llava.data.sources import streams, table
from normalign_llava.train.parsing import parse
from normalign_llava.train.run import main
from normalign_llava.train.settings import complete


pytestmark = pytest.mark.slow
STEPS = 8
FROZEN = dict(vision_learning_rate=0.0, language_learning_rate=0.0, bf16=True)
QLORA = dict(use_peft=True, load_in_4bit=True, dtype="bfloat16", bf16=True)
STREAM = dict(dataset_streaming=True, shuffle_buffer_size=5, dataset_name=None)
CASES = {
    "frozen in 4 bits": (dict(**FROZEN, load_in_4bit=True), 0, 0),
    "frozen in bfloat16": (dict(**FROZEN, dtype="bfloat16"), 0, 0),
    "4 bits": (dict(**QLORA, lora_dropout=0.3), 0, 0),
    "into a second epoch": (dict(train_sampling_strategy="group_by_length"), 2, 0),
    "streamed mixture": (STREAM, 0, 3),
    # Three steps an epoch, and readers that stay: the resumed run starts its own.
    "at an epoch's end": (dict(use_peft=True, lora_dropout=0.3), 2, 2),
}
"""Options of both runs, and the workers of the uninterrupted and of the resumed one."""
INTERRUPT = pytest.param(signal.SIGINT, marks=pytest.mark.nightly)


def recipe(folder: Path, parts: Path, **options) -> str:
    folder.mkdir()
    saved = dict(max_steps=STEPS, save_steps=2, save_total_limit=STEPS)
    saved |= dict(gradient_checkpointing=False, dataset_name=str(parts / "first" / "data.json"))
    return training.recipe(folder, parts, **{**saved, **options})


def result(output: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """What was logged at each step, and the weights at the end."""
    # Times differ, and the mean loss is of the steps since the run was resumed.
    differ = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"}
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    for entry, key in itertools.product(state["log_history"], differ):
        entry.pop(key, None)
    return state["log_history"], stored.weights(output)


def killed(when: str, file: str, output: Path) -> list:
    return [HELPERS / "train_killed.py", when, file, "--output_dir", output]


def assert_same(whole: Path, resumed: Path) -> None:
    """Every figure of the log and every weight is equal to the bit."""
    (logged, weights) = result(whole)
    (logged_again, weights_again) = result(resumed)
    assert [entry["step"] for entry in logged if "loss" in entry] == list(range(1, STEPS + 1))
    assert logged_again == logged
    training.assert_equal(weights_again, weights)


def test_what_is_trained_is_shown_first_and_kept_beside_the_checkpoint(
    tmp_path, parts, capsys, monkeypatch
):
    file = training.recipe(tmp_path, parts, stage="align")
    ended = []
    end = Accelerator.end_training

    def end_training(accelerator):  # trackers, and the processes' group
        ended.append((tmp_path / "out" / "README.md").exists())
        end(accelerator)

    monkeypatch.setattr(Accelerator, "end_training", end_training)
    output = main([file, "--seed", "5", "--learning_rate", "5e-4"])
    assert ended == [True]
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 rows = 2 per device x 1 process(es) x 2 accumulation step(s)" in shown
    record = json.loads((output / "training.json").read_text())
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(output)
    linears = sum(p.numel() for n, p in model.named_parameters() if "projector.linear" in n)
    modules = [tuple(row.values()) for row in record["run"]["modules"]]
    trained = [(name, count, rate) for name, _, count, rate, _ in modules if count]
    assert trained == [("projector", linears, 5e-4), ("norm", 64, 5e-4)] and len(modules) == 4
    assert record["run"]["disk"]["checkpoints"] == 2
    assert (record["options"]["seed"], record["options"]["warmup_steps"]) == (5, 0.03)
    assert (record["stage"], record["arm"], record["quantization"]) == ("align", "gwc", None)
    assert str(tmp_path) not in json.dumps(record) and str(parts) not in json.dumps(record)
    text = (output / "README.md").read_text().split("```yaml")[1].split("```")[0]
    (again := tmp_path / "again.yaml").write_text(text)
    parsed = parse([str(again), "--output_dir", str(tmp_path)])[1]
    assert parsed.learning_rates(use_peft=False) == record["learning_rates"]


def test_of_two_machines_the_first_alone_prints_what_is_next(tmp_path, parts, prepared):
    options = dict(stage="align", max_steps=1, per_device_train_batch_size=1, use_cpu=True)
    file = training.recipe(tmp_path, parts, **options)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    together |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    words = ["-m", "normalign_llava.train", file]
    started = [prepared.start(words, RANK=rank, **together) for rank in "01"]
    first, second = (process.wait() for process in started)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    for said in ("Next: ", "Tokens per image"):
        assert first.stdout.count(said) == 1 and said not in second.stdout


IMPORTED = """
import sys
for name in list(sys.modules):  # the process has them from the beginning
    if name.partition(".")[0] == "normalign_llava":
        del sys.modules[name]
import normalign_llava.cli
from transformers import TrainerCallback
from normalign_llava.train.parsing import parse
from normalign_llava.train.run import train

class Imported(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        own = {name: module for name, module in sys.modules.items() if "normalign_llava." in name}
        print("IMPORTED", *(name for name in own if "__init__" not in own[name].__file__))

train(*parse(sys.argv[1:]), [Imported()])
"""
"""Prints the modules of this package, with code in them, that the first step has imported."""


def test_a_run_imports_what_it_uses(prepared, tmp_path, parts):
    file = training.recipe(tmp_path, parts, stage="align", max_steps=1)
    done = prepared.run(["-c", IMPORTED, file])
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("IMPORTED"))
    modules = [name.removeprefix("normalign_llava.") for name in line.split()[1:]]
    above = {name for name in modules if name.startswith(("hub_cards", "evaluation", "diagnose"))}
    assert above == {"diagnose.measure.families"}
    assert len(modules) <= 61, sorted(modules)


def test_a_checkpoint_of_the_hub_is_asked_for_once_at_its_commit(hub, prepared, tmp_path, parts):
    served = hub.serve("bea/base", parts / "model")
    notice = "notices/vision/LICENSE"
    build = json.loads((parts / "model/build.json").read_text())
    named = json.dumps({**build, "notices": [notice]})
    commit = served.change({"build.json": named.encode(), notice: b"the terms"}).oid
    served.branches["trial"] = commit
    served.change({"build.json": b"{}", notice: b"other terms"})  # on main
    options = dict(model_name_or_path="bea/base", model_revision="trial", max_steps=1)
    file = training.recipe(tmp_path, parts, **options)
    hub.requests.clear()
    done = prepared.run(["-m", "normalign_llava", "train", file])
    assert done.returncode == 0, done.stderr
    asked = [request for request in hub.requests if "/api/models/bea/base/rev" in request]
    assert asked == ["GET /api/models/bea/base/revision/trial"]
    assert (tmp_path / "out" / notice).read_text() == "the terms"
    assert json.loads((tmp_path / "out" / "build.json").read_text())["notices"] == [notice]
    read = [request for request in hub.requests if "/resolve/" in request]
    assert read and all(f"/resolve/{commit}/" in request for request in read)


def test_the_commands_named_next_lead_from_parts_to_report(tmp_path, parts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ["--max_steps", "1", "--global_batch_size", "2", "--bf16", "false"]
    words = ["build", "--vision", str(parts / "vision"), "--language", str(parts / "language")]
    words += ["--output", "a model"]
    ran = []
    for extra in ([], rows, [*rows, "--use_peft"], []):
        done = CliRunner().invoke(app, [*words, *extra])
        assert done.exit_code == 0, done.output
        ran.append(words[0])
        line = done.output.strip().splitlines()[-1].removeprefix("Next: ")
        command, *words = shlex.split(line.replace("DATA", str(parts / "data" / "data.json")))
        assert command == "normalign"
    assert ran == ["build", "train", "train", "merge"]
    assert words == ["diagnose", "a model-align-tune-merged"]
    assert (tmp_path / words[1] / "config.json").is_file()


def test_an_untrained_checkpoint_is_trained_as_another_arm_and_others_keep_a_gain(tmp_path, parts):
    def gain(name, checkpoint, **options):
        file = training.recipe(tmp_path, parts, model_name_or_path=str(checkpoint), **options)
        output = main([file, "--output_dir", str(tmp_path / name)])
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(output)
        assert "arm" not in options or arm_of(model.config) == options["arm"]
        ratio = model.config.text_embedding_norm / 32**0.5
        return model.model.multi_modal_projector.norm.weight, ratio

    still = dict(learning_rate=0.0, vision_learning_rate=1e-9)  # which moves nothing in float32
    untrained = training.checkpoint(tmp_path, arm="none")
    assert torch.equal(gain("unit", untrained, arm="unit", **still)[0], torch.ones(32))
    found, ratio = gain("gwc", untrained, arm="gwc", **still)
    torch.testing.assert_close(found, torch.full((32,), ratio))
    trained, _ = gain("trained", parts / "model")
    with pytest.raises(ValueError, match="trained as arm 'gwc'; arm 'unit' would discard its gain"):
        gain("again", tmp_path / "trained", arm="unit")
    assert torch.equal(gain("again", tmp_path / "trained", arm="aligned", **still)[0], trained)


def test_a_bad_image_met_in_training_stops_or_is_listed(tmp_path, parts, capsys, monkeypatch):
    """Images of 8 of 16 rows alone are opened first, as long as they can tell enough."""
    monkeypatch.setattr(table, "MANY_ROWS", 8)
    unopened = sorted({*range(16)} - {*np.random.default_rng(0).choice(16, 8, replace=False)})
    data = tmp_path / "data" / "data.json"
    bad = unopened[0]
    folders = []

    def run(cut, *words):
        images = ["cut.png" if number in cut else "red.png" for number in range(16)]
        rows = [train_data.llava("<image>\nwhat?", "red", image) for image in images]
        train_data.write_json(data.parent, rows)
        (data.parent / "cut.png").write_bytes(train_data.image_bytes()[:60])
        folders.append(tmp_path / str(len(folders)))
        old = {"source": "old.json", "row": 1, "file": None, "reason": "of an earlier run"}
        folders[-1].mkdir()
        (folders[-1] / "dropped_rows.jsonl").write_text(json.dumps(old) + "\n")
        return main([file, "--output_dir", str(folders[-1]), "--bad_rows", *words])

    file = training.recipe(tmp_path, parts, dataset_name=str(data), max_steps=4)
    with pytest.raises(ValueError, match=f"that cannot be trained on:\n.*row {bad}: .*cut.png"):
        run({bad}, "stop")
    for more in ([], ["--dataloader_num_workers", "2"]):
        with pytest.raises(ValueError, match=r"truncated.* met 5 bad row.*, and 4 may be skipped"):
            run(unopened[:5], "0.3", *more)
    capsys.readouterr()
    run({bad}, "0.3")
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 row was dropped, listed in" in shown and f"row {bad}: " in shown
    assert shown.count("dropped, listed in") == 1  # none of an earlier run
    output = run({bad}, "skip", "--check_images", "--dataset_name", f"{data.parent}:train")
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("dropped, listed in") == 1  # training met no more
    record = json.loads((output / "training.json").read_text())
    assert record["data"][0]["dropped"] == [bad]
    assert record["options"]["dataset_name"] == "data:train"
    assert str(tmp_path) not in json.dumps(record)


def test_killed_in_a_save_and_resumed_is_as_if_never_stopped(prepared, tmp_path, parts, capfd):
    file = recipe(tmp_path / "run", parts)
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    main([file, "--output_dir", str(whole)])
    done = prepared.run(killed("save:4", file, stopped))
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not list(stopped.glob("*.safetensors"))

    capfd.readouterr()
    main([file, "--output_dir", str(stopped), "--resume_from_checkpoint"])
    said = " ".join(capfd.readouterr().err.split())
    assert f"Resuming from {stopped}/checkpoint-2." in said and "Skipped" in said
    assert_same(whole, stopped)


@pytest.mark.parametrize("number", [signal.SIGTERM, INTERRUPT])
def test_a_stopped_run_leaves_no_process_and_says_how_to_resume(prepared, tmp_path, parts, number):
    file = recipe(tmp_path / "run", parts, dataloader_num_workers=2)
    stopped = tmp_path / "stop ped"
    done = prepared.run(killed(f"{number.name}:5", file, stopped))
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 128 + number and "Traceback" not in done.stderr, done.stderr
    readers = re.search(r"^readers (\d+) (\d+)$", done.stdout, re.M)
    for reader in readers.groups():
        with pytest.raises(ProcessLookupError):
            os.kill(int(reader), 0)
    assert said.startswith("Stopped. Step 5 was done")
    advice = said[said.index("--resume") : said.index(". What was done")]
    assert advice.endswith(f"'{stopped / 'checkpoint-4'}'")
    main([file, "--output_dir", str(stopped), "--max_steps", "6", *shlex.split(advice)])
    assert json.loads((stopped / "trainer_state.json").read_text())["global_step"] == 6


def test_a_resumed_run_keeps_the_precision_that_it_began_with(tmp_path, parts, processor):
    processor(0.3)
    file = recipe(tmp_path / "run", parts, bf16=None, max_steps=2)
    output = tmp_path / "out"
    main([file, "--output_dir", str(output)])
    processor(5.0)
    main([file, "--output_dir", str(output), "--resume_from_checkpoint", "--max_steps", "3"])
    record = json.loads((output / "training.json").read_text())
    assert record["options"]["bf16"]
    assert (record["run"]["autocast"], record["steps_done"]) == ("bfloat16", 3)
    other = [file, "--output_dir", str(tmp_path / "other")]
    resumed = [*other, "--resume_from_checkpoint", str(output / "checkpoint-2")]
    assert not complete(parse(other)[1])[0].bf16
    assert complete(parse(resumed)[1])[0].bf16


@pytest.mark.parametrize("case", CASES)
def test_resumed_from_what_a_kill_leaves_is_as_if_never_stopped(tmp_path, parts, case):
    options, before, after = CASES[case]
    step = 6 if case == "at an epoch's end" else 4
    if case == "streamed mixture":
        paths = [str(parts / name / "data.json") for name in ("first", "second")]
        datasets = [dict(path=paths[0], fraction=0.7), dict(path=paths[1], fraction=0.3)]
        options = {**options, "datasets": datasets}
        step = 2
    words = [recipe(tmp_path / "run", parts, **options), "--dataloader_num_workers"]
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    main([*words, str(before), "--output_dir", str(whole)])
    shutil.copytree(whole / f"checkpoint-{step}", stopped / f"checkpoint-{step}")
    main([*words, str(after), "--output_dir", str(stopped), "--resume_from_checkpoint"])
    assert_same(whole, stopped)


def test_two_runs_do_not_share_a_folder(prepared, tmp_path, parts):
    file = recipe(tmp_path / "run", parts, max_steps=4)
    out = tmp_path / "out"
    first = prepared.start(killed("wait:3", file, out))
    while not (tmp_path / "out-waiting").exists():
        assert first.poll() is None, "it has ended"
        time.sleep(0.01)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for more in ([], ["--resume_from_checkpoint"]):
        with pytest.raises(ValueError, match=f"{out} is being written to .*process {first.pid}[.]"):
            main([file, "--output_dir", str(out), *more])
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    (tmp_path / "out-go-on").touch()
    assert first.wait().returncode == 0
    assert stored.weights(out) and not list(out.glob(".*"))


def test_a_run_resumed_at_its_end_takes_no_further_step(tmp_path, parts):
    file = recipe(tmp_path / "run", parts, lr_scheduler_type="constant", max_steps=2, **QLORA)
    output = main([file, "--output_dir", str(tmp_path / "out")])
    names = {path.name for path in output.iterdir()}
    for path in output.iterdir():
        if path.is_file():
            path.unlink()  # as if killed before the result was written
    earlier = {"source": "a.json", "row": 1, "file": None, "reason": "before the run was resumed"}
    (output / "dropped_rows.jsonl").write_text(json.dumps(earlier) + "\n")
    main([file, "--output_dir", str(output), "--resume_from_checkpoint"])
    assert json.loads((output / "dropped_rows.jsonl").read_text()) == earlier
    names.add("dropped_rows.jsonl")
    assert {path.name for path in output.iterdir()} == names and "README.md" in names
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2
    training.assert_equal(stored.weights(output), stored.weights(output / "checkpoint-2"))


def test_a_run_is_resumed_with_what_does_not_change_its_steps_and_not_as_another(tmp_path, parts):
    file = recipe(tmp_path / "run", parts, max_steps=4)
    resumed = [file, "--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint"]
    out = main([*resumed[:3], "--max_steps", "2"])
    other = training.checkpoint(tmp_path / "other", seed=1)
    second = parts / "second" / "data.json"
    rows = [train_data.llava(f"<image>\nother {i}?", "so", "red.png") for i in range(10)]
    data = train_data.write_json(tmp_path / "first", [*rows, train_data.llava("no image?", "no")])
    for words, named in (
        (resumed[:3], "holds an earlier run.*--resume_from_checkpoint"),
        ([*resumed, "--learning_rate", "1e-4"], r"rate of \w+ \(was 0.001, is 0.0001\)"),
        ([*resumed, "--arm", "unit"], r"arm \(was gwc, is unit\)"),
        ([*resumed, "--use_peft"], "use_peft"),
        ([*resumed, "--seed", "7"], r"seed \(was 42, is 7\)"),
        ([*resumed, "--dataset_name", str(second)], r"data .*\(was .*11.*, is .*9"),
        ([*resumed, "--dataset_name", str(data)], r"differs in .*the data \(used.*was"),
        ([*resumed, "--model_name_or_path", str(other)], "records of the model to train"),
        ([*resumed, "--seed", "7", "--dry_run"], r"seed \(was 42, is 7\)"),
    ):
        with pytest.raises(ValueError, match=named):
            main(words)
    main([*resumed, "--save_steps", "1", "--bad_rows", "skip"])
    assert (out / "checkpoint-3").exists() and (out / "checkpoint-4").exists()


def test_a_bad_row_of_a_stream_stops_before_a_run_that_skips_it(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_FIRST", 5)  # rows that are checked before training
    rows = [*train_data.mixed_rows() * 2, train_data.llava("Q", "")]
    path = train_data.write_json(tmp_path / "data", rows, "data.jsonl")
    options = dict(dataset_streaming=True, shuffle_buffer_size=1, max_steps=4, save_steps=1)
    file = recipe(tmp_path / "run", parts, dataset_name=str(path), **options)
    out = tmp_path / "out"
    message = r"row 10: the answer in turn 1 is empty.*_rows skip.*_from_checkpoint (\S+)\. What"
    with pytest.raises(ValueError) as error:
        main([file, "--output_dir", str(out)])
    checkpoint = re.search(message, str(error.value), re.S)[1]
    words = ["--output_dir", str(out), "--resume_from_checkpoint", checkpoint]
    main([file, *words, "--bad_rows", "skip"])
    assert (out / "checkpoint-4").exists()
