# SPDX-License-Identifier: Apache-2.0
"""What watches the steps: measurements for the log, the check for finite numbers, printed lines."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather_object, reduce
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ...diagnose.measure.families import decoder_layers, token_positions
from ...modeling_normalign_llava import _gathered, gain_magnitude
from ..keeping.checkpoints import newest_complete
from ..modules.forward import watching_outputs
from ..modules.model import base_model, module_of, projector_norm, trained_parameters
from ..modules.precision import evaluating
from ..settings import RunConfig


logger = get_logger(__name__)  # logs in one process only

_IGNORED = -100  # the label of a token that is not learned

GRADIENT_PARTS = ("vision_tower", "projector", "gain", "bias", "language_model")
"""Parts whose gradients are measured. The norm's gain and bias are apart from the projector."""


class Measurements(TrainerCallback):
    """Measures the modules at the steps that are logged; at others it costs next to nothing.

    docs/options.md lists what is logged, over all micro-batches and processes of the step. Frozen
    parts have no entry. DeepSpeed hides gradients. `logging_strategy="epoch"` has no such steps.
    """

    def __init__(self, args: RunConfig):
        self.max_grad_norm = args.max_grad_norm
        self._hooks: list[Any] = []
        self._measuring = False
        self._inputs: dict[str, Any] = {}  # of the forward pass, until its tokens are measured
        self._divisor: Tensor | float = 1.0  # of this step's clipping
        self._clipped: Tensor | int = 0  # how many steps since the last log were
        self._steps = 0  # since the last log
        self._grad_norms: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}  # the sum of norms, and their number

    def after_clip(self, total_norm: Tensor | float | None) -> None:
        """Takes the norm of all gradients before clipping, on its device; DeepSpeed's is None."""
        if total_norm is None or not self.max_grad_norm:
            return
        ratio = (_whole(total_norm) + 1e-6) / self.max_grad_norm  # as torch computes it
        self._divisor = torch.as_tensor(ratio).clamp(min=1.0)
        self._clipped = self._clipped + (self._divisor > 1)
        self._steps += 1

    def collect(self) -> dict[str, float]:
        """What was measured at a logged step, over all processes, which must call this together."""
        if not self._measuring:
            return {}
        self._measuring = False
        tensors = norm_values(self._model) | self._grad_norms
        values = {name: tensor.item() for name, tensor in tensors.items()}
        for name, (total, count) in reduce(self._norms, "sum").items():
            if count:
                values[name] = (total / count).item()
        if self._steps:
            values["clip/share"] = int(self._clipped) / self._steps
        self._clipped = self._steps = 0
        return values

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._model = base_model(model)
        self._clipped = self._steps = 0
        state.compute_steps(args, state.max_steps)  # a resumed state has those of earlier options

    def on_step_begin(self, args, state, control, **kwargs):
        step = state.global_step + 1
        by_steps = args.logging_strategy == "steps" and step % state.logging_steps == 0
        self._measuring = by_steps or (step == 1 and args.logging_first_step)
        if not self._measuring:
            return
        self._grad_norms, self._norms = {}, {}
        inner, first = self._model.model, decoder_layers(self._model.model.language_model)[0]
        self._hooks = [
            inner.register_forward_pre_hook(self._keep_inputs, with_kwargs=True),
            first.register_forward_pre_hook(self._add_token_norms, with_kwargs=True),
        ]

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for hook in self._hooks:
            hook.remove()
        if not self._measuring or AcceleratorState().distributed_type == DistributedType.DEEPSPEED:
            return
        norms: dict[str, list[Tensor]] = {}
        for name, parameter in trained_parameters(model).items():
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float32)
                norms.setdefault(_part(name), []).append(_whole(norm).to(args.device))
        # Measured after clipping and scaled back: only by then are the gradients of fp16 unscaled.
        for part, values in norms.items():
            self._grad_norms[f"grad_norm/{part}"] = torch.stack(values).norm() * self._divisor

    def _keep_inputs(self, module, args, kwargs):
        self._inputs = kwargs

    @torch.no_grad()
    def _add_token_norms(self, module, args, kwargs):
        if not self._inputs:
            return  # gradient checkpointing runs the layer again
        hidden = args[0] if args else kwargs["hidden_states"]
        norms = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32)
        ids, mask, self._inputs = self._inputs["input_ids"], self._inputs.get("attention_mask"), {}
        for name, places in token_positions(ids, mask, self._model.config.image_token_id).items():
            mask = places.to(norms.device)
            total = torch.stack([torch.where(mask, norms, 0).sum(), mask.sum()])
            self._norms[f"norm/{name}"] = total + self._norms.get(f"norm/{name}", 0)


@torch.no_grad()
def norm_values(model: nn.Module) -> dict[str, Tensor]:
    """Size of gain and bias (table 5) and the factor of gradient compensation (eq. 12), by name."""
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
    """Which of `GRADIENT_PARTS` a parameter belongs to."""
    module = module_of(name)
    if module == "norm":
        return "gain" if name.endswith("weight") else "bias"
    return {"vision": "vision_tower", "language": "language_model"}.get(module, module)


def _whole(norm: Any) -> Any:
    """A norm as a number or a whole tensor, also if FSDP2 divides the gradients."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


MAX_CONSECUTIVE_SKIPS = 10
"""A run that skips bad steps stops after so many in a row."""


class FiniteCheck(TrainerCallback):
    """Checks that loss and gradients of a step are finite; only if not, finds the first bad module.

    Bad values are counted on their device. Once in an optimizer step the counts are summed over the
    processes, so that all of them stop or none, and read, which waits for the device. With fp16,
    infinite gradients are normal now and then: the gradient scaler, or DeepSpeed, skips such a step
    and lowers its scale. There only the loss counts, until the scale is below 1.

    A step without any label, as all its rows were skipped, has zero gradients. It is not taken
    either: an optimizer would still decay weights and follow its momentum.
    """

    def __init__(self, args: RunConfig):
        self.args = args
        # Losses and norms that are not finite, and labels.
        self._counts = torch.zeros(3, dtype=torch.int32, device=args.device)
        self._batches: list[Mapping[str, Any]] = []  # of this step
        self._step = self._skipped = 0
        self._in_training = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if damaged := weights_not_finite(model):
            raise FloatingPointError(f"{damaged[0]} is not finite. Train another checkpoint.")

    def on_step_begin(self, args, state, control, **kwargs):
        """Forgets the step before, also one that was never taken."""
        self._step, self._batches = state.global_step + 1, []
        self._in_training = True
        self._counts.zero_()

    def on_train_end(self, args, state, control, **kwargs):
        """Forgets the last step's batches: a loss that is computed later belongs to no step."""
        self._in_training, self._batches = False, []

    def check_loss(self, loss: Tensor, batch: Mapping[str, Any]) -> None:
        """Checks the loss of a batch, which is kept until the step is taken."""
        if not self._in_training:
            return  # of an estimate of memory, or of somebody's call
        self._counts[0] += ~loss.detach().isfinite().all().to(self._counts.device)
        labels = batch.get("labels")
        count = 1 if labels is None else (labels != _IGNORED).sum().to(self._counts.device)
        self._counts[2] += count
        self._batches.append(batch)

    def is_step_finite(
        self, model: nn.Module, total_norm: Tensor | float | None, scaler: GradScaler | None
    ) -> bool:
        """Whether the optimizer may take this step. All processes must call it at the same time."""
        if total_norm is not None:  # DeepSpeed may not know it, or give -1 if it is not finite
            norm = torch.as_tensor(_whole(total_norm), device=self.args.device)
            self._counts[1] += ~(norm.isfinite() & (norm >= 0))
        losses, gradients, labels = reduce(self._counts, "sum").tolist()
        batches, self._batches = self._batches, []  # before the next ones are read
        if not (losses or gradients):
            self._skipped = 0
            if not labels:
                logger.warning(f"Step {self._step} has no labels, and is passed over.")
            return labels > 0 or AcceleratorState().distributed_type == DistributedType.DEEPSPEED
        if self.args.fp16 and not losses and (scaler is None or scaler.get_scale() >= 1):
            return True
        elsewhere = "the loss" if losses else "the gradients, with finite outputs"
        place = self._first_module(model, batches) or elsewhere
        problem = f"Step {self._step} has values that are not finite, first in {place}."
        self._skipped += 1
        if self.args.bad_steps == "skip" and self._skipped < MAX_CONSECUTIVE_SKIPS:
            logger.warning(f"{problem} The step is skipped.")
            return False
        raise FloatingPointError(
            f"{problem} {self._remedy()} --bad_steps skip, in a resumed run too, skips such steps, "
            f"but not {MAX_CONSECUTIVE_SKIPS} in a row."
        )

    def check_weights(self, model: nn.Module) -> None:
        """Checks weights before they are saved. All processes must call it if they are sharded."""
        if damaged := weights_not_finite(model):
            raise FloatingPointError(
                f"After step {self._step}, {len(damaged)} tensors are not finite, first "
                f"{damaged[0]}. They are not saved. {self._remedy()}"
            )

    def _first_module(self, model: nn.Module, batches: list[Mapping[str, Any]]) -> str:
        """The first module whose output is not finite, in one more pass of the step's batches."""
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
        left = f"The last complete checkpoint is {last}." if last else "No checkpoint is complete."
        return f"{left} Start again with lower learning rates."


@torch.no_grad()
def weights_not_finite(model: nn.Module) -> list[str]:
    """Names of parameters with NaN or infinite values; if they are sharded, in any process."""
    # Whole parameters are not compared with other processes: the first alone may save them.
    largest, sharded = {}, False
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's
        shard = shard.to_local() if isinstance(shard, DTensor) else shard
        sharded |= shard is not parameter
        if shard.is_floating_point() and shard.numel():  # 4-bit weights are packed
            # `isfinite` makes copies: of embeddings, more than stage 1 takes besides weights.
            largest[name] = torch.linalg.vector_norm(shard, torch.inf)
    damaged = [name for name, value in largest.items() if not value.isfinite()]
    return list(dict.fromkeys(gather_object(damaged))) if sharded else damaged


LOG_COLUMNS = {
    "loss": ("loss", 9, ".4g"),
    "lr": ("learning_rate", 8, ".3g"),
    "visual": ("norm/visual", 8, ".3g"),
    "text": ("norm/text", 8, ".3g"),
    "gradient": ("grad_norm", 8, ".3g"),
    "clipped": ("clip/share", 7, ".0%"),
}
"""The columns between step and time left: key in the log, width and format."""


def show_lines(trainer: Trainer) -> None:
    """Has a trainer print lines of what it logs, and bars on a terminal; a notebook has a table."""
    bars, printer = trainer.pop_callback(ProgressCallback), trainer.pop_callback(PrinterCallback)
    if bars and sys.stderr.isatty():
        trainer.add_callback(Bars)
    if bars or printer:
        trainer.add_callback(ProgressLines)


class Bars(ProgressCallback):
    """The Trainer's bars, without what is logged."""

    on_log = TrainerCallback.on_log


class ProgressLines(TrainerCallback):
    """Prints a line, 80 columns at most, for a logged step or held-out loss; `-`: not measured."""

    def __init__(self):
        # Evaluation and `Trainer.log` may come before training.
        self._first_step = 0
        self._began: float | None = None  # when the first step did
        self._explained = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._first_step, self._began = state.global_step, None
        names = (f"{name:>{width}}" for name, (_, width, _) in LOG_COLUMNS.items())
        _print(state, "step", *names, "time left")

    def on_step_begin(self, args, state, control, **kwargs):
        """Starts the clock at the first step: before it, a resumed run reads the earlier rows."""
        if self._began is None:
            self._began = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        step, steps = f"{state.global_step}/{state.max_steps}", state.global_step - self._first_step
        if "loss" in logs:
            cells = []
            for key, width, form in LOG_COLUMNS.values():
                value = format(logs[key], form) if key in logs else "-"
                cells.append(f"{value:>{width}}")
            _print(state, step, *cells, f"{self._time_left(state, steps):>9}")
            self._explain(args, state, logs)
        elif "train_runtime" in logs:
            took = timedelta(seconds=round(logs["train_runtime"]))
            loss = f", mean loss {logs['train_loss']:.4g}" if steps else ": the run was complete"
            _print(state, f"{steps:,} steps in {took}{loss}")
        else:
            for key in (key for key in logs if key.endswith("_loss")):
                _print(state, step, f"{key} {logs[key]:.4g}")

    def _time_left(self, state, steps: int) -> str:
        if steps < 1 or self._began is None:
            return "-"
        pace = (time.perf_counter() - self._began) / steps
        return str(timedelta(seconds=round(pace * (state.max_steps - state.global_step))))

    def _explain(self, args, state, logs: Mapping[str, float]) -> None:
        """Says once why steps are clipped with GWC: its factor is in the gradient that is shown."""
        factor, clipped = logs.get("gwc/factor", 1.0), logs.get("clip/share", 0.0)
        if self._explained or factor <= 1 or clipped <= 0.5:
            return
        self._explained = True
        show(
            state,
            f"GWC multiplies the gradients of projector and vision tower by {factor:.3g}, so the "
            f"gradient is large and clipped to max_grad_norm {args.max_grad_norm:g}: as intended.",
        )


def show(state, text: str) -> None:
    """Prints a line in the first process, above the bars."""
    if state.is_world_process_zero:
        tqdm.write(text)
        sys.stdout.flush()  # a file is read while it is written


def _print(state, first: str, *cells: str) -> None:
    width = max(len("step"), 2 * len(str(state.max_steps)) + 1)
    show(state, " ".join([f"{first:>{width}}", *cells]))
