# SPDX-License-Identifier: Apache-2.0
"""The options of a training run, in YAML, Python and on the command line: TRL's, and others."""

import os
import re
from dataclasses import dataclass, replace
from typing import Any

from transformers import BitsAndBytesConfig, TrainingArguments
from trl import ModelConfig, SFTConfig, get_quantization_config

from ..data.sources.arguments import check_choices
from .command import ModelOptions, TrainingOptions, check_refused, names_in


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

WITH_ADAPTERS = {"learning_rate": 2e-4, "projector_learning_rate": 2e-5, "norm_learning_rate": 2e-5}
"""Learning rates of stage `tune` with adapters: LLaVA-1.5's for LoRA."""

BOTH_STAGES: dict[str, Any] = {
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "seed": 42,
    "warmup_steps": 0.03,
    "weight_decay": 0.0,
    "save_steps": 0.1,
    "save_total_limit": 2,
}
"""Defaults of both stages. Steps below 1 are a share of all."""

WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
"""Schedules of transformers that ignore `warmup_steps`."""

PATHS = (
    "output_dir",
    "resume_from_checkpoint",
    "deepspeed",
    "fsdp_config",
    "accelerator_config",
)
"""Options that may be the path of a file or folder. `~` in them is the home folder."""

MODULES = ("vision", "projector", "norm", "language")
"""Parts of the model with a learning rate of their own."""

LEAST = {
    "per_device_train_batch_size": 1,
    "global_batch_size": 1,
    "learning_rate": 0,
    **{f"{module}_learning_rate": 0 for module in MODULES},
    "probe_rows": 1,
    "sample_count": 0,
    "sample_max_new_tokens": 1,
}
"""The least value of numbers that no library checks."""


@dataclass(repr=False)
class NormAlignConfig(TrainingOptions, SFTConfig):
    """TRL's `SFTConfig`, with the stage, the arm, a learning rate for each module and probes.

    It holds the given values, and checks them one by one. If nobody gave an option, and its value
    follows from the stage, the machine or the data, it is None until [`complete`] begins a run.

    Rows longer than `max_length` are dropped, never truncated. Labels are on assistant turns only.
    Unless `bf16` or `fp16` is set, steps are in bfloat16 where this machine is fast in it
    ([`half_precision_pays`]), or in float16 on a GPU without bfloat16, if hidden states allow it.

    Raises:
        ValueError: An option cannot have the value.
        TypeError: A number is a text.
    """

    __repr__ = TrainingArguments.__str__  # without tokens

    def __post_init__(self):
        if self.output_dir is None:
            self.output_dir = "trainer_output"  # as TRL has it
        for name in PATHS:
            path = getattr(self, name)
            if isinstance(path, str):
                setattr(self, name, os.path.expanduser(path))
        check_choices(self)
        check_refused(self)
        check_values(self)

    def learning_rates(self, use_peft: bool) -> dict[str, float]:
        """Returns the peak learning rate of each module.

        A module's own option comes first. A given `learning_rate` is next, for every module that
        the stage trains. The stage's defaults are last. The rate of a frozen module is 0. With
        adapters, the vision tower is frozen by default.

        Args:
            use_peft: Whether adapters are trained in place of the language model.
        """
        defaults = dict(STAGES.get(self.stage or "", {}))
        if use_peft and self.stage == "tune":
            defaults |= WITH_ADAPTERS
        if use_peft:
            defaults["vision_learning_rate"] = 0.0
        general_rate = self.learning_rate
        if general_rate is None:
            general_rate = defaults.get("learning_rate", SFTConfig.learning_rate)
        rate_of_module = {}
        for module in MODULES:
            option = f"{module}_learning_rate"
            rate_of_module[module] = getattr(self, option)
            if rate_of_module[module] is None:
                rate_of_module[module] = defaults.get(option, general_rate)
                if rate_of_module[module] > 0 and self.learning_rate is not None:
                    rate_of_module[module] = self.learning_rate
        return rate_of_module


def check_values(options: NormAlignConfig) -> None:
    """Checks values that a library would ignore, or refuse only after long work.

    Raises:
        ValueError: An option cannot have the value.
        TypeError: A number is a text.
    """
    for option, least in LEAST.items():
        value = getattr(options, option)
        if isinstance(value, str):
            raise TypeError(f"{option} must be a number, got {value!r}. Leave out the quotes.")
        if value is not None and not value >= least:
            raise ValueError(f"{option} must be at least {least}, got {value}.")
    if not any(options.learning_rates(use_peft=False).values()):
        raise ValueError("Every learning rate is 0: nothing would be trained. Change one.")
    memory = options.device_memory
    if memory is not None and not options.dry_run:
        raise ValueError("--device_memory is for a dry run. Add --dry_run, or leave it out.")
    if memory is not None and not re.fullmatch(r"[\d.]+[KMG]i?B", str(memory), re.I):
        raise ValueError(f"--device_memory must have a unit, as 24GiB has, got {memory}.")
    if options.max_steps < 1 and options.max_steps != -1:
        raise ValueError(f"max_steps {options.max_steps} would train for all epochs. Leave it out.")
    check_early_stopping(options)


def check_early_stopping(options: NormAlignConfig) -> None:
    """Raises ValueError unless early stopping has what it needs."""
    patience = options.early_stopping_patience
    threshold = options.early_stopping_threshold
    if patience is None:
        if threshold:
            raise ValueError("early_stopping_threshold needs early_stopping_patience. Set both.")
        return
    if patience < 1:
        raise ValueError(f"early_stopping_patience must be at least 1, got {patience}.")
    if not threshold >= 0:
        raise ValueError(f"early_stopping_threshold must be at least 0, got {threshold}.")
    missing = []
    if options.eval_strategy == "no":
        missing.append("eval_strategy steps (with eval_steps) or epoch")
    if not options.load_best_model_at_end:
        missing.append("load_best_model_at_end true")
    if missing:
        raise ValueError(f"early_stopping_patience needs {', and '.join(missing)}.")


@dataclass
class ModelArguments(ModelOptions, ModelConfig):
    """TRL's `ModelConfig`: the checkpoint, its precision and the adapters.

    Raises:
        ValueError: An option cannot have the value, or would have no effect.
    """

    def __post_init__(self):
        super().__post_init__()
        check_refused(self)
        if self.model_name_or_path is not None:
            self.model_name_or_path = os.path.expanduser(self.model_name_or_path)
        self.lora_modules_to_save = name_list(self.lora_modules_to_save) or None
        for option, value in vars(self).items():
            if value == getattr(type(self), option, value):
                continue
            is_of_adapters = option.startswith(("lora_", "use_dora", "use_rslora"))
            if is_of_adapters and not self.use_peft:
                raise ValueError(f"{option} is for adapters. Add --use_peft.")
            if option == "bnb_4bit_quant_type" and not self.load_in_4bit:
                raise ValueError("bnb_4bit_quant_type is for 4 bits. Add --load_in_4bit.")

    @property
    def quantization(self) -> BitsAndBytesConfig | None:
        """As in TRL. But [`load_model`], not `dtype`, sets the precision of products."""
        return get_quantization_config(replace(self, dtype="float32"))


def name_list(texts: str | list[str] | None) -> list[str]:
    """Returns the names in some texts. One text may hold several names."""
    if isinstance(texts, str):
        texts = [texts]
    names = []
    for text in texts or ():
        names += names_in(text) or [text]
    return names
