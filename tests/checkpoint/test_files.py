"""Files and folders that are replaced whole, or not at all."""

import os
import shutil
import subprocess
import sys

import pytest
import tiny_parts as parts

from normalign_llava.checkpoint.files import atomic_write, finished_folder, replaced_folder
from normalign_llava.checkpoint.lock import LOCK, only_writer
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
    left, locked, own, other = (tmp_path / f".out-{name}" for name in ("ab12_xyz", "12345678", "backup99", "notes"))
    (left / "out").mkdir(parents=True)
    locked.mkdir()
    (locked / LOCK).touch()
    os.utime(locked, (0, 0))
    young = tmp_path / ".out-87654321"
    shutil.copytree(locked, young)
    os.utime(young)
    for folder in (own, other):
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    with replaced_folder(tmp_path / "out", lambda folder: []) as staging:
        (staging / "file").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"out", own.name, other.name, young.name}
    shutil.rmtree(young)
    left = tmp_path / ".README.md-abcdefgh"
    left.mkdir()
    (left / "README.md").write_text("half of it")
    with atomic_write(tmp_path / "README.md") as first, atomic_write(tmp_path / "README.md") as second:
        assert not left.exists() and first.parent.is_dir()  # which another writes at the moment
        first.write_text("first")
        second.write_text("second")
    assert {path.name for path in tmp_path.iterdir()} == {"out", own.name, other.name, "README.md"}


def test_a_folder_that_cannot_be_written_to_is_named_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file"
    for write in (atomic_write(folder / "a"), replaced_folder(folder / "a", list), only_writer(folder / "a")):
        with pytest.raises(NotWritable, match=f"^{folder}.* cannot be written to: .* --output "), write:
            pass
    for error in (OSError(28, "No space left"), OSError(13, "Permission", "/else")):
        with pytest.raises(OSError) as raised, atomic_write(tmp_path / "a"):
            raise error
        assert isinstance(raised.value, NotWritable) == (error.errno == 28)
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


@pytest.mark.parametrize("make", [finished_folder, lambda target: replaced_folder(target, lambda folder: [])])
def test_what_is_finished_is_kept_where_its_place_was_taken(tmp_path, make):
    target = tmp_path / "out"
    said = r"out (was filled|holds file, which).* What was made is in"
    with pytest.raises(FileExistsError, match=said) as error, make(target) as staging:
        (staging / "file").write_text("ours")
        target.mkdir()
        (target / "file").write_text("theirs")
    (kept,) = (path for path in tmp_path.iterdir() if path != target)
    assert f"is in {kept}." in str(error.value) and (kept / "file").read_text() == "ours"
    assert (target / "file").read_text() == "theirs"


KILLED = """
import os, signal, sys
from pathlib import Path
from normalign_llava.checkpoint.files import replaced_folder

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
with replaced_folder(target, lambda folder: ["first", "second"]) as staging:
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
        with pytest.raises(RuntimeError), replaced_folder(target, lambda folder: ["first", "second"]):
            left.append({(target / name).read_text() for name in ("first", "second")})
            raise RuntimeError
        assert list(tmp_path.iterdir()) == [target]
    assert left == [{"old"}, {"new"}, {"new"}, {"new"}]
