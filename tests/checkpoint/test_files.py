"""Files replaced whole or not at all, by one process at a time; models that are not there."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
import tiny_parts
import train_data
import training
from hub_server import HubServer

from normalign_llava.checkpoint import files
from normalign_llava.checkpoint.files import atomic_write, finished_folder, lock_folder
from normalign_llava.errors import NotWritable


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def paths_in(folder: Path) -> set[Path]:
    return set(folder.iterdir())


def write_files(folder: Path, contents: dict[str, str]) -> Path:
    """A folder with files of these contents."""
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in contents.items():
        (folder / file_name).write_text(content)
    return folder


def replaceable(*file_names):
    """Names the files of a folder that may be replaced."""
    return lambda folder: list(file_names)


def test_a_file_is_written_past_planted_links(tmp_path):
    card_path = tmp_path / "card.md"
    outside_path = tmp_path / "outside"
    planted_path = tmp_path / f".card.md-{os.getpid()}"
    planted_path.symlink_to(outside_path)
    card_path.symlink_to(outside_path)
    with atomic_write(card_path) as unfinished:
        unfinished.write_text("new")
        with pytest.raises(RuntimeError), atomic_write(card_path) as another:
            another.write_text("other")
            raise RuntimeError
    assert card_path.read_text() == "new"
    assert not card_path.is_symlink()
    assert not outside_path.exists()
    assert paths_in(tmp_path) == {card_path, planted_path}


def test_a_file_has_the_mode_of_any_other(tmp_path):
    card_path = tmp_path / "card.md"
    with atomic_write(card_path) as unfinished:
        unfinished.write_text("new")
    plain_path = tmp_path / "plain"
    plain_path.touch()
    assert card_path.stat().st_mode == plain_path.stat().st_mode


STOPPED = """
import signal, sys
from normalign_llava.cli import app

def stop(event, arguments):
    if event == "os.mkdir" and "/.out-" in str(arguments[0]) and str(arguments[0]).endswith("/out"):
        signal.raise_signal(signal.Signals[number])

number = sys.argv.pop(1)
sys.addaudithook(stop)
app()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_name", "expected_status"),
    [
        ("SIGTERM", 143),
        ("SIGINT", 130),
    ],
)
def test_a_command_that_is_stopped_leaves_no_unfinished_folder(
    prepared, tmp_path, signal_name, expected_status
):
    vision = tiny_parts.vision(tmp_path / "vision")
    language = tiny_parts.language(tmp_path / "language")
    options = ["--vision", vision, "--language", language, "--output", tmp_path / "out"]
    before = paths_in(tmp_path)
    process = prepared.run(["-c", STOPPED, signal_name, "build", *options])
    assert process.returncode == expected_status, process.stderr
    last_line = process.stderr.splitlines()[-1]
    assert last_line.startswith("Stopped.")
    assert paths_in(tmp_path) == before


def write_half(tmp_path, place) -> None:
    write_files((tmp_path / place).parent, {Path(place).name: "half of it"})


def test_the_folder_that_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    write_half(tmp_path, ".out-ab12_xyz/out")
    write_half(tmp_path, ".out-backup99/mine.txt")
    write_half(tmp_path, ".out-notes/out")
    with finished_folder(tmp_path / "out") as staging:
        (staging / "file").write_text("new")
    assert names_in(tmp_path) == {".out-backup99", ".out-notes", "out"}


def test_the_file_that_a_killed_run_left_is_removed(tmp_path):
    write_half(tmp_path, ".README.md-abcdefgh/README.md")
    card_path = tmp_path / "README.md"
    with atomic_write(card_path) as first, atomic_write(card_path) as second:
        # The first is being written at the moment, so the second leaves it.
        assert first.parent.is_dir()
        first.write_text("first")
        second.write_text("second")
    assert names_in(tmp_path) == {"README.md"}


@pytest.mark.parametrize("write", [atomic_write, finished_folder, lock_folder])
def test_a_folder_that_cannot_be_written_to_is_named_with_a_remedy(tmp_path, write):
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    message = f"^{not_a_folder}.* cannot be written to: .* another folder"
    with pytest.raises(NotWritable, match=message), write(not_a_folder / "a"):
        pass
    assert names_in(tmp_path) == {"file"}


def test_a_full_disk_is_a_folder_that_cannot_be_written_to(tmp_path):
    with pytest.raises(NotWritable), atomic_write(tmp_path / "a"):
        raise OSError(28, "No space left")
    assert names_in(tmp_path) == set()


def test_an_error_of_another_place_stays(tmp_path):
    with pytest.raises(OSError) as raised, atomic_write(tmp_path / "a"):
        raise OSError(13, "Permission", "/else")
    assert not isinstance(raised.value, NotWritable)
    assert names_in(tmp_path) == set()


def test_what_is_finished_is_kept_where_its_place_was_taken(tmp_path):
    target = tmp_path / "out"
    message = "out holds file.* What was made is in"
    with pytest.raises(FileExistsError, match=message) as error, finished_folder(target) as staging:
        (staging / "file").write_text("ours")
        write_files(target, {"file": "theirs"})
    (kept_path,) = paths_in(tmp_path) - {target}
    assert f"is in {kept_path}." in str(error.value)
    assert (kept_path / "file").read_text() == "ours"
    assert (target / "file").read_text() == "theirs"


def test_a_place_that_is_taken_is_refused_at_once(tmp_path):
    target = write_files(tmp_path / "out", {"file": "theirs"})
    with pytest.raises(ValueError, match="out holds file.*Choose another"), finished_folder(target):
        pass
    assert (target / "file").read_text() == "theirs"


KILLED = """
import os, signal, sys
from pathlib import Path
from normalign_llava.checkpoint.files import finished_folder

target, killed_at, steps, replace = Path(sys.argv[1]), int(sys.argv[2]), 0, os.replace

def killed_before_and_after(*paths):
    global steps
    for when in range(2):
        if when:
            replace(*paths)
        steps += 1
        if steps == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

os.replace = killed_before_and_after
with finished_folder(target, lambda folder: ["first", "second"]) as staging:
    for name in ("first", "second"):
        (staging / name).write_text("new")
"""


@pytest.mark.parametrize(
    ("killed_at", "expected"),
    [
        (1, "old"),
        (2, "new"),
        (3, "new"),
        (4, "new"),
    ],
)
def test_a_replacement_killed_at_any_step_leaves_the_old_or_the_new(tmp_path, killed_at, expected):
    target = write_files(tmp_path / "out", {"first": "old", "second": "old"})
    process = subprocess.run([sys.executable, "-c", KILLED, target, str(killed_at)])
    assert process.returncode == -signal.SIGKILL

    with pytest.raises(RuntimeError), finished_folder(target, replaceable("first", "second")):
        assert (target / "first").read_text() == expected
        assert (target / "second").read_text() == expected
        raise RuntimeError
    assert paths_in(tmp_path) == {target}


def test_a_replacement_has_four_steps(tmp_path):
    target = write_files(tmp_path / "out", {"first": "old", "second": "old"})
    process = subprocess.run([sys.executable, "-c", KILLED, target, "5"])
    assert process.returncode == 0


HOLDS = """
import sys
from pathlib import Path
from normalign_llava.checkpoint.files import finished_folder, lock_folder

with {"lock": lock_folder, "finished": finished_folder}[sys.argv[1]](Path(sys.argv[2])) as staging:
    if staging:
        (staging / "file").write_text("theirs")
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def hold():
    """Starts a process that holds a folder, `how` as in `HOLDS`, until its input is closed."""
    processes = []

    def start(how: str, folder: Path) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, how, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def model_path(tmp_path):
    """An empty folder, `model`."""
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def busy_with(process) -> str:
    return rf"model is being written to by `-c lock .*`, process {process.pid}\. Wait for"


def test_a_second_process_gets_the_name_of_the_first(model_path, tmp_path, hold):
    process = hold("lock", model_path)
    # The first attempt must not take the name away.
    for _ in range(2):
        other_lock = lock_folder(tmp_path / "other")
        model_lock = lock_folder(model_path, wait=0)
        with pytest.raises(ValueError, match=busy_with(process)), other_lock, model_lock:
            pass
    # No folder is left that was made for a lock.
    assert paths_in(tmp_path) == {model_path}


def test_no_folder_is_finished_in_one_that_another_process_holds(model_path, hold, monkeypatch):
    process = hold("lock", model_path)
    monkeypatch.setattr(files, "lock_folder", partial(lock_folder, wait=0))
    results = finished_folder(model_path / "results", replaceable("file"))
    with pytest.raises(ValueError, match=busy_with(process)), results:
        pass


def test_a_second_process_waits_for_a_short_one(model_path, tmp_path, hold):
    process = hold("lock", model_path)
    process.stdin.close()
    # In one process, a folder is locked as often as is asked.
    with lock_folder(model_path, wait=60), lock_folder(model_path):
        files.check_free(model_path)
    assert list(tmp_path.rglob("*")) == [model_path]


def test_the_lock_of_a_killed_process_is_removed(model_path, hold):
    process = hold("lock", model_path)
    process.kill()
    process.wait()
    assert (model_path / files.LOCK).exists()
    files.check_free(model_path)
    assert not list(model_path.iterdir())


@pytest.mark.parametrize(
    "lock_content",
    [
        pytest.param(None, id="ended-meanwhile"),
        pytest.param(b"", id="writes-its-name"),
        pytest.param(b"\xff", id="not-utf-8"),
    ],
)
def test_a_process_that_cannot_be_named_is_another_process(tmp_path, lock_content):
    lock_path = tmp_path / files.LOCK
    if lock_content is not None:
        lock_path.write_bytes(lock_content)
    message = files.busy_message(tmp_path, lock_path)
    assert "is being written to by another process." in message


def test_what_a_living_process_makes_is_not_removed_and_nobody_else_makes_it(tmp_path, hold):
    target = tmp_path / "out"
    process = hold("finished", target)
    (unfinished_file,) = tmp_path.glob(".out-*/out/file")
    message = f"out is being written to by .*, process {process.pid}"
    with pytest.raises(ValueError, match=message), finished_folder(target):
        pass
    assert unfinished_file.exists()

    process.communicate()
    assert (target / "file").read_text() == "theirs"
    assert paths_in(tmp_path) == {target}


def modification_times(folder: Path) -> dict[Path, int]:
    times = {}
    for path in folder.rglob("*"):
        if path.is_file():
            times[path] = path.stat().st_mtime_ns
    return times


@pytest.mark.slow
def test_commands_name_the_process_that_writes_to_their_folder(prepared, tmp_path, hold):
    model = training.checkpoint(tmp_path)
    new_path = tmp_path / "new"
    vision = tiny_parts.vision(tmp_path / "vision")
    language = tiny_parts.language(tmp_path / "language")
    dataset = train_data.write_json(tmp_path, [train_data.llava("what?", "red")])
    train_options = ["--model_name_or_path", model, "--dataset_name", dataset]
    commands = {
        "card": ["card", model],
        "diagnose": ["diagnose", model],
        "publish": ["publish", model, "--repo-id", "bea/model", "--dry-run"],
        "train": ["train", *train_options, "--output_dir", model],
        "build": ["build", "--vision", vision, "--language", language, "--output", new_path],
    }
    holder_of_model = hold("lock", model)
    holder_of_new = hold("finished", new_path)
    holders = {**dict.fromkeys(commands, holder_of_model), "build": holder_of_new}

    before = modification_times(tmp_path)
    started = {}
    for command, arguments in commands.items():
        started[command] = prepared.start(["-m", "normalign_llava", *arguments])
    for command, process in started.items():
        ended = process.wait()
        assert ended.returncode == 1, (command, ended.stderr)
        assert f", process {holders[command].pid}." in ended.stderr, (command, ended.stderr)
    assert modification_times(tmp_path) == before


CLIENT = """
import json, sys
from huggingface_hub import hf_hub_download
from normalign_llava.checkpoint.files import require_model
for name, revision in json.load(sys.stdin):
    try:
        said, _ = require_model(name, revision)
        hf_hub_download(name, "config.json")
    except ValueError as error:
        said = str(error)
    print(json.dumps(said))
"""


def find_models(names_and_revisions, environment) -> list[str]:
    """Looks for models in a process of its own. Returns the names that are there, or errors."""
    process = subprocess.run(
        [sys.executable, "-c", CLIENT],
        input=json.dumps(names_and_revisions),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


NOT_HUB_IDS = ["none", "./user/none", "user/none/", "a/b/c", "../model", "~/model"]


def test_the_hub_is_asked_once_and_only_of_what_may_be_there(tmp_path):
    write_files(tmp_path / "model", {"config.json": "{}"})
    absent = ("user/none", None)
    present = ("user/model", None)
    names_and_revisions = [(name, None) for name in NOT_HUB_IDS]
    names_and_revisions += [absent, ("user/model", "v9"), present]
    with HubServer({"user/model": tmp_path / "model"}) as hub:
        environment = hub.environment(tmp_path / "home")
        answers = find_models(names_and_revisions, environment)
        requests = [request.split("?")[0] for request in hub.requests]
    *not_asked, of_absent, of_version, of_present = answers

    for name, answer in zip(NOT_HUB_IDS, not_asked, strict=True):
        assert answer.startswith(f"{name} does not exist here")
    assert of_absent.startswith(f"user/none does not exist here. {hub.url} has none")
    assert of_version.startswith(f"user/model does not exist here. {hub.url} has none")
    assert of_present == "user/model"

    about_models = [request for request in requests if "/api/models/" in request]
    assert about_models.count("GET /api/models/user/none") == 1
    owners = {request.split("/")[3] for request in about_models}
    assert owners == {"user"}

    # The hub is gone now.
    for changes, reason in (({}, "cannot be asked"), ({"HF_HUB_OFFLINE": "1"}, "offline")):
        of_absent, of_present = find_models([absent, present], environment | changes)
        assert of_absent.startswith(f"user/none does not exist here. {hub.url}")
        assert reason in of_absent
        assert of_present == "user/model"


def test_a_name_in_the_home_folder_is_a_folder_there(model_path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.require_model("~/model") == (str(model_path), None)


def test_a_folder_whose_name_is_a_hub_id_too_is_the_one_that_is_here(tmp_path, monkeypatch):
    (tmp_path / "user" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert files.is_hub_id("user/model")
    assert files.require_model("user/model") == ("user/model", None)


CONFIG = {"config.json": "{}"}
ADAPTER = {"adapter_config.json": "{}"}


@pytest.mark.parametrize("contents", [CONFIG, CONFIG | ADAPTER], ids=["model", "with-adapter"])
def test_a_folder_with_a_configuration_is_a_checkpoint(tmp_path, contents):
    folder = write_files(tmp_path / "folder", contents)
    assert files.require_checkpoint(folder) == (str(folder), None)


def test_an_adapter_is_no_checkpoint_before_it_is_merged(tmp_path):
    adapter_path = write_files(tmp_path / "adapter", ADAPTER)
    with pytest.raises(ValueError, match=f"normalign merge {adapter_path} --output"):
        files.require_checkpoint(adapter_path)


def test_a_folder_without_a_configuration_is_no_checkpoint(tmp_path):
    folder = write_files(tmp_path / "folder", {})
    with pytest.raises(ValueError, match="folder has no config.json.* Look again"):
        files.require_checkpoint(folder, remedy="Look again.")


def test_a_folder_that_is_not_there_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"none does not exist here\. Look again"):
        files.require_checkpoint(tmp_path / "none", remedy="Look again.")


@pytest.mark.parametrize(
    "contents",
    [CONFIG, ADAPTER, CONFIG | ADAPTER],
    ids=["model", "adapter", "both"],
)
def test_a_folder_of_a_model_or_an_adapter_is_accepted(tmp_path, contents):
    files.check_folder(write_files(tmp_path / "folder", contents))


def test_a_folder_of_neither_is_refused(tmp_path):
    folder = write_files(tmp_path / "folder", {})
    with pytest.raises(ValueError, match="folder has no config.json.*adapter_config.json"):
        files.check_folder(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none does not exist here"):
        files.check_folder(tmp_path / "none")


def test_an_adapter_has_weights(tmp_path):
    adapter_path = write_files(tmp_path / "adapter", ADAPTER)
    with pytest.raises(ValueError, match="adapter has no adapter_model.safetensors"):
        files.check_adapter(adapter_path)
    (adapter_path / "adapter_model.safetensors").touch()
    files.check_adapter(adapter_path)


def test_a_model_is_no_adapter(tmp_path):
    model_path = write_files(tmp_path / "model", CONFIG)
    with pytest.raises(ValueError, match="model has no adapter_config.json"):
        files.check_adapter(model_path)


def test_checkpoints_of_a_run_are_named_in_order(tmp_path):
    for step in (6, 3, 8, 1, 5, 4, 7):
        write_files(tmp_path / f"checkpoint-{step}", CONFIG)
    write_files(tmp_path / "checkpoint-2", {})
    expected = ", ".join(f"checkpoint-{step}" for step in (1, 3, 4, 5, 6, 7, 8))
    with pytest.raises(ValueError, match=f"It has {expected}: name one"):
        files.require_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model", "a/b/c", "../b", "a/b c", "a/-b", ""])
def test_what_is_no_repository_s_name_is_refused(name):
    assert not files.is_hub_id(name)
    with pytest.raises(ValueError):
        files.check_repo_id(name)


def test_a_repository_s_name_is_accepted():
    assert files.is_hub_id("a/b-1.5")
    assert files.check_repo_id("a/b-1.5") is None


@pytest.mark.parametrize(
    ("normalign_cache", "xdg_cache", "expected"),
    [
        ("", "", "/home/ann/.cache/normalign-llava"),
        ("", "/cache", "/cache/normalign-llava"),
        ("~/kept", "/cache", "/home/ann/kept"),
    ],
)
def test_where_downloads_are_kept(monkeypatch, normalign_cache, xdg_cache, expected):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("NORMALIGN_CACHE", normalign_cache)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg_cache)
    assert str(files.cache_dir()) == expected


def test_a_replaced_folder_is_new_as_a_whole(tmp_path):
    target = write_files(tmp_path / "[1]*", {"first": "old", "second": "old"})
    write_half(tmp_path, ".[1]*-abcdefgh/[1]*/first")
    with finished_folder(target, replaceable("first", "second")) as staging:
        (staging / "first").write_text("new")
    assert names_in(target) == {"first"}
    assert (target / "first").read_text() == "new"
    assert paths_in(tmp_path) == {target}


def test_a_folder_with_a_file_of_somebody_else_is_not_replaced(tmp_path):
    target = write_files(tmp_path / "[1]*", {"first": "new", "mine": "mine"})
    message = r"holds mine. It is not overwritten\. Choose"
    with pytest.raises(ValueError, match=message), finished_folder(target, replaceable("first")):
        pass
    assert names_in(target) == {"first", "mine"}


def test_a_link_stays_one_to_the_folder_that_is_replaced(tmp_path):
    folder = write_files(tmp_path / "real", {"first": "old"})
    link_path = tmp_path / "link"
    link_path.symlink_to(folder)
    with finished_folder(link_path, replaceable("first")) as staging:
        (staging / "first").write_text("new")
    assert link_path.is_symlink()
    assert (folder / "first").read_text() == "new"
    assert paths_in(tmp_path) == {folder, link_path}


LONG_COMMAND = [
    "/bin/normalign",
    "train",
    "recipe.yaml",
    "--output_dir",
    "a" * 30,
    "b" * 200,
]


@pytest.mark.parametrize(
    ("arguments", "expected_begin"),
    [
        pytest.param(LONG_COMMAND, "`normalign train recipe.yaml --output_dir a", id="long"),
        pytest.param([""], "`python`", id="none"),
    ],
)
def test_a_lock_has_the_command_and_is_held_by_whatever_path(
    tmp_path, monkeypatch, arguments, expected_begin
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", arguments)
    with lock_folder("out"), lock_folder(tmp_path / "out", wait=0):
        lock_text = (tmp_path / "out" / files.LOCK).read_text()
    assert lock_text.startswith(expected_begin)
    assert lock_text.endswith(f", process {os.getpid()}")
    assert len(lock_text) < 160


def test_what_only_looks_like_a_killed_run_s_is_kept(tmp_path):
    other_path = tmp_path / "other"
    write_files(other_path / "out", {"file": "mine"})
    (tmp_path / ".out-linklink").symlink_to(other_path)
    # A process has just made this lock.
    write_files(tmp_path / ".out-lonelock", {files.LOCK: ""})
    (tmp_path / ".out-of_files").write_text("")
    write_files(tmp_path / ".out-withmore", {"out": "", "more": ""})
    write_files(tmp_path / ".out-toolongx1", {"out": ""})
    before = sorted(tmp_path.rglob("*"))
    assert files.complete_or_remove_unfinished(tmp_path / "out") == []
    assert sorted(tmp_path.rglob("*")) == before
    assert (other_path / "out" / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("run_file", "place"),
    [
        pytest.param(
            "run/adapter_config.json",
            "run/checkpoint-6",
            id="its adapter",
        ),
        pytest.param(
            "run/training.json",
            "run/checkpoint-6",
            id="its record",
        ),
        pytest.param(
            "run/trainer_state.json",
            "run/checkpoint-6",
            id="its state",
        ),
        pytest.param(
            "run/checkpoint-3/trainer_state.json",
            "run/checkpoint-6",
            id="another checkpoint",
        ),
        pytest.param(
            "run/checkpoint-6/trainer_state.json",
            "run/checkpoint-6",
            id="the same checkpoint",
        ),
        pytest.param(
            "run/checkpoint-6/trainer_state.json",
            "run/checkpoint-6/a/b",
            id="in a checkpoint",
        ),
        pytest.param(
            "run/training.json",
            "run/checkpoint-6-merged",
            id="the beginning of a name",
        ),
    ],
)
def test_a_place_that_is_a_run_s_is_refused(tmp_path, monkeypatch, run_file, place):
    run_path = tmp_path / run_file
    write_files(run_path.parent, {run_path.name: "{}"})
    monkeypatch.chdir(tmp_path)
    reason = "is named as a checkpoint"
    if place.endswith("a/b"):
        reason = "lies in checkpoint-6"
    message = f"{tmp_path / place} {reason}.* outside {tmp_path / 'run'},"
    with pytest.raises(ValueError, match=message):
        files.check_not_in_run(Path(place))


@pytest.mark.parametrize(
    ("run_file", "place"),
    [
        pytest.param(
            "run/training.json",
            "run/checkpoint-best",
            id="a name without a step",
        ),
        pytest.param(
            "run/training.json",
            "run/my-checkpoint-6",
            id="another name",
        ),
        pytest.param(
            "run/training.json",
            "run",
            id="the run itself",
        ),
        pytest.param(
            "run/config.json",
            "run/checkpoint-6",
            id="no run's",
        ),
        pytest.param(
            "run/training.json",
            "checkpoint-6",
            id="another folder's",
        ),
    ],
)
def test_a_place_that_is_no_run_s_is_accepted(tmp_path, monkeypatch, run_file, place):
    run_path = tmp_path / run_file
    write_files(run_path.parent, {run_path.name: "{}"})
    monkeypatch.chdir(tmp_path)
    files.check_not_in_run(Path(place))


def test_json_that_is_not_there_is_none(tmp_path):
    assert files.json_or_none(tmp_path / "a.json") is None


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{", id="cut-off"),
        pytest.param(b'"\xff"', id="not-utf-8"),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_json_that_cannot_be_read_is_none(tmp_path, content):
    json_path = tmp_path / "a.json"
    json_path.write_bytes(content)
    assert files.json_or_none(json_path) is None


def test_json_is_written_as_it_is_read(tmp_path):
    json_path = tmp_path / "a.json"
    content = {"name": "Größe 🪁", "list": [1, 2.5, None]}
    files.write_json(json_path, content)
    text = json_path.read_text(encoding="utf-8")
    assert files.json_or_none(json_path) == content
    assert json.loads(text) == content
    assert "Größe 🪁" in text
    assert text.endswith("}\n")


def test_a_folder_made_for_a_lock_stays_if_it_was_filled(tmp_path):
    folder = tmp_path / "a" / "b"
    with lock_folder(folder):
        (folder / "file").touch()
        lock_text = (folder / files.LOCK).read_text()
    assert f"process {os.getpid()}" in lock_text
    assert names_in(folder) == {"file"}


def test_a_lock_is_given_back_after_an_error(tmp_path):
    folder = write_files(tmp_path / "a" / "b", {"file": ""})
    with pytest.raises(RuntimeError), lock_folder(folder):
        raise RuntimeError
    with lock_folder(folder, wait=0):
        assert (folder / files.LOCK).exists()
        # Somebody may do this who clears up.
        (folder / files.LOCK).unlink()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Parts, a LLaVA and a NormAlign-LLaVA; an adapter of it, images, data, and a recipe."""
    root = tmp_path_factory.mktemp("trained")
    training.checkpoint(root)
    tiny_parts.llava(root / "llava", tiny.llava(tied=False))
    training.adapter(root / "adapter", root / "model")

    train_data.images(root / "images", "red.png")
    sample_row = train_data.llava("<image>\nwhat is it?", "it is red", "red.png")
    train_data.write_json(root / "data", [sample_row, sample_row])
    training.recipe(
        root,
        root,
        model_name_or_path="bea/model",
        max_steps=1,
        use_cpu=True,
    )
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected_repositories"),
    [
        (
            "build --vision bea/vision --language bea/language --output {new}",
            {"vision", "language"},
        ),
        (
            "build --from-llava bea/llava --output {new}",
            {"llava"},
        ),
        (
            "merge {folder}/adapter --base bea/model --output {new}",
            {"model"},
        ),
        (
            "diagnose bea/model --data {folder}/images --output {new}",
            {"model"},
        ),
        (
            "gain bea/language --critical --revision main",
            {"language"},
        ),
        (
            "train {folder}/recipe.yaml --output_dir {new}",
            {"model"},
        ),
    ],
    ids=["build", "retrofit", "merge", "diagnose", "gain", "train"],
)
def test_files_of_a_moving_repository_are_of_one_commit(
    hub, prepared, trained, tmp_path, command, expected_repositories
):
    for model_name in ("vision", "language", "llava", "model"):
        repository = hub.serve(f"bea/{model_name}", trained / model_name)
        repository.resolve = partial(resolve_and_move, repository, repository.resolve)
    arguments = command.format(folder=trained, new=tmp_path / "new").split()
    process = prepared.run(["-m", "normalign_llava", *arguments])
    assert process.returncode == 0, process.stderr

    requests = "\n".join(hub.requests)
    commits_read = set(re.findall(r"bea/(\w+)/(?:resolve|tree)/(\w+)", requests))
    assert {model_name for model_name, _ in commits_read} == expected_repositories
    assert "main" not in {commit for _, commit in commits_read}
    assert len(commits_read) == len(expected_repositories), commits_read


def resolve_and_move(repository, resolve, revision):
    """The commit of `revision`. When it is `main`, that has another configuration from now on."""
    commit = resolve(revision)
    if revision == "main":
        config = json.loads(repository.blobs[commit.files["config.json"]])
        config["after"] = commit.oid
        repository.change({"config.json": json.dumps(config).encode()})
    return commit
