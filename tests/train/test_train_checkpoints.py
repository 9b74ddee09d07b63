# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Trainer checkpoints: complete or not, which one a run resumes from, full disks and kills."""

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import training
from paths import HELPERS
from transformers import TrainerCallback

from normalign_llava.train.keeping.checkpoints import missing_from, newest_complete, writing_checkpoint
from normalign_llava.train.keeping.resume import resolve_resume


pytestmark = pytest.mark.slow


class LimitFileSize(TrainerCallback):
    """From the third step on, no file may grow beyond `limit` bytes."""

    def __init__(self, limit):
        self.limit = limit

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))


SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory):
    """A run with checkpoint-2 and checkpoint-4."""
    root = tmp_path_factory.mktemp("run")
    training.trainer(root, checkpoint, **SAVED).train()
    return root


@pytest.fixture
def run(written, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(written, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer.pt", "optimizer"),
        ("scheduler.pt", "scheduler"),
        ("rng_state.pth", "random states"),
        ("trainer_state.json", "trainer_state"),
    ],
)
def test_a_file_that_the_trainer_would_not_miss_is_missed(run, name, said):
    folder = run / "checkpoint-4"
    assert missing_from(folder, 1) == []
    (folder / name).unlink()
    (missing,) = missing_from(folder, 1)
    assert said in missing
    assert newest_complete(run, 1) == run / "checkpoint-2"


@pytest.mark.parametrize("length", [0, -1])
def test_a_checkpoint_without_the_end_of_its_last_file_is_not_complete(run, length):
    state = run / "checkpoint-4" / "trainer_state.json"
    content = state.read_text().rstrip()
    state.write_text(content[:length])
    assert "trainer_state.json" in missing_from(state.parent, 1)[0]


def test_random_states_are_those_of_as_many_processes(run):
    folder = run / "checkpoint-4"
    assert "random states of 2 process(es) (it has those of 1)" in missing_from(folder, 2)[0]
    shutil.copyfile(folder / "rng_state.pth", folder / "rng_state_1.pth")
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    assert missing_from(folder, 2) == []
    assert "of 1 process(es) (it has those of 2)" in missing_from(folder, 1)[0]
    assert "of 3 process(es) (it has those of 2)" in missing_from(folder, 3)[0]


@pytest.mark.parametrize("optimizer", ["optimizer.bin", "optimizer_0/.metadata", "latest"])
def test_fsdps_and_deepspeeds_optimizers_count(run, optimizer):
    folder = run / "checkpoint-4"
    (folder / "optimizer.pt").unlink()
    assert missing_from(folder, 1) == ["the optimizer's state"]
    (folder / optimizer).parent.mkdir(exist_ok=True)
    with (folder / optimizer).open("wb") as file:
        torch.save({}, file)
    assert missing_from(folder, 1) == []


def test_the_newest_complete_one_is_found_by_number(run):
    assert newest_complete(run / "none", 1) is None
    os.utime(run / "checkpoint-2")
    for name in ("checkpoint-10", "checkpoint-best"):
        (run / name).mkdir()
    (run / "checkpoint-30").touch()
    assert newest_complete(run, 1) == run / "checkpoint-4"
    (run / "checkpoint-4" / "trainer_state.json").unlink()
    assert newest_complete(run, 1) == run / "checkpoint-2"


def test_which_checkpoint_a_run_resumes_from(run, tmp_path, capsys):
    assert resolve_resume(None, tmp_path / "none", 1) is None and resolve_resume(False, tmp_path, 1) is None
    assert resolve_resume("last", tmp_path, 1) is None
    assert f"from the beginning: {tmp_path} holds no complete checkpoint" in capsys.readouterr().err
    for value in ("last", "true", "True", True):
        assert resolve_resume(value, run, 1) == run / "checkpoint-4"
    with pytest.raises(ValueError, match="checkpoint-2, checkpoint-4.*--resume_from_checkpoint.*--output_dir"):
        resolve_resume(None, run, 1)
    assert resolve_resume(str(run / "checkpoint-2"), tmp_path / "elsewhere", 1) == run / "checkpoint-2"

    (run / "checkpoint-4" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-4 is not complete.*trainer_state.json.*Name a complete one"):
        resolve_resume(str(run / "checkpoint-4"), run, 1)
    capsys.readouterr()
    assert resolve_resume("last", run, 1) == run / "checkpoint-2"
    said = capsys.readouterr().err
    assert f"Skipped {run / 'checkpoint-4'}" in said and f"Resuming from {run / 'checkpoint-2'}." in said


def test_a_checkpoint_of_weights_alone_cannot_be_resumed_from(checkpoint, tmp_path):
    training.trainer(tmp_path, checkpoint, **{**SAVED, "max_steps": 1, "save_steps": 1}, save_only_model=True).train()
    for resume in (str(tmp_path / "checkpoint-1"), "last"):
        with pytest.raises(ValueError, match="checkpoint-1.*was it written with save_only_model?"):
            resolve_resume(resume, tmp_path, 1)


def test_an_earlier_run_is_not_written_over(written, run):
    (run / "checkpoint-4" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="from .*checkpoint-2 would write over .*checkpoint-4.*optimizer"):
        resolve_resume("last", run, 1)
    with pytest.raises(ValueError, match="from the beginning would write over.*as many processes as wrote it"):
        resolve_resume("last", run, 2)
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        resolve_resume(str(written / "checkpoint-4"), run, 1)
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoint-{step}")
    (run / "config.json").write_text("{}")
    for resume in (None, "last"):
        with pytest.raises(ValueError, match="holds .* model.*hoose another"):
            resolve_resume(resume, run, 1)


def test_an_earlier_folder_does_not_mix_with_the_new_one(run):
    folder = run / "checkpoint-4"
    with writing_checkpoint(folder, 1):
        assert not folder.exists()
        folder.mkdir()
    for error in (ValueError("no"), OSError(13, "Permission denied"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, writing_checkpoint(folder, 1):
            folder.mkdir()
            raise error
        assert raised.value is error and folder.exists()


def test_a_disk_that_is_full_later_does_not_cost_a_checkpoint(run):
    folder = run / "checkpoint-4"
    with pytest.raises(OSError, match="No space left"), writing_checkpoint(folder, 1):
        shutil.copytree(run / "checkpoint-2", folder)
        raise OSError(28, "No space left on device")  # as when older checkpoints are removed
    assert missing_from(folder, 1) == []


CHILD = """
    import json, resource, sys
    from pathlib import Path
    sys.path[:0] = {tests!r}
    import training
    from test_train_checkpoints import SAVED, LimitFileSize
    large, output = Path(sys.argv[1]), Path(sys.argv[2])
    for number in map(int, sys.argv[3:]):
        try:
            trainer = training.trainer(output / str(number), large, save_total_limit=1, **SAVED)
            trainer.add_callback(LimitFileSize(number))
            trainer.train()
        except OSError as error:
            print(json.dumps(["limit", number, type(error).__name__, str(error), type(error.__cause__).__name__]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_full_disk_leaves_the_last_checkpoint_and_names_a_remedy(tmp_path):
    large = training.checkpoint(tmp_path / "large", hidden_size=256, intermediate_size=2048, head_dim=128)
    weights = (large / "model.safetensors").stat().st_size
    # The first file that cannot be written is text, the weights, or the optimizer's, which is twice as large.
    limits = {300: "OSError", weights // 2: "SafetensorError", weights * 3 // 2: "RuntimeError"}
    source = textwrap.dedent(CHILD).format(tests=[str(HELPERS), str(Path(__file__).parent)])
    command = [sys.executable, "-c", source, str(large), str(tmp_path), *map(str, limits)]
    done = subprocess.run(command, capture_output=True, text=True)  # to pipes, which have no limit
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["limit"')]
    assert [(number, cause) for _, number, _, _, cause in reports] == list(limits.items()), done.stderr
    for _, number, kind, said, _ in reports:
        output = tmp_path / str(number)
        assert kind == "OSError"
        assert f"The checkpoint {output / 'checkpoint-4'} could not be written: " in said
        assert "MiB are free there" in said
        for option in ("--save_total_limit", "--output_dir", f"--resume_from_checkpoint {output / 'checkpoint-2'}"):
            assert option in said
        assert [path.name for path in output.glob("*checkpoint*")] == ["checkpoint-2"]
        assert resolve_resume("last", output, 1) == output / "checkpoint-2"
