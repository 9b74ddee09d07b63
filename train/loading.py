# SPDX-License-Identifier: Apache-2.0
"""The model of a planned run, loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import weights
from ..checkpoint.prompts import stop_as_trained
from .memory import largest_batch
from .modules.load import load_model, settle_float16
from .prepare import Plan
from .settings import Precision, RunConfig


@dataclass(frozen=True)
class LoadedModel:
    """The model of a run, before TRL's trainer adds adapters.

    Attributes:
        model: The model to train.
        settings: The options that TRL's trainer gets, a copy of the plan's.
        precision: The precision of steps, and why.
        commit: The commit of the Hub that the model was loaded from.
        weights_in: Folders with files of its frozen modules, the newest first.
    """

    model: Any
    settings: RunConfig
    precision: Precision
    commit: str | None
    weights_in: list[Path]


def load(plan: Plan) -> LoadedModel:
    """Loads the model of a plan, and settles the precision of steps if the model decides it.

    Raises:
        ValueError: The checkpoint cannot be loaded.
        OSError: A file of it cannot be read or fetched.
    """
    settings = plan.trainer_config()
    opened = plan.model
    model = opened.model
    commit = None
    weights_in: list[Path] = []
    if opened.checkpoint is not None:
        model = load_model(
            opened.checkpoint,
            settings,
            plan.learning_rates,
            opened.quantization,
            use_peft=opened.adapters is not None,
        )
        commit = opened.checkpoint.revision
        weights_in = weights.fetch_index_folder(model.name_or_path, commit)
    stop_as_trained(model, opened.processor)  # the processor may not be the checkpoint's
    precision = plan.precision
    if precision.fp16_needs_check and not settings.dry_run:
        batch = largest_batch(settings, plan.data.train, plan.data.collator)
        precision = settle_float16(model, settings.device, batch)
        if not precision.fp16:
            init_kwargs = {**(settings.model_init_kwargs or {}), "dtype": "float32"}
            settings.set_derived(fp16=False, model_init_kwargs=init_kwargs)
            settings.mixed_precision = "no"
    return LoadedModel(model, settings, precision, commit, weights_in)
