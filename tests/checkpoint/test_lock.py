"""One process at a time writes to a folder; others wait, or are told which process it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import suite_tasks
import tiny_parts
import train_data
import training

from normalign_llava.checkpoint.files import finished_folder, remove_unfinished, replaced_folder
from normalign_llava.checkpoint.lock import LOCK, check_free, only_writer, writer_of


HOLDS = """
import sys
from pathlib import Path
from normalign_llava.checkpoint.files import finished_folder, replaced_folder
from normalign_llava.checkpoint.lock import only_writer

hold = {"lock": only_writer, "finished": finished_folder, "replaced": replaced_folder}[sys.argv[1]]
with hold(Path(sys.argv[2]), *[lambda folder: []] * (sys.argv[1] == "replaced")) as staging:
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
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_second_process_is_told_of_the_first_and_waits_for_a_short_one(tmp_path, hold):
    folder = tmp_path / "model"
    folder.mkdir()
    first = hold("lock", folder)
    named = rf"model is being written to by `-c lock .*`, process {first.pid} on \S+, since \d{{4}}-.*Wait for"
    for _ in range(2):  # the first attempt must not take the name away
        with pytest.raises(ValueError, match=named), only_writer(folder, wait=0):
            pass
    with pytest.raises(ValueError, match=named), only_writer(tmp_path / "other"), only_writer(folder, wait=0):
        pass
    first.stdin.close()
    with only_writer(folder, wait=60), only_writer(folder):  # and in one process, as often as is asked
        assert str(os.getpid()) in writer_of(folder)
        check_free(folder)
    assert writer_of(folder) is None
    assert list(tmp_path.rglob("*")) == [folder]  # no lock is left, and no folder that was made for one


def test_a_killed_process_leaves_no_lock(tmp_path, hold):
    killed = hold("lock", tmp_path)
    killed.kill()
    killed.wait()
    assert (tmp_path / LOCK).exists()
    check_free(tmp_path)
    with only_writer(tmp_path, wait=0):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["finished", "replaced"])
def test_what_a_living_process_makes_is_not_removed_and_nobody_else_makes_it(tmp_path, hold, how):
    target = tmp_path / "out"
    first = hold(how, target)
    (made,) = tmp_path.glob(".out-*/out/file")
    for other in (finished_folder(target), replaced_folder(target, lambda folder: [])):
        with pytest.raises(ValueError, match=f"out is being written to by .*, process {first.pid} on"), other:
            pass
    assert len(remove_unfinished(target)) == 1 and made.exists()
    first.communicate()
    assert (target / "file").read_text() == "theirs" and list(tmp_path.iterdir()) == [target]


@pytest.mark.slow
def test_commands_are_told_who_writes_to_the_folder_that_they_would_write_to(prepared, tmp_path, hold):
    model, tasks, built = training.checkpoint(tmp_path), tmp_path / "tasks", tmp_path / "new"
    suite_tasks.write(tasks)
    vision, language = tiny_parts.vision(tmp_path / "vision"), tiny_parts.language(tmp_path / "language")
    data = train_data.write_json(tmp_path, [train_data.llava("what?", "red")])
    commands = [
        ["card", model],
        ["diagnose", model],
        ["evaluate", model, "--include-path", tasks, "--tasks", "tiny_choosing"],
        ["publish", model, "--repo-id", "bea/model", "--dry-run"],
        ["train", "--model_name_or_path", model, "--dataset_name", data, "--output_dir", model],
        ["build", "--vision", vision, "--language", language, "--output", built],
    ]
    holders = [hold("lock", model), hold("finished", built)]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    started = [prepared.start(["-m", "normalign_llava", *command]) for command in commands]
    for command, done in zip(commands, [process.wait() for process in started], strict=True):
        holder = holders[command[0] == "build"].pid
        assert done.returncode == 1 and f", process {holder} on " in done.stderr, (command[0], done.stderr)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
