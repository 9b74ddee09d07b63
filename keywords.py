# SPDX-License-Identifier: Apache-2.0
"""Functions that take the fields of a dataclass as their arguments."""

from collections.abc import Callable
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

    fields = signature(options_type)

    def decorator(function: Callable[[Options], Result]) -> Callable[Fields, Result]:
        name = f"{function.__name__}()"

        @wraps(function)
        def wrapper(*arguments: Fields.args, **keywords: Fields.kwargs) -> Result:
            unknown = [keyword for keyword in keywords if keyword not in fields.parameters]
            if unknown:
                message = f"{name} got an unexpected keyword argument {unknown[0]!r}."
                for field in get_close_matches(unknown[0], fields.parameters, n=1):
                    message += f" Did you mean {field!r}?"
                raise TypeError(message)
            try:
                fields.bind(*arguments, **keywords)
            except TypeError as error:  # a field is missing, or given twice
                raise TypeError(f"{name}: {error}") from None
            return function(options_type(*arguments, **keywords))

        wrapper.__signature__ = fields.replace(  # type: ignore[attr-defined]
            return_annotation=signature(function).return_annotation
        )
        return wrapper

    return decorator
