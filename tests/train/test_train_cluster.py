"""The page on clusters: its figures from the models' shapes, and its job file on one node."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import stored
import torch
import training
from paths import DOCS, ROOT

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration
from normalign_llava.train.options.arguments import STAGES


PAGE = DOCS / "cluster.md"
JOB = ROOT / "examples" / "train.slurm"
GIGA = 10**9


def parameters(shape: str) -> dict[str, int]:
    """Names and sizes of all parameters of a model of this shape."""
    config = runpy.run_path(str(ROOT / "benchmarks" / "shapes.py"))["llava_config"](shape, NormAlignLlavaConfig)
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(config)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def table(page: Path, head: str) -> list[list[str]]:
    """The cells of the table whose first line is `head`."""
    lines = page.read_text().split(f"{head}\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("shape", ["3b", "7b"])
def test_bytes_moved_follow_from_the_shapes(shape):
    sizes = parameters(shape)
    assert f"(P = {sum(sizes.values()):,})" in PAGE.read_text()
    rows = table(PAGE, "| model | stage | N | rows per pass | A | DDP | FSDP2 | ZeRO-3 |")
    rows = [row for row in rows if row[0] == shape.upper()]
    assert len(rows) == 5
    for _, stage, *cells in rows:
        count, per_pass, passes = map(int, cells[:3])
        assert count * per_pass * passes == STAGES[stage]["global_batch_size"]
        trained = scattered = once = twice = 0
        for name, size in sizes.items():
            tower = "vision_tower." in name
            is_trained = stage == "tune" or "multi_modal_projector." in name
            trained += size if is_trained else 0
            forward_only = tower and stage == "align"
            scattered += size if forward_only else 2 * size  # ZeRO-3
            own_unit = ".layers." in name or "projector.norm." in name
            twice += size if own_unit and not forward_only else 0
            once += size
        share = (count - 1) / count
        ddp = 2 * share * 4 * trained
        fsdp = share * 2 * (passes * (once + twice) + trained)
        zero = share * 4 * passes * (scattered + trained)
        assert cells[3:] == [f"{ddp / GIGA:.2f}", f"{fsdp / GIGA:.1f}", f"{zero / GIGA:.1f}"], (stage, count)


@pytest.mark.nightly
def test_the_job_file_trains_on_one_node_with_two_processes_and_resumes(tmp_path, parts):
    recipe = training.recipe(tmp_path, parts, use_cpu=True, per_device_train_batch_size=1, save_steps=1)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "scontrol": "echo localhost",
        "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 exec "$@"',
        "python": f'exec {sys.executable} "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    chosen = dict(SLURM_JOB_NODELIST="localhost", SLURM_JOB_NUM_NODES="1", SLURM_JOB_ID=str(os.getpid()))
    chosen |= dict(ACCELERATE_CONFIG="ddp", PROCESSES_PER_NODE="2", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    environment = {**os.environ, **chosen, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}

    def submit(*options: str) -> str:
        command = ["bash", str(JOB), recipe, *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-3000:]
        return " ".join((done.stdout + done.stderr).split())

    said = submit()
    assert "4 rows = 1 per device x 2 process(es) x 2 accumulation step(s)" in said
    assert "Resuming from the beginning" in said
    assert stored.weights(tmp_path / "out")
    assert f"Resuming from {tmp_path / 'out' / 'checkpoint-2'}" in submit("--max_steps", "3")
