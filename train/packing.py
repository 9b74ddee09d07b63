# SPDX-License-Identifier: Apache-2.0
"""Which rows come together, in which order, and without padding."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from math import ceil
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler
from transformers import TrainerCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from .modules.model import evaluating
from .options.arguments import NormAlignConfig


def train_sampler(args: NormAlignConfig, rows: Dataset) -> Sampler | None:
    """The order of rows in memory with `group_by_length` or `packing`; None where the Trainer's own serves."""
    grouped = args.train_sampling_strategy == "group_by_length"
    if not (grouped or args.packing) or "length" not in (rows.column_names or []):
        return None
    lengths = rows.with_format(None)["length"][:]  # without building rows, as the Trainer would
    seed = args.seed if args.data_seed is None else args.data_seed
    sampler: Sampler
    if grouped:
        rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        sampler = SeededLengthGroups(lengths, rows_per_step, seed)
    elif args.train_sampling_strategy == "sequential":
        sampler = SequentialSampler(rows)
    else:  # the order that accelerate gives a run without packing
        sampler = SeedableRandomSampler(rows, data_seed=seed)
    return BalancedSampler(sampler, lengths, args) if args.packing else sampler


class SeededLengthGroups(LengthGroupedSampler):
    """The Trainer's sampler, in an order that depends on seed and epoch alone.

    The Trainer's own depends on the random state of its process, which dropout moves on and a resumed run lacks.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def balanced(lengths: Sequence[int], passes: int, processes: int = 1) -> list[list[int]]:
    """The positions of the rows of each pass: rows go, longest first, to the pass with the fewest tokens so far.

    First comes a pass of every process, then the next of every process, largest first. The order of processes
    alternates, so that the sums of tokens over a process's passes are close too.
    """
    open_passes: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(passes)]
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        tokens, number, rows = open_passes[0]
        rows.append(position)
        heapq.heapreplace(open_passes, (tokens + lengths[position], number, rows))
    largest_first = [rows for _, _, rows in sorted(open_passes, key=lambda one: (-one[0], one[1]))]
    dealt = []
    for start in range(0, passes, processes):
        dealt += largest_first[start : start + processes][:: -1 if start // processes % 2 else 1]
    return dealt


class BalancedSampler(BatchRebalanceSampler):
    """The rows of each forward pass of one process, of nearly equal tokens; a step has those without packing.

    It extends transformers' sampler, whose batches the Trainer takes as they are, for one process. That one has an
    order of its own, and balances padded lengths. The order here is that of `sampler`, the same on every process.

    The last step of an epoch has a multiple of `train_batch_size` rows for each process, as accelerate has it: rows
    from the start of the epoch fill it, or `dataloader_drop_last` drops its rest.
    """

    def __init__(self, sampler: Sampler[int], lengths: list[int], args: NormAlignConfig):
        self.sampler, self.together = sampler, args.train_batch_size * args.world_size
        rows_per_step = self.together * args.gradient_accumulation_steps
        super().__init__(lengths, rows_per_step, args.world_size, args.gradient_accumulation_steps)
        self.rank, self.drop_last, self.rows_of_epoch = args.process_index, args.dataloader_drop_last, len(lengths)
        if self.drop_last:
            self.rows_of_epoch -= len(lengths) % self.together
        elif self.dp_size > 1:
            self.rows_of_epoch += -len(lengths) % self.together

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(islice(cycle(self.sampler), self.rows_of_epoch))
        for start in range(0, self.rows_of_epoch, self.effective_batch_size):
            rows = order[start : start + self.effective_batch_size]
            passes = ceil(len(rows) / self.together) * self.dp_size
            dealt = balanced([self.lengths[row] for row in rows], passes, self.dp_size)
            for positions in dealt[self.rank :: self.dp_size]:
                yield [rows[position] for position in positions]

    def __len__(self) -> int:
        return ceil(self.rows_of_epoch / self.together)


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A padded batch of B rows as one sequence of their N tokens, kept apart by their position ids.

    transformers builds the mask of such a sequence, for every implementation of attention, from position ids that
    start again, if no attention mask is given and the cache is off. `input_ids`, `labels` and `position_ids` are
    `(1, N)`. The first label of each row is masked: the token before it belongs to another row.
    """
    real = batch.pop("attention_mask").bool()
    batch["labels"][torch.arange(len(real)), real.int().argmax(1)] = -100
    sequence = {name: batch.pop(name)[real][None] for name in ("input_ids", "labels")}
    positions = (real.long().cumsum(1) - 1)[real][None]
    return {**sequence, "position_ids": positions, **batch}


class PackedAttentionCheck(TrainerCallback):
    """Checks before the first step that a language model keeps the rows of one sequence apart.

    Layers with recurrence do not, nor do positions that ignore `position_ids`.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Compares a short row alone with the same row behind two others."""
        rows = torch.tensor([[5, 6, 7, 8, 9, 10], [6, 7, 8, 9, 10, 11], [9, 5, 11, 7, 12, 8]], device=args.device)
        length = rows.shape[1]
        positions = torch.arange(length, device=args.device)

        def states(*chosen: Tensor) -> Tensor:
            batch = {"input_ids": torch.cat(chosen)[None], "position_ids": positions.repeat(len(chosen))[None]}
            return model(**batch, use_cache=False).logits[0, -length:].float()

        with evaluating(model, args):
            alone, behind, behind_another = states(rows[2]), states(rows[0], rows[2]), states(rows[1], rows[2])
        # Rounding depends on the shapes of products, and these, in a mixture of experts, on the other rows.
        by_place, by_others = ((behind - other).norm() / alone.norm() for other in (alone, behind_another))
        half = args.bf16 or args.fp16
        if by_place > (0.05 if half else 1e-3) or by_others > (0.01 if half else 1e-5):
            kind = model.config.get_text_config().model_type
            raise ValueError(f"padding_free cannot be used with a {kind}, which mixes rows. Leave it out.")
