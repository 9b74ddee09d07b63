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
    """Has a trainer print lines in place of all that is logged, and bars on a terminal. A notebook has a table."""
    bars, dictionaries = trainer.pop_callback(ProgressCallback), trainer.pop_callback(PrinterCallback)
    if bars and sys.stderr.isatty():
        trainer.add_callback(Bars)
    if bars or dictionaries:
        trainer.add_callback(ProgressLines)


class Bars(ProgressCallback):
    """The Trainer's bars, without what is logged."""

    on_log = TrainerCallback.on_log


class ProgressLines(TrainerCallback):
    """Prints a line for each logged step and each held-out loss; the time left is at the mean pace so far."""

    def on_train_begin(self, args, state, control, **kwargs):
        self._first_step, self._began = state.global_step, time.perf_counter()
        _print(state, "step", *(f"{name:>{width}}" for name, (_, width, _) in COLUMNS.items()), "time left")

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Prints the line, with `-` for what was not measured."""
        step = f"{state.global_step}/{state.max_steps}"
        if "loss" in logs:
            pace = (time.perf_counter() - self._began) / (state.global_step - self._first_step)
            left = timedelta(seconds=round(pace * (state.max_steps - state.global_step)))
            columns = COLUMNS.values()
            cells = (f"{format(logs[key], form) if key in logs else '-':>{width}}" for key, width, form in columns)
            _print(state, step, *cells, f"{left!s:>9}")
        elif "train_runtime" in logs:
            steps, took = state.global_step - self._first_step, timedelta(seconds=round(logs["train_runtime"]))
            _print(state, f"{steps:,} steps in {took}, mean loss {logs['train_loss']:.4g}")
        else:
            for key in (key for key in logs if key.endswith("_loss")):
                _print(state, step, f"{key} {logs[key]:.4g}")


def _print(state, first: str, *cells: str) -> None:
    if state.is_world_process_zero:
        width = max(len("step"), 2 * len(str(state.max_steps)) + 1)
        tqdm.write(" ".join([f"{first:>{width}}", *cells]))  # above the bars
        sys.stdout.flush()  # a file is read while it is written
