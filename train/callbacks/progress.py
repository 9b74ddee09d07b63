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
    """Has a trainer print lines of what it logs, and bars on a terminal.

    A notebook keeps its table.
    """
    progress_bars = trainer.pop_callback(ProgressCallback)
    printer = trainer.pop_callback(PrinterCallback)
    if progress_bars and sys.stderr.isatty():
        trainer.add_callback(Bars)
    if progress_bars or printer:
        trainer.add_callback(ProgressLines)


class Bars(ProgressCallback):
    """The Trainer's bars, without what is logged."""

    on_log = TrainerCallback.on_log


class ProgressLines(TrainerCallback):
    """Prints a line of at most 80 columns for a logged step or held-out loss.

    What was not measured is `-`.
    """

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
        """Prints a logged step, held-out losses, or the steps and the time of the whole run."""
        step = f"{state.global_step}/{state.max_steps}"
        if "loss" in logs:
            cells = []
            for key, width, number_format in LOG_COLUMNS.values():
                figure = "-"
                if key in logs:
                    figure = format(logs[key], number_format)
                cells.append(f"{figure:>{width}}")
            _print_cells(state, step, *cells, f"{self._time_left(state):>9}")
            self._explain_clipping(args, state, logs)
        elif "train_runtime" in logs:
            steps_taken = state.global_step - self._first_step
            duration = timedelta(seconds=round(logs["train_runtime"]))
            result = ": the run was complete"
            if steps_taken:
                result = f", mean loss {logs['train_loss']:.4g}"
            _print_cells(state, f"{steps_taken:,} steps in {duration}{result}")
        else:
            for key, value in logs.items():
                if key.endswith("_loss"):
                    _print_cells(state, step, f"{key} {value:.4g}")

    def _time_left(self, state) -> str:
        """Returns the time that the remaining steps need at the mean pace of this run."""
        steps_taken = state.global_step - self._first_step
        if steps_taken < 1 or self._started_at is None:
            return "-"
        seconds_per_step = (time.perf_counter() - self._started_at) / steps_taken
        seconds_left = seconds_per_step * (state.max_steps - state.global_step)
        return str(timedelta(seconds=round(seconds_left)))

    def _explain_clipping(self, args, state, logs: Mapping[str, float]) -> None:
        """Explains once why steps are clipped with GWC: the gradient contains its factor."""
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


def _print_cells(state, first: str, *cells: str) -> None:
    """Prints the cells of a line. The first is as wide as the last step's number needs."""
    digits = len(str(state.max_steps))
    width = max(len("step"), 2 * digits + 1)
    show(state, " ".join([f"{first:>{width}}", *cells]))
