# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: writing them, checking them, and choosing one to resume from."""

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import sort_checkpoints

from ...checkpoint.files import ADAPTER_CONFIG, STATE, TRAINING_RECORD, json_or_none, lock_folder
from ...console import Console
from ...errors import write_failure
from ..command import OFF


RESULT = ("config.json", ADAPTER_CONFIG, TRAINING_RECORD)
"""A folder with one of these files holds a trained model."""


def is_first_process() -> bool:
    """Returns whether this process prints, and removes files, for all processes of a run."""
    return os.environ.get("RANK", "0") == "0"


def is_complete(checkpoint: Path) -> bool:
    """Returns whether a checkpoint is complete. The trainer's state is written last."""
    return isinstance(json_or_none(checkpoint / STATE), dict)


def missing_from(checkpoint: Path, world_size: int) -> list[str]:
    """Returns what a checkpoint lacks. The Trainer would resume without it, and say nothing."""
    if not is_complete(checkpoint):
        return [f"{STATE} (the last file that is written)"]
    saved_names = {state_path.name for state_path in checkpoint.glob("rng_state*.pth")}
    if not saved_names:
        return ["optimizer, scheduler and random states (was it written with save_only_model?)"]
    missing = []
    if not (checkpoint / "latest").exists():  # DeepSpeed's, with the states of all
        # One process or DDP, FSDP in one file, FSDP in shards.
        optimizers = ("optimizer.pt", "optimizer.bin", "optimizer_0")
        if not any((checkpoint / name).exists() for name in optimizers):
            missing.append("the optimizer's state")
        if not (checkpoint / "scheduler.pt").exists():
            missing.append("scheduler.pt")
    needed = {f"rng_state_{rank}.pth" for rank in range(world_size)}
    if world_size == 1:
        needed = {"rng_state.pth"}
    if saved_names != needed:
        missing.append(f"random states of {world_size} process(es) (it has {len(saved_names)})")
    for state_path in state_files(checkpoint):
        if not is_zipfile(state_path):  # such a file lists its contents at its end
            missing.append(f"a whole {state_path.name} (it is damaged)")
    return missing


def state_files(checkpoint: Path) -> list[Path]:
    """Returns the files of states that torch wrote. Each is a zip archive."""
    patterns = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth")
    return sorted(file for pattern in patterns for file in checkpoint.glob(pattern))


@contextmanager
def reading_checkpoint(checkpoint: str | os.PathLike | None) -> Iterator[None]:
    """Raises ValueError with the damaged file's name, if an error inside comes from such a file."""
    try:
        yield
    except Exception as error:
        damaged = checkpoint and _unreadable_file(Path(checkpoint))
        if not damaged:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"{damaged} is damaged: {lines[0]} Remove {checkpoint}, and resume from the one "
            "before with --resume_from_checkpoint, or copy the file there again."
        ) from error


def _unreadable_file(checkpoint: Path) -> Path | None:
    """Reads the files of a checkpoint. Returns the first one that cannot be read, or None."""
    for path in [*state_files(checkpoint), *sorted(checkpoint.glob("*.safetensors"))]:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            else:
                with ZipFile(path) as archive:
                    if archive.testzip() is not None:
                        return path
        except (OSError, ValueError, BadZipFile, SafetensorError):
            return path
    return None


def newest_complete(output_dir: str | os.PathLike, world_size: int) -> Path | None:
    """Returns the checkpoint of the highest step that can be resumed from, or None."""
    for checkpoint in reversed(checkpoints_in(output_dir)):
        if not missing_from(checkpoint, world_size):
            return checkpoint
    return None


def checkpoints_in(output_dir: str | os.PathLike) -> list[Path]:
    """Returns the folders `checkpoint-N` of a run, by step."""
    return [Path(path) for path in sort_checkpoints(str(output_dir))]


@contextmanager
def writing_checkpoint(checkpoint: str | os.PathLike, world_size: int) -> Iterator[None]:
    """Removes an earlier folder before a checkpoint is written, in the first process.

    Other processes must wait for it. On a full disk, the part that was written is removed.

    Raises:
        OSError: The checkpoint cannot be written.
    """
    folder = Path(checkpoint)
    if is_first_process():
        _remove(folder)
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's own is not an Exception
        cause = write_failure(error)
        if cause is None or is_complete(folder):
            raise
        _remove(folder)
        free_mib = shutil.disk_usage(folder.parent).free / 2**20
        last_complete = newest_complete(folder.parent, world_size)
        next_command = "start again"
        if last_complete:
            next_command = f"resume with --resume_from_checkpoint {last_complete}"
        raise OSError(
            f"The checkpoint {folder} could not be written: {cause}. {free_mib:,.1f} MiB are free. "
            "Make room, keep fewer (--save_total_limit) or write elsewhere (--output_dir), then "
            f"{next_command}."
        ) from error


def _remove(checkpoint: Path) -> None:
    (checkpoint / STATE).unlink(missing_ok=True)  # first, as the removal may be interrupted
    shutil.rmtree(checkpoint, ignore_errors=True)


@contextmanager
def writing_result(output: Path) -> Iterator[None]:
    """Removes the files `RESULT`, if a full disk stops the writing of a model.

    Raises:
        OSError: The model cannot be written.
    """
    try:
        yield
    except Exception as error:
        cause = write_failure(error)
        if cause is None:
            raise
        for file_name in RESULT:
            (output / file_name).unlink(missing_ok=True)
        raise OSError(
            f"The trained model could not be written to {output}: {cause}. Make room, and run the "
            "same command with --resume_from_checkpoint: it goes on from the last checkpoint."
        ) from error


@contextmanager
def only_run(output_dir: Path) -> Iterator[None]:
    """Locks the folder of a run, as [`lock_folder`] does.

    All processes must call this together. The first one takes the lock.

    Raises:
        ValueError: The first process cannot take the lock. All processes raise this error.
    """
    problem = [""]
    with ExitStack() as lock:
        if PartialState().is_main_process:
            try:
                lock.enter_context(lock_folder(output_dir, wait=0))
            except ValueError as error:
                problem = [str(error)]
            except OSError as error:
                problem = [f"--output_dir {output_dir} cannot be written to: {error}"]
        broadcast_object_list(problem)
        if problem[0]:
            raise ValueError(problem[0])
        yield


def is_resumed(resume: str | bool | None) -> bool:
    """Returns whether an option `resume_from_checkpoint` asks for an earlier run."""
    return str(resume).lower() not in OFF


def resolve_resume(resume: str | bool | None, output: Path, world_size: int) -> Path | None:
    """Returns the checkpoint to resume from, or None for the beginning. Prints the newest.

    Args:
        resume: The folder of a checkpoint. `"last"` or true is the newest complete checkpoint in
            `output`, or the beginning if there is none. None or false is the beginning.
        output: The folder of the run.
        world_size: How many processes train.

    Raises:
        ValueError: The checkpoint is not complete, or resuming would write over another run.
    """
    if not is_resumed(resume):
        if checkpoints_in(output):
            raise ValueError(
                f"{output} holds an earlier run. Add --resume_from_checkpoint, or change "
                "--output_dir."
            )
        if has_result(output):
            raise ValueError(f"{output} holds a model. Choose another --output_dir.")
        return None
    if str(resume).lower() not in ("last", "true", "yes", "on"):
        named = Path(str(resume))
        check_named(named, output, world_size)
        return named
    newest = newest_complete(output, world_size)
    unused = checkpoints_in(output)
    if newest:
        unused = unused[unused.index(newest) + 1 :]
    console = Console(stderr=True, soft_wrap=True, quiet=not is_first_process())
    for checkpoint in unused:
        if is_complete(checkpoint):
            missing = "; ".join(missing_from(checkpoint, world_size))
            raise ValueError(
                f"Resuming from {newest or 'the beginning'} would write over {checkpoint}. It only "
                f"lacks {missing}. Resume with as many processes, or remove it."
            )
        console.print(f"Skipped {checkpoint}: it was not written to its end.")
    if newest is None and has_result(output):
        raise ValueError(f"{output} holds a model, but no checkpoint. Choose another --output_dir.")
    origin = newest or f"the beginning: {output} holds no complete checkpoint"
    console.print(f"Resuming from {origin}.")
    return newest


def has_result(output: Path) -> bool:
    """Returns whether a folder holds a model."""
    return any((output / name).exists() for name in RESULT)


def check_named(named: Path, output: Path, world_size: int) -> None:
    """Raises ValueError unless a run in `output` can go on from a named checkpoint."""
    earlier = checkpoints_in(output)
    if not named.is_dir():
        existing = ", ".join(path.name for path in earlier) or "no checkpoint"
        raise ValueError(f"The checkpoint {named} does not exist. {output} has {existing}.")
    missing = missing_from(named, world_size)
    if missing:
        raise ValueError(f"{named} lacks {'; '.join(missing)}. Name a complete one, or last.")
    place = named.resolve()
    if earlier and place.parent != output.resolve():
        raise ValueError(f"{output} holds another run than {named}'s. Change --output_dir.")
    places = [checkpoint.resolve() for checkpoint in earlier]
    if place not in places:
        return
    after = earlier[places.index(place) + 1 :]
    later_names = [checkpoint.name for checkpoint in after if is_complete(checkpoint)]
    if later_names:
        raise ValueError(
            f"{output} holds {', '.join(later_names)}. A later resume from `last` would take them "
            f"for the newest of the run that goes on from {named.name}. Remove them, or write to "
            "another --output_dir."
        )


def _training_record(folder: Path) -> dict[str, Any]:
    """Reads the training record of a folder. Returns an empty one if there is none."""
    record = json_or_none(folder / TRAINING_RECORD)
    return record if isinstance(record, dict) else {}


def read_precision(resume: str | bool | None, output_dir: str | None) -> tuple[bool, bool] | None:
    """Reads `bf16` and `fp16` of the run that is resumed. Returns None if no record has them."""
    newest_first = reversed(checkpoints_in(output_dir or "trainer_output"))
    for folder in (Path(str(resume)), *newest_first):
        options = _training_record(folder).get("options", {})
        if "bf16" in options:
            return options["bf16"], options.get("fp16", False)
    return None


def after_stop(output: Path, world_size: int, step: int) -> str:
    """Returns sentences: what a run that stopped after `step` has lost, and how to resume it."""
    if not step:
        return "Nothing was trained."
    record = _training_record(output)
    last_step = record.get("steps_done")
    best_record = record.get("best")
    if best_record:  # the weights are from an earlier step
        last_step = best_record.get("of_steps", last_step)
    if last_step == step:
        return f"The trained model is complete in {output}."
    fact = f"Step {step} was done."
    newest = newest_complete(output, world_size)
    if newest is None:
        return f"{fact} {output} holds no complete checkpoint, so it is lost. Lower --save_steps."
    option = f"--resume_from_checkpoint {shlex.quote(str(newest))}"
    return f"{fact} Resume with the same command and {option}. What was done since is lost."
