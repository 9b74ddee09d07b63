# SPDX-License-Identifier: Apache-2.0
"""The arguments of `publish`."""

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class PublishOptions:
    """The arguments of [`publish`]. Its docstring explains them."""

    checkpoint: str | os.PathLike
    repo_id: str
    _: KW_ONLY
    private: bool | None = None
    revision: str = "main"
    create_pr: bool = False
    space: bool = False
    as_adapter: bool = False
    gguf: bool = False
    base: str | None = None
    base_quantization: str | None = None
    dry_run: bool = False
    check_loading: bool = True
    replace_card: bool = False
    replace_files: bool = False
    token: str | None = None
    notify: Callable[[str], object] = print
