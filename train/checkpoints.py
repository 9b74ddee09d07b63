# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Trainer checkpoints: whether one is complete, which one to resume from, and what happens when one cannot be written.

The Trainer takes the folder with the highest number, whatever is in it, and starts a fresh optimizer without a word
where the optimizer's file is missing.
"""

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import FileSystemReader

from ..checkpoint.files import read_json, write_failure
from ..checkpoint.names import STATE


LAYOUTS = {
    "optimizer.bin": ("pytorch_model_fsdp.bin",),
    "optimizer_0/.metadata": ("pytorch_model_fsdp_0/.metadata",),
    "optimizer.pt": ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
}
"""The optimizer's file and those of which one holds the model: FSDP in one file, FSDP in shards, all others."""


def missing_from(checkpoint: str | os.PathLike, world_size: int) -> list[str]:
    """What a trainer checkpoint lacks to be resumed from, as phrases that name the file; empty where it is complete.

    Complete are: every safetensors file, to the length its header says, and every shard that an index names; optimizer
    and scheduler; the random state of each process; a trainer state of the step in the folder's name. FSDP's sharded
    files and DeepSpeed's ZeRO folder count as model and optimizer. No tensor is loaded: files of torch are known to be
    whole by the directory at their end.

    Args:
        checkpoint: The folder, `checkpoint-N`.
        world_size: How many processes resume. Their random states must be those of as many processes.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return ["the folder itself"]
    faults = [f"{path.relative_to(folder)} ({fault})" for path in _files(folder) if (fault := _damage(path))]
    step = _step(folder)
    state = read_json(folder / STATE)
    if not (folder / STATE).exists():
        faults.append(STATE)
    elif isinstance(state, dict) and step is not None and state.get("global_step") != step:
        faults.append(f"{STATE} of step {step} (it is of step {state.get('global_step')})")

    if (folder / "latest").exists() or any(folder.glob("global_step*")):
        faults += _missing_from_deepspeed(folder, world_size)
    else:
        training = [*LAYOUTS, "scheduler.pt", *(path.name for path in folder.glob("rng_state*.pth"))]
        if isinstance(state, dict) and not any((folder / name).exists() for name in training):
            return [*faults, "optimizer, scheduler and random states (was it written with save_only_model?)"]
        faults += _missing_from_plain(folder)
    names, held = random_states(folder, world_size)
    if held != names:
        absent = ", ".join(sorted(names - held)) or "random states"
        faults.append(f"{absent} of a run of {world_size} process(es) (it holds random states of {len(held)})")
    return faults


def newest_complete(output_dir: str | os.PathLike, world_size: int) -> tuple[Path | None, dict[Path, list[str]]]:
    """The complete checkpoint of the highest step in `output_dir`, or None, and the newer ones with what they lack."""
    passed_over: dict[Path, list[str]] = {}
    for folder in reversed(checkpoints_in(output_dir)):
        if not (missing := missing_from(folder, world_size)):
            return folder, passed_over
        passed_over[folder] = missing
    return None, passed_over


@contextmanager
def writing_checkpoint(checkpoint: str | os.PathLike, world_size: int) -> Iterator[None]:
    """Around the writing of a checkpoint: afterwards it is there as written, or an error says why not and it is gone.

    On entry the first process removes a folder of that name, which an earlier run left: files of two runs must not
    mix. Other processes must not write before that. Errors but those of a full disk or quota, or a file size limit,
    pass untouched.

    Args:
        checkpoint: The folder, `checkpoint-N`.
        world_size: Number of processes, by which the last complete checkpoint is judged.

    Raises:
        OSError: the checkpoint could not be written; the message names the cause, the room there is, the last complete
            checkpoint, and what to do.
    """
    folder = Path(checkpoint)
    if os.environ.get("RANK", "0") == "0":
        _remove(folder)
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's own is not an Exception
        if (cause := write_failure(error)) is None:
            raise
        _remove(folder)
        raise OSError(_explain(folder, cause, world_size)) from error


def random_states(folder: Path, world_size: int) -> tuple[set[str], set[str]]:
    """The files that there must be, and those that there are."""
    names = {"rng_state.pth"} if world_size == 1 else {f"rng_state_{rank}.pth" for rank in range(world_size)}
    return names, {path.name for path in folder.glob("rng_state*.pth")}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _damage(path: Path) -> str | None:
    """What is wrong with a file of a kind that shows it, or None."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt"):
                return None
        except (SafetensorError, OSError) as error:
            return f"cut short or damaged: {error}"
    if path.suffix in (".pt", ".pth", ".bin"):
        return None if zipfile.is_zipfile(path) else "cut short"
    if path.name.endswith(".index.json"):
        index = read_json(path)
        shards = sorted(set(index["weight_map"].values())) if index else []
        absent = [name for name in shards if not (path.parent / name).exists()]
        return "cut short" if index is None else f"the shards {', '.join(absent)} are missing" if absent else None
    if path.suffix == ".json":
        return "cut short" if read_json(path) is None else None
    return _sharded_damage(path.parent) if path.name == ".metadata" else None


def _sharded_damage(folder: Path) -> str | None:
    # torch.distributed.checkpoint writes this file last; it says which bytes of which file hold what.
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data.values()
    except (EOFError, pickle.UnpicklingError) as error:
        return f"cut short: {error}"
    ends: dict[str, int] = {}
    for part in stored:
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    sizes = {path.name: path.stat().st_size for path in _files(folder)}
    short = [name for name, end in ends.items() if sizes.get(name, 0) < end]
    return f"{', '.join(sorted(short))} missing or cut short" if short else None


def _missing_from_plain(folder: Path) -> list[str]:
    def there(name: str) -> bool:
        return (folder / name.split("/")[0]).exists()

    begun = (item for item in LAYOUTS.items() if any(there(name) for name in (item[0], *item[1])))
    optimizer, models = next(begun, ("optimizer.pt", LAYOUTS["optimizer.pt"]))
    required = [optimizer, "scheduler.pt"]
    if there("adapter_model.safetensors"):
        required.append("adapter_config.json")
    faults = [name for name in required if not (folder / name).exists()]
    return faults if any((folder / name).exists() for name in models) else [" or ".join(models), *faults]


def _missing_from_deepspeed(folder: Path, world_size: int) -> list[str]:
    # DeepSpeed writes `latest`, the name of the folder with the states, when all processes have written theirs.
    try:
        states = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ["latest"]
    faults = [] if any(states.glob("*model_states.pt")) else [f"{states.name}/*model_states.pt"]
    shards = [f"*zero_pp_rank_{rank}_*optim_states.pt" for rank in range(world_size)]
    return faults + [f"{states.name}/{shard}" for shard in shards if not any(states.glob(shard))]


def _step(folder: Path) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name)
    return int(match[1]) if match else None


def checkpoints_in(output_dir: str | os.PathLike) -> list[Path]:
    """The folders `checkpoint-N` of a run, by step."""
    folders = {step: path for path in Path(output_dir).glob("checkpoint-*") if (step := _step(path)) is not None}
    return [folders[step] for step in sorted(folders) if folders[step].is_dir()]


def _remove(folder: Path) -> None:
    # First what makes it complete, so that a removal that is interrupted leaves no checkpoint that looks whole.
    (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _explain(folder: Path, cause: str, world_size: int) -> str:
    last, _ = newest_complete(folder.parent, world_size)
    room = f"{shutil.disk_usage(folder.parent).free / 2**20:,.1f} MiB are free there"
    if last:
        room += f", and {last.name} takes {sum(path.stat().st_size for path in _files(last)) / 2**20:,.1f} MiB"
    return (
        f"The checkpoint {folder} could not be written: {cause}. What was written of it is removed; {room}. "
        + (f"The last complete checkpoint is {last}. " if last else "There is no complete checkpoint yet. ")
        + "Make room, keep fewer checkpoints (--save_total_limit) or write to another disk (--output_dir), then "
        + (f"resume with --resume_from_checkpoint {last}." if last else "start again.")
    )
