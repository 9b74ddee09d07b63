# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Running mean and standard deviation, in constant memory."""

import math

import torch
from torch import Tensor

from ..report import Moments


def widest(device: torch.device) -> torch.dtype:
    """The widest float that `device` has: float64, except on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


class RunningMoments:
    """Running moments of values by group (Chan, Golub and LeVeque's update), in the widest float.

    Nothing is copied from a GPU until `results`, so that it does not have to be waited for.

    Of each group, `quantities` values have moments of their own.
    """

    def __init__(self, groups: int = 1, quantities: int = 1):
        self._shape = (groups, quantities)
        self._state: tuple[Tensor, Tensor, Tensor] | None = None  # count, mean, sum of squared distances from the mean

    def add(self, values: Tensor, masks: Tensor | None = None) -> Tensor:
        """Adds values, and returns the means of these alone, `(groups, quantities)`, NaN without values.

        Args:
            values: `(n,)`, or `(quantities, n)`.
            masks: Which values belong to each group: boolean, `(n,)`, `(groups, n)` or `(groups, quantities, n)`;
                default all. Values outside every group may be NaN.
        """
        groups, quantities = self._shape
        values = values.detach().to(widest(values.device)).reshape(1, quantities, -1)
        if masks is None:
            masks = torch.ones(values.shape[-1], dtype=torch.bool, device=values.device)
        masks = masks.to(values.device)
        if masks.dim() < 3:
            masks = masks.reshape(1 if masks.dim() == 1 else len(masks), 1, masks.shape[-1])
        values = torch.where(masks, values, 0.0).expand(groups, quantities, -1)
        count = masks.sum(-1).to(values.dtype).expand(groups, quantities)
        mean = values.sum(-1) / count.clamp(min=1)
        squares = (torch.where(masks, values - mean.unsqueeze(-1), 0.0)).square().sum(-1)
        means = torch.where(count > 0, mean, math.nan)
        if self._state is None:
            self._state = (count, mean, squares)
            return means
        old_count, old_mean, old_squares = (each.to(values.device) for each in self._state)
        total = (old_count + count).clamp(min=1)
        distance = mean - old_mean
        self._state = (
            old_count + count,
            old_mean + distance * count / total,
            old_squares + squares + distance.square() * old_count * count / total,
        )
        return means

    def results(self) -> list[list[Moments | None]]:
        """Moments by group and quantity; None without values."""
        groups, quantities = self._shape
        if self._state is None:
            return [[None] * quantities for _ in range(groups)]
        count, mean, squares = (each.cpu().double() for each in self._state)
        std = (squares / count.clamp(min=1)).sqrt()
        return [
            [
                Moments(mean[g, q].item(), std[g, q].item(), int(count[g, q])) if count[g, q] > 0 else None
                for q in range(quantities)
            ]
            for g in range(groups)
        ]

    def result(self) -> Moments | None:
        """Moments of the first group's first quantity."""
        return self.results()[0][0]
