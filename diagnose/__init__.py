# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of any vision-language model: norms at the interface, rotation in depth, attention.

Names are imported on first use: training measures with two modules of this package alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING


_EXPORTS = {"Report": "report", "probe": "measure.probe"}

__all__ = ["Report", "probe"]

if TYPE_CHECKING:
    from .measure.probe import probe
    from .report import Report


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
