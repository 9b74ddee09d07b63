# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How long a run still takes, by what its steps usually take and by the pace of training so far."""

import time

from tqdm import tqdm
from transformers import TrainerCallback


SECONDS = {
    "fetch": (4, 4),
    "convert": (20, 20),
    "build": (2, 2),
    "evaluate before": (10, 16),
    "stage 1": (30, 50),
    "stage 2": (305, 535),
    "merge": (2, 2),
    "evaluate after": (25, 40),
    "reload": (15, 20),
    "baseline, stage 1": (30, 50),
    "baseline, stage 2": (305, 535),
    "evaluate baseline": (25, 40),
    "diagnose": (15, 25),
}
"""Of each step in order: rough seconds on two cores with fast bfloat16, and on two without."""


class TimeLeft:
    """The time that is left, as a sentence by `str`.

    Args:
        seconds: Usual seconds of each step that is to be taken.
    """

    def __init__(self, seconds: dict[str, float]):
        self._usual, self._left = seconds, dict(seconds)
        self._measured = self._expected = 0.0

    def advance(self, step: str, share: float, seconds: float | None = None) -> None:
        """Counts a share of a step as done.

        Args:
            step: Its name.
            share: Share of the whole step, 0 to 1.
            seconds: How long that share took, by which the pace of the run is corrected; None leaves the pace.
        """
        usual = share * self._usual[step]
        self._left[step] = max(self._left[step] - usual, 0.0)
        if seconds is not None:
            self._measured += seconds
            self._expected += usual

    def finish(self, step: str) -> None:
        """Counts a whole step as done."""
        self._left[step] = 0.0

    def seconds(self) -> float:
        """Seconds that are left."""
        pace = self._measured / self._expected if self._expected else 1.0
        return pace * sum(self._left.values())

    def __str__(self) -> str:
        minutes = round(self.seconds() / 60)
        return f"about {minutes} minutes left in all" if minutes > 1 else "about a minute left in all"


class TrainingPace(TrainerCallback):
    """Corrects the time left by the pace of a training stage, and prints it each minute.

    Args:
        time_left: What is corrected.
        step: Name of the stage in it.
    """

    def __init__(self, time_left: TimeLeft, step: str):
        self.time_left, self.step = time_left, step
        self._then = self._printed = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        """Starts the clock at the first step; those before a resumed one count as done."""
        if not self._then:
            self.time_left.advance(self.step, state.global_step / state.max_steps)
            self._then = self._printed = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Counts the step."""
        now = time.perf_counter()
        self.time_left.advance(self.step, 1 / state.max_steps, now - self._then)
        self._then = now
        if now - self._printed >= 60:
            tqdm.write(f"The quickstart: {self.time_left}.")  # above the trainer's bar
            self._printed = now
