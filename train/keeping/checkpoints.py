# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: how they are written, which are complete, from which a run resumes."""

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from zipfile import BadZipFile, ZipFile, is_zipfile

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import sort_checkpoints

from ...checkpoint.files import ADAPTER_CONFIG, STATE, TRAINING_RECORD, json_or_none, only_writer
from ...errors import Console, write_failure
from ..command import OFF


RESULT = ("config.json", ADAPTER_CONFIG, TRAINING_RECORD)
"""Files by which a folder is known to hold a trained model."""


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: the first process writes the trainer's state last."""
    return isinstance(json_or_none(checkpoint / STATE), dict)


def missing_from(checkpoint: str | os.PathLike, world_size: int) -> list[str]:
    """What a checkpoint lacks, but the Trainer would resume without: its mark, or some state."""
    folder = Path(checkpoint)
    if not is_complete(folder):
        return [f"{STATE}, which is written last"]
    saved = {path.name for path in folder.glob("rng_state*.pth")}
    if not saved:
        return ["optimizer, scheduler and random states (was it written with save_only_model?)"]
    ranks = {f"rng_state_{rank}.pth" for rank in range(world_size)}
    names = ranks if world_size > 1 else {"rng_state.pth"}
    damaged = [f"a whole {path.name} (it is damaged)" for path in truncated_states(folder)]
    deepspeed = (folder / "latest").exists()  # and in it all states
    # Of one process or DDP, of FSDP in one file, of FSDP in shards.
    optimizers = [folder / name for name in ("optimizer.pt", "optimizer.bin", "optimizer_0")]
    present = {
        "the optimizer's state": deepspeed or any(path.exists() for path in optimizers),
        "scheduler.pt": deepspeed or (folder / "scheduler.pt").exists(),
        f"random states of {world_size} process(es) (it has {len(saved)})": saved == names,
    }
    return [name for name, is_there in present.items() if not is_there] + damaged


def truncated_states(checkpoint: Path) -> list[Path]:
    """The files of states whose end is missing, which is where such a file lists what it holds."""
    return [path for path in state_files(checkpoint) if not is_zipfile(path)]


def state_files(checkpoint: Path) -> list[Path]:
    """The files of states that torch wrote, each of them an archive."""
    patterns = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth")
    return sorted(path for pattern in patterns for path in checkpoint.glob(pattern))


@contextmanager
def reading_checkpoint(checkpoint: str | os.PathLike | None) -> Iterator[None]:
    """Has states or weights of a checkpoint read; of what fails, names the file that is damaged."""
    try:
        yield
    except Exception as error:
        damaged = [] if checkpoint is None else _unreadable(Path(checkpoint))
        if not damaged:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"{damaged[0]} is damaged: {lines[0]} Remove {checkpoint}, and resume from the one "
            "before with --resume_from_checkpoint; or copy the file there again."
        ) from error


def _unreadable(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint that cannot be read, by reading them as far as the first one."""
    for path in state_files(checkpoint):
        try:
            with ZipFile(path) as archive:
                damaged_entry = archive.testzip()
        except (OSError, ValueError, BadZipFile):
            return [path]
        if damaged_entry is not None:
            return [path]
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError):
            return [path]
    return []


def newest_complete(output_dir: str | os.PathLike, world_size: int) -> Path | None:
    """The checkpoint of the highest step in `output_dir` that can be resumed from, or None."""
    newest_first = reversed(checkpoints_in(output_dir))
    return next((folder for folder in newest_first if not missing_from(folder, world_size)), None)


def checkpoints_in(output_dir: str | os.PathLike) -> list[Path]:
    """The folders `checkpoint-N` of a run, by step."""
    return [Path(path) for path in sort_checkpoints(str(output_dir))]


@contextmanager
def writing_checkpoint(checkpoint: str | os.PathLike, world_size: int) -> Iterator[None]:
    """Removes an earlier folder, for which others must wait, and what a full disk cut short."""
    folder = Path(checkpoint)
    if os.environ.get("RANK", "0") == "0":
        _remove(folder)
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's own is not an Exception
        if (cause := write_failure(error)) is None or is_complete(folder):
            raise
        _remove(folder)
        last = newest_complete(folder.parent, world_size)
        free = shutil.disk_usage(folder.parent).free / 2**20
        raise OSError(
            f"The checkpoint {folder} could not be written: {cause}. {free:,.1f} MiB are free. "
            "Make room, keep fewer (--save_total_limit) or write elsewhere (--output_dir), then "
            f"{f'resume with --resume_from_checkpoint {last}' if last else 'start again'}."
        ) from error


def _remove(folder: Path) -> None:
    (folder / STATE).unlink(missing_ok=True)  # first, as the removal may be interrupted
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing_result(output: Path) -> Iterator[None]:
    """Has the trained model written; on a full disk, removes the files that mark it as a model."""
    try:
        yield
    except Exception as error:
        if (cause := write_failure(error)) is None:
            raise
        for name in RESULT:
            (output / name).unlink(missing_ok=True)
        raise OSError(
            f"The trained model could not be written to {output}: {cause}. Make room, and run the "
            "same command with --resume_from_checkpoint: it goes on from the last checkpoint."
        ) from error


@contextmanager
def only_run(output_dir: str | os.PathLike) -> Iterator[None]:
    """[`only_writer`] for a run. All processes call it: the first takes the lock, or all stop."""
    problem = [""]
    with ExitStack() as lock:
        if PartialState().is_main_process:
            try:
                lock.enter_context(only_writer(output_dir, wait=0))
            except ValueError as error:
                problem = [str(error)]
            except OSError as error:
                problem = [f"--output_dir {output_dir} cannot be written to: {error}"]
        broadcast_object_list(problem)
        if problem[0]:
            raise ValueError(problem[0])
        yield


def is_resumed(resume: str | bool | None) -> bool:
    """Whether an option `resume_from_checkpoint` asks for an earlier run."""
    return str(resume).lower() not in OFF


def resolve_resume(resume: str | bool | None, output: Path, world_size: int) -> Path | None:
    """Returns the checkpoint to resume from, or None for the beginning. One process prints it.

    Args:
        resume: A folder; `"last"` or true for the newest complete checkpoint in `output`, or the
            beginning if there is none; None or false for the beginning.
        output: The folder of the run.
        world_size: How many processes train.

    Raises:
        ValueError: The checkpoint is not complete, or resuming would write over another run.
    """
    option = str(resume).lower()
    if option in OFF:
        check_new(output)
        return None
    if option in ("last", "true", "yes", "on"):
        return last_checkpoint(output, world_size)
    named = Path(str(resume))
    check_named(named, output, world_size)
    return named


def has_result(output: Path) -> bool:
    """Returns whether a folder holds a model."""
    return any((output / name).exists() for name in RESULT)


def check_new(output: Path) -> None:
    """Raises ValueError if a new run would write over something."""
    if checkpoints_in(output):
        remedy = "Add --resume_from_checkpoint, or change --output_dir."
        raise ValueError(f"{output} holds an earlier run. {remedy}")
    if has_result(output):
        raise ValueError(f"{output} holds a model. Choose another --output_dir.")


def check_named(named: Path, output: Path, world_size: int) -> None:
    """Raises ValueError unless a run in `output` can go on from a named checkpoint."""
    earlier = checkpoints_in(output)
    if not named.is_dir():
        known = ", ".join(path.name for path in earlier) or "no checkpoint"
        raise ValueError(f"There is no checkpoint {named}. {output} has {known}.")
    missing = missing_from(named, world_size)
    if missing:
        raise ValueError(f"{named} lacks {'; '.join(missing)}. Name a complete one, or last.")
    if earlier and named.resolve().parent != output.resolve():
        raise ValueError(f"{output} holds another run than {named}'s. Change --output_dir.")
    later = _later(named, earlier)
    if later:
        raise ValueError(
            f"{output} holds {', '.join(later)}, which a later resume from `last` would take "
            f"for the newest of the run that goes on from {named.name}. Remove them, or write "
            "to another --output_dir."
        )


def last_checkpoint(output: Path, world_size: int) -> Path | None:
    """Returns the newest complete checkpoint, or None for the beginning, and prints it."""
    newest = newest_complete(output, world_size)
    unused = checkpoints_in(output)
    if newest:
        unused = unused[unused.index(newest) + 1 :]
    console = Console(stderr=True, soft_wrap=True, quiet=os.environ.get("RANK", "0") != "0")
    for folder in unused:
        if is_complete(folder):
            lacks = "; ".join(missing_from(folder, world_size))
            raise ValueError(
                f"Resuming from {newest or 'the beginning'} would write over {folder}, which only "
                f"lacks {lacks}. Resume with as many processes, or remove it."
            )
        console.print(f"Skipped {folder}: it was not written to its end.")
    if newest is None and has_result(output):
        raise ValueError(f"{output} holds a model, but no checkpoint. Choose another --output_dir.")
    origin = newest or f"the beginning: {output} holds no complete checkpoint"
    console.print(f"Resuming from {origin}.")
    return newest


def _later(named: Path, checkpoints: list[Path]) -> list[str]:
    """The complete checkpoints after one of them."""
    places = [folder.resolve() for folder in checkpoints]
    if named.resolve() not in places:
        return []
    after = checkpoints[places.index(named.resolve()) + 1 :]
    return [folder.name for folder in after if is_complete(folder)]


def began_in(resume: str | bool | None, output_dir: str | None) -> tuple[bool, bool] | None:
    """`bf16` and `fp16` of a run that is resumed, by the record in its checkpoints, or None."""
    for folder in (Path(str(resume)), *reversed(checkpoints_in(output_dir or "trainer_output"))):
        options = (json_or_none(folder / TRAINING_RECORD) or {}).get("options", {})
        if "bf16" in options:
            return options["bf16"], options.get("fp16", False)
    return None


def after_stop(output: Path, world_size: int, step: int) -> str:
    """What is lost of a run that was stopped after `step`, and how to resume it."""
    if not step:
        return "Nothing was trained."
    record = json_or_none(output / TRAINING_RECORD) or {}
    last = (record.get("best") or {}).get("of_steps", record.get("steps_done"))
    if last == step:
        return f"The trained model is complete in {output}."
    done = f"Step {step} was done."
    if newest := newest_complete(output, world_size):
        resume = f"--resume_from_checkpoint {shlex.quote(str(newest))}"
        return f"{done} Resume with the same command and {resume}. What was done since is lost."
    return f"{done} {output} holds no complete checkpoint, so it is lost. Lower --save_steps."
