# SPDX-License-Identifier: Apache-2.0
"""The options of `normalign train` in words: TRL's parser, for recipes and command lines."""

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


def parse(
    words: Sequence[str], recipe: dict[str, Any] | None = None
) -> tuple[DataArguments, NormAlignConfig, ModelArguments]:
    """Parses options: the command line overrides the recipe, which overrides the stage.

    Args:
        words: The command line. It begins with the recipe, unless `recipe` is given.
        recipe: What [`read_command`] has read.

    Raises:
        ValueError: An option does not exist, or its value is wrong.
    """
    if recipe is None:
        words, recipe = read_command(words)
    check_names(words, recipe)
    parser = option_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    defaults = without_overruled(recipe, words)
    environment = defaults.pop("env", None) or {}  # as TrlParser has it
    for name, value in environment.items():
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
    init_kwargs = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    training.model_init_kwargs = init_kwargs | (training.model_init_kwargs or {})
    return data, training, model


def _refuse(message: str) -> NoReturn:
    """Raises ValueError, in place of argparse's error, which each process of a run would print."""
    sentence = message[:1].upper() + message[1:]
    if not sentence.endswith((".", "?")):
        sentence += "."
    raise ValueError(f"{sentence} `normalign train --help-all` lists the options.")


def option_parser() -> TrlParser:
    """Returns the parser of all options, TRL's included."""
    kinds = [DataArguments, NormAlignConfig, ModelArguments]
    hints: dict[str, Any] = {}
    for kind in kinds:
        hints |= get_type_hints(kind)
    parser = TrlParser(kinds, usage=USAGE, allow_abbrev=False)
    for action in parser._actions:
        if action.type is not None and action.dest in hints:
            action.type = _reader(hints[action.dest], action.choices or (), action.type)
        if action.dest == "fsdp":  # a boolean, and before transformers 5 a text
            action.type = _read_text_or_truth
    return parser


def _reader(hint: Any, choices: Sequence[Any], read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns what reads an option's text: as `read` does, but in more words and numbers.

    Args:
        hint: The type of the option.
        choices: The values that it may have, if they are few.
        read: What argparse would read it with.
    """
    if "no" in choices:
        return partial(_read_choice, read)
    types = _types_in(hint)
    if any(kind is dict or get_origin(kind) is dict for kind in types):
        return _read_unless_off
    if str in types:
        return _read_text_or_truth if bool in types else read
    readers = {bool: truth, int: whole_number, float: number}
    fitting = [reader for kind, reader in readers.items() if kind in types]
    if len(fitting) != 1:
        return read
    if type(None) in types:
        return partial(_read_or_none, fitting[0])
    return fitting[0]


def _types_in(hint: Any) -> set[Any]:
    """Returns the types that a value may have, or that those in its list may have."""
    if get_origin(hint) is list:
        return {get_args(hint)[0]}
    types = {hint, *get_args(hint)}
    for kind in get_args(hint):
        if get_origin(kind) is list:
            types.add(get_args(kind)[0])
    return types


def truth(text: str | bool) -> bool:
    """Returns a boolean that is written in one of people's words for it."""
    word = str(text).lower()
    if word in ("true", "yes", "on", "t", "y", "1"):
        return True
    if word in OFF and word != "none":
        return False
    raise ArgumentTypeError(f"it must be true or false, got {text!r}")


def number(text: str | float) -> float:
    """Returns a number such as 0.5, 5e-1 or 1_000, also one that YAML writes as .inf."""
    try:
        return float(re.sub(r"\.(?=inf|nan)", "", str(text), flags=re.IGNORECASE))
    except ValueError:
        raise ArgumentTypeError(f"it must be a number, got {text!r}") from None


def whole_number(text: str | float) -> int:
    """Returns a whole number such as 1000, 1e3 or 1_000."""
    try:
        return int(str(text))
    except ValueError:
        value = number(text)
    if not value.is_integer():
        raise ArgumentTypeError(f"it must be a whole number, got {text!r}")
    return int(value)


def _read_or_none(read: Callable[[str], Any], text: str) -> Any:
    if text.lower() in ("none", "null"):
        return None
    return read(text)


def _read_choice(read: Callable[[str], Any], text: str) -> Any:
    """Returns one of several words. "no" may be written as people and YAML write it."""
    if text.lower() in ("no", "false", "off"):
        return "no"
    return read(text)


def _read_unless_off(text: str) -> str | None:
    """Returns the text of a mapping or the path of its file; None for words that switch it off."""
    if text.lower() in OFF:
        return None
    return text


def _read_text_or_truth(text: str) -> str | bool:
    """Returns a boolean if the text is one, or the text."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return words.get(text.lower(), text)


def _read_lists(parser: TrlParser, recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe with its lists read as on the command line. argparse reads single texts."""
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
    """Returns a sentence about options that do not exist, with the closest one that does."""
    known: list[str] = []
    for action in parser._actions:
        known += action.option_strings
    sentence = f"There is no option {', '.join(names)}."
    with_underscores = names[0].replace("-", "_").replace("__", "--", 1)
    close = get_close_matches(with_underscores, known, n=1)
    if close:
        sentence += f" Did you mean {close[0]}?"
    return sentence
