# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Diagnosis of any vision-language model: norms at the interface, rotation in depth, attention."""

from .measure.probe import probe
from .report import Report


__all__ = ["Report", "probe"]
