# SPDX-License-Identifier: Apache-2.0
"""A picture of the loss over the steps of a run, in its output folder."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from ...checkpoint.files import atomic_write


logger = get_logger(__name__)  # logs in one process only

LOSS_CURVE = "loss.png"
"""File in `output_dir`."""

PAUSE = 60.0
"""Seconds between two drawings."""

FEWEST = 3
"""Points of a curve: one or two show nothing."""


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
        curves = loss_curves(state.log_history)
        if all(len(points) < FEWEST for points in curves.values()):
            return
        self._drawn_at = time.monotonic()
        picture = Path(args.output_dir) / LOSS_CURVE
        try:
            with atomic_write(picture) as partial:
                draw_losses(curves, partial, best=state.best_global_step)
        except OSError as error:  # the model that is saved next matters more
            logger.warning(f"{picture} was not drawn: {error}")


def loss_curves(log_history: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Returns pairs of step and loss, for `"loss"` and for every held-out loss in the log."""
    losses_by_step: dict[str, dict[int, float]] = {}
    for log_entry in log_history:
        for key, logged_value in log_entry.items():
            is_held_out = key.startswith("eval_") and key.endswith("loss")
            if key == "loss" or is_held_out:
                losses_by_step.setdefault(key, {})[log_entry["step"]] = logged_value
    return {key: sorted(losses.items()) for key, losses in losses_by_step.items()}


def draw_losses(
    curves: dict[str, list[tuple[int, float]]], file: Path, best: int | None = None
) -> None:
    """Draws curves of [`loss_curves`] as a PNG. A vertical line marks the best step."""
    from matplotlib.figure import Figure  # late: it takes half a second
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for loss_name, points in curves.items():
        steps, losses = zip(*points, strict=True)
        if loss_name == "loss":
            marker = "." if len(points) < 50 else ""
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
