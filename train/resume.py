# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which checkpoint a run is resumed from, and what must not be lost."""

import os
from pathlib import Path

from ..checkpoint.files import read_json
from ..checkpoint.names import ADAPTER_CONFIG, STATE, TRAINING_RECORD
from ..errors import Console
from .checkpoints import checkpoints_in, missing_from, newest_complete, random_states


RESULT = ("config.json", ADAPTER_CONFIG, TRAINING_RECORD)
"""Files of which a folder with a model has at least one."""


def resolve_resume(resume: str | bool | None, output_dir: str | os.PathLike, world_size: int) -> Path | None:
    """The checkpoint to resume from, or None to start from the beginning.

    Checkpoints that are passed over are named on standard error, by the first process.

    Args:
        resume: The option `resume_from_checkpoint`: a folder; `"last"` or true for the newest complete checkpoint in
            `output_dir`, or the beginning where there is none; None or false for the beginning.
        output_dir: Folder of the run.
        world_size: How many processes resume.

    Raises:
        ValueError: the named checkpoint is not complete, or a start from the beginning would mix its checkpoints with
            those of an earlier run.
    """
    word, output = str(resume).lower(), Path(output_dir)
    if output.is_file():
        raise ValueError(f"The --output_dir {output} is a file. Choose another.")
    earlier = [path.name for path in checkpoints_in(output)]
    result = [name for name in RESULT if (output / name).exists()]
    if word in ("none", "false"):
        if earlier + result:
            raise ValueError(
                f"{output} holds an earlier run or a model: {', '.join(earlier + result)}. Resume from its "
                "checkpoints with --resume_from_checkpoint, or choose another --output_dir."
            )
        return None
    if word not in ("last", "true"):
        if missing := missing_from(str(resume), world_size):
            raise ValueError(
                f"The checkpoint {resume} is not complete. It lacks: {'; '.join(missing)}. Name a complete one, or "
                "let the newest complete one be found with --resume_from_checkpoint last."
            )
        if earlier and Path(str(resume)).resolve().parent != output.resolve():
            raise ValueError(
                f"{output} holds checkpoints of another run ({', '.join(earlier)}) than {resume}. Choose another "
                "--output_dir."
            )
        return Path(str(resume))
    found, passed_over = newest_complete(output, world_size)
    if others := [folder for folder in passed_over if _was_saved_otherwise(folder, world_size)]:
        faults = "; ".join(f"{folder} lacks {', '.join(passed_over[folder])}" for folder in others)
        raise ValueError(
            f"Resuming from {found or 'the beginning'} would write over checkpoints that were saved whole: {faults}. "
            "Resume with as many processes as wrote them, or choose another --output_dir."
        )
    if not found and result:
        raise ValueError(f"{output} holds a model and no checkpoint to resume from. Choose another --output_dir.")
    if os.environ.get("RANK", "0") == "0":
        console = Console(stderr=True, soft_wrap=True)
        for folder, missing in passed_over.items():
            console.print(f"Passed over {folder}, which is not complete. It lacks: {'; '.join(missing)}.")
        whence = f"from {found}" if found else f"from the beginning: {output_dir} holds no complete checkpoint"
        console.print(f"Resuming {whence}.")
    return found


def _was_saved_otherwise(folder: Path, world_size: int) -> bool:
    """Whether it lacks something because of how it was saved, and not because saving was cut short."""
    names, held = random_states(folder, world_size)
    record = read_json(folder / TRAINING_RECORD) or {}
    processes = record.get("processes", world_size)
    return bool(read_json(folder / STATE)) and (not held or bool(held - names) or processes != world_size)
