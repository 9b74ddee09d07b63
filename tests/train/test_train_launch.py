# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch`: what it is asked for, and how its errors end the command."""

import os
import signal
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from normalign_llava.signals import Terminated
from normalign_llava.train.command import launch


@pytest.fixture
def without_deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)


@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_zero_needs_deepspeed_before_processes_are_started(name):
    with pytest.raises(ImportError, match="needs deepspeed"):
        launch(name, None, [])


@pytest.mark.usefixtures("without_deepspeed")
def test_a_file_with_zero_needs_deepspeed_before_processes_are_started(tmp_path):
    own_file = tmp_path / "own.yaml"
    own_file.write_text("distributed_type: DEEPSPEED\n")
    with pytest.raises(ImportError, match="needs deepspeed"):
        launch(str(own_file), None, [])


@pytest.mark.usefixtures("without_deepspeed")
def test_an_unknown_file_of_accelerate_is_refused():
    with pytest.raises(ValueError, match="file zero4 does not exist. .*ddp, fsdp2, zero2, zero3"):
        launch("zero4", None, [])


def replace_launcher(monkeypatch, launch_command):
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch_command)


@pytest.fixture
def failing_launcher(monkeypatch):
    """Makes the end of `accelerate launch` an error."""

    def fail_with(error):
        def launch_command(arguments):
            raise error

        replace_launcher(monkeypatch, launch_command)

    return fail_with


@pytest.fixture
def launches(monkeypatch):
    """What `accelerate launch` is asked for; it does nothing."""
    asked = []
    replace_launcher(monkeypatch, asked.append)
    return asked


def assert_launched(arguments, config_name, processes):
    assert arguments.config_file.endswith(config_name)
    assert arguments.num_processes == processes
    assert arguments.quiet
    assert arguments.module
    assert arguments.training_script == "normalign_llava.train"
    assert arguments.training_script_args == ["recipe.yaml", "--seed", "3"]


@pytest.mark.parametrize("processes", [None, 2])
def test_a_launch_with_a_file_of_the_package_has_the_processes_that_are_asked_for(
    launches, processes
):
    launch("ddp", processes, ["recipe.yaml", "--seed", "3"])
    assert len(launches) == 1
    assert_launched(launches[0], "ddp.yaml", processes)


@pytest.mark.parametrize("processes", [None, 2])
def test_a_launch_has_the_processes_of_the_file_unless_others_are_asked_for(
    launches, tmp_path, processes
):
    own_file = tmp_path / "own.yaml"
    own_file.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    launch(str(own_file), processes, ["recipe.yaml", "--seed", "3"])
    assert len(launches) == 1
    assert_launched(launches[0], "own.yaml", processes)


@pytest.mark.parametrize(
    "signal_number, expected_error",
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, Terminated),
    ],
)
def test_a_launcher_that_is_stopped_stops_the_command(
    failing_launcher, signal_number, expected_error
):
    failing_launcher(SignalException("stopped", signal_number))
    with pytest.raises(expected_error):
        launch("ddp", 2, [])


def process_failure(rank, exitcode, seconds):
    failure = ProcessFailure(rank, 99, exitcode, "none.json")
    failure.timestamp = seconds
    return failure


def failed(exitcode):
    """The error of torch's launcher where the second process ended first."""
    failures = {
        0: process_failure(0, 1, seconds=20),
        1: process_failure(1, exitcode, seconds=10),
    }
    return ChildFailedError("train", failures)


def test_a_process_that_failed_has_said_why(failing_launcher):
    failing_launcher(failed(3))
    with pytest.raises(SystemExit) as ended:
        launch("ddp", 2, [])
    assert ended.value.code == 3


def test_a_process_that_was_killed_is_named(failing_launcher):
    failing_launcher(failed(-signal.SIGKILL))
    with pytest.raises(ChildProcessError, match="Process 1 was ended by SIGKILL"):
        launch("ddp", 2, [])


RAISES = """
from normalign_llava.errors import exit_on_error
with exit_on_error():
    raise ValueError('what went wrong')
"""


def test_the_size_of_a_run_without_a_rank_does_not_hide_an_error():
    environment = {**os.environ, "WORLD_SIZE": "2"}
    environment.pop("RANK", None)
    finished = subprocess.run(
        [sys.executable, "-c", RAISES],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert "what went wrong" in finished.stderr
    assert "KeyError" not in finished.stderr
