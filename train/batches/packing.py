# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Divides the rows of each optimizer step into forward passes of nearly equal numbers of tokens.

Which rows make a step, and in which order the steps come, stays as it is.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from math import ceil
from typing import Any

from datasets import IterableDataset
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler


PACKED = "packed"
"""Column of a packed stream: the rows of one forward pass."""


def balanced(lengths: Sequence[int], passes: int, processes: int = 1) -> list[list[int]]:
    """Gives each row, longest first, to the forward pass that has the fewest tokens so far.

    Args:
        lengths: Tokens of each row.
        passes: Forward passes of all processes together, at most as many as rows.
        processes: Number of processes; divides `passes`.

    Returns:
        The positions of the rows of each pass: first a pass of every process, then the next of every process, largest
        first. The order of processes alternates, so that the sums of tokens over a process's passes are close too.
    """
    open_passes: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(passes)]
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        tokens, number, rows = open_passes[0]
        rows.append(position)
        heapq.heapreplace(open_passes, (tokens + lengths[position], number, rows))
    largest_first = [rows for _, _, rows in sorted(open_passes, key=lambda found: (-found[0], found[1]))]
    dealt = []
    for start in range(0, passes, processes):
        dealt += largest_first[start : start + processes][:: -1 if start // processes % 2 else 1]
    return dealt


class BalancedSampler(BatchRebalanceSampler):
    """The rows of each forward pass of one process; the rows of a step are those without packing.

    It extends transformers' sampler because the Trainer takes the batches of that one as they are, for one process.
    That one has an order of its own, and balances padded lengths.

    Args:
        sampler: Gives the rows in order, the same on every process.
        lengths: Tokens of each row.
        rows_per_step: Rows in an optimizer step, over all processes.
        rows_per_pass: Rows in a forward pass without packing. The last step of an epoch has a multiple of it for each
            process, as accelerate has it: rows from the start of the epoch fill it, or `drop_last` drops its rest.
        accumulation: Forward passes of a process in a step.
        processes, rank: Number of processes, and which this is.
        drop_last: The Trainer's `dataloader_drop_last`.
    """

    def __init__(
        self,
        sampler: Sampler[int],
        lengths: Sequence[int],
        *,
        rows_per_step: int,
        rows_per_pass: int,
        accumulation: int,
        processes: int,
        rank: int,
        drop_last: bool,
    ):
        super().__init__(list(lengths), rows_per_step, processes, accumulation, rank=rank, drop_last=drop_last)
        self.sampler, self.rows_per_pass = sampler, rows_per_pass

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which decides the order."""
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.steps():
            for part in self._divide(rows)[self.rank :: self.dp_size]:
                yield [rows[position] for position in part]

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, the last of which may have fewer rows."""
        return ceil(self._rows_of_epoch() / self.effective_batch_size)

    def __len__(self) -> int:
        whole, rest = divmod(self._rows_of_epoch(), self.effective_batch_size)
        return whole * self.grad_accum + self._passes(rest) // self.dp_size

    def steps(self) -> Iterator[list[int]]:
        """The rows of each optimizer step, over all processes, in the epoch that was set."""
        order, count = list(self.sampler), self._rows_of_epoch()
        order = list(islice(cycle(order), count))
        for start in range(0, count, self.effective_batch_size):
            yield order[start : start + self.effective_batch_size]

    def fit(self, tokens: int, epochs: int) -> int:
        """Sets and returns the least accumulation with which no forward pass has more than `tokens` tokens.

        Raises:
            ValueError: A single row has more.
        """
        check_longest(max(self.lengths), tokens)
        for epoch in range(epochs):
            self.set_epoch(epoch)
            for rows in self.steps():
                while self._largest(rows) > tokens:
                    self.grad_accum += 1
        self.set_epoch(0)
        return self.grad_accum

    def _rows_of_epoch(self) -> int:
        together = self.rows_per_pass * self.dp_size
        count = len(self.lengths)
        if self.drop_last:
            return count // together * together
        return count if self.dp_size == 1 else ceil(count / together) * together

    def _passes(self, rows: int) -> int:
        """Forward passes of all processes in a step of so many rows."""
        return min(self.grad_accum, ceil(rows / (self.rows_per_pass * self.dp_size))) * self.dp_size

    def _largest(self, rows: Sequence[int]) -> int:
        return max(sum(self.lengths[rows[position]] for position in part) for part in self._divide(rows))

    def _divide(self, rows: Sequence[int]) -> list[list[int]]:
        return balanced([self.lengths[row] for row in rows], self._passes(len(rows)), self.dp_size)


def check_longest(longest: int, tokens: int, source: str = "The data") -> None:
    """Raises ValueError if the longest row has more tokens than a forward pass may have."""
    if longest > tokens:
        raise ValueError(
            f"{source}: the longest row has {longest} tokens, more than tokens_per_device {tokens}. Raise it, or "
            "lower max_length."
        )


def packed_stream(rows: IterableDataset, rows_per_pass: int, accumulation: int, processes: int) -> IterableDataset:
    """A stream of forward passes, each a list of rows, from a buffer of the rows of one optimizer step."""
    together = rows_per_pass * processes

    def divide(columns: dict[str, list[Any]]) -> dict[str, list[list[dict[str, Any]]]]:
        step = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        passes = ceil(len(step) / together) * processes  # fewer at the end of the stream
        step = list(islice(cycle(step), max(len(step), passes)))  # each process has a row, if one comes twice
        parts = balanced([row["length"] for row in step], passes, processes)
        return {PACKED: [[step[position] for position in part] for part in parts]}

    return rows.map(divide, batched=True, batch_size=together * accumulation, remove_columns=rows.column_names)
