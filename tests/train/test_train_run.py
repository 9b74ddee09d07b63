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
from json_files import read_json
from paths import HELPERS
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.arms import arm_of
from normalign_llava.cli import app
from normalign_llava.data.sources import streams, table
from normalign_llava.train.options import parse
from normalign_llava.train.run import main
from normalign_llava.train.settings import complete


pytestmark = pytest.mark.slow
STEPS = 8
FROZEN = {
    "vision_learning_rate": 0.0,
    "language_learning_rate": 0.0,
    "bf16": True,
}
QLORA = {
    "use_peft": True,
    "load_in_4bit": True,
    "dtype": "bfloat16",
    "bf16": True,
}
STREAM = {
    "dataset_streaming": True,
    "shuffle_buffer_size": 5,
    "dataset_name": None,
}
INTERRUPT = pytest.param(signal.SIGINT, marks=pytest.mark.nightly)


def write_recipe(folder: Path, parts: Path, **options) -> str:
    folder.mkdir()
    options = {
        "max_steps": STEPS,
        "save_steps": 2,
        "save_total_limit": STEPS,
        "gradient_checkpointing": False,
        "dataset_name": str(parts / "first" / "data.json"),
        **options,
    }
    return training.recipe(folder, parts, **options)


def log_history(output: Path) -> list[dict]:
    """What was logged at each step."""
    state = read_json(output / f"checkpoint-{STEPS}" / "trainer_state.json")
    # Times differ, and the mean loss is of the steps since the run was resumed.
    differing = [
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "train_loss",
    ]
    for entry, key in itertools.product(state["log_history"], differing):
        entry.pop(key, None)
    return state["log_history"]


def killed(moment: str, recipe: str, output: Path) -> list:
    """The words of a run that kills itself."""
    return [HELPERS / "train_killed.py", moment, recipe, "--output_dir", output]


def assert_same(whole: Path, resumed: Path) -> None:
    """Every figure of the log and every weight is equal to the bit."""
    expected_log = log_history(whole)
    steps = [entry["step"] for entry in expected_log if "loss" in entry]
    assert steps == list(range(1, STEPS + 1))
    assert log_history(resumed) == expected_log
    training.assert_equal(stored.weights(resumed), stored.weights(whole))


def printed(capsys) -> str:
    """What was printed since the last call, on one line."""
    return " ".join(capsys.readouterr().out.split())


def trained_modules(record) -> list[tuple]:
    """Name, number of trained parameters and learning rate of the modules that are trained."""
    modules = []
    for module_entry in record["run"]["modules"]:
        module_name, _, count, learning_rate, _ = module_entry.values()
        if count:
            modules.append((module_name, count, learning_rate))
    return modules


def test_what_is_trained_is_shown_first_and_kept_beside_the_checkpoint(
    tmp_path, parts, capsys, monkeypatch
):
    recipe = training.recipe(tmp_path, parts, stage="align")
    card_at_end = []
    end_training = Accelerator.end_training

    def record_end(accelerator):
        """Trackers and the processes' group end when the card is written."""
        card_at_end.append((tmp_path / "out" / "README.md").exists())
        end_training(accelerator)

    monkeypatch.setattr(Accelerator, "end_training", record_end)
    output = main([recipe, "--seed", "5", "--learning_rate", "5e-4"])
    assert card_at_end == [True]
    batch = "4 rows = 2 per device x 1 process(es) x 2 accumulation step(s)"
    assert batch in printed(capsys)

    record = read_json(output / "training.json")
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(output)
    linear_size = 0
    for parameter_name, parameter in model.named_parameters():
        if "projector.linear" in parameter_name:
            linear_size += parameter.numel()
    assert trained_modules(record) == [("projector", linear_size, 5e-4), ("norm", 64, 5e-4)]
    assert len(record["run"]["modules"]) == 4
    assert record["run"]["disk"]["checkpoints"] == 2
    assert record["options"]["seed"] == 5
    assert record["options"]["warmup_steps"] == 0.03
    assert record["stage"] == "align"
    assert record["arm"] == "gwc"
    assert record["quantization"] is None
    assert str(tmp_path) not in json.dumps(record)
    assert str(parts) not in json.dumps(record)

    card = (output / "README.md").read_text()
    recipe_in_card = card.split("```yaml")[1].split("```")[0]
    repeated_recipe = tmp_path / "again.yaml"
    repeated_recipe.write_text(recipe_in_card)
    train_options = parse([str(repeated_recipe), "--output_dir", str(tmp_path)])[1]
    assert train_options.learning_rates(use_peft=False) == record["learning_rates"]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_only_the_first_of_two_machines_prints_what_is_next(tmp_path, parts, prepared):
    recipe = training.recipe(
        tmp_path,
        parts,
        stage="align",
        max_steps=1,
        per_device_train_batch_size=1,
        use_cpu=True,
    )
    environment = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    command = ["-m", "normalign_llava.train", recipe]
    processes = [prepared.start(command, RANK=rank, **environment) for rank in "01"]
    first = processes[0].wait()
    second = processes[1].wait()
    errors = first.stderr + second.stderr
    assert first.returncode == 0, errors
    assert second.returncode == 0, errors
    for words in ("Next: ", "Tokens per image"):
        assert first.stdout.count(words) == 1
        assert words not in second.stdout


IMPORTED = """
import sys
for name in list(sys.modules):  # the process has them from the beginning
    if name.partition(".")[0] == "normalign_llava":
        del sys.modules[name]
import normalign_llava.cli
from transformers import TrainerCallback
from normalign_llava.train.options import parse
from normalign_llava.train.run import train

class Imported(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        own = {name: module for name, module in sys.modules.items() if "normalign_llava." in name}
        print("IMPORTED", *(name for name in own if "__init__" not in own[name].__file__))

train(*parse(sys.argv[1:]), [Imported()])
"""
"""Prints the modules of this package, with code in them, that the first step has imported."""


def test_a_run_imports_what_it_uses(prepared, tmp_path, parts):
    recipe = training.recipe(tmp_path, parts, stage="align", max_steps=1)
    done = prepared.run(["-c", IMPORTED, recipe])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")]
    assert len(lines) == 1
    modules = []
    for module_name in lines[0].split()[1:]:
        modules.append(module_name.removeprefix("normalign_llava."))
    layers_above = ("hub_cards", "evaluation", "diagnose")
    imported_from_above = {name for name in modules if name.startswith(layers_above)}
    assert imported_from_above == {"diagnose.measure.families"}
    assert len(modules) <= 54, sorted(modules)


def test_a_checkpoint_of_the_hub_is_asked_for_once_at_its_commit(hub, prepared, tmp_path, parts):
    repository = hub.serve("bea/base", parts / "model")
    notice = "notices/vision/LICENSE"
    build_record = read_json(parts / "model" / "build.json")
    build_record["notices"] = [notice]
    trial_files = {
        "build.json": json.dumps(build_record).encode(),
        notice: b"the terms",
    }
    commit = repository.change(trial_files).oid
    repository.branches["trial"] = commit
    repository.change({"build.json": b"{}", notice: b"other terms"})  # on main
    recipe = training.recipe(
        tmp_path,
        parts,
        model_name_or_path="bea/base",
        model_revision="trial",
        max_steps=1,
    )
    hub.requests.clear()
    done = prepared.run(["-m", "normalign_llava", "train", recipe])
    assert done.returncode == 0, done.stderr
    commit_requests = [line for line in hub.requests if "/api/models/bea/base/rev" in line]
    assert commit_requests == ["GET /api/models/bea/base/revision/trial"]
    assert (tmp_path / "out" / notice).read_text() == "the terms"
    assert read_json(tmp_path / "out" / "build.json")["notices"] == [notice]
    file_requests = [line for line in hub.requests if "/resolve/" in line]
    assert file_requests
    for request in file_requests:
        assert f"/resolve/{commit}/" in request


def test_the_commands_named_next_lead_from_parts_to_report(tmp_path, parts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_options = ["--max_steps", "1", "--global_batch_size", "2", "--bf16", "false"]
    build_options = ["--vision", str(parts / "vision"), "--language", str(parts / "language")]
    words = ["build", *build_options, "--output", "a model"]
    commands = []
    for more_words in ([], run_options, [*run_options, "--use_peft"], []):
        done = CliRunner().invoke(app, [*words, *more_words])
        assert done.exit_code == 0, done.output
        commands.append(words[0])
        last_line = done.output.strip().splitlines()[-1]
        advice = last_line.removeprefix("Next: ")
        advice = advice.replace("DATA", str(parts / "data" / "data.json"))
        command, *words = shlex.split(advice)
        assert command == "normalign"
    assert commands == ["build", "train", "train", "merge"]
    assert words == ["diagnose", "a model-align-tune-merged"]
    assert (tmp_path / words[1] / "config.json").is_file()


def train_arm(tmp_path, parts, name, checkpoint, **options):
    """The model that is trained of a checkpoint, in the folder `name`."""
    recipe = training.recipe(tmp_path, parts, model_name_or_path=str(checkpoint), **options)
    output = main([recipe, "--output_dir", str(tmp_path / name)])
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(output)
    if "arm" in options:
        assert arm_of(model.config) == options["arm"]
    return model


def gain_of(model):
    return model.model.multi_modal_projector.norm.weight


# The rates move nothing in float32.
STILL = {"learning_rate": 0.0, "vision_learning_rate": 1e-9}


def test_an_untrained_checkpoint_is_trained_as_another_arm(tmp_path, parts):
    untrained = training.checkpoint(tmp_path, arm="none")
    unit_model = train_arm(tmp_path, parts, "unit", untrained, arm="unit", **STILL)
    assert torch.equal(gain_of(unit_model), torch.ones(32))
    model = train_arm(tmp_path, parts, "gwc", untrained, arm="gwc", **STILL)
    ratio = model.config.text_embedding_norm / 32**0.5
    torch.testing.assert_close(gain_of(model), torch.full((32,), ratio))


def test_a_trained_checkpoint_keeps_its_gain(tmp_path, parts):
    trained = train_arm(tmp_path, parts, "trained", parts / "model")
    checkpoint = tmp_path / "trained"
    with pytest.raises(ValueError, match="trained as arm 'gwc'; arm 'unit' would discard its gain"):
        train_arm(tmp_path, parts, "again", checkpoint, arm="unit")
    model = train_arm(tmp_path, parts, "again", checkpoint, arm="aligned", **STILL)
    assert torch.equal(gain_of(model), gain_of(trained))


@pytest.fixture
def unopened(monkeypatch):
    """Of 16 rows, those whose images are not opened before training.

    Only images of 8 rows are opened first, as long as they can tell enough.
    """
    monkeypatch.setattr(table, "MANY_ROWS", 8)
    opened_rows = np.random.default_rng(0).choice(16, 8, replace=False)
    return sorted({*range(16)} - {*opened_rows})


@pytest.fixture
def run_with_cut_images(tmp_path, parts):
    """Trains on 16 rows, of which some have an image that is cut, where a run was before."""
    data_folder = tmp_path / "data"
    recipe = training.recipe(
        tmp_path,
        parts,
        dataset_name=str(data_folder / "data.json"),
        max_steps=4,
    )

    def run(name, cut_rows, *words):
        train_rows = []
        for number in range(16):
            image_name = "cut.png" if number in cut_rows else "red.png"
            train_rows.append(train_data.llava("<image>\nwhat?", "red", image_name))
        train_data.write_json(data_folder, train_rows)
        (data_folder / "cut.png").write_bytes(train_data.image_bytes()[:60])
        output_dir = tmp_path / name
        output_dir.mkdir()
        dropped_before = {
            "source": "old.json",
            "row": 1,
            "file": None,
            "reason": "of an earlier run",
        }
        (output_dir / "dropped_rows.jsonl").write_text(json.dumps(dropped_before) + "\n")
        return main([recipe, "--output_dir", str(output_dir), "--bad_rows", *words])

    return run


def test_a_bad_image_met_in_training_stops(run_with_cut_images, unopened):
    bad_row = unopened[0]
    message = f"that cannot be trained on:\n.*row {bad_row}: .*cut.png"
    with pytest.raises(ValueError, match=message):
        run_with_cut_images("stop", {bad_row}, "stop")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="no workers"),
        pytest.param(["--dataloader_num_workers", "2"], id="2 workers"),
    ],
)
def test_more_bad_images_than_may_be_skipped_stop(run_with_cut_images, unopened, words):
    bad_rows = unopened[:5]
    with pytest.raises(ValueError, match=r"truncated.* met 5 bad row.*, and 4 may be skipped"):
        run_with_cut_images("skip", bad_rows, "0.3", *words)


def test_a_bad_image_met_in_training_is_listed(run_with_cut_images, unopened, capsys):
    bad_row = unopened[0]
    run_with_cut_images("skip", {bad_row}, "0.3")
    output = printed(capsys)
    assert "1 row was dropped, listed in" in output
    assert f"row {bad_row}: " in output
    assert output.count("dropped, listed in") == 1  # none of an earlier run


def test_a_bad_image_found_before_training_is_recorded(
    tmp_path, run_with_cut_images, unopened, capsys
):
    bad_row = unopened[0]
    dataset_name = f"{tmp_path / 'data'}:train"
    words = ["skip", "--check_images", "--dataset_name", dataset_name]
    output = run_with_cut_images("checked", {bad_row}, *words)
    assert printed(capsys).count("dropped, listed in") == 1  # training met no more
    record = read_json(output / "training.json")
    assert record["data"][0]["dropped"] == [bad_row]
    assert record["options"]["dataset_name"] == "data:train"
    assert str(tmp_path) not in json.dumps(record)


def test_killed_in_a_save_and_resumed_is_as_if_never_stopped(prepared, tmp_path, parts, capfd):
    recipe = write_recipe(tmp_path / "run", parts)
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    main([recipe, "--output_dir", str(whole)])
    done = prepared.run(killed("save:4", recipe, stopped))
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not list(stopped.glob("*.safetensors"))

    capfd.readouterr()
    main([recipe, "--output_dir", str(stopped), "--resume_from_checkpoint"])
    messages = " ".join(capfd.readouterr().err.split())
    assert f"Resuming from {stopped}/checkpoint-2." in messages
    assert "Skipped" in messages
    assert_same(whole, stopped)


@pytest.mark.parametrize("number", [signal.SIGTERM, INTERRUPT])
def test_a_stopped_run_leaves_no_process_and_says_how_to_resume(prepared, tmp_path, parts, number):
    recipe = write_recipe(tmp_path / "run", parts, dataloader_num_workers=2)
    stopped = tmp_path / "stop ped"
    done = prepared.run(killed(f"{number.name}:5", recipe, stopped))
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    readers = re.search(r"^readers (\d+) (\d+)$", done.stdout, re.M)
    for process_id in readers.groups():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process_id), 0)
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("Stopped. Step 5 was done")
    start = last_line.index("--resume")
    end = last_line.index(". What was done")
    advice = last_line[start:end]
    checkpoint = stopped / "checkpoint-4"
    assert advice.endswith(f"'{checkpoint}'")
    main([recipe, "--output_dir", str(stopped), "--max_steps", "6", *shlex.split(advice)])
    assert read_json(stopped / "trainer_state.json")["global_step"] == 6


def test_a_resumed_run_keeps_the_precision_that_it_began_with(tmp_path, parts, processor):
    processor(0.3)
    recipe = write_recipe(tmp_path / "run", parts, bf16=None, max_steps=2)
    output = tmp_path / "out"
    main([recipe, "--output_dir", str(output)])
    processor(5.0)
    main([recipe, "--output_dir", str(output), "--resume_from_checkpoint", "--max_steps", "3"])
    record = read_json(output / "training.json")
    assert record["options"]["bf16"]
    assert record["run"]["autocast"] == "bfloat16"
    assert record["steps_done"] == 3

    other_run = [recipe, "--output_dir", str(tmp_path / "other")]
    checkpoint = output / "checkpoint-2"
    resumed_run = [*other_run, "--resume_from_checkpoint", str(checkpoint)]
    assert not complete(parse(other_run)[1])[0].bf16
    assert complete(parse(resumed_run)[1])[0].bf16


def mixture(parts):
    """A streamed mixture of the first and the second data set."""
    datasets = [
        {"path": str(parts / "first" / "data.json"), "fraction": 0.7},
        {"path": str(parts / "second" / "data.json"), "fraction": 0.3},
    ]
    return {**STREAM, "datasets": datasets}


@pytest.mark.parametrize(
    "options, workers, workers_resumed, step",
    [
        pytest.param({**FROZEN, "load_in_4bit": True}, 0, 0, 4, id="frozen in 4 bits"),
        pytest.param({**FROZEN, "dtype": "bfloat16"}, 0, 0, 4, id="frozen in bfloat16"),
        pytest.param({**QLORA, "lora_dropout": 0.3}, 0, 0, 4, id="4 bits"),
        pytest.param(
            {"train_sampling_strategy": "group_by_length"},
            2,
            0,
            4,
            id="into a second epoch",
        ),
        pytest.param(mixture, 0, 3, 2, id="streamed mixture"),
        # Three steps an epoch, and readers that stay: the resumed run starts its own.
        pytest.param(
            {"use_peft": True, "lora_dropout": 0.3},
            2,
            2,
            6,
            id="at an epoch's end",
        ),
    ],
)
def test_resumed_from_what_a_kill_leaves_is_as_if_never_stopped(
    tmp_path, parts, options, workers, workers_resumed, step
):
    if callable(options):
        options = options(parts)
    recipe = write_recipe(tmp_path / "run", parts, **options)
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    main([recipe, "--dataloader_num_workers", str(workers), "--output_dir", str(whole)])
    checkpoint = f"checkpoint-{step}"
    shutil.copytree(whole / checkpoint, stopped / checkpoint)
    resumed = [recipe, "--dataloader_num_workers", str(workers_resumed)]
    main([*resumed, "--output_dir", str(stopped), "--resume_from_checkpoint"])
    assert_same(whole, stopped)


def modification_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_two_runs_do_not_share_a_folder(prepared, tmp_path, parts):
    recipe = write_recipe(tmp_path / "run", parts, max_steps=4)
    output = tmp_path / "out"
    first_run = prepared.start(killed("wait:3", recipe, output))
    while not (tmp_path / "out-waiting").exists():
        assert first_run.poll() is None, "it has ended"
        time.sleep(0.01)
    before = modification_times(output)
    message = f"{output} is being written to .*process {first_run.pid}[.]"
    for more_words in ([], ["--resume_from_checkpoint"]):
        with pytest.raises(ValueError, match=message):
            main([recipe, "--output_dir", str(output), *more_words])
    assert modification_times(output) == before
    (tmp_path / "out-go-on").touch()
    assert first_run.wait().returncode == 0
    assert stored.weights(output)
    assert not list(output.glob(".*"))


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_resumed_at_its_end_takes_no_further_step(tmp_path, parts):
    recipe = write_recipe(
        tmp_path / "run",
        parts,
        lr_scheduler_type="constant",
        max_steps=2,
        **QLORA,
    )
    output = main([recipe, "--output_dir", str(tmp_path / "out")])
    expected_names = file_names(output) | {"dropped_rows.jsonl"}
    # As if killed before the result was written.
    for path in output.iterdir():
        if path.is_file():
            path.unlink()
    dropped_row = {
        "source": "a.json",
        "row": 1,
        "file": None,
        "reason": "before the run was resumed",
    }
    list_path = output / "dropped_rows.jsonl"
    list_path.write_text(json.dumps(dropped_row) + "\n")
    main([recipe, "--output_dir", str(output), "--resume_from_checkpoint"])
    assert read_json(list_path) == dropped_row
    assert file_names(output) == expected_names
    assert "README.md" in expected_names
    assert read_json(output / "trainer_state.json")["global_step"] == 2
    training.assert_equal(stored.weights(output), stored.weights(output / "checkpoint-2"))


def test_a_run_is_resumed_with_what_does_not_change_its_steps_and_not_as_another(tmp_path, parts):
    recipe = write_recipe(tmp_path / "run", parts, max_steps=4)
    started = [recipe, "--output_dir", str(tmp_path / "out")]
    resumed = [*started, "--resume_from_checkpoint"]
    output = main([*started, "--max_steps", "2"])
    with pytest.raises(ValueError, match="holds an earlier run.*--resume_from_checkpoint"):
        main(started)

    other_model = training.checkpoint(tmp_path / "other", seed=1)
    data_of_other_length = parts / "second" / "data.json"
    other_rows = []
    for number in range(10):
        other_rows.append(train_data.llava(f"<image>\nother {number}?", "so", "red.png"))
    other_rows.append(train_data.llava("no image?", "no"))
    data_of_equal_length = train_data.write_json(tmp_path / "first", other_rows)
    refused = [
        (["--learning_rate", "1e-4"], r"rate of \w+ \(was 0.001, is 0.0001\)"),
        (["--arm", "unit"], r"arm \(was gwc, is unit\)"),
        (["--use_peft"], "use_peft"),
        (["--seed", "7"], r"seed \(was 42, is 7\)"),
        (["--dataset_name", str(data_of_other_length)], r"data .*\(was .*11.*, is .*9"),
        (["--dataset_name", str(data_of_equal_length)], r"differs in .*the data \(used.*was"),
        (["--model_name_or_path", str(other_model)], "records of the model to train"),
        (["--seed", "7", "--dry_run"], r"seed \(was 42, is 7\)"),
    ]
    for words, message in refused:
        with pytest.raises(ValueError, match=message):
            main([*resumed, *words])

    main([*resumed, "--save_steps", "1", "--bad_rows", "skip"])
    assert (output / "checkpoint-3").exists()
    assert (output / "checkpoint-4").exists()


def test_a_bad_row_of_a_stream_stops_before_a_run_that_skips_it(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_FIRST", 5)  # rows that are checked before training
    good_rows = train_data.mixed_rows() * 2
    bad_row = train_data.llava("Q", "")
    data_path = train_data.write_json(tmp_path / "data", [*good_rows, bad_row], "data.jsonl")
    recipe = write_recipe(
        tmp_path / "run",
        parts,
        dataset_name=str(data_path),
        dataset_streaming=True,
        shuffle_buffer_size=1,
        max_steps=4,
        save_steps=1,
    )
    output = tmp_path / "out"
    with pytest.raises(ValueError) as error:
        main([recipe, "--output_dir", str(output)])
    message = r"row 10: the answer in turn 1 is empty.*_rows skip.*_from_checkpoint (\S+)\. What"
    checkpoint = re.search(message, str(error.value), re.S)[1]
    resumed = [recipe, "--output_dir", str(output), "--resume_from_checkpoint", checkpoint]
    main([*resumed, "--bad_rows", "skip"])
    assert (output / "checkpoint-4").exists()
