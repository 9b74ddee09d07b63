# SPDX-License-Identifier: Apache-2.0
"""What the options of a run become on this machine: everything that nobody gave is found here."""

import os
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any, Literal

import torch
from accelerate import DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from trl import SFTConfig

from ..checkpoint.precision import half_precision_pays
from ..data.sources.arguments import cores
from .command import OFF
from .keeping.checkpoints import is_resumed, read_precision
from .options import BOTH_STAGES, STAGES, WITHOUT_WARMUP, NormAlignConfig, name_list


BY_STAGE = ("learning_rate", "per_device_train_batch_size", "global_batch_size", *BOTH_STAGES)
"""Options whose default is the stage's, or else TRL's."""

CHECKPOINTING = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Names of options since transformers 5.24, and their former names, which warn by themselves."""

MOST_READERS = 8
"""Processes that read batches, at most, unless somebody asks for more."""


@dataclass(frozen=True)
class Precision:
    """The precision of a run's steps.

    Attributes:
        bf16: Whether steps are autocast to bfloat16.
        fp16: Whether steps are autocast to float16.
        is_tried: Whether `fp16` holds only if [`settle_float16`] finds that it can.
        because: Why it is so, if that was measured.
    """

    bf16: bool
    fp16: bool
    is_tried: bool = False
    because: str = ""


@dataclass(repr=False)
class RunConfig(NormAlignConfig):
    """A `NormAlignConfig` in which every option has its value: what TRL's trainer works with.

    [`complete`] makes it from what was given. As an `SFTConfig`, it chooses the device and opens
    the process group when it is made. In a copy of `dataclasses.replace`, values that nobody gave
    are found anew.

    Attributes:
        given: What a person gave, without secrets.
        settled: The value that each option got. What differs from it now was changed since.
    """

    given: InitVar[NormAlignConfig | None] = None
    settled: InitVar[dict[str, Any] | None] = None

    def __post_init__(self, given: NormAlignConfig | None, settled: dict[str, Any] | None):
        self.given = given or NormAlignConfig(self.output_dir)
        self.settled = settled or {}
        if self.settled:  # of `dataclasses.replace`: beside a change, TRL would refuse old values
            anew, _ = complete(self.to_give())
            self.__dict__.update(anew.__dict__)
        else:
            SFTConfig.__post_init__(self)

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the model; a dry run has no weights to move."""
        return False if self.dry_run else super().place_model_on_device

    def learning_rates(self, use_peft: bool) -> dict[str, float]:
        """Returns the peak learning rate of each module, by what was given."""
        return self.to_give().learning_rates(use_peft)

    def settle(self, **values: Any) -> None:
        """Sets options to values that follow from others, so that nobody has given them."""
        for name, value in values.items():
            setattr(self, name, value)
        self.settled = {**values_of(self), "hub_token": None}

    def to_give(self) -> NormAlignConfig:
        """Returns options for another run: what was given to this one, and what changed since."""
        changed = {}
        for name, value in values_of(self).items():
            if name not in self.settled or value != self.settled[name]:
                changed[name] = value
        return replace(self.given, **changed)


def values_of(options: NormAlignConfig) -> dict[str, Any]:
    """Returns the options by name."""
    return {field.name: getattr(options, field.name) for field in fields(options) if field.init}


def complete(given: NormAlignConfig) -> tuple[RunConfig, Precision]:
    """Returns the options with everything that nobody gave, and the precision of steps.

    Defaults come from the stage, the other options, accelerate's configuration and the machine,
    which may be measured. All processes of a run must call this together.

    Raises:
        ValueError: Options contradict each other, or an option would have no effect.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes that read have a core each
    given = replace(given)  # what was set since it was made is checked too
    values = values_of(given)
    for name, default in (stage_defaults(given) | machine_defaults(given)).items():
        if values[name] is None:
            values[name] = default
    if given.early_stopping_patience is not None:  # a resumed run counts on
        values["restore_callback_states_from_checkpoint"] = True
    precision = choose_precision(given, values["use_cpu"])
    values["bf16"] = precision.bf16
    values["fp16"] = precision.fp16
    values["report_to"] = trackers(given.report_to)
    values["padding_free"] = given.padding_free or given.packing
    values["hub_token"] = (given.hub_token or "").strip() or None  # YAML may add a line break
    # The filter hides bad steps from the log, and waits for the device at every batch.
    values["logging_nan_inf_filter"] = given.bad_steps == "skip"

    without_token: dict[str, Any] = {"hub_token": None}
    settings = RunConfig(**values, given=replace(given, **without_token))
    if settings.deepspeed_plugin is not None:
        check_deepspeed(settings.deepspeed_plugin, settings)
        keep_float32(settings.deepspeed_plugin, settings)
        settings.deepspeed_plugin.set_deepspeed_weakref()  # ZeRO-3 loads models in its precision
    check_together(settings)
    settings.settle()
    return settings, precision


def machine_defaults(given: NormAlignConfig) -> dict[str, Any]:
    """Returns the defaults that follow from the machine and from other options."""
    use_cpu = given.use_cpu
    if use_cpu is None:
        use_cpu = not torch.accelerator.is_available()
    readers = given.dataloader_num_workers
    if readers is None:
        readers = default_readers(use_cpu)
    defaults = {
        "use_cpu": use_cpu,
        "dataloader_num_workers": readers,
        "dataloader_persistent_workers": readers > 0,
        "router_aux_loss_coef": 0.0,  # TRL would take the language model's
    }
    for new_name, former_name in CHECKPOINTING.items():
        if hasattr(given, new_name):
            defaults[new_name] = getattr(given, former_name)
    return defaults


def stage_defaults(given: NormAlignConfig) -> dict[str, Any]:
    """Returns the defaults of the options `BY_STAGE`."""
    defaults = {name: getattr(SFTConfig, name, None) for name in BY_STAGE}
    if given.stage:
        defaults |= BOTH_STAGES
        defaults |= {name: value for name, value in STAGES[given.stage].items() if name in defaults}
    if given.load_best_model_at_end:  # it must be a multiple of eval_steps
        defaults["save_steps"] = SFTConfig.save_steps
    schedule = given.lr_scheduler_type or defaults["lr_scheduler_type"]
    if schedule in WITHOUT_WARMUP:
        defaults["warmup_steps"] = 0
    return defaults


def default_readers(use_cpu: bool) -> int:
    """Returns how many processes read batches: beside an accelerator, all cores but one."""
    if use_cpu:
        return 0
    others = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    return max(0, min(MOST_READERS, others))


def trackers(report_to: str | list[str] | None) -> list[str]:
    """Returns the names of trackers, one in each text, and "none" for a word that means it."""
    names = name_list(report_to or "none")
    return ["none" if name.lower() in OFF else name for name in names]


def choose_precision(given: NormAlignConfig, use_cpu: bool) -> Precision:
    """Returns the precision of steps: a given one, accelerate's, or what suits the machine."""
    if given.bf16 is not None or given.fp16:
        return Precision(bool(given.bf16), bool(given.fp16))
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION")  # in accelerate's configuration
    if configured in ("bf16", "fp16"):
        return Precision(bf16=configured == "bf16", fp16=configured == "fp16")
    if given.device_memory is not None and use_cpu:  # of a GPU that is not here
        return Precision(bf16=True, fp16=False)
    if is_resumed(given.resume_from_checkpoint):
        began = read_precision(given.resume_from_checkpoint, given.output_dir)
        if began is not None:
            bf16, fp16 = began
            return Precision(bf16, fp16)
    bf16 = bfloat16_pays(use_cpu)
    in_accelerate = {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"} & os.environ.keys()
    is_sharded = given.deepspeed or given.fsdp or in_accelerate
    on_gpu = torch.cuda.is_available() and not use_cpu
    is_tried = given.fp16 is None and on_gpu and not bf16 and not is_sharded
    return Precision(bf16, fp16=is_tried, is_tried=is_tried)


def bfloat16_pays(use_cpu: bool) -> bool:
    """Returns whether steps in bfloat16 are fast here. One process measures a CPU, for all."""
    if not use_cpu:
        return half_precision_pays()
    answer = [False]
    if os.environ.get("RANK", "0") == "0":
        answer = [half_precision_pays(device="cpu")]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=True)  # opens the process group
        broadcast_object_list(answer)
    return answer[0]


def check_together(settings: RunConfig) -> None:
    """Raises ValueError for options that libraries would pass over beside the others."""
    usable = get_available_reporting_integrations()
    unknown = [name for name in settings.report_to or () if name not in usable]
    if unknown:
        known = ", ".join(usable)
        raise ValueError(f"report_to {unknown[0]!r} is not installed. Install it, or use {known}.")
    if settings.lr_scheduler_type in WITHOUT_WARMUP and settings.warmup_steps:
        steps = f"warmup_steps {settings.warmup_steps:g}"
        raise ValueError(f"This lr_scheduler_type has no warm-up. Leave {steps} out.")
    if settings.save_strategy == "steps" and settings.save_steps <= 0:
        steps = f"save_steps {settings.save_steps:g}"
        raise ValueError(f"{steps} saves nothing. Use save_strategy: no.")
    if settings.do_eval and settings.eval_strategy == "no":
        raise ValueError("do_eval alone evaluates nothing. Set eval_strategy.")
    is_seeded = settings.accelerator_config.use_seedable_sampler
    if not is_seeded and settings.save_strategy != "no":
        raise ValueError(
            "use_seedable_sampler false has an order of rows that no resumed run finds again. "
            "Leave it out, or set save_strategy: no."
        )
    check_unpadded(settings)


def check_unpadded(settings: RunConfig) -> None:
    """Raises ValueError for an option that cannot be used where rows are joined without padding."""
    if not settings.padding_free:
        return
    contradictions = {
        "neftune_noise_alpha": settings.neftune_noise_alpha is not None,  # its noise is by length
        "pad_to_multiple_of": settings.pad_to_multiple_of,
    }
    if settings.packing:
        strategy = settings.train_sampling_strategy
        is_seeded = settings.accelerator_config.use_seedable_sampler
        contradictions |= {
            "train_sampling_strategy batch_rebalance": strategy == "batch_rebalance",
            "average_tokens_across_devices false": not settings.average_tokens_across_devices,
            "use_seedable_sampler false": not is_seeded,
        }
    other = "packing" if settings.packing else "padding_free"
    for name, is_set in contradictions.items():
        if is_set:
            raise ValueError(f"{name} cannot be used with {other}. Leave one of them out.")


def autocast_dtype(settings: RunConfig) -> Literal["bfloat16", "float16"] | None:
    """What steps are autocast to, if they are."""
    if settings.bf16:
        return "bfloat16"
    return "float16" if settings.fp16 else None


def best_metric(args: TrainingArguments) -> str:
    """The key in the log of what tells the best step, as the Trainer completes it."""
    metric = args.metric_for_best_model or "loss"
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def check_fsdp(settings: RunConfig) -> None:
    """Raises ValueError if FSDP's first version would shard the model, wherever that is set.

    It keeps the parameters of a unit in one tensor of one precision, so that steps in bfloat16 use
    a rounded gain. It is accelerate's default in files and in the environment.
    """
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")  # of `use_configured_state`
    if settings.fsdp_plugin_args is not None:
        version = settings.fsdp_plugin_args["fsdp_version"]
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


def check_deepspeed(plugin: DeepSpeedPlugin, settings: RunConfig) -> None:
    """Checks DeepSpeed's configuration and options that DeepSpeed would not follow."""
    if settings.bad_steps == "skip":
        raise ValueError("bad_steps cannot be 'skip': DeepSpeed takes the steps. Leave it out.")
    if settings.fp16:
        raise ValueError("fp16 would round the gain under DeepSpeed. Use bf16, or no DeepSpeed.")
    options = {"optimizer": "optim", "scheduler": "lr_scheduler_type", "torch_autocast": "bf16"}
    for section, option in options.items():
        if section in plugin.deepspeed_config:
            raise ValueError(f"DeepSpeed's section {section!r} would undo {option}. Remove it.")
    for name in ("bf16", "fp16"):
        value = bool(getattr(settings, name))
        enabled = plugin.get_value(f"{name}.enabled", "auto")
        if enabled not in ("auto", value):
            raise ValueError(f"{name} is {enabled} in DeepSpeed's configuration. Remove it there.")


def keep_float32(plugin: DeepSpeedPlugin, settings: RunConfig) -> None:
    """Has DeepSpeed autocast to bfloat16 and keep all weights in float32, as other training does.

    Its section `bf16` would round every weight, the gain too, and save that. With an empty list of
    modules, weights and gradients are sent in float32: ZeRO-3 saves weights as they are sent.
    """
    if settings.bf16:
        plugin.deepspeed_config.pop("bf16", None)
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        plugin.deepspeed_config["torch_autocast"] = autocast
