# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Benchmarks in training: the first samples of each task of a suite, answered by the model as it is by then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ...errors import install
from ..modules.model import base_model
from ..options.arguments import NormAlignConfig
from .depth_probe import evaluating
from .progress import print_at_step


def suite_tasks(args: NormAlignConfig) -> tuple[list[str], Any]:
    """The tasks that `eval_suite` names, and the `TaskManager` that loads them; no data are loaded."""
    try:
        from ...evaluate.engine import SUITES, chosen_tasks
    except ModuleNotFoundError as error:
        raise ValueError(f"eval_suite needs the package {error.name}. {install('evaluate')}.") from error
    if args.eval_strategy == IntervalStrategy.NO and not args.eval_steps:
        raise ValueError("eval_suite is evaluated every eval_steps steps. Set eval_steps.")
    names = [name.strip() for name in str(args.eval_suite).split(",")]
    suites, tasks = [name for name in names if name in SUITES], [name for name in names if name not in SUITES]
    path = Path(args.eval_suite_path) if args.eval_suite_path else None
    try:
        return chosen_tasks(suites, tasks, path, args.eval_suite_limit)
    except ValueError as error:
        raise ValueError(f"eval_suite: {error} The suites are {', '.join(SUITES)}.") from error


class SuiteCallback(TrainerCallback):
    """Evaluates the first samples of each task, and logs `eval_TASK_METRIC`.

    It runs every `eval_steps` steps, or with each evaluation on held-out rows if there is one. Every process runs all
    samples, since sharded weights need all of them. Model and random states are left as they were, so that a run is
    the same with and without it.
    """

    def __init__(self, args: NormAlignConfig, log: Callable[[dict[str, float]], None]):
        tasks, manager = suite_tasks(args)
        from ...evaluate.engine import load_task

        self.log = log
        self.tasks = {}
        for task in tasks:
            try:
                self.tasks[task] = load_task(task, manager)
            except Exception as error:
                raise ValueError(f"eval_suite: {task} cannot be loaded. {type(error).__name__}: {error}") from error
        self._last_step: int | None = None

    def on_step_end(self, args, state, control, **kwargs):
        """Evaluates every `eval_steps` steps, if nothing else is evaluated."""
        if args.eval_strategy == IntervalStrategy.NO and state.global_step % state.eval_steps == 0:
            due = control.should_log
            self._evaluate(args, state, **kwargs)
            control.should_log = due  # logging says that the step has been logged

    def on_evaluate(self, args, state, control, **kwargs):
        self._evaluate(args, state, **kwargs)

    def _evaluate(self, args, state, model, processing_class, **kwargs) -> None:
        from ...evaluate.engine import MultimodalLM, sample_scores

        if self._last_step == state.global_step:
            return  # there are several sets of held-out rows
        self._last_step = state.global_step
        with evaluating(model, args):
            lm = MultimodalLM(base_model(model), processing_class, args.per_device_eval_batch_size)
            logs: dict[str, float] = {}
            for task, loaded in self.tasks.items():
                scores = sample_scores(lm, task, loaded, limit=args.eval_suite_limit)
                logs |= {f"eval_{task}_{metric}": score for metric, score in scores.items()}
                if scores:
                    metric, score = next(iter(scores.items()))
                    print_at_step(state, f"{task} {metric} {score:.4g}")
            self.log(logs)  # in evaluation mode, where the trainer adds no measurements of the step
