# SPDX-License-Identifier: Apache-2.0
"""The options of a training run, in YAML and on the command line: TRL's, and others."""

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import torch
from accelerate import DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from transformers import BitsAndBytesConfig, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from trl import ModelConfig, SFTConfig, TrlParser, get_quantization_config

from ..checkpoint.precision import half_precision_pays
from ..data.sources.arguments import DataArguments, check_choices, cores
from .command import (
    OFF,
    USAGE,
    ModelOptions,
    TrainingOptions,
    check_names,
    check_refused,
    names_in,
    read_command,
    without_overruled,
)
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
LEAST |= {"probe_rows": 1, "sample_count": 0, "sample_max_new_tokens": 1}
"""The least value of numbers that nobody else checks."""


CHECKPOINTING = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Names of options since transformers 5.24, and their former names, which warn by themselves."""


@dataclass(repr=False)
class NormAlignConfig(TrainingOptions, SFTConfig):
    """TRL's `SFTConfig`, with the stage, the arm, a learning rate for each module and probes.

    Rows longer than `max_length` are dropped, never truncated. Labels are on assistant turns alone.
    Unless `bf16` or `fp16` is set, steps are in bfloat16 where this machine is fast in it
    ([`half_precision_pays`]), or in float16 on a GPU without bfloat16, if hidden states allow it.

    Attributes:
        followed: The options that nobody gave, and what they became: their values follow from other
            options or from the machine. With `dataclasses.replace` they follow anew, and what was
            given stays. A value that is set later is a given one.

    Raises:
        ValueError: A value is wrong, or contradicts another one, or would have no effect.
    """

    fp16_is_tried = False  # whether `fp16` holds only if [`settle_float16`] finds that it can
    precision_because = ""  # why the precision is what it is, if that was measured
    followed: InitVar[dict[str, Any] | None] = None

    __repr__ = TrainingArguments.__str__  # without tokens

    def __post_init__(self, followed: dict[str, Any] | None):
        defaults = {field.name: field.default for field in fields(self) if field.init}
        for name, value in (followed or {}).items():  # of the config that this one replaces
            if getattr(self, name) is value:
                setattr(self, name, defaults[name])
        before = {name: getattr(self, name) for name in defaults}
        self._complete()
        self.hub_token = (before["hub_token"] or "").strip() or None  # YAML may add a line break
        self.followed = {}
        for name, value in before.items():
            now = getattr(self, name)
            is_plain = now is None or isinstance(now, bool | int | float | str)
            if value is defaults[name] and now is not value and is_plain:
                self.followed[name] = now
        check_refused(self)
        check_values(self)

    def is_given(self, name: str) -> bool:
        """Whether somebody gave an option; if not, its value follows from other things."""
        # By identity: a given number may equal the one that would follow.
        return name not in self.followed or getattr(self, name) is not self.followed[name]

    def let_follow(self, name: str, value: Any) -> None:
        """Sets an option to a value that follows from other things, unless it was given so."""
        if getattr(self, name) != value:
            setattr(self, name, value)
            self.followed = {**self.followed, name: value}

    def give(self, name: str, value: Any) -> None:
        """Sets an option to a value that somebody gave, also if it would follow."""
        setattr(self, name, value)
        self.followed = {key: known for key, known in self.followed.items() if key != name}

    def __getstate__(self) -> dict[str, Any]:
        following = {name: own for name, own in self.followed.items() if not self.is_given(name)}
        return {**vars(self), "followed": following}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A pickle has each number twice, and `is_given` asks whether both are one.
        self.followed = {name: getattr(self, name) for name in self.followed}

    def _complete(self) -> None:
        """Sets what was not given."""
        for name in ("resume_from_checkpoint", "deepspeed", "fsdp_config", "accelerator_config"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, os.path.expanduser(value))
        check_choices(self)
        check_early_stopping(self)
        defaults = {**BOTH_STAGES, **STAGES[self.stage]} if self.stage else {}
        if self.load_best_model_at_end:
            defaults.pop("save_steps", None)  # it must be a multiple of eval_steps
        if self.lr_scheduler_type in WITHOUT_WARMUP:
            defaults["warmup_steps"] = 0
        sizes = ("per_device_train_batch_size", "global_batch_size")
        for name in ("learning_rate", *sizes, *BOTH_STAGES):
            if getattr(self, name) is None:
                setattr(self, name, defaults.get(name, getattr(SFTConfig, name, None)))
        for new_name, name in CHECKPOINTING.items():
            if new_name in vars(self) and getattr(self, new_name) is None:
                setattr(self, new_name, getattr(self, name))
        if self.early_stopping_patience is not None:  # a resumed run counts on
            self.restore_callback_states_from_checkpoint = True
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
        self.report_to = [
            "none" if name.lower() in OFF else name for name in _names(self.report_to or "none")
        ]
        super().__post_init__()
        if self.router_aux_loss_coef is None:
            self.router_aux_loss_coef = 0.0  # TRL would take the language model's
        self.padding_free = self.padding_free or self.packing
        if self.deepspeed_plugin is not None:
            check_deepspeed(self.deepspeed_plugin, self)
            keep_float32(self.deepspeed_plugin, self)
            self.deepspeed_plugin.set_deepspeed_weakref()  # ZeRO-3 loads models in its precision
        # The filter hides bad steps from the log, and waits for the device at every batch.
        self.logging_nan_inf_filter = self.bad_steps == "skip"

    def _choose_precision(self) -> None:
        configured = os.environ.get("ACCELERATE_MIXED_PRECISION")  # in accelerate's configuration
        resumed = self.resume_from_checkpoint
        began = began_in(resumed, self.output_dir) if is_resumed(resumed) else None
        if configured in ("bf16", "fp16"):
            self.bf16, self.fp16 = configured == "bf16", configured == "fp16"
        elif self.device_memory is not None and self.use_cpu:
            self.bf16 = True  # of a GPU that is not here, as those that have it
        elif began is not None:
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
        """The peak learning rate of each module; 0 if frozen, as the vision tower with adapters.

        A module's own option comes first. A given `learning_rate` is next, for every module that
        the stage trains; then the stage's defaults.
        """
        rate_is_given = self.is_given("learning_rate")
        defaults = dict(STAGES.get(self.stage or "", {}))
        if use_peft and self.stage == "tune":
            defaults |= WITH_ADAPTERS
        if use_peft:
            defaults["vision_learning_rate"] = 0.0
        rest = self.learning_rate
        if not rate_is_given:
            rest = defaults.get("learning_rate", rest)
        rates = {}
        for module in ("vision", "projector", "norm", "language"):
            name = f"{module}_learning_rate"
            rate = defaults.get(name, rest)
            if rate_is_given and rate > 0:
                rate = self.learning_rate
            own = getattr(self, name)
            rates[module] = rate if own is None else own
        return rates


def check_early_stopping(args: NormAlignConfig) -> None:
    """Raises ValueError unless early stopping has what it needs."""
    patience, threshold = args.early_stopping_patience, args.early_stopping_threshold
    if patience is None:
        if threshold:
            raise ValueError("early_stopping_threshold needs early_stopping_patience. Set both.")
        return
    if patience < 1:
        raise ValueError(f"early_stopping_patience must be at least 1, got {patience}.")
    if not threshold >= 0:
        raise ValueError(f"early_stopping_threshold must be at least 0, got {threshold}.")
    missing = []
    if args.eval_strategy == "no":
        missing.append("eval_strategy steps (with eval_steps) or epoch")
    if not args.load_best_model_at_end:
        missing.append("load_best_model_at_end true")
    if missing:
        raise ValueError(f"early_stopping_patience needs {', and '.join(missing)}.")


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
        if self.model_name_or_path is not None:
            self.model_name_or_path = os.path.expanduser(self.model_name_or_path)
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
    check_names(words, recipe)
    parser = option_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    defaults = without_overruled(recipe, words)
    for name, value in (defaults.pop("env", None) or {}).items():  # as TrlParser has it
        os.environ[name] = str(value)
    unknown = parser.set_defaults_with_config(**_read_lists(parser, defaults))
    parsed = parser.parse_args_into_dataclasses(list(words), return_remaining_strings=True)
    data, training, model, rest = parsed
    unknown_names = [f"--{name}" for name in defaults if f"--{name}" in unknown]
    unknown_names += [word.partition("=")[0] for word in rest if word.startswith("--")]
    if unknown_names:
        _refuse(_no_option(unknown_names, parser))
    if rest:
        _refuse(f"{rest[0]!r} belongs to no option, nor is it the first word, the recipe")
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
    stop = "" if sentence.endswith((".", "?")) else "."
    raise ValueError(f"{sentence}{stop} `normalign train --help-all` lists the options.")


def option_parser() -> TrlParser:
    """The parser of all options, TRL's included."""
    kinds = [DataArguments, NormAlignConfig, ModelArguments]
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    parser = TrlParser(kinds, usage=USAGE, allow_abbrev=False)
    for action in parser._actions:
        if action.type is not None and action.dest in hints:
            action.type = _reader(hints[action.dest], action.choices or (), action.type)
        if action.dest == "fsdp":  # a boolean, and before transformers 5 a text
            action.type = _read_text_or_truth
    return parser


def _reader(hint: Any, choices: Sequence[Any], read: Callable[[str], Any]) -> Callable[[str], Any]:
    """What reads an option's text, by its type: as `read` does, but in more words and numbers."""
    kinds = {hint, *get_args(hint)} if get_origin(hint) is not list else {get_args(hint)[0]}
    lists = [kind for kind in kinds if get_origin(kind) is list]
    kinds |= {get_args(kind)[0] for kind in lists}
    readers = {bool: truth, int: whole_number, float: number}
    fitting = [reader for kind, reader in readers.items() if kind in kinds]
    if "no" in choices:
        return partial(_read_choice, read)
    if any(kind is dict or get_origin(kind) is dict for kind in kinds):
        return _read_unless_off
    if str in kinds:
        return _read_text_or_truth if bool in kinds else read
    if len(fitting) != 1:
        return read
    return partial(_read_or_none, fitting[0]) if type(None) in kinds else fitting[0]


def truth(text: str | bool) -> bool:
    """A boolean in the words that people have for it."""
    word = str(text).lower()
    if word in ("true", "yes", "on", "t", "y", "1"):
        return True
    if word in OFF and word != "none":
        return False
    raise ArgumentTypeError(f"it must be true or false, got {text!r}")


def number(text: str | float) -> float:
    """A number such as 0.5, 5e-1 or 1_000, also one that YAML writes as .inf."""
    try:
        return float(re.sub(r"\.(?=inf|nan)", "", str(text), flags=re.IGNORECASE))
    except ValueError:
        raise ArgumentTypeError(f"it must be a number, got {text!r}") from None


def whole_number(text: str | float) -> int:
    """A whole number such as 1000, 1e3 or 1_000."""
    try:
        return int(str(text))
    except ValueError:
        value = number(text)
    if not value.is_integer():
        raise ArgumentTypeError(f"it must be a whole number, got {text!r}")
    return int(value)


def _read_or_none(read: Callable[[str], Any], text: str) -> Any:
    return None if text.lower() in ("none", "null") else read(text)


def _read_choice(read: Callable[[str], Any], text: str) -> Any:
    """A choice among words of which one is "no", as people and YAML write it."""
    return "no" if text.lower() in ("no", "false", "off") else read(text)


def _read_unless_off(text: str) -> str | None:
    """The text of a mapping or the path of its file, or None in words that switch it off."""
    return None if text.lower() in OFF else text


def _read_text_or_truth(text: str) -> str | bool:
    """A value that is a boolean or a text."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return words.get(text.lower(), text)


def _read_lists(parser: TrlParser, recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose lists are read as on the command line; argparse reads single texts itself."""
    actions = {action.dest: action for action in parser._actions}
    read = dict(recipe)
    for name, value in recipe.items():
        action = actions.get(name)
        if action is None or action.type is None:
            continue
        if isinstance(value, list):
            texts = [entry for entry in value if isinstance(entry, str)]
            if len(texts) == len(value) and action.nargs == "+":
                read[name] = [parser._get_value(action, text) for text in value]
        elif value is False and "no" in (action.choices or ()):
            read[name] = "no"  # given in Python, or read as YAML 1.1
    return read


def _no_option(names: Sequence[str], parser: TrlParser) -> str:
    """A sentence about options that there are not, with the closest one that there is."""
    known = [option for action in parser._actions for option in action.option_strings]
    sentence = f"There is no option {', '.join(names)}"
    close = get_close_matches(names[0].replace("-", "_").replace("__", "--", 1), known, n=1)
    return f"{sentence}. Did you mean {close[0]}?" if close else f"{sentence}."


def autocast_dtype(training: NormAlignConfig) -> Literal["bfloat16", "float16"] | None:
    """What steps are autocast to, if they are."""
    return "bfloat16" if training.bf16 else "float16" if training.fp16 else None


def best_metric(args: TrainingArguments) -> str:
    """The key in the log of what tells the best step, as the Trainer completes it."""
    metric = args.metric_for_best_model or "loss"
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def is_resumed(resume: str | bool | None) -> bool:
    """Whether an option `resume_from_checkpoint` asks for an earlier run."""
    return str(resume).lower() not in OFF


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
