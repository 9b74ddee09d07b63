# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Stops a run at the first step whose loss or gradients are not finite, and names the module they came from."""

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, reduce
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from ..keeping.checkpoints import newest_complete
from ..modules.model import base_model, projector_norm
from ..options.arguments import NormAlignConfig


logger = get_logger(__name__)  # logs in one process only

PLACES = (
    "the vision tower's output",
    "the projector's output",
    "the norm's output",
    "the language model's output",
    "the loss",
    "the gradient from the loss",
    "the gradient from the language model",
    "the gradient from the norm",
    "the gradient from the projector",
    "the gradients of weights",
)
"""Where values can stop being finite, in the order of a step."""

LOSS, WEIGHTS = PLACES.index("the loss"), len(PLACES) - 1

IN_A_ROW = 10
"""A run that skips bad steps stops after so many in a row."""


class FiniteCheck(TrainerCallback):
    """Checks whether loss and gradients of a step are finite, and if not, where they stopped being so.

    Every module's output, and the gradient it gets, is checked and counted on its device. Once in an optimizer step
    the counts are summed over the processes, so that all of them stop or none, and read, which waits for the device.
    (The Trainer's `logging_nan_inf_filter`, which waits twice for each batch, is off.)

    With fp16, infinite gradients are normal now and then: the gradient scaler, or DeepSpeed, skips such a step and
    lowers its scale. There only the loss counts, until the scale is below 1.
    """

    def __init__(self, model: nn.Module, args: NormAlignConfig):
        self.args = args
        self._not_finite = torch.zeros(len(PLACES), dtype=torch.int32, device=args.device)
        self._step = self._skipped = 0
        inner, norm = base_model(model).model, projector_norm(model)
        # By their place in `PLACES`.
        inner.multi_modal_projector.register_forward_pre_hook(lambda module, inputs: self._watch(0, inputs[0]))
        norm.register_forward_pre_hook(lambda module, inputs: self._watch(1, inputs[0]))
        norm.register_forward_hook(lambda module, inputs, output: self._watch(2, output))
        inner.language_model.register_forward_hook(lambda module, inputs, output: self._watch(3, output[0]))

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Raises FloatingPointError if weights are not finite from the start."""
        if damaged := weights_not_finite(model):
            raise FloatingPointError(
                f"{len(damaged)} tensors of the model are not finite, first {damaged[0]}. Train another checkpoint."
            )

    def on_step_begin(self, args, state, control, **kwargs):
        """Resets the counts."""
        self._step = state.global_step + 1
        self._not_finite.zero_()

    def check_loss(self, loss: Tensor) -> None:
        """Checks the loss of a batch."""
        self._count(LOSS, loss)

    def is_step_finite(self, total_norm: Tensor | float | None, scaler: GradScaler | None) -> bool:
        """Whether the optimizer may take this step. All processes must call it at the same time.

        Args:
            total_norm: The norm of all gradients; None if DeepSpeed does not know it, below 0 if it is not finite.
            scaler: The gradient scaler of fp16.

        Raises:
            FloatingPointError: Loss or gradients are not finite, and `bad_steps` is "stop" or the last steps were
                skipped too. The message names step, module and the last complete checkpoint.
        """
        if total_norm is not None:
            norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
            norm = torch.as_tensor(norm, device=self.args.device)
            self._not_finite[WEIGHTS] += ~(norm.isfinite() & (norm >= 0))
        found = reduce(self._not_finite, "sum").tolist()
        if not (found[LOSS] or found[WEIGHTS]):
            self._skipped = 0
            return True
        if self.args.fp16 and not found[LOSS] and (scaler is None or scaler.get_scale() >= 1):
            return True
        first = next(place for place, count in zip(PLACES, found, strict=True) if count)
        problem = f"Step {self._step} has values that are not finite, first in {first}."
        self._skipped += 1
        if self.args.bad_steps == "stop":
            skip = ", or skip such steps with --bad_steps skip, in a resumed run too"
            raise FloatingPointError(f"{problem} {self._remedy(skip)}")
        if self._skipped == IN_A_ROW:
            raise FloatingPointError(f"{problem} So had the {IN_A_ROW - 1} steps before it. {self._remedy()}")
        logger.warning(f"{problem} The step is skipped.")
        return False

    def check_weights(self, model: nn.Module) -> None:
        """Checks the weights before they are saved. If they are sharded, all processes must call it at the same time.

        Raises:
            FloatingPointError: Some of them are NaN or infinite.
        """
        if found := weights_not_finite(model):
            raise FloatingPointError(
                f"After step {self._step}, {len(found)} tensors of the model are not finite, first {found[0]}. They "
                f"are not saved. {self._remedy()}"
            )

    def _watch(self, place: int, values: Tensor) -> None:
        """Checks what one module passes to the next, and the gradient it gets back."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return  # torch.compile cannot trace hooks on gradients
        self._count(place, values)
        if values.requires_grad:  # gradients come back in reverse order
            values.register_hook(lambda gradient: self._count(WEIGHTS - 1 - place, gradient))

    def _count(self, place: int, values: Tensor) -> None:
        self._not_finite[place] += ~values.detach().isfinite().all().to(self._not_finite.device)

    def _remedy(self, skip: str = "") -> str:
        last = newest_complete(self.args.output_dir, self.args.world_size)
        remaining = f"The last complete checkpoint is {last}." if last else "There is no complete checkpoint yet."
        return f"{remaining} Start again with lower learning rates{skip}."


@torch.no_grad()
def weights_not_finite(model: nn.Module) -> list[str]:
    """Names of parameters with values that are NaN or infinite, in this process's shards or another's.

    Only sharded weights are compared with other processes: the first process alone may save weights that all have.
    """
    names, finite, sharded = [], [], is_deepspeed_zero3_enabled()
    for name, parameter in model.named_parameters():
        shard = parameter.ds_tensor if is_deepspeed_zero3_enabled() else parameter
        if isinstance(shard, DTensor):
            shard, sharded = shard.to_local(), True
        if shard.is_floating_point():  # 4-bit weights are packed
            names.append(name)
            finite.append(shard.isfinite().all())
    on_host = torch.stack([each.to(finite[0].device) for each in finite]).tolist()  # waits for the device once
    damaged = [name for name, is_finite in zip(names, on_host, strict=True) if not is_finite]
    return list(dict.fromkeys(gather_object(damaged))) if sharded else damaged
