"""Files and folders that are replaced whole, or not at all; and one process at a time that writes to a folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_parts as parts
import train_data
import training

from normalign_llava.checkpoint.files import LOCK, atomic_write, check_free, finished_folder, only_writer
from normalign_llava.errors import NotWritable


def test_a_file_is_written_past_planted_links(tmp_path):
    target, outside, plain = (tmp_path / name for name in ("card.md", "outside", "plain"))
    (tmp_path / f".card.md-{os.getpid()}").symlink_to(outside)
    target.symlink_to(outside)
    with atomic_write(target) as partial:
        partial.write_text("new")
        with pytest.raises(RuntimeError), atomic_write(target) as another:
            another.write_text("other")
            raise RuntimeError
    plain.touch()
    assert target.read_text() == "new" and not outside.exists() and not target.is_symlink()
    assert target.stat().st_mode == plain.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"card.md", f".card.md-{os.getpid()}", "plain"}


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
    words = ["--vision", parts.vision(tmp_path / "vision"), "--language", parts.language(tmp_path / "language")]
    before = {path.name for path in tmp_path.iterdir()}
    done = prepared.run(["-c", STOPPED, number, "build", *words, "--output", tmp_path / "out"])
    assert done.returncode == status and done.stderr.splitlines()[-1].startswith("Stopped."), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == before


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    for name in (".out-ab12_xyz/out", ".out-backup99/mine.txt", ".out-notes/out", ".README.md-abcdefgh/README.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("half of it")
    kept = {".out-backup99", ".out-notes", "out", "README.md"}
    with finished_folder(tmp_path / "out") as staging:
        (staging / "file").write_text("new")
    with atomic_write(tmp_path / "README.md") as first, atomic_write(tmp_path / "README.md") as second:
        assert first.parent.is_dir()  # which another writes at the moment
        first.write_text("first")
        second.write_text("second")
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_folder_that_cannot_be_written_to_is_named_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file"
    for write in (atomic_write(folder / "a"), finished_folder(folder / "a"), only_writer(folder / "a")):
        with pytest.raises(NotWritable, match=f"^{folder}.* cannot be written to: .* --output "), write:
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
        with pytest.raises(RuntimeError), finished_folder(target, lambda folder: ["first", "second"]):
            left.append({(target / name).read_text() for name in ("first", "second")})
            raise RuntimeError
        assert list(tmp_path.iterdir()) == [target]
    assert left == [{"old"}, {"new"}, {"new"}, {"new"}]


# -------------------------------------------------------------------------------------------------------------- locks
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
    """Starts a process that holds a folder in one of the ways of `HOLDS` until its standard input is closed."""
    processes = []

    def start(how: str, folder: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDS, how, str(folder)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
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
        with pytest.raises(ValueError, match=named), only_writer(tmp_path / "other"), only_writer(folder, wait=0):
            pass
    first.stdin.close()
    with only_writer(folder, wait=60), only_writer(folder):  # and in one process, as often as is asked
        check_free(folder)
    assert list(tmp_path.rglob("*")) == [folder]  # no lock is left, and no folder that was made for one
    killed = hold("lock", folder)
    killed.kill()
    killed.wait()
    assert (folder / LOCK).exists()
    check_free(folder)
    assert not list(folder.iterdir())


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
def test_commands_are_told_who_writes_to_the_folder_that_they_would_write_to(prepared, tmp_path, hold):
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
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    started = [prepared.start(["-m", "normalign_llava", *command]) for command in commands]
    for command, done in zip(commands, [process.wait() for process in started], strict=True):
        holder = holders[command[0] == "build"].pid
        assert done.returncode == 1 and f", process {holder}." in done.stderr, (command[0], done.stderr)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
