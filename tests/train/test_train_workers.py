"""Processes that read batches: how many there are, what they raise, and what remains of them."""

import os
import signal

import pytest
import training
from paths import HELPERS

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
