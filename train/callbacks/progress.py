# SPDX-License-Identifier: Apache-2.0
"""What a run prints: a line of at most 80 columns for each logged step."""

import sys
import time
from datetime import timedelta

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback


COLUMNS = {
    "loss": ("loss", 9, ".4g"),
    "lr": ("learning_rate", 8, ".3g"),
    "visual": ("norm/visual", 8, ".3g"),
    "text": ("norm/text", 8, ".3g"),
    "gradient": ("grad_norm", 8, ".3g"),
    "clipped": ("clip/share", 7, ".0%"),
}
"""The columns between step and time left: key in the log, width and format."""


def show_lines(trainer: Trainer) -> None:
    """Has a trainer print lines in place of all that is logged, and bars on a terminal alone.

    A notebook has neither, but a table.
    """
    bars, dictionaries = trainer.pop_callback(ProgressCallback), trainer.pop_callback(PrinterCallback)
    if bars and sys.stderr.isatty():
        trainer.add_callback(Bars)
    if bars or dictionaries:
        trainer.add_callback(ProgressLines)


class Bars(ProgressCallback):
    """The Trainer's bars, without what is logged."""

    def on_log(self, args, state, control, **kwargs):
        pass  # [`ProgressLines`] prints it


class ProgressLines(TrainerCallback):
    """Prints a line for each logged step and each held-out loss.

    The time left is for the remaining steps at the mean pace since the run began or was resumed, evaluations and saves
    included.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self._first_step, self._began = state.global_step, None

    def on_step_begin(self, args, state, control, **kwargs):
        """Starts the clock at the first step: before it, a resumed run skips rows."""
        if self._began is None:
            self._began = time.perf_counter()
            names = (f"{name:>{width}}" for name, (_, width, _) in COLUMNS.items())
            _print(state, " ".join([f"{'step':>{_width(state)}}", *names, f"{'time left':>9}"]))

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Prints the line, with `-` for what was not measured."""
        if "loss" in logs:
            pace = (time.perf_counter() - self._began) / (state.global_step - self._first_step)
            left = timedelta(seconds=round(pace * (state.max_steps - state.global_step)))
            columns = COLUMNS.values()
            cells = (f"{format(logs[key], form) if key in logs else '-':>{width}}" for key, width, form in columns)
            print_at_step(state, " ".join([*cells, f"{str(left):>9}"]))
        elif "train_runtime" not in logs:
            for key in (key for key in logs if key.endswith("_loss")):
                print_at_step(state, f"{key} {logs[key]:.4g}")
        elif self._began is None:
            _print(state, f"Nothing was left to train: step {state.global_step:,} is the last.")
        else:
            steps, took = state.global_step - self._first_step, timedelta(seconds=round(logs["train_runtime"]))
            _print(state, f"{steps:,} steps in {took}, mean loss {logs['train_loss']:.4g}")


def print_at_step(state, text: str) -> None:
    """Prints a line that begins with the step, in the first process."""
    _print(state, f"{f'{state.global_step}/{state.max_steps}':>{_width(state)}} {text}")


def _print(state, text: str) -> None:
    if state.is_world_process_zero:
        tqdm.write(text)  # above the bars
        sys.stdout.flush()  # a file is read while it is written


def _width(state) -> int:
    return max(len("step"), 2 * len(str(state.max_steps)) + 1)
