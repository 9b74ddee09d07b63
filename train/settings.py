# SPDX-License-Identifier: Apache-2.0
"""The options of a run, completed with everything that follows from them on this machine."""

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
from .keeping.checkpoints import is_first_process, is_resumed, read_precision
from .options import BOTH_STAGES, STAGES, WITHOUT_WARMUP, NormAlignConfig, name_list


BY_STAGE = ("learning_rate", "per_device_train_batch_size", "global_batch_size", *BOTH_STAGES)
"""Options whose default is the stage's, or else TRL's."""

CHECKPOINTING = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Names of options since transformers 5.24, and their former names. Those warn by themselves."""

MOST_READERS = 8
"""The most processes that read batches by default."""


@dataclass(frozen=True)
class Precision:
    """The precision of a run's steps.

    Attributes:
        bf16: Whether steps are autocast to bfloat16.
        fp16: Whether steps are autocast to float16.
        fp16_needs_check: Whether `fp16` holds only if [`settle_float16`] finds that it can.
        because: Why it is so, if that was measured.
    """

    bf16: bool
    fp16: bool
    fp16_needs_check: bool = False
    because: str = ""


@dataclass(repr=False)
class RunConfig(NormAlignConfig):
    """A `NormAlignConfig` with a value for every option. TRL's trainer works with it.

    [`complete`] makes it of the options that were given. As an `SFTConfig`, it chooses the device
    and opens the process group when it is made. `dataclasses.replace` completes a copy anew.

    Attributes:
        given: The options that a person gave, without secrets.
        settled: The value that each option got. Options that differ from it were changed since.
    """

    given: InitVar[NormAlignConfig | None] = None
    settled: InitVar[dict[str, Any] | None] = None

    def __post_init__(self, given: NormAlignConfig | None, settled: dict[str, Any] | None):
        self.given = given or NormAlignConfig(self.output_dir)
        self.settled = settled or {}
        if self.settled:  # a copy of `dataclasses.replace`: TRL would refuse old values
            anew, _ = complete(self.to_give())
            self.__dict__.update(anew.__dict__)
        else:
            SFTConfig.__post_init__(self)

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the model. A dry run has no weights to move."""
        return False if self.dry_run else super().place_model_on_device

    def learning_rates(self, use_peft: bool) -> dict[str, float]:
        """Returns the peak learning rate of each module, from the given options."""
        return self.to_give().learning_rates(use_peft)

    def set_derived(self, **values: Any) -> None:
        """Sets options to values that follow from others. They do not count as given."""
        self.__dict__.update(values)
        self.settled = {**values_of(self), "hub_token": None}

    def to_give(self) -> NormAlignConfig:
        """Returns options for another run: the given ones, and those that changed since."""
        changes = {}
        for option, value in values_of(self).items():
            if option not in self.settled or value != self.settled[option]:
                changes[option] = value
        return replace(self.given, **changes)


def values_of(options: TrainingArguments) -> dict[str, Any]:
    """Returns the options by name."""
    return {field.name: getattr(options, field.name) for field in fields(options) if field.init}


def complete(given: NormAlignConfig) -> tuple[RunConfig, Precision]:
    """Returns the options with everything that nobody gave, and the precision of steps.

    Defaults come from the stage, the other options, accelerate's configuration and the machine,
    which may be measured. All processes of a run must call this together. It may open the process
    group, and sets TOKENIZERS_PARALLELISM in the environment.

    Raises:
        ValueError: Options contradict each other, or an option would have no effect.
        TypeError: A value has the wrong type.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes that read have a core each
    given = replace(given)  # options that were set since it was made are checked too
    values = values_of(given)
    for option, default in defaults_of(given).items():
        if values[option] is None:
            values[option] = default
    if given.early_stopping_patience is not None:  # a resumed run keeps its count
        values["restore_callback_states_from_checkpoint"] = True
    precision = choose_precision(given, values["use_cpu"])
    trackers = name_list(given.report_to or "none")
    values.update(
        bf16=precision.bf16,
        fp16=precision.fp16,
        report_to=["none" if tracker.lower() in OFF else tracker for tracker in trackers],
        padding_free=given.padding_free or given.packing,
        hub_token=(given.hub_token or "").strip() or None,  # YAML may add a line break
        # The filter hides bad steps from the log, and waits for the device at every batch.
        logging_nan_inf_filter=given.bad_steps == "skip",
    )

    given.hub_token = None
    settings = RunConfig(**values, given=given)
    if settings.deepspeed_plugin is not None:
        check_deepspeed(settings.deepspeed_plugin, settings)
        keep_float32(settings.deepspeed_plugin, settings)
        settings.deepspeed_plugin.set_deepspeed_weakref()  # ZeRO-3 loads models in its precision
    check_contradictions(settings)
    settings.set_derived()
    return settings, precision


def defaults_of(given: NormAlignConfig) -> dict[str, Any]:
    """Returns the defaults that follow from the stage, the machine and other options."""
    defaults = {name: getattr(SFTConfig, name, None) for name in BY_STAGE}
    if given.stage:
        defaults |= BOTH_STAGES
        defaults |= {name: value for name, value in STAGES[given.stage].items() if name in defaults}
    if given.load_best_model_at_end:  # it must be a multiple of eval_steps
        defaults["save_steps"] = SFTConfig.save_steps
    schedule = given.lr_scheduler_type or defaults["lr_scheduler_type"]
    if schedule in WITHOUT_WARMUP:
        defaults["warmup_steps"] = 0
    use_cpu = given.use_cpu
    if use_cpu is None:
        use_cpu = not torch.accelerator.is_available()
    readers = given.dataloader_num_workers
    if readers is None:
        readers = 0
        if not use_cpu:  # all cores but one
            cores_of_process = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            readers = max(0, min(MOST_READERS, cores_of_process - 1))
    defaults |= {
        "use_cpu": use_cpu,
        "dataloader_num_workers": readers,
        "dataloader_persistent_workers": readers > 0,
        "router_aux_loss_coef": 0.0,  # TRL would take the language model's
    }
    for new_name, former_name in CHECKPOINTING.items():
        if hasattr(given, new_name):
            defaults[new_name] = getattr(given, former_name)
    return defaults


def choose_precision(given: NormAlignConfig, use_cpu: bool) -> Precision:
    """Returns the precision of steps: a given one, accelerate's, the resumed run's, or the fastest.

    The machine may be measured, a CPU by the first process, and records of an earlier run are read.
    """
    if given.bf16 is not None or given.fp16:
        return Precision(bool(given.bf16), bool(given.fp16))
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION")  # in accelerate's configuration
    if configured in ("bf16", "fp16"):
        return Precision(bf16=configured == "bf16", fp16=configured == "fp16")
    if given.device_memory is not None and use_cpu:  # another machine's GPU
        return Precision(bf16=True, fp16=False)
    if is_resumed(given.resume_from_checkpoint):
        recorded = read_precision(given.resume_from_checkpoint, given.output_dir)
        if recorded is not None:
            return Precision(*recorded)
    measured = [False]
    if not use_cpu:
        measured = [half_precision_pays()]
    else:
        if is_first_process():
            measured = [half_precision_pays(device="cpu")]
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            PartialState(cpu=True)  # opens the process group
            broadcast_object_list(measured)
    bf16 = measured[0]
    in_accelerate = {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"} & os.environ.keys()
    is_sharded = given.deepspeed or given.fsdp or in_accelerate
    on_gpu = torch.cuda.is_available() and not use_cpu
    may_use_fp16 = given.fp16 is None and on_gpu and not bf16 and not is_sharded
    return Precision(bf16, fp16=may_use_fp16, fp16_needs_check=may_use_fp16)


def check_contradictions(settings: RunConfig) -> None:
    """Raises ValueError for options that libraries would ignore because of other options."""
    usable = get_available_reporting_integrations()
    for tracker in settings.report_to or ():
        if tracker not in usable:
            known = ", ".join(usable)
            raise ValueError(f"report_to {tracker!r} is not installed. Install it, or use {known}.")
    if settings.lr_scheduler_type in WITHOUT_WARMUP and settings.warmup_steps:
        raise ValueError(
            "This lr_scheduler_type has no warm-up. Leave warmup_steps "
            f"{settings.warmup_steps:g} out."
        )
    if settings.save_strategy == "steps" and settings.save_steps <= 0:
        raise ValueError(
            f"save_steps {settings.save_steps:g} saves nothing. Use save_strategy: no."
        )
    if settings.do_eval and settings.eval_strategy == "no":
        raise ValueError("do_eval evaluates nothing without eval_strategy. Set it.")
    is_seeded = settings.accelerator_config.use_seedable_sampler
    if not is_seeded and settings.save_strategy != "no":
        raise ValueError(
            "use_seedable_sampler false has an order of rows that no resumed run finds again. "
            "Leave it out, or set save_strategy: no."
        )
    if not settings.padding_free:
        return
    joins_rows = "padding_free"
    contradictions = {
        "neftune_noise_alpha": settings.neftune_noise_alpha is not None,  # its noise is by length
        "pad_to_multiple_of": settings.pad_to_multiple_of,
    }
    if settings.packing:
        joins_rows = "packing"
        strategy = settings.train_sampling_strategy
        contradictions |= {
            "train_sampling_strategy batch_rebalance": strategy == "batch_rebalance",
            "average_tokens_across_devices false": not settings.average_tokens_across_devices,
            "use_seedable_sampler false": not is_seeded,
        }
    used = [option for option, is_set in contradictions.items() if is_set]
    if used:
        raise ValueError(f"{used[0]} cannot be used with {joins_rows}. Leave one of them out.")


def autocast_dtype(settings: RunConfig) -> Literal["bfloat16", "float16"] | None:
    """Returns the dtype that steps are autocast to, or None."""
    if settings.bf16:
        return "bfloat16"
    return "float16" if settings.fp16 else None


def best_metric(args: TrainingArguments) -> str:
    """Returns the key in the log of the metric that decides which step is best."""
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
    """Raises ValueError for a configuration of DeepSpeed that does not go with the options."""
    if settings.bad_steps == "skip":
        raise ValueError("bad_steps cannot be 'skip': DeepSpeed takes the steps. Leave it out.")
    if settings.fp16:
        raise ValueError("fp16 would round the gain under DeepSpeed. Use bf16, or no DeepSpeed.")
    options = {"optimizer": "optim", "scheduler": "lr_scheduler_type", "torch_autocast": "bf16"}
    for section, option in options.items():
        if section in plugin.deepspeed_config:
            raise ValueError(f"DeepSpeed's section {section!r} would undo {option}. Remove it.")
    for option in ("bf16", "fp16"):
        enabled = plugin.get_value(f"{option}.enabled", "auto")
        if enabled not in ("auto", bool(getattr(settings, option))):
            raise ValueError(
                f"{option} is {enabled} in DeepSpeed's configuration. Remove it there."
            )


def keep_float32(plugin: DeepSpeedPlugin, settings: RunConfig) -> None:
    """Has DeepSpeed autocast to bfloat16 and keep all weights in float32, as other training does.

    Its section `bf16` would round every weight, the gain too, and save that. With an empty list of
    modules, weights and gradients are sent in float32: ZeRO-3 saves weights as they are sent.
    """
    if settings.bf16:
        plugin.deepspeed_config.pop("bf16", None)
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        plugin.deepspeed_config["torch_autocast"] = autocast
