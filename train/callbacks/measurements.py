# SPDX-License-Identifier: Apache-2.0
"""What is logged of the modules in training: token norms, gain, gradients, updates, clipping."""

import math
from itertools import accumulate
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, reduce
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from ...diagnose.measure.families import decoder_layers
from ...diagnose.measure.positions import token_positions
from ...modeling_normalign_llava import _gathered, gain_magnitude
from ..modules.model import base_model, module_of, projector_norm, trained_parameters


PARTS = ("vision_tower", "projector", "gain", "bias", "language_model")
"""Parts whose gradients and updates are measured; the projector without its norm, whose gain and bias are apart."""

SAMPLE = 2**16
"""Most elements of a part whose update is measured, evenly spaced over its trained parameters."""


class Measurements(TrainerCallback):
    """Measures the modules at the steps that are logged; at others it costs next to nothing.

    docs/options.md lists what is logged. The trainer passes in the norm that it clips by, and adds what
    [`~Measurements.collect`] returns to its logs: sums over all micro-batches and processes of the step. Updates are
    compared in a sample of at most `SAMPLE` elements, and left out while all of these are zero, as the bias at first.

    A part that is frozen has no entry. DeepSpeed keeps the gradients to itself and steps before the Trainer does: with
    it there are no gradient norms and update ratios. The steps measured are those of `logging_steps` and
    `logging_first_step`; `logging_strategy="epoch"` has none.
    """

    def __init__(self, args: TrainingArguments):
        self.max_grad_norm = args.max_grad_norm
        self._hooks: list[Any] = []
        self._measuring = False
        self._inputs: dict[str, Any] = {}  # of the forward pass, until its tokens are measured
        self._total_norm: Tensor | float | None = None  # of this step's gradients
        self._grad_norms: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._ratios: dict[str, Tensor] = {}  # two sums over all processes
        self._clipped: Tensor | int = 0
        self._clippings = 0

    def after_clip(self, total_norm: Tensor | float | None) -> None:
        """Takes the norm of all gradients before clipping, without waiting for the device; DeepSpeed has None."""
        if total_norm is None:
            return
        self._total_norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        self._clipped = self._clipped + (self._clip_factor() > 1)
        self._clippings += 1

    def collect(self) -> dict[str, float]:
        """What was measured since the last call; empty if the step is not a logged one.

        Every process must call it at the same step: it sums over processes.
        """
        if not self._measuring:
            return {}
        self._measuring = False
        found = {name: value.item() for name, value in (norm_values(self._model) | self._grad_norms).items()}
        sums = reduce(torch.stack(list(self._ratios.values())), "sum").double()
        for name, (above, below) in zip(self._ratios, sums.tolist(), strict=True):
            if below > 0:
                ratio = above / below
                found[name] = ratio**0.5 if name.startswith("update_ratio/") else ratio
        if self._clippings:
            found["clip/share"] = float(self._clipped) / self._clippings
        self._clipped, self._clippings = 0, 0
        return found

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._model = base_model(model)
        state.compute_steps(args, state.max_steps)  # a resumed state has those of the options before

    def on_step_begin(self, args, state, control, **kwargs):
        """Hooks the forward passes of a step that is logged."""
        step = state.global_step + 1
        self._measuring = (step == 1 and args.logging_first_step) or (
            args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0
        )
        if not self._measuring:
            return
        self._grad_norms, self._before = {}, {}
        ratios = ("norm/visual", "norm/text", *(f"update_ratio/{part}" for part in PARTS))
        self._ratios = {name: torch.zeros(2, device=args.device) for name in ratios}
        inner = self._model.model
        self._hooks = [
            inner.register_forward_pre_hook(self._keep_inputs, with_kwargs=True),
            decoder_layers(inner.language_model)[0].register_forward_pre_hook(self._add_token_norms, with_kwargs=True),
        ]

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Measures gradient norms and copies a sample of the weights."""
        for hook in self._hooks:
            hook.remove()
        if not self._measuring or AcceleratorState().distributed_type == DistributedType.DEEPSPEED:
            return
        factor = self._clip_factor()
        for part, parameters in _trained_parts(model).items():
            norms = [_full_norm(p.grad).to(args.device) for p in parameters if p.grad is not None]
            if norms:
                # Measured after clipping and scaled back: only by then are the gradients of fp16 unscaled.
                self._grad_norms[f"grad_norm/{part}"] = torch.linalg.vector_norm(torch.stack(norms)) * factor
            self._before[part] = _sample(parameters)

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Compares the sample of the weights with what it was."""
        for part, parameters in (_trained_parts(model) if self._before else {}).items():
            before, after = self._before.pop(part), _sample(parameters)
            self._add(f"update_ratio/{part}", (after - before).square().sum(), before.square().sum())

    def _clip_factor(self):
        # The divisor of torch's clipping.
        if self._total_norm is None or not self.max_grad_norm:
            return 1.0
        return torch.as_tensor((self._total_norm + 1e-6) / self.max_grad_norm).clamp(min=1.0)

    def _add(self, name: str, above: Tensor, below: Tensor) -> None:
        self._ratios[name] += torch.stack((above, below)).to(self._ratios[name])

    def _keep_inputs(self, module, args, kwargs):
        self._inputs = kwargs

    @torch.no_grad()
    def _add_token_norms(self, module, args, kwargs):
        if not self._inputs:
            return  # gradient checkpointing runs the layer again
        hidden = args[0] if args else kwargs["hidden_states"]
        norms = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32)
        ids, mask, self._inputs = self._inputs["input_ids"], self._inputs.get("attention_mask"), {}
        for name, positions in token_positions(ids, mask, self._model.config.image_token_id).items():
            at = positions.to(norms.device)
            self._add(f"norm/{name}", torch.where(at, norms, 0).sum(), at.sum())


@torch.no_grad()
def norm_values(model: nn.Module) -> dict[str, Tensor]:
    """Size of gain and bias (table 5) and the factor of gradient compensation (eq. 12), as 0-d tensors by name."""
    norm = projector_norm(model)
    values = {"gwc/factor": torch.ones(())}
    if isinstance(norm, nn.Identity):
        return values
    with _gathered(*norm.parameters()) as (gain, *bias):
        values["gain/l2"] = torch.linalg.vector_norm(gain, dtype=torch.float32)
        values["gain/mean_abs"] = gain.float().abs().mean()
        if bias:  # an RMSNorm has none
            values["bias/mean_abs"] = bias[0].float().abs().mean()
        if norm.compensate:
            values["gwc/factor"] = 1 / gain_magnitude(gain, norm.gain_floor)
    return values


def _trained_parts(model: nn.Module) -> dict[str, list[Tensor]]:
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in trained_parameters(model).items():
        module = module_of(name)
        part = {"vision": "vision_tower", "language": "language_model"}.get(module, module)
        if module == "norm":
            part = "gain" if name.endswith("weight") else "bias"
        parts.setdefault(part, []).append(parameter)
    return parts


def _sample(tensors: list[Tensor]) -> Tensor:
    # Of this process's shards: only ratios of sums over all processes are taken of it.
    shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    flat = [shard.detach().reshape(-1) for shard in shards]
    stride = math.ceil(sum(map(len, flat)) / SAMPLE) or 1
    starts = accumulate(map(len, flat[:-1]), initial=0)
    views = [values[-start % stride :: stride] for start, values in zip(starts, flat, strict=True)]
    return torch.cat([view.to(views[0].device, torch.float32) for view in views])


def _full_norm(gradient: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
