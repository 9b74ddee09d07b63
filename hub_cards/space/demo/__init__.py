# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A page that asks a NormAlign-LLaVA about an image and shows where its words look, and how long its tokens are.

A Hugging Face Space gets this folder as it is, so its files import nothing of the package but each other, relatively.
"""

from .model import ATTENTION, load
from .page import build_app, launch


__all__ = ["ATTENTION", "build_app", "launch", "load"]
