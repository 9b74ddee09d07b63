# SPDX-License-Identifier: Apache-2.0
"""Functions that take the fields of a dataclass as their arguments."""

from collections.abc import Callable
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
    argument that is not a field raises TypeError.

    Args:
        options_type: The dataclass. Fields after `KW_ONLY` are given by name.
    """

    def decorator(function: Callable[[Options], Result]) -> Callable[Fields, Result]:
        @wraps(function)
        def wrapper(*arguments: Fields.args, **keywords: Fields.kwargs) -> Result:
            return function(options_type(*arguments, **keywords))

        returned = signature(function).return_annotation
        fields_as_arguments = signature(options_type).replace(return_annotation=returned)
        wrapper.__signature__ = fields_as_arguments  # type: ignore[attr-defined]
        return wrapper

    return decorator
