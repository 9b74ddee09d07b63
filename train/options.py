# SPDX-License-Identifier: Apache-2.0
"""The options of a training run, in YAML and on the command line: TRL's, and others."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
from accelerate import DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from transformers import BitsAndBytesConfig
from transformers.integrations import get_available_reporting_integrations
from trl import ModelConfig, SFTConfig, TrlParser, get_quantization_config

from ..checkpoint.precision import half_precision_pays
from ..data.sources.arguments import DataArguments, check_choices, cores
from .command import USAGE, ModelOptions, TrainingOptions, check_refused, names_in, read_command
from .keeping.checkpoints import began_in


STAGES: dict[str, dict[str, Any]] = {
    "align": dict(learning_rate=1e-3, vision_learning_rate=0.0, language_learning_rate=0.0),
    "tune": dict(learning_rate=1e-5, vision_learning_rate=2e-6),
}
STAGES["align"] |= dict(global_batch_size=256, per_device_train_batch_size=2)
STAGES["tune"] |= dict(global_batch_size=128, per_device_train_batch_size=1)
"""Defaults of the paper's two stages (appendix E)."""

WITH_ADAPTERS = {"learning_rate": 2e-4, "projector_learning_rate": 2e-5, "norm_learning_rate": 2e-5}
"""Learning rates of stage `tune` with adapters: LLaVA-1.5's for LoRA."""

BOTH_STAGES: dict[str, Any] = dict(num_train_epochs=1.0, lr_scheduler_type="cosine", seed=42)
BOTH_STAGES |= dict(warmup_steps=0.03, weight_decay=0.0, save_steps=0.1, save_total_limit=2)
"""Defaults of both stages. Steps below 1 are a share of all."""

WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
"""Schedules of transformers that ignore `warmup_steps`."""

LEAST = {"per_device_train_batch_size": 1, "global_batch_size": 1, "learning_rate": 0}
LEAST |= {f"{module}_learning_rate": 0 for module in ("vision", "projector", "norm", "language")}
"""The least value of numbers that nobody else checks."""


@dataclass
class NormAlignConfig(TrainingOptions, SFTConfig):
    """TRL's `SFTConfig`, with the stage, the arm, a learning rate for each module and probes.

    Rows longer than `max_length` are dropped, never truncated. Labels are on assistant turns alone.
    Unless `bf16` or `fp16` is set, steps are in bfloat16 where this machine is fast in it
    ([`half_precision_pays`]), or in float16 on a GPU without bfloat16, if hidden states allow it.

    Raises:
        ValueError: A value is wrong, or contradicts another one, or would have no effect.
    """

    fp16_is_tried = False  # whether `fp16` holds only if [`settle_float16`] finds that it can
    precision_because = ""  # why the precision is what it is, if that was measured

    def __post_init__(self):
        check_choices(self)
        self.learning_rate_is_given = self.learning_rate is not None
        defaults = {**BOTH_STAGES, **STAGES[self.stage]} if self.stage else {}
        if self.load_best_model_at_end:
            defaults.pop("save_steps", None)  # it must be a multiple of eval_steps
        if self.lr_scheduler_type in WITHOUT_WARMUP:
            defaults["warmup_steps"] = 0
        sizes = ("per_device_train_batch_size", "global_batch_size")
        for name in ("learning_rate", *sizes, *BOTH_STAGES):
            if getattr(self, name) is None:
                setattr(self, name, defaults.get(name, getattr(SFTConfig, name, None)))
        if self.use_cpu is None:
            self.use_cpu = not torch.accelerator.is_available()
        if self.dataloader_num_workers is None:  # beside an accelerator, all cores but one
            others = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
            self.dataloader_num_workers = 0 if self.use_cpu else max(0, min(8, others))
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers have a core each
        if self.dataloader_persistent_workers is None:
            self.dataloader_persistent_workers = self.dataloader_num_workers > 0
        if self.bf16 is None and not self.fp16:
            self._choose_precision()
        self.fp16 = bool(self.fp16)
        self.report_to = _names(self.report_to or "none")
        super().__post_init__()
        if self.router_aux_loss_coef is None:
            self.router_aux_loss_coef = 0.0  # TRL would take the language model's
        check_refused(self)
        check_values(self)
        self.padding_free = self.padding_free or self.packing
        if self.deepspeed_plugin is not None:
            check_deepspeed(self.deepspeed_plugin, self)
            keep_float32(self.deepspeed_plugin, self)
            self.deepspeed_plugin.set_deepspeed_weakref()  # ZeRO-3 loads models in its precision
        # The filter hides bad steps from the log, and waits for the device at every batch.
        self.logging_nan_inf_filter = self.bad_steps == "skip"
        self.hub_token = (self.hub_token or "").strip() or None  # YAML may add a line break

    def _choose_precision(self) -> None:
        configured = os.environ.get("ACCELERATE_MIXED_PRECISION")  # in accelerate's configuration
        if configured in ("bf16", "fp16"):
            self.bf16, self.fp16 = configured == "bf16", configured == "fp16"
        elif self.device_memory is not None and self.use_cpu:
            self.bf16 = True  # of a GPU that is not here, as those that have it
        elif began := began_in(self.resume_from_checkpoint, self.output_dir):
            self.bf16, self.fp16 = began
        else:
            measures = not self.use_cpu or os.environ.get("RANK", "0") == "0"
            answer = [measures and half_precision_pays(device="cpu" if self.use_cpu else None)]
            if self.use_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:  # one measures for all
                PartialState(cpu=True)
                broadcast_object_list(answer)
            (self.bf16,) = answer
            in_accelerate = {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"} & os.environ.keys()
            sharded = self.deepspeed or self.fsdp or in_accelerate
            on_gpu = torch.cuda.is_available() and not self.use_cpu
            if self.fp16 is None and on_gpu and not (self.bf16 or sharded):
                self.fp16 = self.fp16_is_tried = True

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the model; a dry run has no weights to move."""
        return False if self.dry_run else super().place_model_on_device

    def learning_rates(self, use_peft: bool) -> dict[str, float]:
        """The peak learning rate of each module; 0 if frozen, as the vision tower with adapters."""
        defaults = STAGES.get(self.stage or "", {})
        if use_peft and self.stage == "tune" and not self.learning_rate_is_given:
            defaults = WITH_ADAPTERS
        rest = self.learning_rate
        if not self.learning_rate_is_given:
            rest = defaults.get("learning_rate", rest)
        rates = {}
        for module in ("vision", "projector", "norm", "language"):
            name = f"{module}_learning_rate"
            default = 0.0 if use_peft and module == "vision" else defaults.get(name, rest)
            rates[module] = default if getattr(self, name) is None else getattr(self, name)
        return rates


def check_values(args: NormAlignConfig) -> None:
    """Raises ValueError for values that libraries would pass over, or refuse after long work."""
    for name, least in LEAST.items():
        if (value := getattr(args, name)) is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
    if not any(args.learning_rates(use_peft=False).values()):
        raise ValueError("Every learning rate is 0: nothing would be trained. Change one.")
    usable = get_available_reporting_integrations()
    if unknown := [name for name in args.report_to or () if name not in usable]:
        known = ", ".join(usable)
        raise ValueError(f"report_to {unknown[0]!r} is not installed. Install it, or use {known}.")
    if (size := args.device_memory) is not None and not args.dry_run:
        raise ValueError("--device_memory is for a dry run. Add --dry_run, or leave it out.")
    if size is not None and not re.fullmatch(r"[\d.]+[KMG]i?B", str(size), re.I):
        raise ValueError(f"--device_memory must have a unit, as 24GiB has, got {size}.")
    if args.lr_scheduler_type in WITHOUT_WARMUP and args.warmup_steps:
        steps = f"warmup_steps {args.warmup_steps:g}"
        raise ValueError(f"This lr_scheduler_type has no warm-up. Leave {steps} out.")
    if args.max_steps < 1 and args.max_steps != -1:
        raise ValueError(f"max_steps {args.max_steps} would train for all epochs. Leave it out.")
    if args.save_strategy == "steps" and args.save_steps <= 0:
        raise ValueError(f"save_steps {args.save_steps:g} saves nothing. Use save_strategy: no.")
    if args.do_eval and args.eval_strategy == "no":
        raise ValueError("do_eval alone evaluates nothing. Set eval_strategy.")
    if not args.accelerator_config.use_seedable_sampler and args.save_strategy != "no":
        raise ValueError(
            "use_seedable_sampler false has an order of rows that no resumed run finds again. "
            "Leave it out, or set save_strategy: no."
        )
    if not (args.packing or args.padding_free):
        return
    contradictions = {
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,  # its noise is by length
        "pad_to_multiple_of": args.pad_to_multiple_of,
    }
    if args.packing:
        strategy = args.train_sampling_strategy
        contradictions |= {
            "train_sampling_strategy batch_rebalance": strategy == "batch_rebalance",
            "average_tokens_across_devices false": not args.average_tokens_across_devices,
            "use_seedable_sampler false": not args.accelerator_config.use_seedable_sampler,
        }
    for name, is_set in contradictions.items():
        if is_set:
            other = "packing" if args.packing else "padding_free"
            raise ValueError(f"{name} cannot be used with {other}. Leave one of them out.")


@dataclass
class ModelArguments(ModelOptions, ModelConfig):
    """TRL's `ModelConfig`: which checkpoint, in which precision, with which adapters."""

    def __post_init__(self):
        super().__post_init__()
        check_refused(self)
        self.lora_modules_to_save = _names(self.lora_modules_to_save) or None
        values, kind = vars(self), type(self)
        changed = [name for name in values if values[name] != getattr(kind, name, values[name])]
        lora = [name for name in changed if name.startswith(("lora_", "use_dora", "use_rslora"))]
        if lora and not self.use_peft:
            raise ValueError(f"{lora[0]} is for adapters. Add --use_peft.")
        if "bnb_4bit_quant_type" in changed and not self.load_in_4bit:
            raise ValueError("bnb_4bit_quant_type is for 4 bits. Add --load_in_4bit.")

    @property
    def quantization(self) -> BitsAndBytesConfig | None:
        """TRL's; but [`load_model`], not `dtype`, sets the precision of products."""
        return get_quantization_config(replace(self, dtype="float32"))


def parse(
    words: Sequence[str], recipe: dict[str, Any] | None = None
) -> tuple[DataArguments, NormAlignConfig, ModelArguments]:
    """Parses options: the command line overrides the recipe, which overrides the stage.

    `words` begin with the recipe, unless [`read_command`] has read it.
    """
    if recipe is None:
        words, recipe = read_command(words)
    parser = option_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    defaults = dict(recipe)
    for name, value in defaults.pop("env", {}).items():  # as TrlParser has it
        os.environ[name] = str(value)
    unknown = parser.set_defaults_with_config(**defaults)
    parsed = parser.parse_args_into_dataclasses(list(words), return_remaining_strings=True)
    data, training, model, rest = parsed
    if unknown := [*unknown, *rest]:
        _refuse(f"There is no option {' '.join(unknown)}")
    for name in ("test_split_size", "eval_dataset_name"):
        if getattr(data, name) and training.eval_strategy == "no":
            raise ValueError(f"{name} needs eval_strategy steps or epoch. Set one, or drop {name}.")
    of_model = {"revision": model.model_revision, "dtype": model.dtype}
    of_model["attn_implementation"] = model.attn_implementation
    training.model_init_kwargs = {**of_model, **(training.model_init_kwargs or {})}
    return data, training, model


def _refuse(message: str) -> NoReturn:
    """In place of argparse's, which each process of a run would print."""
    sentence = message[:1].upper() + message[1:]
    raise ValueError(f"{sentence}. `normalign train --help-all` lists the options.")


def option_parser() -> TrlParser:
    """The parser of all options, TRL's included."""
    kinds = [DataArguments, NormAlignConfig, ModelArguments]
    return TrlParser(kinds, usage=USAGE, allow_abbrev=False)


def autocast_dtype(training: NormAlignConfig) -> Literal["bfloat16", "float16"] | None:
    """What steps are autocast to, if they are."""
    return "bfloat16" if training.bf16 else "float16" if training.fp16 else None


def _names(texts: str | list[str] | None) -> list[str]:
    """The names in some texts, of which one may hold several."""
    texts = [texts] if isinstance(texts, str) else texts or []
    return [name for text in texts for name in names_in(text) or [text]]


def check_fsdp(args: NormAlignConfig) -> None:
    """Raises ValueError if FSDP's first version would shard the model, wherever that is set.

    It keeps the parameters of a unit in one tensor of one precision, so that steps in bfloat16 use
    a rounded gain. It is accelerate's default in files and in the environment.
    """
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")  # of `use_configured_state`
    if args.fsdp_plugin_args is not None:
        version = args.fsdp_plugin_args["fsdp_version"]
        remedy = "Write `version: 2` into fsdp_config."
    elif plugin is not None:
        version = plugin.fsdp_version
        remedy = "Make the plugin with FullyShardedDataParallelPlugin(fsdp_version=2)."
    elif parse_flag_from_env("ACCELERATE_USE_FSDP"):
        version = int(os.environ.get("FSDP_VERSION", "1"))
        remedy = (
            "Write `fsdp_version: 2` under `fsdp_config:` in accelerate's configuration file, or "
            "set FSDP_VERSION=2 if the environment is your own."
        )
    else:
        return
    if version != 2:
        raise ValueError(f"FSDP version {version} would use the gain in bfloat16. {remedy}")


def check_deepspeed(plugin: DeepSpeedPlugin, args: NormAlignConfig) -> None:
    """Checks DeepSpeed's configuration and options that DeepSpeed would not follow."""
    if args.bad_steps == "skip":
        raise ValueError("bad_steps cannot be 'skip': DeepSpeed takes the steps. Leave it out.")
    if args.fp16:
        raise ValueError("fp16 would round the gain under DeepSpeed. Use bf16, or no DeepSpeed.")
    options = {"optimizer": "optim", "scheduler": "lr_scheduler_type", "torch_autocast": "bf16"}
    for section, option in options.items():
        if section in plugin.deepspeed_config:
            raise ValueError(f"DeepSpeed's section {section!r} would undo {option}. Remove it.")
    for name in ("bf16", "fp16"):
        value, enabled = bool(getattr(args, name)), plugin.get_value(f"{name}.enabled", "auto")
        if enabled not in ("auto", value):
            raise ValueError(f"{name} is {enabled} in DeepSpeed's configuration. Remove it there.")


def keep_float32(plugin: DeepSpeedPlugin, args: NormAlignConfig) -> None:
    """Has DeepSpeed autocast to bfloat16 and keep all weights in float32, as other training does.

    Its section `bf16` would round every weight, the gain too, and save that. With an empty list of
    modules, weights and gradients are sent in float32: ZeRO-3 saves weights as they are sent.
    """
    if args.bf16:
        plugin.deepspeed_config.pop("bf16", None)
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        plugin.deepspeed_config["torch_autocast"] = autocast
