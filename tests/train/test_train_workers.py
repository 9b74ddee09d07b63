"""Processes that read batches: how many there are, what they raise, and what remains of them."""

import os
import signal
from types import SimpleNamespace

import pytest
import training
from paths import HELPERS
from transformers import TrainerState

from normalign_llava.train.callbacks import progress
from normalign_llava.train.callbacks.progress import DataWait
from normalign_llava.train.options.arguments import NormAlignConfig, default_workers


pytestmark = pytest.mark.slow


def test_there_is_one_for_each_other_core_and_none_on_a_cpu(tmp_path, monkeypatch):
    chosen = training.arguments(tmp_path)
    assert (chosen.dataloader_num_workers, chosen.dataloader_persistent_workers) == (0, False)
    given = NormAlignConfig(str(tmp_path), use_cpu=True, bf16=False, dataloader_num_workers=2)
    assert (given.dataloader_num_workers, given.dataloader_persistent_workers) == (2, True)
    found = []
    for cores, processes in ((1, 1), (2, 1), (64, 1), (64, 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        found.append(default_workers())
    assert found == [0, 1, 8, 3]


def test_a_step_that_waits_longer_than_it_takes_says_so_once(monkeypatch, capsys):
    now, wait = [0.0], DataWait()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    args, state = SimpleNamespace(dataloader_num_workers=2), TrainerState(max_steps=9, is_world_process_zero=True)
    for waited, worked in ((5.0, 1.0), (1.0, 2.0), (2.0, 1.0), (3.0, 1.0)):
        state.global_step += 1
        wait.seconds = waited
        wait.on_step_begin(args, state, None)
        now[0] += worked
        wait.on_step_end(args, state, None)
    said = capsys.readouterr().out
    assert said.strip().splitlines() == [
        "3/9 waited 2 s for its data and took 1 s. More processes read faster: --dataloader_num_workers, now 2."
    ]
    assert wait.collect() == {"time/data_share": 11 / 16} and wait.collect() == {}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_stopped_run_leaves_no_process_behind(prepared, tmp_path, parts, number):
    file = training.recipe(tmp_path, parts, max_steps=50)
    done = prepared.run([HELPERS / "train_killed.py", f"{number.name}:3", file, "--dataloader_num_workers", "2"])
    assert done.returncode == 128 + number and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("Stopped. Step 3 was done")
    (readers,) = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("readers"))
    assert len(readers) == 2
    for reader in readers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(reader), 0)
