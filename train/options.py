# SPDX-License-Identifier: Apache-2.0
"""The options of a training run: TRL's, and others, as its parser reads them."""

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from transformers import BitsAndBytesConfig, TrainingArguments
from trl import ModelConfig, SFTConfig, TrlParser, get_quantization_config

from ..data.sources.arguments import DataArguments, check_choices
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


STAGES = {
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

BOTH_STAGES = {
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
    "early_stopping_patience": 1,
    "early_stopping_threshold": 0,
}
"""The least value of numbers that no library checks."""

TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NO = dict.fromkeys(("no", "false", "off"), "no")
NOTHING = dict.fromkeys(("none", "null"))
"""Values of words, as people and YAML write them, in options of different types."""


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
        if self.early_stopping_patience is None:
            if self.early_stopping_threshold:
                raise ValueError(
                    "early_stopping_threshold needs early_stopping_patience. Set both."
                )
            return
        missing = []
        if self.eval_strategy == "no":
            missing.append("eval_strategy steps (with eval_steps) or epoch")
        if not self.load_best_model_at_end:
            missing.append("load_best_model_at_end true")
        if missing:
            raise ValueError(f"early_stopping_patience needs {', and '.join(missing)}.")

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
            rate = getattr(self, option)
            if rate is None:
                rate = defaults.get(option, general_rate)
                if rate > 0 and self.learning_rate is not None:
                    rate = self.learning_rate
            rate_of_module[module] = rate
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


def parse(
    words: Sequence[str], recipe: dict[str, Any] | None = None
) -> tuple[DataArguments, NormAlignConfig, ModelArguments]:
    """Parses options. The command line overrides the recipe, and the recipe overrides the stage.

    A recipe's `env` is set in the environment, as TRL's parser does.

    Args:
        words: The command line. It begins with the recipe, unless `recipe` is given.
        recipe: What [`read_command`] has read.

    Raises:
        ValueError: An option does not exist, or its value is wrong, or the recipe cannot be read.
        TypeError: A value has the wrong type.
    """
    if recipe is None:
        words, recipe = read_command(words)
    check_names(words, recipe)
    parser = option_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    defaults = without_overruled(recipe, words)
    environment = defaults.pop("env", None) or {}
    for variable, variable_value in environment.items():
        os.environ[variable] = str(variable_value)
    unknown = parser.set_defaults_with_config(**_parsed_lists(parser, defaults))
    parsed = parser.parse_args_into_dataclasses(list(words), return_remaining_strings=True)
    data, training, model, remaining_words = parsed
    unknown_options = [f"--{option}" for option in defaults if f"--{option}" in unknown]
    unknown_options += [word.partition("=")[0] for word in remaining_words if word.startswith("--")]
    if unknown_options:
        sentence = f"The option {', '.join(unknown_options)} does not exist."
        known_options = [text for action in parser._actions for text in action.option_strings]
        with_underscores = unknown_options[0].replace("-", "_").replace("__", "--", 1)
        for closest in get_close_matches(with_underscores, known_options, n=1):
            sentence += f" Did you mean {closest}?"
        _refuse(sentence)
    if remaining_words:
        _refuse(
            f"{remaining_words[0]!r} belongs to no option, nor is it the first word, the recipe"
        )
    for option in ("test_split_size", "eval_dataset_name"):
        if getattr(data, option) and training.eval_strategy == "no":
            raise ValueError(f"{option} needs eval_strategy steps or epoch. Set one, or drop it.")
    init_kwargs = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    training.model_init_kwargs = init_kwargs | (training.model_init_kwargs or {})
    return data, training, model


def _refuse(message: str) -> NoReturn:
    """Raises ValueError. Each process of a run would print argparse's own error."""
    sentence = message[:1].upper() + message[1:]
    if not sentence.endswith((".", "?")):
        sentence += "."
    raise ValueError(f"{sentence} `normalign train --help-all` lists the options.")


def option_parser() -> TrlParser:
    """Returns the parser of all options, TRL's included. It knows more words than argparse."""
    dataclasses_of_options = [DataArguments, NormAlignConfig, ModelArguments]
    type_hints = {}
    for kind in dataclasses_of_options:
        type_hints.update(get_type_hints(kind))
    parser = TrlParser(dataclasses_of_options, usage=USAGE, allow_abbrev=False)
    parsers = {bool: truth, int: whole_number, float: number}
    for action in parser._actions:
        if action.type is None or action.dest not in type_hints:
            continue
        hint = type_hints[action.dest]
        types = {hint, *get_args(hint)}
        types.update(*map(get_args, types))  # those in lists
        fitting = [parsers[kind] for kind in parsers if kind in types]
        if "no" in (action.choices or ()):
            action.type = partial(_parse_word, NO, action.type)
        elif any(kind is dict or get_origin(kind) is dict for kind in types):
            action.type = partial(_parse_word, dict.fromkeys(OFF), str)
        elif {str, bool} <= types or action.dest == "fsdp":  # a text that may be a boolean
            action.type = partial(_parse_word, TRUTH, str)
        elif str not in types and len(fitting) == 1:
            action.type = fitting[0]
            if type(None) in types:
                action.type = partial(_parse_word, NOTHING, fitting[0])
    return parser


def _parse_word(values: dict[str, Any], parse_text: Callable[[str], Any], text: str) -> Any:
    """Returns the value of a word, or what `parse_text` makes of any other text."""
    word = text.lower()
    return values[word] if word in values else parse_text(text)


def truth(text: str | bool) -> bool:
    """Returns a boolean that is written as "true", "yes", "on" and the like.

    Raises:
        ArgumentTypeError: The text is another one.
    """
    word = str(text).lower()
    if word in ("true", "yes", "on", "t", "y", "1"):
        return True
    if word in OFF and word != "none":
        return False
    raise ArgumentTypeError(f"it must be true or false, got {text!r}")


def number(text: str | float) -> float:
    """Returns a number such as 0.5, 5e-1 or 1_000, also one that YAML writes as .inf.

    Raises:
        ArgumentTypeError: The text is not a number.
    """
    try:
        return float(re.sub(r"\.(?=inf|nan)", "", str(text), flags=re.IGNORECASE))
    except ValueError:
        raise ArgumentTypeError(f"it must be a number, got {text!r}") from None


def whole_number(text: str | float) -> int:
    """Returns a whole number such as 1000, 1e3 or 1_000.

    Raises:
        ArgumentTypeError: The text is not a whole number.
    """
    try:
        return int(str(text))
    except ValueError:
        value = number(text)
    if not value.is_integer():
        raise ArgumentTypeError(f"it must be a whole number, got {text!r}")
    return int(value)


def _parsed_lists(parser: TrlParser, recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe with its lists parsed as on the command line. argparse parses only texts."""
    parsed = dict(recipe)
    for action in parser._actions:
        recipe_value = recipe.get(action.dest)
        if action.type is None:
            continue
        if isinstance(recipe_value, list) and action.nargs == "+":
            if all(isinstance(entry, str) for entry in recipe_value):
                parsed[action.dest] = [parser._get_value(action, text) for text in recipe_value]
        elif recipe_value is False and "no" in (action.choices or ()):
            parsed[action.dest] = "no"  # given in Python, or read as YAML 1.1
    return parsed
