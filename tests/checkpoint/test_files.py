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
from normalign_llava.checkpoint.files import atomic_write, finished_folder, lock_folder
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
    vision = parts.vision(tmp_path / "vision")
    language = parts.language(tmp_path / "language")
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
    for write in (atomic_write, finished_folder, lock_folder):
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
    target = tmp_path / "out"
    left = []
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
        command = [sys.executable, "-c", HOLDS, how, str(folder)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(subprocess.Popen(command, **pipes))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_second_process_is_told_of_the_first_and_waits_for_a_short_one(
    tmp_path, hold, monkeypatch
):
    folder = tmp_path / "model"
    folder.mkdir()
    first = hold("lock", folder)
    named = rf"model is being written to by `-c lock .*`, process {first.pid}\. Wait for"
    for _ in range(2):  # the first attempt must not take the name away
        other = lock_folder(tmp_path / "other")
        with pytest.raises(ValueError, match=named), other, lock_folder(folder, wait=0):
            pass
    with monkeypatch.context() as patched:
        patched.setattr(files, "lock_folder", partial(lock_folder, wait=0))
        results = finished_folder(folder / "results", lambda made: ["file"])
        with pytest.raises(ValueError, match=named), results:
            pass
    first.stdin.close()
    with lock_folder(folder, wait=60), lock_folder(folder):  # in one process, as often as is asked
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
    assert "is being written to by another process." in files.busy_message(
        tmp_path, tmp_path / files.LOCK
    )


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
    model = training.checkpoint(tmp_path)
    built = tmp_path / "new"
    vision = parts.vision(tmp_path / "vision")
    language = parts.language(tmp_path / "language")
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
        holder = holders[command[0] == "build"].pid
        said = done.stderr
        assert done.returncode == 1 and f", process {holder}." in said, (command, said)
    files = (path for path in tmp_path.rglob("*") if path.is_file())
    assert {path: path.stat().st_mtime_ns for path in files} == times


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


def asked(names, environment):
    how = dict(input=json.dumps(names), env=environment, capture_output=True, text=True)
    run = subprocess.run([sys.executable, "-c", CLIENT], **how)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_the_hub_is_asked_once_and_only_of_what_may_be_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    paths = ["none", "./user/none", "user/none/", "a/b/c", "../model", "~/model"]
    absent = ["user/none", None]
    known = ["user/model", None]
    with HubServer({"user/model": tmp_path / "model"}) as hub:
        environment = hub.environment(tmp_path / "home")
        names = [*([path, None] for path in paths), absent, ["user/model", "v9"], known]
        *no_names, unknown, unversioned, model = asked(names, environment)
        for path, said in zip(paths, no_names, strict=True):
            assert said.startswith(f"{path} does not exist here")
        for name, said in (("user/none", unknown), ("user/model", unversioned)):
            assert said.startswith(f"{name} does not exist here. {hub.url} has none")
        assert model == "user/model"
        about = [request.split("?")[0] for request in hub.requests if "/api/models/" in request]
        assert about.count("GET /api/models/user/none") == 1
        assert {path.split("/")[3] for path in about} == {"user"}
    for changes, why in (({}, "cannot be asked"), ({"HF_HUB_OFFLINE": "1"}, "offline")):
        unreachable, kept = asked([absent, known], environment | changes)
        assert unreachable.startswith(f"user/none does not exist here. {hub.url}")
        assert why in unreachable
        assert kept == "user/model"


def test_a_name_in_the_home_folder_is_a_folder_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert files.require_model("~/model") == (str(tmp_path / "model"), None)


def test_a_folder_whose_name_is_a_hub_id_too_is_the_one_that_is_here(tmp_path, monkeypatch):
    (tmp_path / "user" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert files.is_hub_id("user/model")
    assert files.require_model("user/model") == ("user/model", None)


def written(folder, **contents):
    """A folder with files of these contents."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("_json", ".json")).write_text(content)
    return folder


CONFIG = {"config_json": "{}"}
ADAPTER = {"adapter_config_json": "{}"}


def test_folders_are_told_by_the_files_in_them(tmp_path):
    model = written(tmp_path / "a", **CONFIG)
    adapter = written(tmp_path / "b", **ADAPTER)
    both = written(tmp_path / "c", **CONFIG, **ADAPTER)
    neither = written(tmp_path / "d")
    for folder in (model, both):
        assert files.require_checkpoint(folder) == (str(folder), None)
    with pytest.raises(ValueError, match=f"normalign merge {adapter} --output"):
        files.require_checkpoint(adapter)
    with pytest.raises(ValueError, match="d has no config.json.* Look again"):
        files.require_checkpoint(neither, remedy="Look again.")
    with pytest.raises(ValueError, match=r"none does not exist here\. Look again"):
        files.require_checkpoint(tmp_path / "none", remedy="Look again.")
    for folder in (model, adapter, both):
        files.check_folder(folder)
    with pytest.raises(ValueError, match="d has no config.json.*adapter_config.json"):
        files.check_folder(neither)
    with pytest.raises(ValueError, match="none does not exist here"):
        files.check_folder(tmp_path / "none")
    with pytest.raises(ValueError, match="b has no adapter_model.safetensors"):
        files.check_adapter(adapter)
    with pytest.raises(ValueError, match="a has no adapter_config.json"):
        files.check_adapter(model)
    (adapter / "adapter_model.safetensors").touch()
    files.check_adapter(adapter)


def test_checkpoints_of_a_run_are_named_in_order(tmp_path):
    for step in (6, 3, 8, 1, 5, 4, 7):
        written(tmp_path / f"checkpoint-{step}", **CONFIG)
    written(tmp_path / "checkpoint-2")
    expected = ", ".join(f"checkpoint-{step}" for step in (1, 3, 4, 5, 6, 7, 8))
    with pytest.raises(ValueError, match=f"It has {expected}: name one"):
        files.require_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model", "a/b/c", "../b", "a/b c", "a/-b", ""])
def test_what_is_no_repository_s_name_is_refused(name):
    assert not files.is_hub_id(name)
    with pytest.raises(ValueError):
        files.check_repo_id(name)
    assert files.is_hub_id("a/b-1.5") and files.check_repo_id("a/b-1.5") is None


def test_where_downloads_are_kept(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    for name in ("NORMALIGN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert str(files.cache_dir()) == "/home/ann/.cache/normalign-llava"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(files.cache_dir()) == "/cache/normalign-llava"
    monkeypatch.setenv("NORMALIGN_CACHE", "~/kept")
    assert str(files.cache_dir()) == "/home/ann/kept"


def test_a_replaced_folder_is_new_as_a_whole_and_nothing_of_others_is_lost(tmp_path):
    target = written(tmp_path / "[1]*", first="old", second="old")
    left = written(tmp_path / ".[1]*-abcdefgh" / "[1]*", first="half")
    with finished_folder(target, lambda folder: ["first", "second"]) as staging:
        (staging / "first").write_text("new")
    assert [path.name for path in target.iterdir()] == ["first"] and not left.parent.exists()
    assert (target / "first").read_text() == "new"
    (target / "mine").write_text("mine")
    said = r"holds mine. It is not overwritten\. Choose"
    with pytest.raises(ValueError, match=said), finished_folder(target, lambda folder: ["first"]):
        pass
    assert {path.name for path in target.iterdir()} == {"first", "mine"}


def test_a_link_stays_one_to_the_folder_that_is_replaced(tmp_path):
    folder = written(tmp_path / "real", first="old")
    link = tmp_path / "link"
    link.symlink_to(folder)
    with finished_folder(link, lambda folder: ["first"]) as staging:
        (staging / "first").write_text("new")
    assert link.is_symlink() and (folder / "first").read_text() == "new"
    assert {*tmp_path.iterdir()} == {folder, link}


def test_a_lock_has_the_command_and_is_held_by_whatever_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = ["/bin/normalign", "train", "recipe.yaml", "--output_dir", "a" * 30, "b" * 200]
    for words, begin in ((long, "`normalign train recipe.yaml --output_dir a"), ([""], "`python`")):
        monkeypatch.setattr(sys, "argv", words)
        with lock_folder("out"), lock_folder(tmp_path / "out", wait=0):
            lock = (tmp_path / "out" / files.LOCK).read_text()
        assert lock.startswith(begin) and lock.endswith(f", process {os.getpid()}")
        assert len(lock) < 160


def test_what_only_looks_like_a_killed_run_s_is_kept(tmp_path):
    other = written(tmp_path / "other" / "out", file="mine").parent
    (tmp_path / ".out-linklink").symlink_to(other)
    written(tmp_path / ".out-lonelock", **{files.LOCK: ""})  # which a process has just made
    (tmp_path / ".out-of_files").write_text("")
    written(tmp_path / ".out-withmore", out="", more="")
    written(tmp_path / ".out-toolongx1", out="")
    before = sorted(tmp_path.rglob("*"))
    assert files.remove_unfinished(tmp_path / "out") == []
    assert sorted(tmp_path.rglob("*")) == before
    assert (other / "out" / "file").read_text() == "mine"


OF_A_RUN = {
    "its adapter": ("run/adapter_config.json", "run/checkpoint-6", True),
    "its record": ("run/training.json", "run/checkpoint-6", True),
    "its state": ("run/trainer_state.json", "run/checkpoint-6", True),
    "another checkpoint": ("run/checkpoint-3/trainer_state.json", "run/checkpoint-6", True),
    "the same checkpoint": ("run/checkpoint-6/trainer_state.json", "run/checkpoint-6", True),
    "in a checkpoint": ("run/checkpoint-6/trainer_state.json", "run/checkpoint-6/a/b", True),
    "the beginning of a name": ("run/training.json", "run/checkpoint-6-merged", True),
    "a name without a step": ("run/training.json", "run/checkpoint-best", False),
    "another name": ("run/training.json", "run/my-checkpoint-6", False),
    "the run itself": ("run/training.json", "run", False),
    "no run's": ("run/config.json", "run/checkpoint-6", False),
    "another folder's": ("run/training.json", "checkpoint-6", False),
}


@pytest.mark.parametrize("kind", OF_A_RUN)
def test_which_places_are_a_run_s(tmp_path, monkeypatch, kind):
    file, place, is_refused = OF_A_RUN[kind]
    written((tmp_path / file).parent, **{Path(file).name: "{}"})
    monkeypatch.chdir(tmp_path)
    if not is_refused:
        files.check_not_in_run(Path(place))
        return
    checkpoint = "lies in checkpoint-6" if place.endswith("a/b") else "is named as a checkpoint"
    said = f"{tmp_path / place} {checkpoint}.* outside {tmp_path / 'run'},"
    with pytest.raises(ValueError, match=said):
        files.check_not_in_run(Path(place))


def test_json_is_read_if_it_is_there_and_written_as_it_is_read(tmp_path):
    file = tmp_path / "a.json"
    assert files.json_or_none(file) is None
    for content in (b"{", b'"\xff"', b"[" * 100_000):
        file.write_bytes(content)
        assert files.json_or_none(file) is None
    content = {"name": "Größe 🪁", "list": [1, 2.5, None]}
    files.write_json(file, content)
    text = file.read_text(encoding="utf-8")
    assert files.json_or_none(file) == json.loads(text) == content
    assert "Größe 🪁" in text and text.endswith("}\n")


def test_a_folder_made_for_a_lock_stays_if_it_was_filled(tmp_path):
    with lock_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
        lock = (tmp_path / "a" / "b" / files.LOCK).read_text()
    assert f"process {os.getpid()}" in lock
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]
    with pytest.raises(RuntimeError), lock_folder(tmp_path / "a" / "b"):
        raise RuntimeError
    with lock_folder(tmp_path / "a" / "b", wait=0):  # it was given back, and is taken again
        assert (tmp_path / "a" / "b" / files.LOCK).exists()
        (tmp_path / "a" / "b" / files.LOCK).unlink()  # as somebody may who clears up


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
    read = re.findall(r"bea/(\w+)/(?:resolve|tree)/(\w+)", "\n".join(hub.requests))
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
