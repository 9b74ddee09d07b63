# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and updates of tokens by layer, measured as a decoder runs (figures 1b to 4)."""

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
    """Running mean and deviation of values by group, in the widest float.

    Uses the update of Chan, Golub and LeVeque. The state stays on the device until it is asked for:
    a copy would have to wait for the GPU.
    """

    def __init__(self):
        self._state: Tensor | None = None  # count, mean and squared deviations of each group

    def add(self, values: Tensor, masks: Tensor | None = None) -> Tensor:
        """Adds values, and returns the means by group of only these values.

        Args:
            values: Values `(..., n)`. They may be NaN where no group has them.
            masks: Boolean masks `(groups, ..., n)` of the groups. By default, there is one group.

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
        squares = deviations.square().sum(-1)
        means_of_values = torch.where(count > 0, mean, math.nan)
        if self._state is not None:
            previous_count, previous_mean, previous_squares = self._state.to(count.device)
            total_count = (previous_count + count).clamp(min=1)
            distance = mean - previous_mean
            squares_between = distance.square() * previous_count * count / total_count
            squares = previous_squares + squares + squares_between
            mean = previous_mean + distance * count / total_count
            count = previous_count + count
        self._state = torch.stack([count, mean, squares])
        return means_of_values

    def results(self) -> Tensor:
        """Returns mean, standard deviation and count by group, `(3, groups, ...)`.

        Mean and deviation of a group without values are NaN.
        """
        assert self._state is not None
        count, mean, squares = self._state.cpu().double()
        std = (squares / count.clamp(min=1)).sqrt()
        moments = torch.stack([mean, std]).where(count > 0, math.nan)
        return torch.cat([moments, count[None]])

    def result(self) -> Moments | None:
        """Returns the moments of the only group, or None without values."""
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
    input_norm = before.norm(dim=-1)
    update_norm = update.norm(dim=-1)
    update_along = torch.linalg.vecdot(update, before) / input_norm
    update_across = (update_norm.square() - update_along.square()).clamp(min=0).sqrt()
    output_along = input_norm + update_along
    rotation = torch.atan2(update_across, output_along)  # eq. 8; updates may exceed the state
    update_angle = torch.atan2(update_across, update_along)

    log_norm = input_norm.log()
    log_update = update_norm.log()
    measured = [input_norm, rotation, update_norm, update_angle, log_norm, log_update]

    always = torch.ones_like(input_norm, dtype=torch.bool)
    has_state = input_norm > 0
    has_update = update_norm > 0
    has_output = torch.hypot(update_across, output_along) > 0
    defined = [
        always,
        has_state & has_output,
        always,
        has_state & has_update,
        has_state,
        has_update,
    ]
    return torch.stack(measured), torch.stack(defined)


@dataclass
class _ForwardPass:
    """A forward pass, as far as the decoder has run.

    Attributes:
        masks: Mask of each kind of token, `(kinds, batch * tokens)`.
        last_input: Input of the last layer that has run, `(batch * tokens, d)`.
        rotations: For each layer that has run, the mean rotation of each kind, `(kinds,)`.
    """

    masks: Tensor
    last_input: Tensor | None = None
    rotations: list[Tensor] = field(default_factory=list)


class DepthProbe:
    """Measures tokens in each layer by hooks on the layers and the final norm.

    It keeps running moments, and the state of only one layer.
    """

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
        """Measures every forward pass within the block.

        Args:
            masks: Returns a mask for each kind of token, `(kinds, batch * tokens)`. It is called
                when the decoder begins to run: only then the places of newlines are known.
        """

        def begin(layer: nn.Module, args: tuple) -> None:
            self._pass = _ForwardPass(masks())

        with ExitStack() as hooks:
            hooks.enter_context(self._layers[0].register_forward_pre_hook(begin))
            for layer_index, layer in enumerate(self._layers):
                after_layer = partial(self._after_layer, layer_index)
                hooks.enter_context(layer.register_forward_hook(after_layer, with_kwargs=True))
            if self._final_norm is not None:
                hooks.enter_context(self._final_norm.register_forward_hook(self._after_final_norm))
            yield

    def result(self) -> Depth:
        """Returns the curves of all quantities, and the asymmetry.

        Raises ValueError if states are NaN or infinite, or zero for all visual or all text tokens.
        """
        measured = self._results()
        curves: dict[str, dict[str, Curve]] = {name: {} for name in measured}
        for kind_index, kind in enumerate(KINDS):
            norm = measured["norm"][..., kind_index]
            if norm[0, 2] == 0:  # the kind does not occur
                continue
            log_norm = measured["log_norm"][..., kind_index]
            _check_states(kind, norm, log_norm)
            if log_norm[:, 2].all():  # otherwise a padding token's row may be all zero
                for quantity, moments in measured.items():
                    mean, std, _ = moments[..., kind_index].T.tolist()
                    curves[quantity][kind] = Curve(mean, std)
        final_norm = {}
        if self._final_norm is not None:
            final_norm = _by_kind(self._normalized.results())
        rotation = curves["rotation"]
        asymmetry = None
        if "visual" in rotation and "text" in rotation:
            # Without the last layer: it prepares the prediction rather than the next layer's input.
            visual = sum(rotation["visual"].mean[:-1])
            text = sum(rotation["text"].mean[:-1])
            asymmetry = visual / text if text else None
        ratio_moments = self._rotation_ratios.result()
        asymmetry_error = None
        if ratio_moments is not None and ratio_moments.count > 1:
            asymmetry_error = ratio_moments.std / math.sqrt(ratio_moments.count - 1)
        return Depth(
            final_norm=final_norm,
            asymmetry=asymmetry,
            asymmetry_error=asymmetry_error,
            **curves,
        )

    def norm_received(self) -> dict[str, Moments]:
        """Returns the norms of the first layer's input by kind."""
        return _by_kind(self._steps[0].results()[..., NORM])

    def _results(self) -> dict[str, Tensor]:
        """Returns the moments of each quantity, `(layers or states, 3, kinds)`."""
        by_layer = torch.stack([moments.results() for moments in self._steps])
        measured = dict(zip(QUANTITIES, by_layer.unbind(-1), strict=True))
        last_norms = self._last_state.results().unbind(-1)
        for quantity, last_norm in zip(("norm", "log_norm"), last_norms, strict=True):
            measured[quantity] = torch.cat([measured[quantity], last_norm[None]])
        measured["cosine"] = torch.stack([moments.results() for moments in self._cosines])
        return measured

    def _after_layer(
        self, layer_index: int, layer: Any, args: tuple, kwargs: dict, output: Any
    ) -> None:
        forward_pass = self._pass
        assert forward_pass is not None
        layer_input = args[0] if args else kwargs["hidden_states"]
        layer_output = output[0] if isinstance(output, tuple) else output
        before = _rows(layer_input, layer_output.device)
        after = _rows(layer_output, layer_output.device)
        masks = forward_pass.masks.to(after.device)
        measured, defined = quantities(before, after)
        means_by_kind = self._steps[layer_index].add(measured, masks.unsqueeze(1) & defined)
        forward_pass.rotations.append(means_by_kind[:, ROTATION])
        if forward_pass.last_input is not None:
            self._add_cosine(layer_index - 1, masks, forward_pass.last_input, before)
        forward_pass.last_input = before
        if layer_index == len(self._layers) - 1:
            self._add_cosine(layer_index, masks, before, after)
            norm = after.norm(dim=-1)
            is_positive = norm > 0
            norm_and_logarithm = torch.stack([norm, norm.log()])
            defined = torch.stack([torch.ones_like(is_positive), is_positive])
            self._last_state.add(norm_and_logarithm, masks.unsqueeze(1) & defined)
            # The rotation of visual tokens over text's in this pass, without the last layer.
            rotations = [means.to(after.device) for means in forward_pass.rotations[:-1]]
            if rotations:
                total = torch.stack(rotations).sum(0)
                ratio = (total[KINDS.index("visual")] / total[KINDS.index("text")]).view(1)
                self._rotation_ratios.add(ratio, ratio.isfinite())

    def _add_cosine(
        self, layer_index: int, masks: Tensor, state: Tensor, next_state: Tensor
    ) -> None:
        """Adds the cosine between the input of a layer and the input of the next one."""
        state = state.to(masks.device)
        norms = state.norm(dim=-1) * next_state.norm(dim=-1)
        cosine = torch.linalg.vecdot(state, next_state) / norms
        self._cosines[layer_index].add(cosine, masks & (norms > 0))

    def _after_final_norm(self, norm: nn.Module, args: tuple, output: Tensor) -> None:
        if self._pass is not None:  # NanoChat applies it before the first layer too
            norms = _rows(output, output.device).norm(dim=-1)
            self._normalized.add(norms, self._pass.masks)
            self._pass = None


def _rows(states: Tensor, device: torch.device) -> Tensor:
    """Returns states `(..., d)` as `(n, d)` on `device`, in its widest float."""
    return states.detach().flatten(0, -2).to(device, widest(device))


def _check_states(kind: str, norm: Tensor, log_norm: Tensor) -> None:
    """Raises ValueError for a state that is NaN, infinite, or without directions.

    It has no directions if all visual or all text tokens are zero. `norm` and `log_norm` are
    moments `(states, 3)` of the tokens of a kind.
    """
    for state in (~norm.isfinite().all(1)).nonzero():
        raise ValueError(
            f"The {kind} tokens are NaN or infinite in state {state.item()}. "
            "Load the model in bfloat16 or float32, and check its weights."
        )
    for state in (log_norm[:, 2] == 0).nonzero():
        if kind in ("visual", "text"):
            raise ValueError(
                f"All {kind} tokens are zero in state {state.item()}, without a direction. "
                "Check that the projector's weights were trained and loaded."
            )


def _by_kind(moments: Tensor) -> dict[str, Moments]:
    """Returns moments `(3, kinds)` by kind, for the kinds that occur."""
    return {
        kind: Moments(mean, std, int(count))
        for kind, (mean, std, count) in zip(KINDS, moments.T.tolist(), strict=True)
        if count
    }
