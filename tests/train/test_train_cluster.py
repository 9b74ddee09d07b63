"""The job file of the page on clusters, on one node."""

import os
import subprocess
import sys

import pytest
import stored
import training
from paths import ROOT


COMMANDS = {
    "scontrol": "echo localhost",
    "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 exec "$@"',
    "python": f'exec {sys.executable} "$@"',
}
"""Commands of a cluster as Bash scripts."""


@pytest.fixture
def environment(tmp_path):
    """The environment of a job whose commands are in a folder of the path."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for command_name, script in COMMANDS.items():
        command_path = commands / command_name
        command_path.write_text(f"#!/bin/bash\n{script}\n")
        command_path.chmod(0o755)
    return {
        **os.environ,
        "ACCELERATE_CONFIG": "ddp",
        "PROCESSES_PER_NODE": "2",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{commands}:{os.environ['PATH']}",
    }


@pytest.mark.nightly
def test_the_job_file_trains_on_one_node_with_two_processes_and_resumes(
    tmp_path, parts, environment
):
    recipe = training.recipe(tmp_path, parts, per_device_train_batch_size=1, save_steps=1)
    output_folder = tmp_path / "out"

    def submit(*options: str) -> str:
        job_file = str(ROOT / "examples" / "train.slurm")
        completed = subprocess.run(
            ["bash", job_file, recipe, *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert completed.returncode == 0, completed.stderr[-3000:]
        printed = completed.stdout + completed.stderr
        return " ".join(printed.split())

    printed = submit()
    assert "4 rows = 1 per device x 2 process(es) x 2 accumulation step(s)" in printed
    assert "Resuming from the beginning" in printed
    assert stored.weights(output_folder)
    printed = submit("--max_steps", "3")
    assert f"Resuming from {output_folder / 'checkpoint-2'}" in printed
