# SPDX-License-Identifier: Apache-2.0
"""Stops a run at the first step whose loss or gradients are not finite, and names the module they came from."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, reduce
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from ..keeping.checkpoints import newest_complete
from ..modules.model import evaluating, watching_outputs
from ..options.arguments import NormAlignConfig


logger = get_logger(__name__)  # logs in one process only

MAX_CONSECUTIVE_SKIPS = 10
"""A run that skips bad steps stops after so many in a row."""


class FiniteCheck(TrainerCallback):
    """Checks whether loss and gradients of a step are finite; only if not, looks for the module that was first.

    They are counted on their device. Once in an optimizer step the counts are summed over the processes, so that all
    of them stop or none, and read, which waits for the device.

    With fp16, infinite gradients are normal now and then: the gradient scaler, or DeepSpeed, skips such a step and
    lowers its scale. There only the loss counts, until the scale is below 1.
    """

    def __init__(self, args: NormAlignConfig):
        self.args = args
        self._not_finite = torch.zeros(2, dtype=torch.int32, device=args.device)  # losses, norms of gradients
        self._batches: list[Mapping[str, Any]] = []  # of this step
        self._step = self._skipped = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if damaged := weights_not_finite(model):
            raise FloatingPointError(f"{damaged[0]} of the model is not finite. Train another checkpoint.")

    def on_step_begin(self, args, state, control, **kwargs):
        """Forgets the step before, also one that was never taken."""
        self._step, self._batches = state.global_step + 1, []
        self._not_finite.zero_()

    def check_loss(self, loss: Tensor, batch: Mapping[str, Any]) -> None:
        """Checks the loss of a batch, which is kept until the step is taken."""
        if not self._step:
            return  # of an estimate of memory
        self._not_finite[0] += ~loss.detach().isfinite().all().to(self._not_finite.device)
        self._batches.append(batch)

    def is_step_finite(self, model: nn.Module, total_norm: Tensor | float | None, scaler: GradScaler | None) -> bool:
        """Whether the optimizer may take this step. All processes must call it at the same time.

        `total_norm`, of all gradients, is None if DeepSpeed does not know it, and below 0 if it is not finite.
        """
        if total_norm is not None:
            norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
            norm = torch.as_tensor(norm, device=self.args.device)
            self._not_finite[1] += ~(norm.isfinite() & (norm >= 0))
        losses, gradients = reduce(self._not_finite, "sum").tolist()
        batches, self._batches = self._batches, []  # before the next ones are read
        if not (losses or gradients):
            self._skipped = 0
            return True
        if self.args.fp16 and not losses and (scaler is None or scaler.get_scale() >= 1):
            return True
        place = self._first_module(model, batches) or ("the loss" if losses else "the gradients, with finite outputs")
        problem = f"Step {self._step} has values that are not finite, first in {place}."
        self._skipped += 1
        if self.args.bad_steps == "skip" and self._skipped < MAX_CONSECUTIVE_SKIPS:
            logger.warning(f"{problem} The step is skipped.")
            return False
        raise FloatingPointError(
            f"{problem} {self._remedy()} --bad_steps skip, in a resumed run too, skips such steps, but not "
            f"{MAX_CONSECUTIVE_SKIPS} in a row."
        )

    def check_weights(self, model: nn.Module) -> None:
        """Checks the weights before they are saved. If they are sharded, all processes must call it together."""
        if damaged := weights_not_finite(model):
            raise FloatingPointError(
                f"After step {self._step}, {len(damaged)} tensors of the model are not finite, first {damaged[0]}. "
                f"They are not saved. {self._remedy()}"
            )

    def _first_module(self, model: nn.Module, batches: list[Mapping[str, Any]]) -> str:
        """The first module that gives values that are not finite, in one more forward pass of the step's batches."""
        first: list[str] = []

        def look(name: str, outputs: list[Tensor]) -> None:
            if not first and not all(output.isfinite().all() for output in outputs):
                first.append(f"the output of {name}")

        try:
            with evaluating(model, self.args), watching_outputs(model, look):
                for batch in batches:  # all of them: sharded weights are gathered by all processes
                    model(**batch, fused_lm_head=True)
        finally:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # as a backward pass would: gradients are those of shards
        return next(iter(gather_object(first)), "")

    def _remedy(self) -> str:
        last = newest_complete(self.args.output_dir, self.args.world_size)
        remaining = f"The last complete checkpoint is {last}." if last else "There is no complete checkpoint yet."
        return f"{remaining} Start again with lower learning rates."


@torch.no_grad()
def weights_not_finite(model: nn.Module) -> list[str]:
    """Names of parameters with values that are NaN or infinite, in this process's shards or another's.

    Only sharded weights are compared with other processes: the first process alone may save weights that all have.
    """
    largest, sharded = {}, is_deepspeed_zero3_enabled()
    for name, parameter in model.named_parameters():
        shard = parameter.ds_tensor if is_deepspeed_zero3_enabled() else parameter
        if isinstance(shard, DTensor):
            shard, sharded = shard.to_local(), True
        if shard.is_floating_point() and shard.numel():  # 4-bit weights are packed
            # `isfinite` makes copies: of an embedding matrix, they are more than stage 1 takes besides weights.
            largest[name] = torch.linalg.vector_norm(shard, torch.inf)
    damaged = [name for name, value in largest.items() if not value.isfinite()]
    return list(dict.fromkeys(gather_object(damaged))) if sharded else damaged
