# SPDX-License-Identifier: Apache-2.0
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

    Nothing is copied from a GPU until they are asked for, so that it does not have to be waited for.
    """

    def __init__(self):
        self._state: tuple[Tensor, Tensor, Tensor] | None = None  # count, mean, sum of squared distances from the mean

    def add(self, values: Tensor, masks: Tensor | None = None) -> Tensor:
        """Adds values `(..., n)`, and returns the means of these alone by group, NaN without values.

        Args:
            values: Numbers of shape `(n,)`, or one that broadcasts with that of the masks.
            masks: Masks of the groups, boolean, `(groups, ..., n)`; by default all values are one
                group. Values outside every group may be NaN.
        """
        values = values.detach().to(widest(values.device))
        masks = torch.ones_like(values) > 0 if masks is None else masks.to(values.device)
        count = masks.sum(-1).to(values.dtype)
        mean = torch.where(masks, values, 0.0).sum(-1) / count.clamp(min=1)
        squares = torch.where(masks, values - mean.unsqueeze(-1), 0.0).square().sum(-1)
        means = torch.where(count > 0, mean, math.nan)
        if self._state is not None:
            old_count, old_mean, old_squares = (part.to(values.device) for part in self._state)
            total = (old_count + count).clamp(min=1)
            distance = mean - old_mean
            squares = old_squares + squares + distance.square() * old_count * count / total
            mean, count = old_mean + distance * count / total, old_count + count
        self._state = count, mean, squares
        return means

    def results(self) -> Tensor:
        """Mean, standard deviation and count by group, `(3, groups, ...)`; the former are NaN without values."""
        assert self._state is not None
        count, mean, squares = (part.cpu().double() for part in self._state)
        moments = torch.stack([mean, (squares / count.clamp(min=1)).sqrt()])
        return torch.cat([torch.where(count > 0, moments, math.nan), count[None]])

    def result(self) -> Moments | None:
        """Moments of the only group; None without values."""
        mean, std, count = (0.0, 0.0, 0) if self._state is None else self.results().tolist()
        return Moments(mean, std, int(count)) if count else None
