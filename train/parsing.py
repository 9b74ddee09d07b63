# SPDX-License-Identifier: Apache-2.0
"""Parses the options of `normalign train`: TRL's parser, for recipes and command lines."""

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from trl import TrlParser

from ..data.sources.arguments import DataArguments
from .command import OFF, USAGE, check_names, read_command, without_overruled
from .options import ModelArguments, NormAlignConfig


TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NO = dict.fromkeys(("no", "false", "off"), "no")
NOTHING = dict.fromkeys(("none", "null"))
"""Values of words, as people and YAML write them, in options of different types."""


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
    """Returns the parser of all options, TRL's included."""
    dataclasses_of_options = [DataArguments, NormAlignConfig, ModelArguments]
    type_hints: dict[str, Any] = {}
    for kind in dataclasses_of_options:
        type_hints |= get_type_hints(kind)
    parser = TrlParser(dataclasses_of_options, usage=USAGE, allow_abbrev=False)
    for action in parser._actions:
        if action.type is not None and action.dest in type_hints:
            action.type = _text_parser(type_hints[action.dest], action.choices or (), action.type)
        if action.dest == "fsdp":  # a boolean, and before transformers 5 a text
            action.type = partial(_parse_word, TRUTH, str)
    return parser


def _text_parser(
    hint: Any, choices: Sequence[Any], parse_text: Callable[[str], Any]
) -> Callable[[str], Any]:
    """Returns a function that parses an option's text, and knows more words than argparse.

    Args:
        hint: The type of the option.
        choices: The values that it may have, if they are few.
        parse_text: The function that argparse would use.
    """
    if "no" in choices:
        return partial(_parse_word, NO, parse_text)
    types = {hint, *get_args(hint)}
    for kind in list(types):
        if get_origin(kind) is list:
            types.add(get_args(kind)[0])
    if any(kind is dict or get_origin(kind) is dict for kind in types):
        return partial(_parse_word, dict.fromkeys(OFF), str)
    if str in types:
        return partial(_parse_word, TRUTH, str) if bool in types else parse_text
    parsers = {bool: truth, int: whole_number, float: number}
    fitting = [parser for kind, parser in parsers.items() if kind in types]
    if len(fitting) != 1:
        return parse_text
    if type(None) in types:
        return partial(_parse_word, NOTHING, fitting[0])
    return fitting[0]


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
