# SPDX-License-Identifier: Apache-2.0
"""Warnings that are logged once in a run."""

import functools
import logging

from accelerate import PartialState


logger = logging.getLogger(__name__)


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning in the main process, the first time."""
    if PartialState().is_main_process:
        logger.warning(message)
