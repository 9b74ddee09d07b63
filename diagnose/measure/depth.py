# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and updates of tokens in depth, measured while a decoder runs (figures 1b to 4)."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..report import KINDS, Curve, Depth, Moments
from .moments import RunningMoments, widest


QUANTITIES = ("norm", "rotation", "update_norm", "update_angle", "log_norm", "log_update")
"""What is measured of each layer's input and output, in the order of [`quantities`]."""


def quantities(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """`QUANTITIES` of a layer's input and output `(n, d)`, and where each is defined, both `(6, n)`."""
    update = after - before
    norm, size = before.norm(dim=-1), update.norm(dim=-1)
    along = torch.linalg.vecdot(update, before) / norm
    across = (size.square() - along.square()).clamp(min=0).sqrt()
    rotation = torch.atan2(across, norm + along)  # eq. 8, also where the update is longer than the state
    angle = torch.atan2(across, along)
    always, exists, moves = torch.ones_like(norm) > 0, norm > 0, size > 0
    turns = exists & (torch.hypot(across, norm + along) > 0)
    values = torch.stack([norm, rotation, size, angle, norm.log(), size.log()])
    return values, torch.stack([always, turns, always, exists & moves, exists, moves])


@dataclass
class _Pass:
    """A forward pass so far: masks of the kinds, the last layer's input with its norms, mean rotations by layer."""

    masks: Tensor
    state: tuple[Tensor, Tensor] | None = None
    rotations: list[Tensor] = field(default_factory=list)


class DepthProbe:
    """Hooks on a decoder's layers that keep running moments; only one state is kept in memory.

    Args:
        layers: The decoder's layers.
        final_norm: The norm after them, if its output is to be measured.
    """

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module | None = None):
        self._layers, self._final_norm = layers, final_norm
        self._steps, self._cosines = ([RunningMoments() for _ in layers] for _ in range(2))
        self._last, self._final = RunningMoments(), RunningMoments()
        self._ratios = RunningMoments()  # of visual to text rotation, one for each pass
        self._pass: _Pass | None = None

    @contextmanager
    def watching(self, masks: Callable[[], Tensor]) -> Iterator[None]:
        """Measures every forward pass within.

        Args:
            masks: Returns the masks of the kinds, `(len(KINDS), batch * tokens)`, of the current pass. Called once a
                pass, when the decoder runs: the positions of newlines are known only by then.
        """

        def begin(layer: nn.Module, args: tuple) -> None:
            self._pass = _Pass(masks())

        handles = [self._layers[0].register_forward_pre_hook(begin)]
        for number, layer in enumerate(self._layers):
            handles.append(layer.register_forward_hook(partial(self._after_layer, number), with_kwargs=True))
        if self._final_norm is not None:
            handles.append(self._final_norm.register_forward_hook(self._after_final_norm))
        try:
            yield
        finally:
            self._pass = None
            for handle in handles:
                handle.remove()

    def result(self) -> Depth:
        """Curves of all quantities, and the asymmetry."""
        steps = torch.stack([moments.results() for moments in self._steps])  # of each layer, (3, kinds, quantities)
        measured = dict(zip(QUANTITIES, steps.unbind(-1), strict=True))
        for name, last in zip(("norm", "log_norm"), self._last.results().unbind(-1), strict=True):
            measured[name] = torch.cat([measured[name], last[None]])
        measured["cosine"] = torch.stack([moments.results() for moments in self._cosines])
        curves: dict[str, dict[str, Curve]] = {name: {} for name in measured}
        for place, kind in enumerate(KINDS):
            of_kind = {name: moments[..., place].T for name, moments in measured.items()}
            if of_kind["norm"][2, 0] and _have_directions(of_kind, kind):
                for name, (mean, std, _) in of_kind.items():
                    curves[name][kind] = Curve(mean.tolist(), std.tolist())
        # The last layer prepares the prediction rather than the next layer's input, and is left out.
        rotation = curves["rotation"]
        rotated = {kind: sum(rotation[kind].mean[:-1]) for kind in ("visual", "text") if kind in rotation}
        ratios = self._ratios.result()
        return Depth(
            final_norm={} if self._final_norm is None else _by_kind(self._final.results()),
            asymmetry=rotated["visual"] / rotated["text"] if len(rotated) == 2 and rotated["text"] else None,
            asymmetry_error=ratios.std / math.sqrt(ratios.count - 1) if ratios and ratios.count > 1 else None,
            **curves,
        )

    def norm_received(self) -> dict[str, Moments]:
        """Norms of the first layer's input by kind."""
        return _by_kind(self._steps[0].results()[..., QUANTITIES.index("norm")])

    def _after_layer(self, number: int, layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        now = self._pass
        assert now is not None
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        before, after = (_rows(states, after.device) for states in (before, after))
        values, defined = quantities(before, after)
        means = self._steps[number].add(values, now.masks.to(after.device).unsqueeze(1) & defined)
        now.rotations.append(means[:, QUANTITIES.index("rotation")])
        self._add_cosine(number - 1, now, before, values[QUANTITIES.index("norm")])
        if number == len(self._layers) - 1:
            norm = after.norm(dim=-1)
            self._add_cosine(number, now, after, norm)
            defined = torch.stack([torch.ones_like(norm) > 0, norm > 0])
            self._last.add(torch.stack([norm, norm.log()]), now.masks.to(norm.device).unsqueeze(1) & defined)
            if number:  # the asymmetry leaves the last layer out
                rotated = torch.stack([rotation.to(after.device) for rotation in now.rotations[:-1]]).sum(0)
                ratio = rotated[KINDS.index("visual")] / rotated[KINDS.index("text")]
                self._ratios.add(ratio.view(1), ratio.isfinite().view(1))

    def _add_cosine(self, number: int, now: _Pass, state: Tensor, norm: Tensor) -> None:
        """Adds the cosine of layer `number`: of its input, which `now` has, and the next layer's."""
        if now.state is not None:
            old, old_norm = (tensor.to(state.device) for tensor in now.state)
            cosine = torch.linalg.vecdot(old, state) / (old_norm * norm)
            self._cosines[number].add(cosine, now.masks.to(state.device) & (old_norm > 0) & (norm > 0))
        now.state = state, norm

    def _after_final_norm(self, norm: nn.Module, args: tuple, output: Tensor) -> None:
        if self._pass is not None:  # NanoChat applies it before the first layer too
            self._final.add(_rows(output, output.device).norm(dim=-1), self._pass.masks)
            self._pass = None


def _rows(states: Tensor, device: torch.device) -> Tensor:
    return states.detach().reshape(-1, states.shape[-1]).to(device, widest(device))


def _by_kind(moments: Tensor) -> dict[str, Moments]:
    """Moments `(3, kinds)` by kind, of the kinds that occur."""
    return {
        kind: Moments(mean, std, int(count))
        for kind, (mean, std, count) in zip(KINDS, moments.T.tolist(), strict=True)
        if count
    }


def _have_directions(measured: dict[str, Tensor], kind: str) -> bool:
    """Whether tokens of a kind have directions in all layers; an error if visual or text tokens have none."""
    if len(states := (~measured["norm"].isfinite().all(0)).nonzero()):
        raise ValueError(
            f"The {kind} tokens' hidden states are NaN or infinite in state {states[0].item()}. Load the model in "
            "bfloat16 or float32, and check its weights."
        )
    if len(states := (measured["log_norm"][2] == 0).nonzero()):
        if kind not in ("visual", "text"):
            return False  # a padding token's row may be all zero
        raise ValueError(
            f"All {kind} tokens are zero in state {states[0].item()}, so they have no direction. Check that the "
            "projector's weights were trained and loaded."
        )
    return True
