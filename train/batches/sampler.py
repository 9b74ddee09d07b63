# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Batches of rows of similar length, all with images or all without, as LLaVA trains."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler


BATCHES_SORTED_TOGETHER = 50
"""Rows are sorted by length within so many batches: enough for similar lengths, few enough to mix well."""


class ModalityLengthGroupedSampler(Sampler[int]):
    """Every row once an epoch; each `batch_size` rows, of one optimizer step, have one modality and similar lengths.

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
