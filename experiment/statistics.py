# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Means, differences and intervals over seeds."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..evaluate.compare import CONFIDENCE, Interval, over_seeds


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Attributes:
        value: The mean.
        error: Half the width of its 95 % t interval; None with one seed.
    """

    value: float
    error: float | None


@dataclass(frozen=True)
class Difference:
    """A difference of means over seeds.

    Attributes:
        value: The mean difference.
        interval: Its 95 % t interval, paired by seed; None with one seed.
        effect: The mean difference over the standard deviation of the differences (Cohen's d of pairs); None with one
            seed, or if all are alike.
    """

    value: float
    interval: Interval | None
    effect: float | None


def mean_of(values: list[float]) -> Mean:
    """The mean of one value for each seed."""
    found = np.array(values, dtype=float)
    error = None
    if len(found) > 1:
        error = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5)
    return Mean(float(found.mean()), error)


def difference_of(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference:
    """Of values by seed, of the same seeds, those minus these."""
    seeds = sorted(ours)
    first, second = (np.array([values[seed] for seed in seeds]) for values in (ours, theirs))
    apart = first - second
    spread = float(apart.std(ddof=1)) if len(seeds) > 1 else 0.0
    mean = float(apart.mean())
    return Difference(mean, over_seeds(first, second), mean / spread if spread else None)
