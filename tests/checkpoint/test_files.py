"""Files replaced whole or not at all, by one process at a time; models that are not there."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
import tiny_parts as parts
import train_data
import training
from hub_server import HubServer

from normalign_llava.checkpoint import files
from normalign_llava.checkpoint.files import atomic_write, finished_folder, only_writer
from normalign_llava.errors import NotWritable


def test_a_file_is_written_past_planted_links(tmp_path):
    target, outside, plain = (tmp_path / name for name in ("card.md", "outside", "plain"))
    planted = tmp_path / f".card.md-{os.getpid()}"
    planted.symlink_to(outside)
    target.symlink_to(outside)
    with atomic_write(target) as partial:
        partial.write_text("new")
        with pytest.raises(RuntimeError), atomic_write(target) as another:
            another.write_text("other")
            raise RuntimeError
    plain.touch()
    assert target.read_text() == "new" and not outside.exists() and not target.is_symlink()
    assert target.stat().st_mode == plain.stat().st_mode
    assert {*tmp_path.iterdir()} == {target, planted, plain}


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
@pytest.mark.parametrize("number, status", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_command_that_is_stopped_leaves_no_unfinished_folder(prepared, tmp_path, number, status):
    vision, language = parts.vision(tmp_path / "vision"), parts.language(tmp_path / "language")
    words = ["--vision", vision, "--language", language, "--output", tmp_path / "out"]
    before = {*tmp_path.iterdir()}
    done = prepared.run(["-c", STOPPED, number, "build", *words])
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1].startswith("Stopped.")
    assert {*tmp_path.iterdir()} == before


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    left = (".out-ab12_xyz/out", ".README.md-abcdefgh/README.md")
    for name in (*left, ".out-backup99/mine.txt", ".out-notes/out"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("half of it")
    kept = {".out-backup99", ".out-notes", "out", "README.md"}
    with finished_folder(tmp_path / "out") as staging:
        (staging / "file").write_text("new")
    card = tmp_path / "README.md"
    with atomic_write(card) as first, atomic_write(card) as second:
        assert first.parent.is_dir()  # which another writes at the moment
        first.write_text("first")
        second.write_text("second")
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_folder_that_cannot_be_written_to_is_named_with_a_remedy(tmp_path):
    folder = tmp_path / "file"
    folder.touch()
    said = f"^{folder}.* cannot be written to: .* another folder"
    for write in (atomic_write, finished_folder, only_writer):
        with pytest.raises(NotWritable, match=said), write(folder / "a"):
            pass
    for error in (OSError(28, "No space left"), OSError(13, "Permission", "/else")):
        with pytest.raises(OSError) as raised, atomic_write(tmp_path / "a"):
            raise error
        assert isinstance(raised.value, NotWritable) == (error.errno == 28)
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_what_is_finished_is_kept_where_its_place_was_taken(tmp_path):
    target = tmp_path / "out"
    said = "out holds file.* What was made is in"
    with pytest.raises(FileExistsError, match=said) as error, finished_folder(target) as staging:
        (staging / "file").write_text("ours")
        target.mkdir()
        (target / "file").write_text("theirs")
    (kept,) = (path for path in tmp_path.iterdir() if path != target)
    assert f"is in {kept}." in str(error.value) and (kept / "file").read_text() == "ours"
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


def test_a_replacement_killed_at_any_step_leaves_the_old_or_the_new(tmp_path):
    target, left = tmp_path / "out", []
    for step in range(1, 6):
        target.mkdir(exist_ok=True)
        for name in ("first", "second"):
            (target / name).write_text("old")
        run = subprocess.run([sys.executable, "-c", KILLED, target, str(step)])
        if run.returncode == 0:
            break
        folder = finished_folder(target, lambda folder: ["first", "second"])
        with pytest.raises(RuntimeError), folder:
            left.append({(target / name).read_text() for name in ("first", "second")})
            raise RuntimeError
        assert list(tmp_path.iterdir()) == [target]
    assert left == [{"old"}, {"new"}, {"new"}, {"new"}]


HOLDS = """
import sys
from pathlib import Path
from normalign_llava.checkpoint.files import finished_folder, only_writer

with {"lock": only_writer, "finished": finished_folder}[sys.argv[1]](Path(sys.argv[2])) as staging:
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
        command = [sys.executable, "-c", HOLDS, how, str(folder)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(subprocess.Popen(command, **pipes))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_second_process_is_told_of_the_first_and_waits_for_a_short_one(tmp_path, hold):
    folder = tmp_path / "model"
    folder.mkdir()
    first = hold("lock", folder)
    named = rf"model is being written to by `-c lock .*`, process {first.pid}\. Wait for"
    for _ in range(2):  # the first attempt must not take the name away
        other = only_writer(tmp_path / "other")
        with pytest.raises(ValueError, match=named), other, only_writer(folder, wait=0):
            pass
    first.stdin.close()
    with only_writer(folder, wait=60), only_writer(folder):  # in one process, as often as is asked
        files.check_free(folder)
    assert list(tmp_path.rglob("*")) == [folder]  # no lock is left, and no folder made for one
    killed = hold("lock", folder)
    killed.kill()
    killed.wait()
    assert (folder / files.LOCK).exists()
    files.check_free(folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("left", [None, b"", b"\xff"])  # it ended meanwhile, or writes its name
def test_a_process_that_cannot_be_named_is_another_process(tmp_path, left):
    if left is not None:
        (tmp_path / files.LOCK).write_bytes(left)
    assert "is being written to by another process." in files.busy(tmp_path, tmp_path / files.LOCK)


def test_what_a_living_process_makes_is_not_removed_and_nobody_else_makes_it(tmp_path, hold):
    target = tmp_path / "out"
    first = hold("finished", target)
    (made,) = tmp_path.glob(".out-*/out/file")
    said = f"out is being written to by .*, process {first.pid}"
    with pytest.raises(ValueError, match=said), finished_folder(target):
        pass
    assert made.exists()
    first.communicate()
    assert (target / "file").read_text() == "theirs" and list(tmp_path.iterdir()) == [target]


@pytest.mark.slow
def test_commands_are_told_who_writes_to_the_folder_of_theirs(prepared, tmp_path, hold):
    model, built = training.checkpoint(tmp_path), tmp_path / "new"
    vision, language = parts.vision(tmp_path / "vision"), parts.language(tmp_path / "language")
    data = train_data.write_json(tmp_path, [train_data.llava("what?", "red")])
    commands = [
        ["card", model],
        ["diagnose", model],
        ["publish", model, "--repo-id", "bea/model", "--dry-run"],
        ["train", "--model_name_or_path", model, "--dataset_name", data, "--output_dir", model],
        ["build", "--vision", vision, "--language", language, "--output", built],
    ]
    holders = [hold("lock", model), hold("finished", built)]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    started = [prepared.start(["-m", "normalign_llava", *command]) for command in commands]
    for command, done in zip(commands, [process.wait() for process in started], strict=True):
        holder, said = holders[command[0] == "build"].pid, done.stderr
        assert done.returncode == 1 and f", process {holder}." in said, (command, said)
    files = (path for path in tmp_path.rglob("*") if path.is_file())
    assert {path: path.stat().st_mtime_ns for path in files} == times


CLIENT = """
import json, sys
from huggingface_hub import hf_hub_download
from normalign_llava.checkpoint.files import find_model
for name, revision in json.load(sys.stdin):
    try:
        said, _ = find_model(name, revision)
        hf_hub_download(name, "config.json")
    except ValueError as error:
        said = str(error)
    print(json.dumps(said))
"""


def asked(names, environment):
    how = dict(input=json.dumps(names), env=environment, capture_output=True, text=True)
    run = subprocess.run([sys.executable, "-c", CLIENT], **how)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_the_hub_is_asked_once_and_only_of_what_may_be_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    paths = ["none", "./user/none", "user/none/", "a/b/c", "../model", "~/model"]
    absent, known = ["user/none", None], ["user/model", None]
    with HubServer({"user/model": tmp_path / "model"}) as hub:
        environment = hub.environment(tmp_path / "home")
        names = [*([path, None] for path in paths), absent, ["user/model", "v9"], known]
        *no_names, unknown, unversioned, model = asked(names, environment)
        for path, said in zip(paths, no_names, strict=True):
            assert said.startswith(f"{path} is no file or f")
        for name, said in (("user/none", unknown), ("user/model", unversioned)):
            assert said.startswith(f"{name} is no file or folder here. {hub.url} has none")
        assert model == "user/model"
        about = [request.split("?")[0] for request in hub.requests if "/api/models/" in request]
        assert about.count("GET /api/models/user/none") == 1
        assert {path.split("/")[3] for path in about} == {"user"}
    for changes, why in (({}, "cannot be asked"), ({"HF_HUB_OFFLINE": "1"}, "offline")):
        unreachable, kept = asked([absent, known], environment | changes)
        assert unreachable.startswith(f"user/none is no file or folder here. {hub.url}")
        assert why in unreachable
        assert kept == "user/model"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Parts, a LLaVA and a NormAlign-LLaVA; an adapter of it, images, data, and a recipe."""
    folder = tmp_path_factory.mktemp("trained")
    training.checkpoint(folder)
    parts.llava(folder / "llava", tiny.llava(tied=False))
    trainer = training.trainer(folder / "adapter", folder / "model", max_steps=1, use_peft=True)
    trainer.train()
    trainer.save_model()
    train_data.images(folder / "images", "red.png")
    row = train_data.llava("<image>\nwhat is it?", "it is red", "red.png")
    train_data.write_json(folder / "data", [row, row])
    training.recipe(folder, folder, model_name_or_path="bea/model", max_steps=1, use_cpu=True)
    return folder


COMMANDS = {
    "build --vision bea/vision --language bea/language --output {new}": {"vision", "language"},
    "build --from-llava bea/llava --output {new}": {"llava"},
    "merge {folder}/adapter --base bea/model --output {new}": {"model"},
    "diagnose bea/model --data {folder}/images --output {new}": {"model"},
    "gain bea/language --critical --revision main": {"language"},
    "train {folder}/recipe.yaml --output_dir {new}": {"model"},
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_a_moving_repository_are_of_one_commit(hub, prepared, trained, tmp_path, command):
    for name in ("vision", "language", "llava", "model"):
        repository = hub.serve(f"bea/{name}", trained / name)
        repository.resolve = partial(resolve_and_move, repository, repository.resolve)
    words = command.format(folder=trained, new=tmp_path / "new").split()
    done = prepared.run(["-m", "normalign_llava", *words])
    assert done.returncode == 0, done.stderr
    read = re.findall(r"bea/(\w+)/resolve/(\w+)/", "\n".join(hub.requests))
    assert {name for name, _ in read} == COMMANDS[command] and "main" not in dict(read).values()
    assert len(set(read)) == len(COMMANDS[command]), set(read)


def resolve_and_move(repository, resolve, revision):
    """The commit of `revision`. When it is `main`, that has another configuration from now on."""
    commit = resolve(revision)
    if revision == "main":
        settings = json.loads(repository.blobs[commit.files["config.json"]])
        settings["after"] = commit.oid
        repository.change({"config.json": json.dumps(settings).encode()})
    return commit
