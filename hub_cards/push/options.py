# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments of `publish`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict


class PublishKeywords(TypedDict, total=False):
    """The keyword arguments that [`publish`] accepts. Its docstring explains them."""

    private: bool | None
    revision: str
    create_pr: bool
    space: bool
    as_adapter: bool
    base: str | None
    base_quantization: str | None
    dry_run: bool
    check_loading: bool
    replace_card: bool
    replace_files: bool
    token: str | None
    notify: Callable[[str], object]


@dataclass(frozen=True)
class PublishOptions:
    """The keyword arguments of one call of [`publish`], with the defaults of those not given."""

    private: bool | None = None
    revision: str = "main"
    create_pr: bool = False
    space: bool = False
    as_adapter: bool = False
    base: str | None = None
    base_quantization: str | None = None
    dry_run: bool = False
    check_loading: bool = True
    replace_card: bool = False
    replace_files: bool = False
    token: str | None = None
    notify: Callable[[str], object] = print
