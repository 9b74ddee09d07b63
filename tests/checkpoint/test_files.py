"""Files and folders that are replaced whole, or not at all."""

import os

import pytest
import tiny_parts as parts

from normalign_llava.checkpoint.files import atomic_write, replaced_folder


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
    assert {each.name for each in tmp_path.iterdir()} == {"card.md", f".card.md-{os.getpid()}", "plain"}


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
@pytest.mark.parametrize("command, number, status", [("build", "SIGTERM", 143), ("diagnose", "SIGINT", 130)])
def test_a_command_that_is_stopped_leaves_no_unfinished_folder(prepared, tmp_path, command, number, status):
    language = parts.language(tmp_path / "language")
    given = ["--vision", parts.vision(tmp_path / "vision"), "--language", language]
    before = {path.name for path in tmp_path.iterdir()}
    words = [*(given if command == "build" else [language]), "--output", tmp_path / "out"]
    done = prepared.run(["-c", STOPPED, number, command, *words])
    assert done.returncode == status and done.stderr.splitlines()[-1].startswith("Stopped."), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == before


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    left, own, other = (tmp_path / name for name in (".out-ab12_xyz", ".out-backup99", ".out-notes"))
    (left / "out").mkdir(parents=True)
    for folder in (own, other):
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    with replaced_folder(tmp_path / "out", lambda folder: []) as staging:
        (staging / "file").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"out", own.name, other.name}
