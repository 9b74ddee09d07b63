"""The job file of the page on clusters, on one node."""

import os
import subprocess
import sys

import pytest
import stored
import training
from paths import ROOT


@pytest.mark.nightly
def test_the_job_file_trains_on_one_node_with_two_processes_and_resumes(tmp_path, parts):
    recipe = training.recipe(tmp_path, parts, per_device_train_batch_size=1, save_steps=1)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "scontrol": "echo localhost",
        "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 exec "$@"',
        "python": f'exec {sys.executable} "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    environment = os.environ | {"ACCELERATE_CONFIG": "ddp", "PROCESSES_PER_NODE": "2"}
    environment |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    environment |= {"SLURM_JOB_ID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{commands}:{os.environ['PATH']}"}

    def submit(*options: str) -> str:
        command = ["bash", str(ROOT / "examples" / "train.slurm"), recipe, *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-3000:]
        return " ".join((done.stdout + done.stderr).split())

    said = submit()
    assert "4 rows = 1 per device x 2 process(es) x 2 accumulation step(s)" in said
    assert "Resuming from the beginning" in said
    assert stored.weights(tmp_path / "out")
    assert f"Resuming from {tmp_path / 'out' / 'checkpoint-2'}" in submit("--max_steps", "3")
