# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a decoder's layers do to visual and to text tokens, measured while it runs (figures 1b, 2, 3, 4)."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..report import KINDS, Curve, Depth, Moments
from .moments import RunningMoments, widest


_QUANTITIES = ("norm", "rotation", "update_norm", "update_angle", "log_norm", "log_update")


class DepthProbe:
    """Hooks on a decoder's layers that keep running moments; only one state is kept in memory.

    Args:
        layers: The decoder's layers.
        final_norm: The norm after them, if its output is to be measured.
    """

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module | None = None):
        self._modules, self._final_norm = layers, final_norm
        self._layers = [RunningMoments(len(KINDS), len(_QUANTITIES)) for _ in layers]
        self._cosines = [RunningMoments(len(KINDS)) for _ in layers]
        self._last, self._final = RunningMoments(len(KINDS), 2), RunningMoments(len(KINDS))
        self._expected: Callable[[], Tensor] | None = None
        self._masks: Tensor | None = None
        self._state: Tensor | None = None  # input of the previous layer, in float64, and its norms
        self._norms: Tensor | None = None
        self._at_end = False
        self._rotated: Tensor | float = 0.0  # sum over the layers so far of each kind's mean rotation in this pass
        self._ratios = RunningMoments()  # of visual to text rotation, one for each pass

    @contextmanager
    def watching(self, masks: Callable[[], Tensor]) -> Iterator[None]:
        """Measures every forward pass within.

        Args:
            masks: Returns the masks of the kinds, `(len(KINDS), batch * tokens)`, of the current pass. Called once a
                pass, when the decoder runs: the positions of newlines are known only by then.
        """
        self._expected = masks
        handles = [
            layer.register_forward_hook(self._hook(number), with_kwargs=True)
            for number, layer in enumerate(self._modules)
        ]
        if self._final_norm is not None:
            handles.append(self._final_norm.register_forward_hook(self._after_final_norm))
        try:
            yield
        finally:
            self._expected = self._masks = self._state = self._norms = None
            self._at_end = False
            for handle in handles:
                handle.remove()

    def result(self) -> Depth:
        """Curves of all quantities, and the asymmetry.

        Raises:
            ValueError: Hidden states are NaN or infinite, or all tokens of a kind are zero.
        """
        layers = [moments.results() for moments in self._layers]  # [layer][kind][quantity]
        kinds = [kind for kind, found in enumerate(layers[0]) if found[0] is not None]
        last, final = self._last.results(), self._final.results()
        cosines = [moments.results() for moments in self._cosines]
        curves: dict[str, dict[str, Curve]] = {name: {} for name in ("cosine", *_QUANTITIES)}
        for kind in kinds:
            of_kind = {name: [layer[kind][q] for layer in layers] for q, name in enumerate(_QUANTITIES)}
            of_kind["norm"].append(last[kind][0])
            of_kind["log_norm"].append(last[kind][1])
            of_kind["cosine"] = [layer[kind][0] for layer in cosines]
            try:
                found = {name: _curve(values, name, KINDS[kind]) for name, values in of_kind.items()}
            except _Undefined:
                if KINDS[kind] in ("visual", "text"):
                    raise
                continue  # a padding token's row may be all zero
            for name, curve in found.items():
                curves[name][KINDS[kind]] = curve
        finals = {KINDS[kind]: moments for kind in kinds if (moments := final[kind][0]) is not None}
        ratios = self._ratios.result()
        return Depth(
            final_norm=finals,
            asymmetry=_asymmetry(curves["rotation"]),
            asymmetry_error=ratios.std / math.sqrt(ratios.count - 1) if ratios and ratios.count > 1 else None,
            **curves,
        )

    def norm_received(self) -> dict[str, Moments]:
        """Norms of the first layer's input by kind."""
        found = self._layers[0].results()
        return {kind: each[0] for kind, each in zip(KINDS, found, strict=True) if each[0] is not None}

    def _hook(self, number: int) -> Any:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if number == 0:
                assert self._expected is not None
                self._masks, self._rotated = self._expected(), 0.0
            after = output[0] if isinstance(output, tuple) else output
            before = args[0] if args else kwargs["hidden_states"]
            wide = widest(after.device)
            if before.dim() != 3:
                raise ValueError(
                    f"{type(layer).__name__} takes hidden states of shape {tuple(before.shape)}, not (batch, tokens, "
                    "d). This family cannot be measured."
                )
            before, after = (_rows(each).to(after.device, wide) for each in (before, after))
            norm = before.norm(dim=-1)
            if number:
                self._add_cosine(number - 1, before, norm)
            self._add_update(number, before, norm, after - before)
            if number == len(self._layers) - 2:  # the asymmetry leaves the last layer out
                self._add_ratio()
            self._state, self._norms = before, norm
            if number == len(self._layers) - 1:
                norm = after.norm(dim=-1)
                self._last.add(
                    torch.stack([norm, norm.log()]), _defined(self._masks, torch.ones_like(norm) > 0, norm > 0)
                )
                self._add_cosine(number, after, norm)
                self._state, self._norms, self._at_end = None, None, True

        return hook

    def _add_cosine(self, number: int, state: Tensor, norm: Tensor) -> None:
        assert self._masks is not None and self._state is not None and self._norms is not None
        old, old_norm = self._state.to(state.device), self._norms.to(state.device)
        cosine = torch.linalg.vecdot(old, state) / (old_norm * norm)
        self._cosines[number].add(cosine, self._masks.to(state.device) & (old_norm > 0) & (norm > 0))

    def _add_update(self, number: int, state: Tensor, norm: Tensor, update: Tensor) -> None:
        assert self._masks is not None
        size = update.norm(dim=-1)
        along = torch.linalg.vecdot(update, state) / norm
        across = (size.square() - along.square()).clamp(min=0).sqrt()
        rotation = torch.atan2(across, norm + along)  # eq. 8, also where the update is longer than the state
        angle = torch.atan2(across, along)
        always, exists, moves = torch.ones_like(norm) > 0, norm > 0, size > 0
        turns = exists & (torch.hypot(across, norm + along) > 0)
        masks = _defined(self._masks, always, turns, always, exists & moves, exists, moves)
        means = self._layers[number].add(torch.stack([norm, rotation, size, angle, norm.log(), size.log()]), masks)
        rotated = self._rotated.to(means.device) if isinstance(self._rotated, Tensor) else self._rotated
        self._rotated = rotated + means[:, _QUANTITIES.index("rotation")]

    def _add_ratio(self) -> None:
        assert isinstance(self._rotated, Tensor)
        ratio = self._rotated[KINDS.index("visual")] / self._rotated[KINDS.index("text")]
        self._ratios.add(ratio.view(1), ratio.isfinite().view(1))

    def _after_final_norm(self, norm: nn.Module, args: tuple, output: Tensor) -> None:
        if not self._at_end:  # NanoChat applies it before the first layer too
            return
        assert self._masks is not None
        self._at_end = False
        self._final.add(_rows(output).to(widest(output.device)).norm(dim=-1), self._masks)


class _Undefined(ValueError):
    pass


def _rows(states: Tensor) -> Tensor:
    return states.detach().reshape(-1, states.shape[-1])


def _defined(masks: Tensor, *defined: Tensor) -> Tensor:
    """Masks `(kinds, quantities, n)`: `masks`, restricted to tokens for which each quantity is defined."""
    defined_by_quantity = torch.stack(defined)
    return masks.to(defined_by_quantity.device).unsqueeze(1) & defined_by_quantity


def _curve(values: list[Moments | None], name: str, kind: str) -> Curve:
    for number, value in enumerate(values, 1):
        where = f"{'entering' if name in ('norm', 'update_angle') else 'at'} layer {number}"
        if value is None and name in ("update_angle", "log_update"):
            continue
        if value is None:
            raise _Undefined(
                f"All {kind} tokens are zero {where}, so they have no direction ({name}). Check that the projector's "
                "weights were trained and loaded."
            )
        if not all(torch.tensor([value.mean, value.std]).isfinite()):
            raise ValueError(
                f"The {kind} tokens' hidden states are NaN or infinite {where} ({name}). Load the model in bfloat16 "
                "or float32, and check its weights."
            )
    # The update of a layer that changes nothing has no direction.
    return Curve(
        [math.nan if value is None else value.mean for value in values],
        [math.nan if value is None else value.std for value in values],
    )


def _asymmetry(rotation: dict[str, Curve]) -> float | None:
    # The last layer prepares the prediction rather than the next layer's input, and is left out.
    if len(next(iter(rotation.values()), Curve([], [])).mean) < 2 or not {"visual", "text"} <= rotation.keys():
        return None
    return sum(rotation["visual"].mean[:-1]) / sum(rotation["text"].mean[:-1])
