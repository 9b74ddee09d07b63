# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Options of a training run, in YAML and on the command line: TRL's under TRL's names, and ours."""

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import SchedulerType
from trl import ModelConfig, SFTConfig

from ..checkpoint.precision import half_precision_pays
from ..data.sources.arguments import check_choice
from .command import CHOICES
from .deepspeed import check_deepspeed, keep_float32
from .refused import check_refused, check_trackers
from .resume import began_in_bfloat16


STAGES: dict[str, dict[str, Any]] = {
    "align": {
        "learning_rate": 1e-3,
        "vision_learning_rate": 0.0,
        "language_learning_rate": 0.0,
        "global_batch_size": 256,
        "per_device_train_batch_size": 2,
    },
    "tune": {
        "learning_rate": 1e-5,
        "vision_learning_rate": 2e-6,
        "global_batch_size": 128,
        "per_device_train_batch_size": 1,
    },
}
"""Defaults of the paper's two stages (appendix E)."""

ADAPTERS: dict[str, float] = {
    "learning_rate": 2e-4,
    "projector_learning_rate": 2e-5,
    "norm_learning_rate": 2e-5,
}
"""Learning rates of stage `tune` with adapters: LLaVA-1.5's for LoRA."""

BOTH_STAGES: dict[str, Any] = {
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,  # a ratio, since it is below 1
    "weight_decay": 0.0,
    "seed": 42,
}
"""Defaults of both stages."""

WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
"""Schedules of transformers that ignore `warmup_steps`."""


@dataclass
class NormAlignConfig(SFTConfig):
    """TRL's `SFTConfig`, with the stage, the arm, a learning rate for each module, samples and probes.

    Rows longer than `max_length` are dropped, never truncated. Labels are on assistant turns alone. Unless `bf16` or
    `fp16` is given, steps are in bfloat16 where this machine is fast in it ([`half_precision_pays`]).

    Raises:
        ValueError: a learning rate is negative, nothing is trained, warm-up is given to a schedule that has none, or
            an option would put image tokens into the labels.
    """

    stage: Literal["align", "tune"] | None = field(
        default=None,
        metadata={"help": "The paper's stage, which sets defaults: align (projector, norm) or tune (everything)."},
    )
    arm: Literal["none", "unit", "aligned", "gwc"] | None = field(
        default=None, metadata={"help": "Arm to train, if it is not the one the checkpoint was built as."}
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows in an optimizer step over all processes; accumulation steps are derived from it."},
    )
    vision_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the vision tower; 0 freezes. Default: the stage's; 0 with use_peft."},
    )
    projector_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the projector's linear layers; 0 freezes. Default: learning_rate."},
    )
    norm_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of gain and bias; 0 freezes. Default: learning_rate."}
    )
    language_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the language model or its adapters; 0 freezes. Default: learning_rate."},
    )
    learning_rate: float = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "Learning rate of modules that have none of their own. Default: the stage's; for tune with "
            "use_peft 2e-4 for adapters, 2e-5 for projector and norm."
        },
    )
    per_device_train_batch_size: int = field(default=None, metadata={"help": "Rows in a forward pass."})  # type: ignore[assignment]
    num_train_epochs: float = field(default=None, metadata={"help": "Passes over the data."})  # type: ignore[assignment]
    lr_scheduler_type: str = field(default=None, metadata={"help": "Schedule of the learning rate."})  # type: ignore[assignment]
    warmup_steps: float = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Steps of linear warm-up, or their share of all steps if below 1."}
    )
    weight_decay: float = field(default=None, metadata={"help": "Weight decay; never of gain, biases, norms."})  # type: ignore[assignment]
    seed: int = field(default=None, metadata={"help": "Random seed."})  # type: ignore[assignment]
    bf16: bool | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": True,
            "help": "Whether to multiply in bfloat16. Default: what the resumed run did, else if it is fast here.",
        },
    )
    router_aux_loss_coef: float | None = field(default=0.0, metadata={"help": "Always 0 here."})
    max_length: int | None = field(
        default=2048, metadata={"help": "Rows with more tokens, image tokens included, are dropped and counted."}
    )
    assistant_only_loss: bool = field(default=True, metadata={"help": "Always true here: the loss is on the answers."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Always false here: the collator needs all."})
    use_cpu: bool | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "nargs": "?",
            "const": True,
            "help": "Whether to train on the CPU. Default: if there is no accelerator.",
        },
    )
    padding_free: bool = field(
        default=False,
        metadata={"help": "Put the rows of a batch one after another in one sequence, without padding."},
    )
    packing: bool = field(
        default=False,
        metadata={
            "help": "Divide the rows of each step into forward passes of nearly equal numbers of tokens, without "
            "padding. The rows of a step stay the same."
        },
    )
    tokens_per_device: int | None = field(
        default=None,
        metadata={
            "help": "With packing, in place of per_device_train_batch_size: the most tokens in a forward pass. "
            "Accumulation steps are derived from it."
        },
    )
    sample_count: int = field(
        default=4,
        metadata={"help": "Held-out examples to answer at each evaluation, in samples/."},
    )
    sample_max_new_tokens: int = field(default=64, metadata={"help": "Longest answer of these, in tokens."})
    eval_suite: str | None = field(
        default=None,
        metadata={
            "help": "Suites and tasks of `normalign evaluate`, with commas between them, to evaluate every eval_steps."
        },
    )
    eval_suite_limit: int = field(default=32, metadata={"help": "Samples of each of these tasks, the first ones."})
    eval_suite_path: str | None = field(default=None, metadata={"help": "Folder with task files of your own."})
    probe_steps: list[int] | None = field(
        default=None, metadata={"help": "Steps at which inter-layer cosines are recorded on a fixed batch (figure 5)."}
    )
    probe_rows: int = field(default=4, metadata={"help": "Rows in that batch."})
    bad_steps: Literal["stop", "skip"] = field(
        default="stop",
        metadata={
            "help": "If a step's loss or gradients are not finite: stop and name the module they came from, or skip "
            "the step."
        },
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "last",
            "help": "Resume from the newest complete checkpoint in output_dir, or from the one named.",
        },
    )

    def __post_init__(self):
        check_choice(self, "stage", (None, *CHOICES["stage"]))
        check_choice(self, "arm", (None, *CHOICES["arm"]))
        self.learning_rate_is_given = self.learning_rate is not None
        if self.tokens_per_device:
            self.per_device_train_batch_size = 1  # in whose place it is
        defaults = {**BOTH_STAGES, **STAGES[self.stage]} if self.stage else {}
        if self.lr_scheduler_type in WITHOUT_WARMUP:
            if self.warmup_steps:
                schedule = SchedulerType(self.lr_scheduler_type).value
                raise ValueError(
                    f"warmup_steps is {self.warmup_steps:g}, but lr_scheduler_type {schedule} has no warm-up. Leave "
                    "warmup_steps out, or choose another schedule, such as constant_with_warmup."
                )
            self.warmup_steps = 0  # in place of the stage's
        for name in ("learning_rate", "per_device_train_batch_size", "global_batch_size", *BOTH_STAGES):
            if getattr(self, name) is None:
                default = SFTConfig.__dataclass_fields__[name].default if name != "global_batch_size" else None
                setattr(self, name, defaults.get(name, default))
        self.use_cpu = not torch.accelerator.is_available() if self.use_cpu is None else self.use_cpu
        if self.bf16 is None and not self.fp16:
            self._choose_precision()
        super().__post_init__()
        check_refused(self)
        check_trackers(self.report_to)
        if self.do_eval and self.eval_strategy == "no":
            raise ValueError("do_eval alone evaluates nothing. Set eval_strategy.")
        self._check_packing()
        self.padding_free = self.padding_free or self.packing
        if self.padding_free and self.pad_to_multiple_of:
            raise ValueError("pad_to_multiple_of pads, and padding_free leaves no padding. Leave one of them out.")
        check_choice(self, "bad_steps", CHOICES["bad_steps"])
        if self.deepspeed_plugin is not None:
            check_deepspeed(self.deepspeed_plugin, self)
            keep_float32(self.deepspeed_plugin, self)
            self.deepspeed_plugin.set_deepspeed_weakref()  # under ZeRO-3, models are loaded in its precision
        # The filter hides steps that are not finite from the log, and waits for the device at every batch.
        self.logging_nan_inf_filter = self.bad_steps == "skip"
        self.hub_token = self.hub_token and self.hub_token.strip()  # a block of YAML ends in a line break
        self.probe_steps = None if self.probe_steps is None else [int(step) for step in _as_list(self.probe_steps)]
        learning_rates = self.learning_rates(use_peft=False)
        for module, learning_rate in learning_rates.items():
            if learning_rate < 0:
                raise ValueError(f"{module}_learning_rate must not be negative, got {learning_rate}.")
        if not any(learning_rates.values()):
            raise ValueError("Every learning rate is 0, so nothing would be trained. Give some module another.")
        least_of = {"per_device_train_batch_size": 1, "global_batch_size": 1, "probe_rows": 1, "sample_count": 0}
        least_of |= {"tokens_per_device": 1, "eval_suite_limit": 1}
        for name, least in least_of.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        self.router_aux_loss_coef = 0.0  # TRL would take it from the language model's configuration

    def _choose_precision(self) -> None:
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION")  # by a configuration of accelerate
        began = began_in_bfloat16(self.resume_from_checkpoint, self.output_dir)
        self.fp16 = asked == "fp16"
        if asked in ("bf16", "fp16"):
            self.bf16 = asked == "bf16"
        else:
            self.bf16 = half_precision_pays(device="cpu" if self.use_cpu else None) if began is None else began

    def _check_packing(self) -> None:
        if self.packing and self.train_sampling_strategy == "batch_rebalance":
            raise ValueError("packing balances batches without padding; batch_rebalance does with it. Leave one out.")
        if self.packing and not (self.average_tokens_across_devices and self.accelerator_config.use_seedable_sampler):
            raise ValueError(
                "packing needs average_tokens_across_devices and accelerator_config's use_seedable_sampler, which are "
                "on by default, or steps would change. Leave both out."
            )
        if (self.packing or self.padding_free) and self.neftune_noise_alpha is not None:
            raise ValueError(
                "neftune_noise_alpha scales noise by the length of a sequence, which with packing or padding_free "
                "holds several rows. Leave one out."
            )
        if self.tokens_per_device is None:
            return
        if not self.packing:
            raise ValueError("tokens_per_device is for packing. Add packing.")
        if self.global_batch_size is None:
            raise ValueError("tokens_per_device divides the rows of a step. Set global_batch_size, or a stage.")

    def learning_rates(self, use_peft: bool) -> dict[str, float]:
        """The peak learning rate of each module; 0 if it is frozen.

        Args:
            use_peft: Whether adapters are trained in place of the language model. The vision tower is then frozen
                unless it was given a learning rate.
        """
        return {module: value for module, (value, _) in self.explained_learning_rates(use_peft).items()}

    def explained_learning_rates(self, use_peft: bool) -> dict[str, tuple[float, str]]:
        """[`learning_rates`], each with its origin: `"given"`, or whose default it is, such as `"stage tune"`."""
        defaults, origin = STAGES.get(self.stage or "", {}), f"stage {self.stage}" if self.stage else "TRL"
        if use_peft and self.stage == "tune" and not self.learning_rate_is_given:
            defaults, origin = ADAPTERS, "adapters"
        rest = defaults.get("learning_rate", self.learning_rate), origin
        if self.learning_rate_is_given:
            rest = self.learning_rate, "given"
        found = {}
        for module in ("vision", "projector", "norm", "language"):
            name = f"{module}_learning_rate"
            found[module] = (defaults[name], origin) if name in defaults else rest
            if use_peft and module == "vision":
                found[module] = 0.0, "adapters"
            if (given := getattr(self, name)) is not None:
                found[module] = given, "given"
        return found


@dataclass
class ModelArguments(ModelConfig):
    """TRL's `ModelConfig`: which checkpoint, in which precision, with which adapters."""

    use_bnb_nested_quant: bool = field(
        default=True, metadata={"help": "Whether to quantize the constants of 4-bit quantization too."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("load_in_4bit", "load_in_8bit"):
            if getattr(self, name) and not self.use_peft:
                raise ValueError(f"{name} needs adapters: quantized weights cannot be trained. Add --use_peft.")


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]
