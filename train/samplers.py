# SPDX-License-Identifier: Apache-2.0
"""The order of training rows: groups of like length, and passes of nearly equal tokens."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from math import ceil

import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import Sampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from .settings import RunConfig


def train_sampler(args: RunConfig, rows: Dataset) -> Sampler | None:
    """The order of rows with `group_by_length` or `packing`; else None: the Trainer's own."""
    grouped = args.train_sampling_strategy == "group_by_length"
    if not (grouped or args.packing) or "length" not in (rows.column_names or []):
        return None
    lengths = rows.with_format(None)["length"][:]  # without building rows, as the Trainer would
    seed = args.seed if args.data_seed is None else args.data_seed
    sampler: Sampler
    if grouped:
        sampler = SeededLengthGroups(lengths, rows_in_step(args), seed)
    elif args.train_sampling_strategy == "sequential":
        sampler = SequentialSampler(rows)
    else:  # the order that accelerate gives a run without packing
        sampler = SeedableRandomSampler(rows, data_seed=seed)
    if args.packing:
        sampler = BalancedSampler(sampler, lengths, args)
    return sampler


def rows_in_step(args: RunConfig) -> int:
    """Rows of an optimizer step, over all processes."""
    passes = args.gradient_accumulation_steps * args.world_size
    return args.global_batch_size or args.train_batch_size * passes


def passes_in_step(args: RunConfig, rows: Dataset) -> int:
    """The fewest forward passes of a process, in every step of a packed run, that hold its rows.

    A pass holds `max_length` tokens for each of the `per_device_train_batch_size` rows that it has
    without packing, and thus never more than a batch of padded rows might. Raises ValueError if a
    row is longer than that.
    """
    sampler = train_sampler(args, rows)
    assert isinstance(sampler, BalancedSampler) and args.max_length is not None
    most = args.max_length * args.train_batch_size
    longest = max(sampler.lengths)
    if longest > most:
        raise ValueError(
            f"A row has {longest:,} tokens, and a packed pass holds {most:,}, by max_length. Set "
            f"--max_length {longest}, or leave packing out."
        )
    epochs = ceil(args.num_train_epochs)
    if args.max_steps > 0:
        epochs = ceil(args.max_steps / sampler.steps_of_epoch)
    passes = 1
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step in sampler.steps():
            lengths = [sampler.lengths[row] for row in step]
            while _largest_pass(lengths, passes, args.world_size) > most:
                passes += 1
    return passes


def _largest_pass(lengths: Sequence[int], passes: int, processes: int) -> int:
    """Tokens of the largest pass of a step of rows with these lengths."""
    passes_of_all = passes_of_rows(len(lengths), passes, processes)
    tokens_of_passes = []
    for positions in balanced(lengths, passes_of_all, processes):
        tokens_of_passes.append(sum(lengths[position] for position in positions))
    return max(tokens_of_passes)


def passes_of_rows(rows: int, passes: int, processes: int) -> int:
    """Passes of all processes in a step of so many rows: the last one of an epoch may have few."""
    return min(passes, rows // processes) * processes


class SeededLengthGroups(LengthGroupedSampler):
    """The Trainer's sampler, whose order depends on seed and epoch, not on random states."""

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        super().__init__(batch_size, lengths=lengths)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def balanced(lengths: Sequence[int], passes: int, processes: int = 1) -> list[list[int]]:
    """The positions of each pass's rows: the longest first go to the pass with the fewest tokens.

    First comes a pass of every process, then the next of every process, largest first. The order of
    processes alternates, so that the sums of tokens over a process's passes are close too.
    """
    open_passes: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(passes)]
    longest_first = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    for position in longest_first:
        tokens, number, rows = open_passes[0]  # the pass with the fewest tokens
        rows.append(position)
        heapq.heapreplace(open_passes, (tokens + lengths[position], number, rows))
    largest_first = sorted(open_passes, key=lambda entry: (-entry[0], entry[1]))
    dealt = []
    for turn, start in enumerate(range(0, passes, processes)):
        of_processes = [rows for _, _, rows in largest_first[start : start + processes]]
        if turn % 2:
            of_processes.reverse()
        dealt += of_processes
    return dealt


class BalancedSampler(BatchRebalanceSampler):
    """The rows of a process's forward passes, of nearly equal tokens; steps are as without packing.

    It extends transformers' sampler, whose batches the Trainer takes as those of one process. The
    order is that of `sampler`. The last step of an epoch has a multiple of `train_batch_size` rows
    for each process, as in accelerate: the epoch's first rows fill it, or its rest is dropped. A
    step has `gradient_accumulation_steps` passes in each process, or one for each of its rows.
    """

    def __init__(self, sampler: Sampler[int], lengths: list[int], args: RunConfig):
        passes = args.gradient_accumulation_steps
        super().__init__(lengths, rows_in_step(args), args.world_size, passes)
        self.sampler = sampler
        self.rank = args.process_index
        self.drop_last = args.dataloader_drop_last
        together = args.train_batch_size * args.world_size
        self.rows_of_epoch = len(lengths)
        if self.drop_last:
            self.rows_of_epoch -= len(lengths) % together
        elif self.dp_size > 1:
            self.rows_of_epoch += -len(lengths) % together
        self.steps_of_epoch = ceil(self.rows_of_epoch / self.effective_batch_size)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def steps(self) -> Iterator[list[int]]:
        """The rows of each optimizer step, over all processes."""
        order = list(islice(cycle(self.sampler), self.rows_of_epoch))
        for start in range(0, self.rows_of_epoch, self.effective_batch_size):
            yield order[start : start + self.effective_batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.steps():
            passes = passes_of_rows(len(rows), self.grad_accum, self.dp_size)
            lengths = [self.lengths[row] for row in rows]
            dealt = balanced(lengths, passes, self.dp_size)
            for positions in dealt[self.rank :: self.dp_size]:
                yield [rows[position] for position in positions]

    def __len__(self) -> int:
        whole, rest = divmod(self.rows_of_epoch, self.effective_batch_size)
        in_last = passes_of_rows(rest, self.grad_accum, self.dp_size)
        return whole * self.grad_accum + in_last // self.dp_size
