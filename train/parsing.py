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
