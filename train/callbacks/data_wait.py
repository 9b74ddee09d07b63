# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How long training waits for its data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import TrainerCallback

from .progress import print_at_step


class DataWait(TrainerCallback):
    """Measures the time for which steps wait for their batches, and says once that it was longer than a step."""

    def __init__(self):
        self._wait = self._waited = self._worked = 0.0
        self._steps = 0
        self._told = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time in which the batches of a step are fetched."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """`time/data_share`: the share of the time since the last call in which steps waited for their batches."""
        waited, total = self._waited, self._waited + self._worked
        self._waited = self._worked = 0.0
        return {"time/data_share": waited / total} if total else {}

    def on_step_begin(self, args, state, control, **kwargs):
        """Starts the clock of a step that has its batches."""
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Compares it with the wait; at the first step, workers have only just started."""
        worked, waited = time.perf_counter() - self._began, self._wait
        self._waited, self._worked, self._wait = self._waited + waited, self._worked + worked, 0.0
        self._steps += 1
        if self._steps > 1 and waited > worked and not self._told:
            self._told = True
            print_at_step(
                state,
                f"waited {waited:.2g} s for its data and took {worked:.2g} s. More processes read faster: "
                f"--dataloader_num_workers, now {args.dataloader_num_workers}.",
            )
