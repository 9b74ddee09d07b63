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
    """Draws `loss.png` at saves and at the end, of all steps, those before a resumption too.

    A curve of fewer than `FEWEST` points is not drawn.
    """

    def __init__(self):
        self._drawn = time.monotonic()

    def on_save(self, args, state, control, **kwargs):
        if time.monotonic() - self._drawn > PAUSE:
            self._draw(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._draw(args, state)

    def _draw(self, args, state) -> None:
        curves = loss_curves(state.log_history)
        longest = max((len(points) for points in curves.values()), default=0)
        if not state.is_world_process_zero or longest < FEWEST:
            return
        self._drawn = time.monotonic()
        file = Path(args.output_dir) / LOSS_CURVE
        try:
            with atomic_write(file) as written:
                draw_losses(curves, written, best=state.best_global_step)
        except OSError as error:  # the model that is saved next matters more
            logger.warning(f"{file} was not drawn: {error}")


def loss_curves(log_history: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Pairs of step and loss, for `"loss"` and for every held-out loss in the log, by step."""
    curves: dict[str, dict[int, float]] = {}
    for entry in log_history:
        for key, value in entry.items():
            if key == "loss" or (key.startswith("eval_") and key.endswith("loss")):
                curves.setdefault(key, {})[entry["step"]] = value
    return {key: sorted(values.items()) for key, values in curves.items()}


def draw_losses(
    curves: dict[str, list[tuple[int, float]]], file: Path, best: int | None = None
) -> None:
    """Draws curves of [`loss_curves`] as a PNG; a vertical line marks the best step."""
    from matplotlib.figure import Figure  # late: it takes half a second
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, points in curves.items():
        steps = [step for step, _ in points]
        losses = [loss for _, loss in points]
        marker = "." if len(points) < 50 else ""
        if key == "loss":
            axes.plot(steps, losses, marker=marker, linewidth=1, color="0.55", label="training")
        else:
            name = key.removeprefix("eval_").removesuffix("loss").rstrip("_")
            label = f"held out: {name}" if name else "held out"
            axes.plot(steps, losses, marker="o", linewidth=1.8, label=label)
    if best:
        axes.axvline(best, color="0.8", linestyle="--", linewidth=1, zorder=0, label="best step")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, format="png", dpi=150)
