# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which checkpoint a run resumes from, so that nothing of an earlier run is lost."""

import os
import shlex
from pathlib import Path

from transformers import TrainerCallback

from ...checkpoint.files import json_or_none
from ...checkpoint.names import ADAPTER_CONFIG, TRAINING_RECORD
from ...errors import Console
from .checkpoints import checkpoints_in, is_complete, missing_from, newest_complete


def resolve_resume(resume: str | bool | None, output_dir: str | os.PathLike, world_size: int) -> Path | None:
    """The checkpoint to resume from, or None to start from the beginning.

    The first process prints which it is, and which incomplete ones are newer, on standard error.

    Args:
        resume: The option `resume_from_checkpoint`: a folder; `"last"` or true for the newest complete checkpoint in
            `output_dir`, or the beginning if there is none; None or false for the beginning.
    """
    option, output = str(resume).lower(), Path(output_dir)
    earlier = checkpoints_in(output)
    names = ", ".join(path.name for path in earlier)
    result = ", ".join(name for name in ("config.json", ADAPTER_CONFIG, TRAINING_RECORD) if (output / name).exists())
    if option in ("none", "false"):
        if earlier or result:
            raise ValueError(
                f"{output} holds an earlier run or a model: {names or result}. Resume from its checkpoints with "
                "--resume_from_checkpoint, or choose another --output_dir."
            )
        return None
    if option not in ("last", "true"):
        named = Path(str(resume))
        if missing := missing_from(named, world_size):
            raise ValueError(
                f"The checkpoint {named} is not complete. It lacks: {'; '.join(missing)}. Name a complete one, or "
                "let the newest complete one be found with --resume_from_checkpoint last."
            )
        if earlier and named.resolve().parent != output.resolve():
            raise ValueError(
                f"{output} holds checkpoints of another run ({names}) than {named}. Choose another --output_dir."
            )
        return named
    found = newest_complete(output, world_size)
    newer = earlier[earlier.index(found) + 1 :] if found else earlier
    for folder in newer:
        if is_complete(folder):
            raise ValueError(
                f"Resuming from {found or 'the beginning'} would write over {folder}, which was saved whole but lacks "
                f"{'; '.join(missing_from(folder, world_size))}. Resume with as many processes as wrote it, "
                "remove it, or choose another --output_dir."
            )
    if not found and result:
        raise ValueError(f"{output} holds a model and no checkpoint to resume from. Choose another --output_dir.")
    if os.environ.get("RANK", "0") == "0":
        console = Console(stderr=True, soft_wrap=True)
        for folder in newer:
            console.print(f"Skipped {folder}: it was not written to its end.")
        start = f"from {found}" if found else f"from the beginning: {output_dir} holds no complete checkpoint"
        console.print(f"Resuming {start}.")
    return found


def began_in(resume: str | bool | None, output_dir: str | os.PathLike | None) -> tuple[bool, bool] | None:
    """`bf16` and `fp16` of the run that is resumed, from the record in its checkpoints; None if unknown."""
    for folder in (Path(str(resume)), *reversed(checkpoints_in(Path(output_dir or "trainer_output")))):
        options = (json_or_none(folder / TRAINING_RECORD) or {}).get("options", {})
        if "bf16" in options:
            return options["bf16"], options.get("fp16", False)
    return None


class StepCounter(TrainerCallback):
    """Knows the last step that was done, in `step`; None before training."""

    step: int | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Of a resumed run, the checkpoint's step."""
        self.step = state.global_step

    on_step_end = on_train_begin


def after_stop(output_dir: str | os.PathLike, world_size: int, step: int | None) -> str:
    """What is lost of a run that was stopped after `step`, and how to resume it."""
    output = Path(output_dir)
    if not step:
        return "Nothing was trained."
    if (json_or_none(output / TRAINING_RECORD) or {}).get("steps_done") == step:
        return f"The trained model is complete in {output}."
    if newest := newest_complete(output, world_size):
        return (
            f"Step {step} was done. Resume with the same command and --resume_from_checkpoint "
            f"{shlex.quote(str(newest))}. What was done since then is lost."
        )
    return (
        f"Step {step} was done. {output} holds no complete checkpoint, so it is lost. Start again with the same "
        "command; a lower --save_steps saves earlier."
    )
