# SPDX-License-Identifier: Apache-2.0
"""The lines and bars that show how far a run is."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback


LOG_COLUMNS = {
    "loss": ("loss", 9, ".4g"),
    "lr": ("learning_rate", 8, ".3g"),
    "visual": ("norm/visual", 8, ".3g"),
    "text": ("norm/text", 8, ".3g"),
    "gradient": ("grad_norm", 8, ".3g"),
    "clipped": ("clip/share", 7, ".0%"),
}
"""The columns between step and time left: key in the log, width and format."""


def show_lines(trainer: Trainer) -> None:
    """Has a trainer print lines of what it logs, and bars on a terminal; a notebook has a table."""
    bars = trainer.pop_callback(ProgressCallback)
    printer = trainer.pop_callback(PrinterCallback)
    if bars and sys.stderr.isatty():
        trainer.add_callback(Bars)
    if bars or printer:
        trainer.add_callback(ProgressLines)


class Bars(ProgressCallback):
    """The Trainer's bars, without what is logged."""

    on_log = TrainerCallback.on_log


class ProgressLines(TrainerCallback):
    """Prints a line, 80 columns at most, for a logged step or held-out loss; `-`: not measured."""

    def __init__(self):
        # Evaluation and `Trainer.log` may come before training.
        self._first_step = 0
        self._started_at: float | None = None  # when the first step began
        self._explained = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._first_step = state.global_step
        self._started_at = None
        titles = [f"{title:>{width}}" for title, (_, width, _) in LOG_COLUMNS.items()]
        _print_cells(state, "step", *titles, "time left")

    def on_step_begin(self, args, state, control, **kwargs):
        """Starts the clock at the first step: before it, a resumed run reads the earlier rows."""
        if self._started_at is None:
            self._started_at = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self._print_step(state, logs)
            self._explain_clipping(args, state, logs)
        elif "train_runtime" in logs:
            self._print_end(state, logs)
        else:
            for key, value in logs.items():
                if key.endswith("_loss"):
                    _print_cells(state, _step_cell(state), f"{key} {value:.4g}")

    def _print_step(self, state, logs: Mapping[str, float]) -> None:
        """Prints a logged step as a row of the table."""
        cells = []
        for key, width, number_format in LOG_COLUMNS.values():
            figure = "-"
            if key in logs:
                figure = format(logs[key], number_format)
            cells.append(f"{figure:>{width}}")
        _print_cells(state, _step_cell(state), *cells, f"{self._time_left(state):>9}")

    def _print_end(self, state, logs: Mapping[str, float]) -> None:
        """Prints how many steps the run took, in what time, and their mean loss."""
        steps = state.global_step - self._first_step
        duration = timedelta(seconds=round(logs["train_runtime"]))
        result = ": the run was complete"
        if steps:
            result = f", mean loss {logs['train_loss']:.4g}"
        _print_cells(state, f"{steps:,} steps in {duration}{result}")

    def _time_left(self, state) -> str:
        """Returns the time that the remaining steps need at the mean pace of this run."""
        steps = state.global_step - self._first_step
        if steps < 1 or self._started_at is None:
            return "-"
        seconds_per_step = (time.perf_counter() - self._started_at) / steps
        seconds = seconds_per_step * (state.max_steps - state.global_step)
        return str(timedelta(seconds=round(seconds)))

    def _explain_clipping(self, args, state, logs: Mapping[str, float]) -> None:
        """Says once why steps are clipped with GWC: its factor is in the gradient that is shown."""
        factor = logs.get("gwc/factor", 1.0)
        clipped = logs.get("clip/share", 0.0)
        if self._explained or factor <= 1 or clipped <= 0.5:
            return
        self._explained = True
        show(
            state,
            f"GWC multiplies the gradients of projector and vision tower by {factor:.3g}, so the "
            f"gradient is large and clipped to max_grad_norm {args.max_grad_norm:g}: as intended.",
        )


def show(state, text: str) -> None:
    """Prints a line in the first process, above the bars."""
    if state.is_world_process_zero:
        tqdm.write(text)
        sys.stdout.flush()  # a file is read while it is written


def _step_cell(state) -> str:
    return f"{state.global_step}/{state.max_steps}"


def _print_cells(state, first: str, *cells: str) -> None:
    """Prints the cells of a line; the first is as wide as the last step's number needs."""
    digits = len(str(state.max_steps))
    width = max(len("step"), 2 * digits + 1)
    show(state, " ".join([f"{first:>{width}}", *cells]))
