# SPDX-License-Identifier: Apache-2.0
"""Checks that stop a run: values are finite, and rows of one sequence are kept apart."""

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

from ..keeping.checkpoints import newest_complete
from ..modules.forward import watching_outputs
from ..modules.precision import evaluating
from ..modules.sharding import sharding
from ..settings import RunConfig
from .measurements import whole_norm


logger = get_logger(__name__)  # logs in one process only

_IGNORED = -100  # the label of a token that is not learned

MAX_CONSECUTIVE_SKIPS = 10
"""A run that skips bad steps stops after so many in a row."""


class FiniteCheck(TrainerCallback):
    """Checks that loss and gradients of a step are finite. If not, finds the first bad module.

    Bad values are counted on their device. Once in an optimizer step, the counts are summed over
    all processes, so that either all of them stop or none does. Reading the sums waits for the
    device. With fp16, infinite gradients are normal now and then: the gradient scaler, or
    DeepSpeed, skips such a step and lowers its scale. Then only the loss is checked, until the
    scale is below 1.

    If all rows of a step were skipped, it has no labels, and zero gradients. It is not taken
    either, because an optimizer would still decay weights and follow its momentum.
    """

    def __init__(self, args: RunConfig):
        self.args = args
        # Counts of this step: losses that are not finite, such gradient norms, and labels.
        self._counts = torch.zeros(3, dtype=torch.int32, device=args.device)
        self._batches: list[Mapping[str, Any]] = []  # of this step
        self._step = 0
        self._consecutive_skips = 0
        self._in_training = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Raises FloatingPointError if weights are not finite."""
        damaged = weights_not_finite(model)
        if damaged:
            raise FloatingPointError(f"{damaged[0]} is not finite. Train another checkpoint.")

    def on_step_begin(self, args, state, control, **kwargs):
        """Forgets the step before, also one that was never taken."""
        self._step = state.global_step + 1
        self._batches = []
        self._in_training = True
        self._counts.zero_()

    def on_train_end(self, args, state, control, **kwargs):
        """Forgets the last step's batches: a loss that is computed later belongs to no step."""
        self._in_training = False
        self._batches = []

    def check_loss(self, loss: Tensor, batch: Mapping[str, Any]) -> None:
        """Counts the loss of a batch if it is bad. Keeps the batch until the step is taken."""
        if not self._in_training:
            return  # an estimate of memory, or a user's call
        device = self._counts.device
        self._counts[0] += ~loss.detach().isfinite().all().to(device)
        labels = batch.get("labels")
        if labels is None:
            self._counts[2] += 1
        else:
            self._counts[2] += (labels != _IGNORED).sum().to(device)
        self._batches.append(batch)

    def may_take_step(
        self, model: nn.Module, total_norm: Tensor | float | None, scaler: GradScaler | None
    ) -> bool:
        """Returns whether the optimizer may take this step. All processes must call it together.

        A step without labels is passed over, and a bad one is skipped, each with a warning. In fp16
        a bad step may be taken: its scaler then skips it and lowers the scale.

        Args:
            model: The model. If the step is bad, its first bad module is looked for.
            total_norm: The norm of all gradients, if it is known.
            scaler: The gradient scaler of fp16, if there is one.

        Raises:
            FloatingPointError: The step has bad values, and cannot be skipped.
        """
        if total_norm is not None:  # DeepSpeed may not know it, or give -1 if it is not finite
            norm = torch.as_tensor(whole_norm(total_norm), device=self.args.device)
            self._counts[1] += ~(norm.isfinite() & (norm >= 0))
        bad_losses, bad_norms, labels = reduce(self._counts, "sum").tolist()
        batches = self._batches
        self._batches = []  # before the next ones are read
        if not bad_losses and not bad_norms:
            self._consecutive_skips = 0
            if not labels:
                logger.warning(f"Step {self._step} has no labels, and is passed over.")
            # DeepSpeed takes every step.
            return labels > 0 or sharding() == "DeepSpeed"
        if self.args.fp16 and not bad_losses and (scaler is None or scaler.get_scale() >= 1):
            return True
        without_bad_output = "the loss" if bad_losses else "the gradients, with finite outputs"
        place = self._first_bad_output(model, batches) or without_bad_output
        problem = f"Step {self._step} has values that are not finite, first in {place}."
        self._consecutive_skips += 1
        may_skip = self._consecutive_skips < MAX_CONSECUTIVE_SKIPS
        if self.args.bad_steps == "skip" and may_skip:
            logger.warning(f"{problem} The step is skipped.")
            return False
        raise FloatingPointError(
            f"{problem} {self._remedy()} --bad_steps skip, in a resumed run too, skips such steps, "
            f"but not {MAX_CONSECUTIVE_SKIPS} in a row."
        )

    def check_weights(self, model: nn.Module) -> None:
        """Raises FloatingPointError if weights that would be saved are not finite.

        If they are sharded, all processes must call this together.
        """
        damaged = weights_not_finite(model)
        if damaged:
            raise FloatingPointError(
                f"After step {self._step}, {len(damaged)} tensors are not finite, first "
                f"{damaged[0]}. They are not saved. {self._remedy()}"
            )

    def _first_bad_output(self, model: nn.Module, batches: list[Mapping[str, Any]]) -> str:
        """Runs the step's batches once more, and names the first output that is not finite."""
        bad_outputs: list[str] = []

        def note_first(module_name: str, outputs: list[Tensor]) -> None:
            if not bad_outputs and not all(output.isfinite().all() for output in outputs):
                bad_outputs.append(f"the output of {module_name}")

        try:
            with evaluating(model, self.args), watching_outputs(model, note_first):
                for batch in batches:  # all of them: sharded weights are gathered by all processes
                    model(**batch, fused_lm_head=True)
        finally:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # as a backward pass would: each shard has its own gradients
        return next(iter(gather_object(bad_outputs)), "")

    def _remedy(self) -> str:
        last_checkpoint = newest_complete(self.args.output_dir, self.args.world_size)
        fact = "No checkpoint is complete."
        if last_checkpoint:
            fact = f"The last complete checkpoint is {last_checkpoint}."
        return f"{fact} Start again with lower learning rates."


@torch.no_grad()
def weights_not_finite(model: nn.Module) -> list[str]:
    """Returns the names of parameters with NaN or infinite values.

    If parameters are sharded, the shards of all processes count. Whole parameters are not compared
    with other processes, as the first process may be the only one that saves them.
    """
    largest_values = {}
    is_sharded = False
    for parameter_name, parameter in model.named_parameters():
        shard = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's
        if isinstance(shard, DTensor):
            shard = shard.to_local()
        if shard is not parameter:
            is_sharded = True
        if shard.is_floating_point() and shard.numel():  # 4-bit weights are packed
            # `isfinite` makes copies: for embeddings, more than stage 1 takes besides weights.
            largest_values[parameter_name] = torch.linalg.vector_norm(shard, torch.inf)
    damaged = [name for name, largest in largest_values.items() if not largest.isfinite()]
    if is_sharded:
        damaged = list(dict.fromkeys(gather_object(damaged)))
    return damaged


class PackedAttentionCheck(TrainerCallback):
    """Checks before the first step that a language model keeps the rows of one sequence apart.

    Layers with recurrence do not, nor do positions that ignore `position_ids`.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Raises ValueError if a row's logits depend on the rows before it."""
        first = torch.arange(5, 11, device=args.device)  # every vocabulary has these ids
        second = first + 1
        last = torch.tensor([9, 5, 11, 7, 12, 8], device=args.device)
        with evaluating(model, args):
            without_others = last_logits(model, [last])
            behind_first = last_logits(model, [first, last])
            behind_second = last_logits(model, [second, last])
        # Rounding depends on shapes of products. Other rows change them in a mixture of experts.
        place_change = (behind_first - without_others).norm() / without_others.norm()
        rows_change = (behind_first - behind_second).norm() / without_others.norm()
        most_by_place = 1e-3
        most_by_rows = 1e-5
        if args.bf16 or args.fp16:
            most_by_place = 0.05
            most_by_rows = 0.01
        if place_change > most_by_place or rows_change > most_by_rows:
            kind = model.config.get_text_config().model_type
            raise ValueError(f"padding_free would mix rows in a {kind}. Leave it out.")


def last_logits(model: nn.Module, rows: list[Tensor]) -> Tensor:
    """Returns the logits `(T, V)` of the last of some rows `(T,)` in one sequence."""
    length = len(rows[-1])
    positions = torch.arange(length, device=rows[0].device)
    logits = model(
        input_ids=torch.cat(rows)[None],
        position_ids=positions.repeat(len(rows))[None],
        use_cache=False,
    ).logits
    return logits[0, -length:].float()
