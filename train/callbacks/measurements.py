# SPDX-License-Identifier: Apache-2.0
"""Measurements of the modules during training, for the log."""

from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ...diagnose.measure.families import decoder_layers, token_positions
from ...modeling_normalign_llava import gain_magnitude, gathered
from ..modules.model import base_model, module_of, projector_norm, trained_parameters
from ..modules.sharding import sharding
from ..settings import RunConfig


class Measurements(TrainerCallback):
    """Measures the modules at the steps that are logged. Other steps cost next to nothing.

    docs/options.md lists what is logged, over all micro-batches and processes of the step. Frozen
    parts have no entry. DeepSpeed hides gradients. `logging_strategy="epoch"` measures nothing.
    """

    def __init__(self, args: RunConfig):
        self.max_grad_norm = args.max_grad_norm
        self._hooks: list[Any] = []
        self._measuring = False
        # The inputs of the forward pass, until the norms of its tokens are measured.
        self._inputs: dict[str, Any] = {}
        self._clip_divisor: Tensor | float = 1.0  # clipping divides this step's gradients by it
        self._clipped_steps: Tensor | int = 0  # since the last log
        self._known_steps = 0  # since the last log: steps with a known gradient norm
        self._gradient_norms: dict[str, Tensor] = {}
        self._token_norms: dict[str, Tensor] = {}  # by key: the sum of norms, and their number

    def after_clip(self, total_norm: Tensor | float | None) -> None:
        """Counts whether a step was clipped.

        Args:
            total_norm: The norm of all gradients before clipping, or None under DeepSpeed.
        """
        if total_norm is None or not self.max_grad_norm:
            return
        divisor = (whole_norm(total_norm) + 1e-6) / self.max_grad_norm  # as torch computes it
        self._clip_divisor = torch.as_tensor(divisor).clamp(min=1.0)
        self._clipped_steps = self._clipped_steps + (self._clip_divisor > 1)
        self._known_steps += 1

    def collect(self) -> dict[str, float]:
        """Returns the measurements of a logged step, or an empty dictionary for any other step.

        All processes must call this together.
        """
        if not self._measuring:
            return {}
        self._measuring = False
        measurements = {}
        for key, tensor in (norm_values(self._model) | self._gradient_norms).items():
            measurements[key] = tensor.item()
        for key, (norm_sum, count) in reduce(self._token_norms, "sum").items():
            if count:
                measurements[key] = (norm_sum / count).item()
        if self._known_steps:
            measurements["clip/share"] = int(self._clipped_steps) / self._known_steps
        self._clipped_steps = 0
        self._known_steps = 0
        return measurements

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._model = base_model(model)
        self._clipped_steps = 0
        self._known_steps = 0
        state.compute_steps(args, state.max_steps)  # a resumed state has earlier options' steps

    def on_step_begin(self, args, state, control, **kwargs):
        """Registers the hooks that measure tokens, if the step will be logged."""
        next_step = state.global_step + 1
        is_logged = args.logging_strategy == "steps" and next_step % state.logging_steps == 0
        is_logged_first = next_step == 1 and args.logging_first_step
        self._measuring = is_logged or is_logged_first
        if not self._measuring:
            return
        self._gradient_norms = {}
        self._token_norms = {}
        multimodal = self._model.model
        first_layer = decoder_layers(multimodal.language_model)[0]
        self._hooks = [
            multimodal.register_forward_pre_hook(self._keep_inputs, with_kwargs=True),
            first_layer.register_forward_pre_hook(self._add_token_norms, with_kwargs=True),
        ]

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Removes the hooks, and measures the gradients of each part.

        The norm's gain and bias are parts of their own, and do not count as the projector.
        """
        for hook in self._hooks:
            hook.remove()
        if not self._measuring or sharding() == "DeepSpeed":
            return
        norms_of_parts = {}
        for parameter_name, parameter in trained_parameters(model).items():
            if parameter.grad is None:
                continue
            norm = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float32)
            part = module_of(parameter_name)
            part = {"vision": "vision_tower", "language": "language_model"}.get(part, part)
            if part == "norm":
                part = "gain" if parameter_name.endswith("weight") else "bias"
            norms_of_parts.setdefault(part, []).append(whole_norm(norm).to(args.device))
        # Measured after clipping and scaled back: only by then are the gradients of fp16 unscaled.
        for part, part_norms in norms_of_parts.items():
            clipped_norm = torch.stack(part_norms).norm()
            self._gradient_norms[f"grad_norm/{part}"] = clipped_norm * self._clip_divisor

    def _keep_inputs(self, module, args, kwargs):
        self._inputs = kwargs

    @torch.no_grad()
    def _add_token_norms(self, module, args, kwargs):
        """Adds the norms of the hidden states `(B, T, d)` that enter the decoder."""
        inputs = self._inputs
        if not inputs:
            return  # gradient checkpointing runs the layer again
        self._inputs = {}
        hidden_states = args[0] if args else kwargs["hidden_states"]
        norms = torch.linalg.vector_norm(hidden_states, dim=-1, dtype=torch.float32)
        image_token = self._model.config.image_token_id
        positions = token_positions(inputs["input_ids"], inputs.get("attention_mask"), image_token)
        for kind, is_of_kind in positions.items():
            mask = is_of_kind.to(norms.device)
            norm_sum = torch.where(mask, norms, 0).sum()
            key = f"norm/{kind}"
            earlier = self._token_norms.get(key, 0)
            self._token_norms[key] = torch.stack([norm_sum, mask.sum()]) + earlier


@torch.no_grad()
def norm_values(model: nn.Module) -> dict[str, Tensor]:
    """Returns the size of gain and bias (table 5) and the factor of gradient compensation (eq. 12).

    The keys are named as in the log.
    """
    norm = projector_norm(model)
    values = {"gwc/factor": torch.ones(())}
    if isinstance(norm, nn.Identity):
        return values
    with gathered(*norm.parameters()) as (gain, *biases):
        values["gain/l2"] = torch.linalg.vector_norm(gain, dtype=torch.float32)
        values["gain/mean_abs"] = gain.float().abs().mean()
        for bias in biases:  # an RMSNorm has none
            values["bias/mean_abs"] = bias.float().abs().mean()
        if norm.compensate:
            values["gwc/factor"] = 1 / gain_magnitude(gain, norm.gain_floor)
    return values


def whole_norm(norm: Any) -> Any:
    """Returns a norm as a number or a whole tensor, also if FSDP2 divides the gradients."""
    if isinstance(norm, DTensor):
        return norm.full_tensor()
    return norm
