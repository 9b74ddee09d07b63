# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a run prints: a line of at most 80 columns for each logged step."""

import sys
import time
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_utils import has_length


COLUMNS = {
    "loss": ("loss", 9, ".4g"),
    "lr": ("learning_rate", 8, ".3g"),
    "visual": ("norm/visual", 8, ".3g"),
    "text": ("norm/text", 8, ".3g"),
    "gradient": ("grad_norm", 8, ".3g"),
    "clipped": ("clip/share", 7, ".0%"),
}
"""Of each column between step and time left: its key in the log, width and format."""


class ProgressLines(TrainerCallback):
    """Prints a line for each logged step and each held-out loss; on a terminal also progress bars.

    It replaces the Trainer's own callbacks, which print everything that is logged. The time left is for the remaining
    steps at the mean pace since the run began or was resumed, evaluations and saves included.
    """

    def __init__(self) -> None:
        self._first_step = 0
        self._began: float | None = None
        self._headed = False
        self._steps: tqdm | None = None
        self._batches: tqdm | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        """Starts the clock at the first step: before it, a resumed run skips rows."""
        if self._began is None:
            self._began, self._first_step = time.perf_counter(), state.global_step
            self._steps = bar(args, state, total=state.max_steps, initial=state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        """Advances the bar."""
        if self._steps is not None:
            self._steps.update()

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Advances the bar of an evaluation."""
        if self._batches is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self._batches = bar(args, state, total=total, desc="Evaluating")
        self._batches.update()

    def on_evaluate(self, args, state, control, **kwargs):
        """Ends the bar of an evaluation."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Prints the line."""
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            if not self._headed:
                _print(header(state.max_steps))
            self._headed = True
            elapsed = time.perf_counter() - self._began
            left = seconds_left(elapsed, self._first_step, state.global_step, state.max_steps)
            _print(line(logs, state.global_step, state.max_steps, left))
        elif "train_runtime" not in logs:
            for key in (key for key in logs if key.endswith("_loss")):
                print_at_step(state, f"{key} {logs[key]:.4g}")
        elif self._began is None:
            _print(f"Nothing was left to train: step {state.global_step:,} is the last.")
        else:
            steps = state.global_step - self._first_step
            _print(f"{steps:,} steps in {duration(logs['train_runtime'])}, mean loss {logs['train_loss']:.4g}")

    def on_train_end(self, args, state, control, **kwargs):
        """Removes the bar."""
        if self._steps is not None:
            self._steps.close()
        self._began, self._headed, self._steps = None, False, None


def bar(args, state, **kwargs: Any) -> tqdm:
    """A progress bar that vanishes when done; only in the first process, on a terminal, without `disable_tqdm`."""
    hidden = args.disable_tqdm or not state.is_world_process_zero
    return tqdm(leave=False, dynamic_ncols=True, disable=hidden or None, **kwargs)


def print_at_step(state, text: str) -> None:
    """Prints a line that begins with the step."""
    _print(f"{_step(state.global_step, state.max_steps)} {text}")


def header(max_steps: int) -> str:
    """The names of the columns."""
    names = (f"{name:>{width}}" for name, (_, width, _) in COLUMNS.items())
    return " ".join([f"{'step':>{_width(max_steps)}}", *names, f"{'left':>9}"])


def line(logs: dict[str, float], step: int, max_steps: int, left: float) -> str:
    """A logged step as a line of at most 80 columns, with `-` for what was not measured.

    Args:
        logs: What was logged.
        step: The step.
        max_steps: Number of steps.
        left: Time left in seconds.
    """
    shown = (
        f"{logs[key]:>{width}{form}}" if key in logs else f"{'-':>{width}}" for key, width, form in COLUMNS.values()
    )
    return " ".join([_step(step, max_steps), *shown, f"{duration(left):>9}"])


def seconds_left(elapsed: float, first_step: int, step: int, max_steps: int) -> float:
    """Seconds for the steps after `step`, at the pace of those since `first_step`, which took `elapsed` seconds."""
    return elapsed / (step - first_step) * (max_steps - step)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _print(text: str) -> None:
    tqdm.write(text)  # above the bars
    sys.stdout.flush()  # a file is read while it is written


def _step(step: int, max_steps: int) -> str:
    return f"{f'{step}/{max_steps}':>{_width(max_steps)}}"


def _width(max_steps: int) -> int:
    return max(len("step"), 2 * len(str(max_steps)) + 1)
