# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Stops a run at the first step whose loss or gradients are not finite, and names the module that they came from."""

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, reduce
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from .arguments import NormAlignConfig
from .checkpoints import newest_complete
from .model import base_model, projector_norm


logger = get_logger(__name__)  # which speaks for all processes once

PLACES = (
    *("the vision tower's output", "the projector's output", "the norm's output", "the language model's output"),
    *("the loss", "the gradient from the loss", "the gradient from the language model", "the gradient from the norm"),
    *("the gradient from the projector", "the gradients of weights"),
)
"""Where values of a step can cease to be finite, in the order of the step."""

LOSS, WEIGHTS = PLACES.index("the loss"), len(PLACES) - 1

IN_A_ROW = 10
"""Steps in a row without a finite gradient after which a run stops that passes over them."""


class FiniteCheck(TrainerCallback):
    """Looks whether loss and gradients of a step are finite, and if they are not, where on the way they ceased to be.

    What every module gives and gets back is looked at on its device and added up there. Once in an optimizer step it
    is summed over the processes, so that all of them stop or none, and read, which waits for the device. (The
    Trainer's `logging_nan_inf_filter`, which waits twice for each batch, is off.)

    Half precision (fp16) meets gradients that are infinite now and then; the gradient scaler, or DeepSpeed, passes
    over such a step and lowers its scale. There only the loss counts, until the scale is below 1.

    Args:
        model: The model to train, with or without adapters.
        args: Its options.
    """

    def __init__(self, model: nn.Module, args: NormAlignConfig):
        self.args = args
        self._not_finite = torch.zeros(len(PLACES), dtype=torch.int32, device=args.device)
        self._step = self._taken = self._passed_over = 0
        self._damaged: list[str] | None = None
        inner, norm = base_model(model).model, projector_norm(model)
        inner.multi_modal_projector.register_forward_pre_hook(
            lambda module, inputs: self._watch(
                inputs[0], "the vision tower's output", "the gradient from the projector"
            )
        )
        norm.register_forward_pre_hook(
            lambda module, inputs: self._watch(inputs[0], "the projector's output", "the gradient from the norm")
        )
        norm.register_forward_hook(
            lambda module, inputs, output: self._watch(
                output, "the norm's output", "the gradient from the language model"
            )
        )
        inner.language_model.register_forward_hook(
            lambda module, inputs, output: self._watch(
                output[0], "the language model's output", "the gradient from the loss"
            )
        )

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Takes down which weights are not finite from the beginning: no run may need them."""
        self._damaged = weights_not_finite(model)

    def on_step_begin(self, args, state, control, **kwargs):
        """Begins to count anew."""
        self._step = state.global_step + 1
        self._not_finite.zero_()

    def see_loss(self, loss: Tensor) -> None:
        """Looks at the loss of a batch."""
        self._count(LOSS, loss)

    def may_step(self, total_norm: Tensor | float | None, scaler: GradScaler | None) -> bool:
        """Whether the optimizer may take this step. All processes must call it at the same time.

        Args:
            total_norm: The norm of all gradients; None where DeepSpeed does not know it, below 0 where it found that
                it is not finite.
            scaler: What scales the gradients of fp16.

        Raises:
            FloatingPointError: Loss or gradients are not finite, and `bad_steps` is "stop", or so were those of the
                last steps. The message names step, module and the last complete checkpoint.
        """
        if total_norm is not None:
            norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
            norm = torch.as_tensor(norm, device=self.args.device)
            self._not_finite[WEIGHTS] += ~(norm.isfinite() & (norm >= 0))
        found = reduce(self._not_finite, "sum").tolist()
        if not (found[LOSS] or found[WEIGHTS]):
            self._taken, self._passed_over = self._taken + 1, 0
            return True
        if self.args.fp16 and not found[LOSS] and (scaler is None or scaler.get_scale() >= 1):
            return True
        first = next(place for place, count in zip(PLACES, found, strict=True) if count)
        said = f"Step {self._step} has values that are not finite, first in {first}."
        self._passed_over += 1
        if self.args.bad_steps == "stop":
            skip = "; --bad_steps skip passes over such steps, in a run that is resumed too"
            raise FloatingPointError(f"{said} {self._remedy(skip)}")
        if self._passed_over == IN_A_ROW:
            raise FloatingPointError(f"{said} So had the {IN_A_ROW - 1} steps before it. {self._remedy()}")
        logger.warning(f"{said} The step is passed over.")
        return False

    def check_weights(self, model: nn.Module) -> None:
        """Looks at the weights before they are saved. All processes must call it at the same time.

        Raises:
            FloatingPointError: Training made some of them NaN or infinite.
        """
        if self._damaged is not None and (new := [n for n in weights_not_finite(model) if n not in self._damaged]):
            raise FloatingPointError(
                f"After step {self._step}, {len(new)} tensors of the model are not finite, first {new[0]}. They are "
                f"not saved. {self._remedy()}"
            )

    def _watch(self, values: Tensor, place: str, gradient_place: str) -> None:
        """Looks at what one module hands on to another, and at the gradient that it gets back."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return  # evaluation, an answer, or torch.compile, which cannot trace hooks on gradients
        self._count(PLACES.index(place), values)
        if values.requires_grad:
            values.register_hook(lambda gradient: self._count(PLACES.index(gradient_place), gradient))

    def _count(self, place: int, values: Tensor) -> None:
        self._not_finite[place] += ~values.detach().isfinite().all().to(self._not_finite.device)

    def _remedy(self, skip: str = "") -> str:
        if self._damaged and not self._taken:
            return (
                f"{len(self._damaged)} tensors of the model were not finite when they were loaded, first "
                f"{self._damaged[0]}: train from a checkpoint that is not damaged."
            )
        last = newest_complete(self.args.output_dir, self.args.world_size)
        there = f"The last complete checkpoint is {last}." if last else "There is no complete checkpoint yet."
        return f"{there} Start again with lower learning rates{skip}."


@torch.no_grad()
def weights_not_finite(model: nn.Module) -> list[str]:
    """Names of parameters with values that are NaN or infinite, in this process's shards or another's."""
    names, finite = [], []
    for name, parameter in model.named_parameters():
        held = parameter.ds_tensor if is_deepspeed_zero3_enabled() else parameter
        held = held.to_local() if isinstance(held, DTensor) else held
        if held.is_floating_point():  # 4-bit weights are packed
            names.append(name)
            finite.append(held.isfinite().all())
    whole = torch.stack([each.to(finite[0].device) for each in finite]).tolist()
    damaged = [name for name, is_finite in zip(names, whole, strict=True) if not is_finite]
    return list(dict.fromkeys(gather_object(damaged)))
