# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Trainer checkpoints: whether one is complete, which one is the newest, and what happens if one cannot be written.

The file `trainer_state.json` marks a checkpoint as complete: the first process writes it last, after every process has
written its part. The Trainer itself takes the folder with the highest number, whatever is in it, and silently starts
a fresh optimizer if the optimizer's file is missing.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

from ...checkpoint.files import json_or_none
from ...checkpoint.names import ADAPTER_CONFIG, STATE, TRAINING_RECORD
from ...errors import write_failure


OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
"""The optimizer's file or folder: of one process or DDP, of FSDP in one file, of FSDP in shards, of DeepSpeed."""


def is_complete(checkpoint: Path) -> bool:
    """Whether the checkpoint was written to its end."""
    return isinstance(json_or_none(checkpoint / STATE), dict)


def missing_from(checkpoint: str | os.PathLike, world_size: int) -> list[str]:
    """What a trainer checkpoint lacks to resume from; empty if nothing.

    What the Trainer would pass over silently is looked for: the mark of completeness, optimizer, scheduler, and random
    states. It fails by itself if weights are missing.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return ["the folder itself"]
    if not is_complete(folder):
        return [f"{STATE}, which is written last"]
    random_states = {path.name for path in folder.glob("rng_state*.pth")}
    if not random_states:
        return ["optimizer, scheduler and random states (was it written with save_only_model?)"]
    missing = []
    if not any((folder / name).exists() for name in OPTIMIZERS):
        missing.append("the optimizer's state")
    if not (folder / "scheduler.pt").exists() and not (folder / "latest").exists():  # DeepSpeed keeps it with the rest
        missing.append("scheduler.pt")
    if random_states != ({"rng_state.pth"} if world_size == 1 else {f"rng_state_{n}.pth" for n in range(world_size)}):
        missing.append(f"random states of {world_size} process(es) (it has those of {len(random_states)})")
    return missing


def newest_complete(output_dir: str | os.PathLike, world_size: int) -> Path | None:
    """The checkpoint of the highest step in `output_dir` that can be resumed from, or None."""
    found = (folder for folder in reversed(checkpoints_in(output_dir)) if not missing_from(folder, world_size))
    return next(found, None)


def checkpoints_in(output_dir: str | os.PathLike) -> list[Path]:
    """The folders `checkpoint-N` of a run, by step."""
    return [Path(path) for path in sort_checkpoints(str(output_dir))]


@contextmanager
def writing_checkpoint(checkpoint: str | os.PathLike, world_size: int) -> Iterator[None]:
    """Removes an earlier folder of that name, has the checkpoint written, and removes it again if the disk is full.

    The other processes must wait for the first, which removes the earlier folder. Errors other than a full disk, an
    exceeded quota or a limit on file sizes are raised as they are, and so is any error after the checkpoint is
    complete, which then stays.
    """
    folder = Path(checkpoint)
    if os.environ.get("RANK", "0") == "0":
        _remove(folder)
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's own is not an Exception
        if (cause := write_failure(error)) is None or is_complete(folder):
            raise
        _remove(folder)
        last, free = newest_complete(folder.parent, world_size), shutil.disk_usage(folder.parent).free / 2**20
        raise OSError(
            f"The checkpoint {folder} could not be written: {cause}. What was written of it is removed; {free:,.1f} "
            "MiB are free there. Make room, keep fewer checkpoints (--save_total_limit) or write to another disk "
            f"(--output_dir), then {f'resume with --resume_from_checkpoint {last}' if last else 'start again'}."
        ) from error


@contextmanager
def writing_result(output: Path) -> Iterator[None]:
    """Has the trained model written, and removes what makes its folder one of a model again if the disk is full."""
    try:
        yield
    except Exception as error:
        if (cause := write_failure(error)) is None:
            raise
        for name in ("config.json", ADAPTER_CONFIG, TRAINING_RECORD):
            (output / name).unlink(missing_ok=True)
        raise OSError(
            f"The trained model could not be written to {output}: {cause}. Make room, and run the same command with "
            "--resume_from_checkpoint: it goes on from the last checkpoint."
        ) from error


def _remove(folder: Path) -> None:
    (folder / STATE).unlink(missing_ok=True)  # first, or an interrupted removal would leave it marked as complete
    shutil.rmtree(folder, ignore_errors=True)
