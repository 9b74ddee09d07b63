# SPDX-License-Identifier: Apache-2.0
"""What is logged of the modules in training: token norms, gain, gradients, clipping."""

from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, reduce
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from ...diagnose.measure.families import decoder_layers, token_positions
from ...modeling_normalign_llava import _gathered, gain_magnitude
from ..modules.model import base_model, module_of, projector_norm, trained_parameters


PARTS = ("vision_tower", "projector", "gain", "bias", "language_model")
"""Parts whose gradients are measured; the projector without its norm, whose gain and bias are apart."""


class Measurements(TrainerCallback):
    """Measures the modules at the steps that are logged; at others it costs next to nothing.

    docs/options.md lists what is logged: sums over all micro-batches and processes of the step. A part that is
    frozen has no entry. DeepSpeed keeps the gradients to itself. `logging_strategy="epoch"` has no such steps.
    """

    def __init__(self, args: TrainingArguments):
        self.max_grad_norm = args.max_grad_norm
        self._hooks: list[Any] = []
        self._measuring = False
        self._inputs: dict[str, Any] = {}  # of the forward pass, until its tokens are measured
        self._divisor: Tensor | float = 1.0  # of this step's clipping
        self._clipped: list[Tensor] = []  # whether gradients were, of each step since the last log
        self._grad_norms: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}  # the sum of norms, and their number

    def after_clip(self, total_norm: Tensor | float | None) -> None:
        """Takes the norm of all gradients before clipping, without waiting for the device; None is DeepSpeed's."""
        if total_norm is None or not self.max_grad_norm:
            return
        norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        self._divisor = torch.as_tensor((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0)  # as torch's
        self._clipped.append(self._divisor > 1)

    def collect(self) -> dict[str, float]:
        """What was measured since the last call, if the step is a logged one, over all processes, which all call."""
        if not self._measuring:
            return {}
        self._measuring = False
        values = {name: value.item() for name, value in (norm_values(self._model) | self._grad_norms).items()}
        for name, (total, count) in reduce(self._norms, "sum").items():
            if count:
                values[name] = (total / count).item()
        if self._clipped:
            values["clip/share"] = torch.stack(self._clipped).float().mean().item()
        self._clipped = []
        return values

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
        self._grad_norms = {}
        self._norms = {name: torch.zeros(2, device=args.device) for name in ("norm/visual", "norm/text")}
        inner = self._model.model
        self._hooks = [
            inner.register_forward_pre_hook(self._keep_inputs, with_kwargs=True),
            decoder_layers(inner.language_model)[0].register_forward_pre_hook(self._add_token_norms, with_kwargs=True),
        ]

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Measures gradient norms."""
        for hook in self._hooks:
            hook.remove()
        if not self._measuring or AcceleratorState().distributed_type == DistributedType.DEEPSPEED:
            return
        norms: dict[str, list[Tensor]] = {}
        for name, parameter in trained_parameters(model).items():
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float32)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                norms.setdefault(f"grad_norm/{_part(name)}", []).append(norm.to(args.device))
        # Measured after clipping and scaled back: only by then are the gradients of fp16 unscaled.
        self._grad_norms = {
            name: torch.linalg.vector_norm(torch.stack(parts)) * self._divisor for name, parts in norms.items()
        }

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
            self._norms[f"norm/{name}"] += torch.stack([torch.where(at, norms, 0).sum(), at.sum()])


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


def _part(name: str) -> str:
    """Which of `PARTS` a parameter belongs to."""
    module = module_of(name)
    if module == "norm":
        return "gain" if name.endswith("weight") else "bias"
    return {"vision": "vision_tower", "language": "language_model"}.get(module, module)
