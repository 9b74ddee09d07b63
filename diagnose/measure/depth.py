# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and updates of tokens in depth, measured as a decoder runs (figures 1b to 4)."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..report import KINDS, Curve, Depth, Moments


QUANTITIES = ("norm", "rotation", "update_norm", "update_angle", "log_norm", "log_update")
"""What is measured of each layer's input and output, in the order of [`quantities`]."""

NORM = QUANTITIES.index("norm")
ROTATION = QUANTITIES.index("rotation")


def widest(device: torch.device) -> torch.dtype:
    """Returns the widest float that `device` has: float64, except on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


class RunningMoments:
    """Running moments of values by group (Chan, Golub and LeVeque's update), in the widest float.

    They stay on the device until they are asked for: a copy would have to wait for the GPU.
    """

    def __init__(self):
        self._state: tuple[Tensor, Tensor, Tensor] | None = None  # count, mean, squared deviations

    def add(self, values: Tensor, masks: Tensor | None = None) -> Tensor:
        """Adds values, and returns only their own means by group.

        Args:
            values: Values `(..., n)`. They may be NaN where no group has them.
            masks: Boolean masks `(groups, ..., n)` of the groups; by default, there is one group.

        Returns:
            The means by group, `(groups, ...)`, NaN for a group without values.
        """
        values = values.detach().to(widest(values.device))
        if masks is None:
            masks = torch.ones_like(values, dtype=torch.bool)
        masks = masks.to(values.device)
        count = masks.sum(-1).to(values.dtype)
        mean = torch.where(masks, values, 0.0).sum(-1) / count.clamp(min=1)
        deviations = torch.where(masks, values - mean.unsqueeze(-1), 0.0)
        self._combine(count, mean, deviations.square().sum(-1))
        return torch.where(count > 0, mean, math.nan)

    def _combine(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        """Combines the state with count, mean and squared deviations of new values."""
        if self._state is not None:
            old_count, old_mean, old_squares = (part.to(count.device) for part in self._state)
            total = (old_count + count).clamp(min=1)
            distance = mean - old_mean
            squares = old_squares + squares + distance.square() * old_count * count / total
            mean = old_mean + distance * count / total
            count = old_count + count
        self._state = (count, mean, squares)

    def results(self) -> Tensor:
        """Mean, standard deviation (NaN without values) and count by group, `(3, groups, ...)`."""
        assert self._state is not None
        count, mean, squares = (part.cpu().double() for part in self._state)
        std = (squares / count.clamp(min=1)).sqrt()
        moments = torch.where(count > 0, torch.stack([mean, std]), math.nan)
        return torch.cat([moments, count[None]])

    def result(self) -> Moments | None:
        """Moments of the only group; None without values."""
        if self._state is None:
            return None
        mean, std, count = self.results().tolist()
        return Moments(mean, std, int(count)) if count else None


def quantities(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `QUANTITIES` from the input and output of a layer.

    Args:
        before, after: The layer's input and output, `(n, d)`.

    Returns:
        The quantities, and whether each is defined, both `(6, n)`.
    """
    update = after - before
    norm = before.norm(dim=-1)
    update_norm = update.norm(dim=-1)
    along = torch.linalg.vecdot(update, before) / norm
    across = (update_norm.square() - along.square()).clamp(min=0).sqrt()
    norm_along = norm + along  # the output's component in the direction of the input
    rotation = torch.atan2(across, norm_along)  # eq. 8, also if the update is longer than the state
    update_angle = torch.atan2(across, along)
    values = [norm, rotation, update_norm, update_angle, norm.log(), update_norm.log()]

    always = torch.ones_like(norm, dtype=torch.bool)
    has_state = norm > 0
    has_update = update_norm > 0
    has_rotation = has_state & (torch.hypot(across, norm_along) > 0)
    defined = [always, has_rotation, always, has_state & has_update, has_state, has_update]
    return torch.stack(values), torch.stack(defined)


@dataclass
class _ForwardPass:
    """A forward pass, as far as the decoder has run."""

    masks: Tensor  # of each kind, (kinds, batch * tokens)
    last_state: tuple[Tensor, Tensor] | None = None  # (batch * tokens, d), and its norms
    rotations: list[Tensor] = field(default_factory=list)  # by layer, the mean of each kind


class DepthProbe:
    """Hooks on layers and the final norm. They keep running moments and a single state."""

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module | None = None):
        self._layers = layers
        self._final_norm = final_norm
        self._steps = [RunningMoments() for _ in layers]
        self._cosines = [RunningMoments() for _ in layers]
        self._last_state = RunningMoments()
        self._normalized = RunningMoments()  # the last state, after the final norm
        self._rotation_ratios = RunningMoments()  # visual over text rotation, one for each pass
        self._pass: _ForwardPass | None = None

    @contextmanager
    def watching(self, masks: Callable[[], Tensor]) -> Iterator[None]:
        """Measures every forward pass within.

        `masks` returns a mask for each kind, `(kinds, batch * tokens)`. It is called once the
        decoder runs, since the places of newlines are not known earlier.
        """

        def begin(layer: nn.Module, args: tuple) -> None:
            self._pass = _ForwardPass(masks())

        with ExitStack() as hooks:
            hooks.enter_context(self._layers[0].register_forward_pre_hook(begin))
            for number, layer in enumerate(self._layers):
                hook = partial(self._after_layer, number)
                hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
            if self._final_norm is not None:
                hooks.enter_context(self._final_norm.register_forward_hook(self._after_final_norm))
            yield

    def result(self) -> Depth:
        """Returns the curves of all quantities, and the asymmetry.

        Raises ValueError for states that are NaN or infinite, or zero for all visual or all text
        tokens.
        """
        measured = self._results()
        curves: dict[str, dict[str, Curve]] = {name: {} for name in measured}
        for place, kind in enumerate(KINDS):
            norm = measured["norm"][..., place]
            log_norm = measured["log_norm"][..., place]
            if not _has_directions(kind, norm, log_norm):
                continue
            for name, moments in measured.items():
                mean, std, _ = moments[..., place].T.tolist()
                curves[name][kind] = Curve(mean, std)
        final_norm: dict[str, Moments] = {}
        if self._final_norm is not None:
            final_norm = _by_kind(self._normalized.results())
        ratios = self._rotation_ratios.result()
        asymmetry_error = None
        if ratios is not None and ratios.count > 1:
            asymmetry_error = ratios.std / math.sqrt(ratios.count - 1)
        return Depth(
            final_norm=final_norm,
            asymmetry=_asymmetry(curves["rotation"]),
            asymmetry_error=asymmetry_error,
            **curves,
        )

    def norm_received(self) -> dict[str, Moments]:
        """Norms of the first layer's input by kind."""
        return _by_kind(self._steps[0].results()[..., NORM])

    def _results(self) -> dict[str, Tensor]:
        """Moments of each quantity, `(layers or states, 3, kinds)`."""
        steps = torch.stack([moments.results() for moments in self._steps])
        measured = dict(zip(QUANTITIES, steps.unbind(-1), strict=True))
        last_norm, last_log_norm = self._last_state.results().unbind(-1)
        measured["norm"] = torch.cat([measured["norm"], last_norm[None]])
        measured["log_norm"] = torch.cat([measured["log_norm"], last_log_norm[None]])
        measured["cosine"] = torch.stack([moments.results() for moments in self._cosines])
        return measured

    def _after_layer(self, number: int, layer: Any, args: tuple, kwargs: dict, output: Any) -> None:
        assert self._pass is not None
        layer_input = args[0] if args else kwargs["hidden_states"]
        layer_output = output[0] if isinstance(output, tuple) else output
        before = _rows(layer_input, layer_output.device)
        after = _rows(layer_output, layer_output.device)
        masks = self._pass.masks.to(after.device)
        values, defined = quantities(before, after)
        means = self._steps[number].add(values, masks.unsqueeze(1) & defined)
        self._pass.rotations.append(means[:, ROTATION])
        self._add_cosine(number - 1, masks, before, values[NORM])
        if number == len(self._layers) - 1:
            norm = after.norm(dim=-1)
            self._add_cosine(number, masks, after, norm)
            self._add_last_norm(norm, masks)
            self._add_rotation_ratio(after.device)

    def _add_cosine(self, number: int, masks: Tensor, state: Tensor, norm: Tensor) -> None:
        """Adds the cosine of layer `number`, between its input and `state`, the next layer's.

        `norm` are the norms of `state`. Nothing is added before the first layer.
        """
        assert self._pass is not None
        if self._pass.last_state is not None:
            old_state, old_norm = (tensor.to(state.device) for tensor in self._pass.last_state)
            cosine = torch.linalg.vecdot(old_state, state) / (old_norm * norm)
            self._cosines[number].add(cosine, masks & (old_norm > 0) & (norm > 0))
        self._pass.last_state = (state, norm)

    def _add_last_norm(self, norm: Tensor, masks: Tensor) -> None:
        """Adds the norms of the last layer's output, and their logarithms."""
        is_positive = norm > 0
        defined = torch.stack([torch.ones_like(is_positive), is_positive])
        self._last_state.add(torch.stack([norm, norm.log()]), masks.unsqueeze(1) & defined)

    def _add_rotation_ratio(self, device: torch.device) -> None:
        """Adds the pass' rotation of visual tokens over text's, without the last layer."""
        assert self._pass is not None
        rotations = [rotation.to(device) for rotation in self._pass.rotations[:-1]]
        if rotations:
            rotation = torch.stack(rotations).sum(0)
            ratio = rotation[KINDS.index("visual")] / rotation[KINDS.index("text")]
            self._rotation_ratios.add(ratio.view(1), ratio.isfinite().view(1))

    def _after_final_norm(self, norm: nn.Module, args: tuple, output: Tensor) -> None:
        if self._pass is not None:  # NanoChat applies it before the first layer too
            norms = _rows(output, output.device).norm(dim=-1)
            self._normalized.add(norms, self._pass.masks)
            self._pass = None


def _rows(states: Tensor, device: torch.device) -> Tensor:
    """Returns states `(..., d)` as `(n, d)` on `device`, in its widest float."""
    return states.detach().reshape(-1, states.shape[-1]).to(device, widest(device))


def _has_directions(kind: str, norm: Tensor, log_norm: Tensor) -> bool:
    """Whether tokens of a kind occur and have a direction in every state.

    `norm` and `log_norm` are moments `(states, 3)`. Raises ValueError for a state that is NaN or
    infinite, or in which all visual or all text tokens are zero.
    """
    if norm[0, 2] == 0:
        return False
    for state in (~norm.isfinite().all(1)).nonzero():
        raise ValueError(
            f"The {kind} tokens are NaN or infinite in state {state.item()}. "
            "Load the model in bfloat16 or float32, and check its weights."
        )
    zero_states = (log_norm[:, 2] == 0).nonzero()
    if len(zero_states) and kind in ("visual", "text"):
        raise ValueError(
            f"All {kind} tokens are zero in state {zero_states[0].item()}, without a direction. "
            "Check that the projector's weights were trained and loaded."
        )
    return not len(zero_states)  # a padding token's row may be all zero


def _asymmetry(rotation: dict[str, Curve]) -> float | None:
    """Returns the rotation of visual tokens over that of text; None without both."""
    if "visual" not in rotation or "text" not in rotation:
        return None
    # Without the last layer, which prepares the prediction rather than the next layer's input.
    visual = sum(rotation["visual"].mean[:-1])
    text = sum(rotation["text"].mean[:-1])
    return visual / text if text else None


def _by_kind(moments: Tensor) -> dict[str, Moments]:
    """Returns moments `(3, kinds)` by kind, for the kinds that occur."""
    moments_by_kind: dict[str, Moments] = {}
    for kind, (mean, std, count) in zip(KINDS, moments.T.tolist(), strict=True):
        if count:
            moments_by_kind[kind] = Moments(mean, std, int(count))
    return moments_by_kind
