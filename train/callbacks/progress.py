# SPDX-License-Identifier: Apache-2.0
"""What shows how far a run is: lines, bars and a picture of the loss."""

import sys
import time
from datetime import timedelta
from pathlib import Path

from accelerate.logging import get_logger
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ...checkpoint.files import atomic_write


logger = get_logger(__name__)  # logs in one process only

LOG_COLUMNS = {
    "loss": ("loss", 9, ".4g"),
    "lr": ("learning_rate", 8, ".3g"),
    "visual": ("norm/visual", 8, ".3g"),
    "text": ("norm/text", 8, ".3g"),
    "gradient": ("grad_norm", 8, ".3g"),
    "clipped": ("clip/share", 7, ".0%"),
}
"""The columns between step and time left: key in the log, width and format."""

PAUSE = 60.0
"""Seconds between two drawings."""

FEWEST = 3
"""Points of a curve: one or two show nothing."""


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
        self._started_at = None  # when the first step began
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
        """Prints a logged step, held-out losses, or the steps and the time of the whole run.

        With GWC the gradient contains its factor. Why steps are clipped is explained once.
        """
        step = f"{state.global_step}/{state.max_steps}"
        steps_taken = state.global_step - self._first_step
        if "loss" in logs:
            cells = []
            for key, width, number_format in LOG_COLUMNS.values():
                figure = "-"
                if key in logs:
                    figure = format(logs[key], number_format)
                cells.append(f"{figure:>{width}}")
            time_left = "-"  # at the mean pace of this run
            if steps_taken > 0 and self._started_at is not None:
                seconds_per_step = (time.perf_counter() - self._started_at) / steps_taken
                seconds_left = seconds_per_step * (state.max_steps - state.global_step)
                time_left = str(timedelta(seconds=round(seconds_left)))
            _print_cells(state, step, *cells, f"{time_left:>9}")
            factor = logs.get("gwc/factor", 1.0)
            if not self._explained and factor > 1 and logs.get("clip/share", 0.0) > 0.5:
                self._explained = True
                show(
                    state,
                    f"GWC multiplies the gradients of projector and vision tower by {factor:.3g}, "
                    "so the gradient is large and clipped to max_grad_norm "
                    f"{args.max_grad_norm:g}: as intended.",
                )
        elif "train_runtime" in logs:
            duration = timedelta(seconds=round(logs["train_runtime"]))
            result = ": the run was complete"
            if steps_taken:
                result = f", mean loss {logs['train_loss']:.4g}"
            _print_cells(state, f"{steps_taken:,} steps in {duration}{result}")
        else:
            for key, value in logs.items():
                if key.endswith("_loss"):
                    _print_cells(state, step, f"{key} {value:.4g}")


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


class LossCurve(TrainerCallback):
    """Draws `loss.png` at saves and at the end. It has the steps before a resumption too.

    A curve of fewer than `FEWEST` points is not drawn.
    """

    def __init__(self):
        self._drawn_at = time.monotonic()

    def on_save(self, args, state, control, **kwargs):
        if time.monotonic() - self._drawn_at > PAUSE:
            self._draw(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._draw(args, state)

    def _draw(self, args, state) -> None:
        """Writes the picture in the first process, if a curve is long enough."""
        if not state.is_world_process_zero:
            return
        curves: dict[str, dict[int, float]] = {}
        for log_entry in state.log_history:
            for key, logged_value in log_entry.items():
                is_held_out = key.startswith("eval_") and key.endswith("loss")
                if key == "loss" or is_held_out:
                    curves.setdefault(key, {})[log_entry["step"]] = logged_value
        if all(len(losses) < FEWEST for losses in curves.values()):
            return
        self._drawn_at = time.monotonic()
        picture = Path(args.output_dir) / "loss.png"
        try:
            with atomic_write(picture) as partial:
                draw_losses(curves, partial, best=state.best_global_step)
        except OSError as error:  # the model that is saved next matters more
            logger.warning(f"{picture} was not drawn: {error}")


def draw_losses(curves: dict[str, dict[int, float]], file: Path, best: int | None) -> None:
    """Draws losses by step, under their names in the log, as a PNG. A line marks the best step."""
    from matplotlib.figure import Figure  # late: it takes half a second
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for loss_name, loss_of_step in curves.items():
        steps, losses = zip(*sorted(loss_of_step.items()), strict=True)
        if loss_name == "loss":
            marker = "." if len(steps) < 50 else ""
            axes.plot(steps, losses, marker=marker, linewidth=1, color="0.55", label="training")
        else:
            # Several data sets have their names in the names of their losses.
            data_name = loss_name.removeprefix("eval_").removesuffix("loss").rstrip("_")
            label = f"held out: {data_name}" if data_name else "held out"
            axes.plot(steps, losses, marker="o", linewidth=1.8, label=label)
    if best:
        axes.axvline(best, color="0.8", linestyle="--", linewidth=1, zorder=0, label="best step")
    axes.set(xlabel="step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, format="png", dpi=150)
