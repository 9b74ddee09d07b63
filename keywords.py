# SPDX-License-Identifier: Apache-2.0
"""Functions that take the fields of a dataclass as their arguments."""

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar


Fields = ParamSpec("Fields")
Options = TypeVar("Options")
Result = TypeVar("Result")


def takes_fields(
    options_type: Callable[Fields, Options],
) -> Callable[[Callable[[Options], Result]], Callable[Fields, Result]]:
    """Makes the fields of a dataclass the arguments of a function that is given its instance.

    Type checkers, editors and `help` see each field as an argument, with type and default. An
    argument that is not a field raises TypeError, with the name of the function and of a field that
    is spelled alike.

    Args:
        options_type: The dataclass. Fields after `KW_ONLY` are given by name.
    """

    def decorator(function: Callable[[Options], Result]) -> Callable[Fields, Result]:
        fields_as_arguments = signature(options_type)

        @wraps(function)
        def wrapper(*arguments: Fields.args, **keywords: Fields.kwargs) -> Result:
            _check_keywords(function.__name__, keywords, fields_as_arguments.parameters)
            try:
                fields_as_arguments.bind(*arguments, **keywords)
            except TypeError as error:  # a field is missing, or given twice
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(options_type(*arguments, **keywords))

        returned = signature(function).return_annotation
        wrapper.__signature__ = fields_as_arguments.replace(  # type: ignore[attr-defined]
            return_annotation=returned
        )
        return wrapper

    return decorator


def _check_keywords(function_name: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raises TypeError for a keyword that a function does not have."""
    for keyword in given:
        if keyword not in allowed:
            message = f"{function_name}() got an unexpected keyword argument {keyword!r}."
            for name in get_close_matches(keyword, allowed, n=1):
                message += f" Did you mean {name!r}?"
            raise TypeError(message)
