# SPDX-License-Identifier: Apache-2.0
"""Which rows come together, in which order, and without padding."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from math import ceil
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler
from transformers import TrainerCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler

from .modules.model import evaluating
from .options.arguments import NormAlignConfig


BATCHES_SORTED_TOGETHER = 50
"""Rows are sorted by length within so many batches: enough for similar lengths, few enough to mix well."""


def train_sampler(args: NormAlignConfig, rows: Dataset) -> Sampler | None:
    """The order of rows in memory with `group_by_length` or `packing`; None where the Trainer's own serves."""
    grouped = args.train_sampling_strategy == "group_by_length"
    if not (grouped or args.packing) or "length" not in (rows.column_names or []):
        return None
    columns = rows.with_format(None)  # reads the columns alone, without building rows
    lengths, seed = columns["length"][:], args.seed if args.data_seed is None else args.data_seed
    together = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    rows_per_step = args.global_batch_size or together
    sampler: Sampler
    if grouped:  # the Trainer's own sampler knows no modalities
        has_image = [count > 0 for count in columns["image_count"]]
        sampler = ModalityLengthGroupedSampler(lengths, has_image, batch_size=rows_per_step, seed=seed)
    elif args.train_sampling_strategy == "sequential":
        sampler = SequentialSampler(rows)
    else:  # the order that accelerate gives a run without packing
        sampler = SeedableRandomSampler(rows, data_seed=seed)
    if not args.packing:
        return sampler
    return BalancedSampler(
        sampler,
        lengths,
        rows_per_step=rows_per_step,
        rows_per_pass=args.train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        processes=args.world_size,
        rank=args.process_index,
        drop_last=args.dataloader_drop_last,
    )


class ModalityLengthGroupedSampler(Sampler[int]):
    """Every row once an epoch; the rows of a step have similar lengths, and all images or none, as LLaVA trains.

    Rows that do not fill a batch of their modality come last, in a mixed batch that a smaller one may follow. The
    order depends on seed and epoch alone; accelerate calls `set_epoch`, also if a run is resumed within an epoch.
    """

    def __init__(self, lengths: Sequence[int], has_image: Sequence[bool], batch_size: int, seed: int):
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.has_image = np.asarray(has_image, dtype=bool)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which decides the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng([self.seed, self.epoch])
        batches: list[np.ndarray] = []
        rest = np.empty(0, dtype=np.int64)
        for modality in (True, False):
            rows = random.permutation(np.flatnonzero(self.has_image == modality))
            whole = len(rows) // self.batch_size * self.batch_size
            together = self.batch_size * BATCHES_SORTED_TOGETHER
            for start in range(0, whole, together):
                block = rows[start : min(start + together, whole)]
                block = block[np.argsort(-self.lengths[block], kind="stable")]
                batches += np.split(block, len(block) // self.batch_size)
            rest = np.concatenate([rest, rows[whole:]])
        order = [batches[number] for number in random.permutation(len(batches))]
        yield from np.concatenate([*order, rest]).tolist()


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
    largest_first = [rows for _, _, rows in sorted(open_passes, key=lambda one: (-one[0], one[1]))]
    dealt = []
    for start in range(0, passes, processes):
        dealt += largest_first[start : start + processes][:: -1 if start // processes % 2 else 1]
    return dealt


class BalancedSampler(BatchRebalanceSampler):
    """The rows of each forward pass of one process, of nearly equal tokens; a step has those without packing.

    It extends transformers' sampler, whose batches the Trainer takes as they are, for one process. That one has an
    order of its own, and balances padded lengths.

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
            lengths = [self.lengths[row] for row in rows]
            passes = balanced(lengths, self._passes(len(rows)), self.dp_size)
            for positions in passes[self.rank :: self.dp_size]:
                yield [rows[position] for position in positions]

    def __len__(self) -> int:
        whole, rest = divmod(self._rows_of_epoch(), self.effective_batch_size)
        return whole * self.grad_accum + self._passes(rest) // self.dp_size

    def steps(self) -> Iterator[list[int]]:
        """The rows of each optimizer step, over all processes, in the epoch that was set."""
        count = self._rows_of_epoch()
        order = list(islice(cycle(list(self.sampler)), count))
        for start in range(0, count, self.effective_batch_size):
            yield order[start : start + self.effective_batch_size]

    def _rows_of_epoch(self) -> int:
        together, count = self.rows_per_pass * self.dp_size, len(self.lengths)
        if self.drop_last:
            return count // together * together
        return count if self.dp_size == 1 else ceil(count / together) * together

    def _passes(self, rows: int) -> int:
        """Forward passes of all processes in a step of so many rows."""
        return min(self.grad_accum, ceil(rows / (self.rows_per_pass * self.dp_size))) * self.dp_size


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A padded batch of B rows as one sequence of their N tokens, kept apart by their position ids.

    transformers builds the mask of such a sequence, for every implementation of attention, from position ids that
    start again, if no attention mask is given and the cache is off.

    Args:
        batch: `input_ids`, `attention_mask` and `labels` `(B, T)`; `pixel_values`, which stay as they are.

    Returns:
        `input_ids`, `labels` and `position_ids` `(1, N)`; the rest. The first label of each row is masked: the token
        before it belongs to another row.
    """
    real = batch.pop("attention_mask").bool()
    batch["labels"][torch.arange(len(real)), real.int().argmax(1)] = -100
    sequence = {name: batch.pop(name)[real][None] for name in ("input_ids", "labels")}
    positions = (real.long().cumsum(1) - 1)[real][None]
    return {**sequence, "position_ids": positions, **batch}


class PackedAttentionCheck(TrainerCallback):
    """Checks before the first step that a language model keeps the rows of one sequence apart."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Compares a short row alone with the same row behind two others.

        Raises:
            ValueError: They differ, as they do with recurrent layers or with positions that ignore `position_ids`.
        """
        rows = torch.tensor([[5, 6, 7, 8, 9, 10], [6, 7, 8, 9, 10, 11], [9, 5, 11, 7, 12, 8]], device=args.device)
        length = rows.shape[1]
        positions = torch.arange(length, device=args.device)

        def states(*chosen: Tensor) -> Tensor:
            batch = {"input_ids": torch.cat(chosen)[None], "position_ids": positions.repeat(len(chosen))[None]}
            return model(**batch, use_cache=False).logits[0, -length:].float()

        with evaluating(model, args), torch.no_grad():
            alone, behind, behind_another = states(rows[2]), states(rows[0], rows[2]), states(rows[1], rows[2])
        # Rounding depends on the shapes of products, and these, in a mixture of experts, on the other rows.
        by_place, by_others = ((behind - other).norm() / alone.norm() for other in (alone, behind_another))
        half = args.bf16 or args.fp16
        if by_place > (0.05 if half else 1e-3) or by_others > (0.01 if half else 1e-5):
            kind = model.config.get_text_config().model_type
            raise ValueError(
                f"padding_free cannot be used with this language model ({kind}): it does not keep the rows of one "
                "sequence apart. Leave it out."
            )
