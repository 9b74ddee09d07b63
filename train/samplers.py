# SPDX-License-Identifier: Apache-2.0
"""The order of training rows: groups of like length, and passes of nearly equal tokens."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from math import ceil

import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import BatchSampler, Sampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from .settings import RunConfig


def train_sampler(args: RunConfig, rows: Dataset) -> Sampler | None:
    """Returns the order of rows with `group_by_length` or `packing`.

    Otherwise it returns None, and the Trainer chooses the order.
    """
    is_grouped = args.train_sampling_strategy == "group_by_length"
    if not (is_grouped or args.packing) or "length" not in (rows.column_names or []):
        return None
    lengths = rows.with_format(None)["length"][:]  # without building rows, as the Trainer would
    seed = args.seed if args.data_seed is None else args.data_seed
    sampler: Sampler
    if is_grouped:
        sampler = SeededLengthGroups(lengths, rows_in_step(args), seed)
    elif args.train_sampling_strategy == "sequential":
        sampler = SequentialSampler(rows)
    else:  # the order that accelerate gives a run without packing
        sampler = SeedableRandomSampler(rows, data_seed=seed)
    if args.packing:
        sampler = BalancedSampler(sampler, lengths, args)
    return sampler


def rows_in_step(args: RunConfig) -> int:
    """Returns the rows of an optimizer step, over all processes."""
    if args.global_batch_size:
        return args.global_batch_size
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def passes_in_step(args: RunConfig, rows: Dataset) -> int:
    """Returns the fewest forward passes of a process that hold its rows in every packed step.

    A pass holds `max_length` tokens for each of the `per_device_train_batch_size` rows that it has
    without packing. So it never has more tokens than a batch of padded rows might.

    Raises:
        ValueError: A row is longer than a pass.
    """
    sampler = train_sampler(args, rows)
    assert isinstance(sampler, BalancedSampler) and args.max_length is not None
    most_tokens = args.max_length * args.train_batch_size
    longest_row = max(sampler.lengths)
    if longest_row > most_tokens:
        raise ValueError(
            f"A row has {longest_row:,} tokens, and a packed pass holds {most_tokens:,}, by "
            f"max_length. Set --max_length {longest_row}, or leave packing out."
        )
    epochs = ceil(args.num_train_epochs)
    if args.max_steps > 0:
        epochs = ceil(args.max_steps / sampler.steps_of_epoch)
    sampler.grad_accum = 1
    for epoch_number in range(epochs):
        sampler.set_epoch(epoch_number)
        for step_rows in sampler.steps():
            while sampler.most_tokens(step_rows) > most_tokens:
                sampler.grad_accum += 1
    return sampler.grad_accum


class SeededLengthGroups(LengthGroupedSampler):
    """The Trainer's sampler, with an order that depends on seed and epoch, not on random states.

    With only a `generator`, a resumed run would begin with the first epoch's order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        super().__init__(batch_size, lengths=lengths)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


class BalancedSampler(BatchRebalanceSampler):
    """Divides each step's rows into passes of nearly equal tokens. Steps are as without packing.

    transformers' own sampler minimizes padding, and bounds no pass's tokens. Its type has the
    Trainer take the batches of this process as they are. The rows are in the order of `sampler`.
    The last step of an epoch has a multiple of `train_batch_size` rows for each process, as in
    accelerate: the epoch's first rows fill it, or its rest is dropped. A step has
    `gradient_accumulation_steps` passes in each process, or one for each of its rows.
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
        """Yields the rows of each optimizer step, over all processes."""
        row_order = list(islice(cycle(self.sampler), self.rows_of_epoch))
        yield from BatchSampler(row_order, self.effective_batch_size, drop_last=False)

    def passes(self, rows: Sequence[int]) -> list[list[int]]:
        """Returns the rows of each pass of a step, over all processes.

        The longest row goes first, always to the pass with the fewest tokens. The result begins
        with a pass for every process, then comes the next for every process, largest first. The
        order of processes alternates, so that the sums of tokens over a process's passes are close
        too.
        """
        count = min(self.grad_accum, len(rows) // self.dp_size) * self.dp_size
        open_passes: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(count)]
        for row in sorted(rows, key=lambda row: -self.lengths[row]):
            tokens, number, pass_rows = open_passes[0]  # the pass with the fewest tokens
            pass_rows.append(row)
            heapq.heapreplace(open_passes, (tokens + self.lengths[row], number, pass_rows))
        largest_first = sorted(open_passes, key=lambda entry: (-entry[0], entry[1]))
        passes_in_order = []
        for first_pass in range(0, count, self.dp_size):
            following = largest_first[first_pass : first_pass + self.dp_size]
            simultaneous = [pass_rows for _, _, pass_rows in following]
            if first_pass // self.dp_size % 2:
                simultaneous.reverse()
            passes_in_order += simultaneous
        return passes_in_order

    def most_tokens(self, rows: Sequence[int]) -> int:
        """Returns the tokens of the largest pass of a step."""
        return max(sum(self.lengths[row] for row in numbers) for numbers in self.passes(rows))

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.steps():
            yield from self.passes(rows)[self.rank :: self.dp_size]

    def __len__(self) -> int:
        full_steps, last_rows = divmod(self.rows_of_epoch, self.effective_batch_size)
        return full_steps * self.grad_accum + min(self.grad_accum, last_rows // self.dp_size)
