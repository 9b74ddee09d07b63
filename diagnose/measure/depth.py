# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and updates of tokens in depth, measured as a decoder runs (figures 1b to 4)."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..report import KINDS, Curve, Depth, Moments


QUANTITIES = ("norm", "rotation", "update_norm", "update_angle", "log_norm", "log_update")
"""What is measured of each layer's input and output, in the order of [`quantities`]."""


def widest(device: torch.device) -> torch.dtype:
    """The widest float that `device` has: float64, except on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


class RunningMoments:
    """Running moments of values by group (Chan, Golub and LeVeque's update), in the widest float.

    Nothing is copied from a GPU, which would have to be waited for, until they are asked for.
    """

    def __init__(self):
        self._state: tuple[Tensor, Tensor, Tensor] | None = None  # count, mean, squared deviations

    def add(self, values: Tensor, masks: Tensor | None = None) -> Tensor:
        """Adds values `(..., n)`, and returns the means of these alone by group, NaN without any.

        Groups have boolean masks `(groups, ..., n)`, outside which values may be NaN.
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
        """Mean, standard deviation (NaN without values) and count by group, `(3, groups, ...)`."""
        assert self._state is not None
        count, mean, squares = (part.cpu().double() for part in self._state)
        moments = torch.stack([mean, (squares / count.clamp(min=1)).sqrt()])
        return torch.cat([torch.where(count > 0, moments, math.nan), count[None]])

    def result(self) -> Moments | None:
        """Moments of the only group; None without values."""
        mean, std, count = (0.0, 0.0, 0) if self._state is None else self.results().tolist()
        return Moments(mean, std, int(count)) if count else None


def quantities(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """`QUANTITIES` of a layer's input and output `(n, d)`, and where they exist, both `(6, n)`."""
    update = after - before
    norm, size = before.norm(dim=-1), update.norm(dim=-1)
    along = torch.linalg.vecdot(update, before) / norm
    across = (size.square() - along.square()).clamp(min=0).sqrt()
    rotation = torch.atan2(across, norm + along)  # eq. 8, also of an update longer than the state
    angle = torch.atan2(across, along)
    always, exists, moves = torch.ones_like(norm) > 0, norm > 0, size > 0
    turns = exists & (torch.hypot(across, norm + along) > 0)
    values = torch.stack([norm, rotation, size, angle, norm.log(), size.log()])
    return values, torch.stack([always, turns, always, exists & moves, exists, moves])


class DepthProbe:
    """Hooks on layers, and the norm after them, that keep running moments and a single state."""

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module | None = None):
        self._layers, self._final_norm = layers, final_norm
        self._steps, self._cosines = ([RunningMoments() for _ in layers] for _ in range(2))
        self._last, self._final = RunningMoments(), RunningMoments()
        self._ratios = RunningMoments()  # of visual to text rotation, one for each pass
        # Of the current pass: masks of the kinds, the last state and its norms, mean rotations.
        self._masks: Tensor | None = None
        self._state: tuple[Tensor, Tensor] | None = None
        self._rotations: list[Tensor] = []

    @contextmanager
    def watching(self, masks: Callable[[], Tensor]) -> Iterator[None]:
        """Measures every forward pass within.

        `masks` returns those of the kinds, `(kinds, batch * tokens)`, once the decoder runs: where
        newlines are is not known earlier.
        """

        def begin(layer: nn.Module, args: tuple) -> None:
            self._masks, self._state, self._rotations = masks(), None, []

        with ExitStack() as hooks:
            hooks.enter_context(self._layers[0].register_forward_pre_hook(begin))
            for number, layer in enumerate(self._layers):
                hook = partial(self._after_layer, number)
                hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
            if self._final_norm is not None:
                hooks.enter_context(self._final_norm.register_forward_hook(self._after_final_norm))
            yield

    def result(self) -> Depth:
        """Curves of all quantities, and the asymmetry; an error for states that have none."""
        steps = torch.stack([moments.results() for moments in self._steps])
        measured = dict(zip(QUANTITIES, steps.unbind(-1), strict=True))
        for name, last in zip(("norm", "log_norm"), self._last.results().unbind(-1), strict=True):
            measured[name] = torch.cat([measured[name], last[None]])
        measured["cosine"] = torch.stack([moments.results() for moments in self._cosines])
        curves: dict[str, dict[str, Curve]] = {name: {} for name in measured}
        for place, kind in enumerate(KINDS):
            of_kind = {name: moments[..., place].T for name, moments in measured.items()}
            if not of_kind["norm"][2, 0]:
                continue
            for state in (~of_kind["norm"].isfinite().all(0)).nonzero():
                raise ValueError(
                    f"The {kind} tokens are NaN or infinite in state {state.item()}. "
                    "Load the model in bfloat16 or float32, and check its weights."
                )
            zero = (of_kind["log_norm"][2] == 0).nonzero()
            if len(zero) and kind in ("visual", "text"):
                raise ValueError(
                    f"All {kind} tokens are zero in state {zero[0].item()}, without a direction. "
                    "Check that the projector's weights were trained and loaded."
                )
            if not len(zero):  # a padding token's row may be all zero
                for name, (mean, std, _) in of_kind.items():
                    curves[name][kind] = Curve(mean.tolist(), std.tolist())
        # Without the last layer, which prepares the prediction rather than the next layer's input.
        rotated = {kind: sum(curve.mean[:-1]) for kind, curve in curves["rotation"].items()}
        visual, text = rotated.get("visual"), rotated.get("text")
        ratios = self._ratios.result()
        error = ratios.std / math.sqrt(ratios.count - 1) if ratios and ratios.count > 1 else None
        return Depth(
            final_norm={} if self._final_norm is None else _by_kind(self._final.results()),
            asymmetry=visual / text if visual is not None and text else None,
            asymmetry_error=error,
            **curves,
        )

    def norm_received(self) -> dict[str, Moments]:
        """Norms of the first layer's input by kind."""
        return _by_kind(self._steps[0].results()[..., QUANTITIES.index("norm")])

    def _after_layer(self, number: int, layer: Any, args: tuple, kwargs: dict, output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        before, after = (_rows(states, after.device) for states in (before, after))
        assert self._masks is not None
        masks = self._masks.to(after.device)
        values, defined = quantities(before, after)
        means = self._steps[number].add(values, masks.unsqueeze(1) & defined)
        self._rotations.append(means[:, QUANTITIES.index("rotation")])
        self._add_cosine(number - 1, masks, before, values[QUANTITIES.index("norm")])
        if number == len(self._layers) - 1:
            norm = after.norm(dim=-1)
            self._add_cosine(number, masks, after, norm)
            defined = torch.stack([torch.ones_like(norm) > 0, norm > 0])
            self._last.add(torch.stack([norm, norm.log()]), masks.unsqueeze(1) & defined)
            if number:  # the asymmetry leaves the last layer out
                earlier = [rotation.to(after.device) for rotation in self._rotations[:-1]]
                rotated = torch.stack(earlier).sum(0)
                ratio = rotated[KINDS.index("visual")] / rotated[KINDS.index("text")]
                self._ratios.add(ratio.view(1), ratio.isfinite().view(1))

    def _add_cosine(self, number: int, masks: Tensor, state: Tensor, norm: Tensor) -> None:
        """Adds the cosine of layer `number`: of its input, which was kept, and the next layer's."""
        if self._state is not None:
            old, old_norm = (tensor.to(state.device) for tensor in self._state)
            cosine = torch.linalg.vecdot(old, state) / (old_norm * norm)
            self._cosines[number].add(cosine, masks & (old_norm > 0) & (norm > 0))
        self._state = state, norm

    def _after_final_norm(self, norm: nn.Module, args: tuple, output: Tensor) -> None:
        if self._masks is not None:  # NanoChat applies it before the first layer too
            self._final.add(_rows(output, output.device).norm(dim=-1), self._masks)
            self._masks = None


def _rows(states: Tensor, device: torch.device) -> Tensor:
    return states.detach().reshape(-1, states.shape[-1]).to(device, widest(device))


def _by_kind(moments: Tensor) -> dict[str, Moments]:
    """Moments `(3, kinds)` by kind, of the kinds that occur."""
    by_kind = zip(KINDS, moments.T.tolist(), strict=True)
    return {kind: Moments(mean, std, int(count)) for kind, (mean, std, count) in by_kind if count}
