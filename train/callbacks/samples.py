# SPDX-License-Identifier: Apache-2.0
"""What the model answers to a few held-out rows at each evaluation."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.logging import get_logger
from torch import nn
from transformers import LlavaProcessor, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ...checkpoint.files import SAMPLES
from ...console import Console
from ...data.rows.images import ImageRules, open_and_find_problem
from ...data.rows.parse import ParsedRow
from ...evaluation.answering import Message, answers
from ...evaluation.questions import text_of, with_images
from ..modules.model import base_model
from ..modules.precision import evaluating
from ..settings import RunConfig
from .step_lines import write_step


logger = get_logger(__name__)  # logs in one process only


def sample_callback(held_out: Any, args: RunConfig, *, is_sharded: bool) -> "SampleCallback | None":
    """Returns the callback of a run, or None if no rows are to be answered.

    Args:
        held_out: Parsed rows, or several data sets by name. Only the first one is used.
        args: The options of the run.
        is_sharded: Whether no process has the whole model. Then no row is answered, and a warning
            says so.
    """
    sample_count = args.sample_count
    if sample_count is None:
        sample_count = 4
    if held_out is None or sample_count == 0:
        return None
    if is_sharded:
        if args.sample_count or args.eval_strategy != IntervalStrategy.NO:
            logger.warning(
                "Evaluations answer no held-out rows, since the model is sharded: each token would "
                "gather it. Use `normalign ask` on a checkpoint."
            )
        return None
    if isinstance(held_out, dict):
        held_out = next(iter(held_out.values()))
    return SampleCallback(held_out, sample_count, args.sample_max_new_tokens)


class Sample(NamedTuple):
    """A held-out row: what comes before its last answer, and that answer."""

    prompt: list[Message]
    truth: str


@dataclass
class SampleCallback(TrainerCallback):
    """Answers the same held-out rows at each evaluation, greedily, in the first process.

    `samples.jsonl` in `output_dir` gets a line for each answer: `{"step", "sample", "question",
    "answer", "truth", "images"}`, where `images` are files in `samples/`. Lines of this step or
    later ones, from before a run was resumed, are dropped. The model and the random state are left
    as they were.

    Args:
        rows: Parsed held-out rows. They are read at the first evaluation.
        count: How many rows are answered: the first ones whose images can be read.
        max_new_tokens: The most tokens in an answer.
    """

    rows: Iterable[ParsedRow]
    count: int
    max_new_tokens: int
    _answered_at: int | None = None

    @cached_property
    def samples(self) -> list[Sample]:
        """The rows that are answered, each divided at its last answer."""
        rules = ImageRules()
        readable_rows = (
            row for row in self.rows if open_and_find_problem(row["images"], rules) is None
        )
        samples = []
        for row in islice(readable_rows, self.count):
            messages = row["messages"]
            last_answer = len(messages) - 1
            while messages[last_answer]["role"] != "assistant":
                last_answer -= 1
            prompt = with_images(messages[:last_answer], row["images"])
            samples.append(Sample(prompt, text_of(messages[last_answer])))
        return samples

    def on_evaluate(
        self,
        args,
        state,
        control,
        model: nn.Module | None = None,
        processing_class: LlavaProcessor | None = None,
        **kwargs,
    ):
        """Answers once a step, also where several held-out data sets are evaluated."""
        if not state.is_world_process_zero or self._answered_at == state.global_step:
            return
        self._answered_at = state.global_step
        unwrapped = base_model(model)
        console = Console()
        console.print(f"Held-out rows at step {state.global_step}:", soft_wrap=True)
        output_dir = Path(args.output_dir)
        entries = []
        for number, sample in enumerate(self.samples):
            with evaluating(model, args):
                [answer] = answers(
                    unwrapped, processing_class, [sample.prompt], self.max_new_tokens
                )
            question = text_of(sample.prompt[-1])
            console.print(
                f"  {_short(question)}: {_short(answer)} (true: {_short(sample.truth)})",
                soft_wrap=True,
            )
            images = []
            for message in sample.prompt:
                images += [part["image"] for part in message["content"] if part["type"] == "image"]
            file_names = []
            for index, image in enumerate(images):
                file_name = f"samples/{number}-{index}.png"
                (output_dir / "samples").mkdir(parents=True, exist_ok=True)
                image.save(output_dir / file_name)
                file_names.append(file_name)
            entries.append(
                {
                    "sample": number,
                    "question": question,
                    "answer": answer,
                    "truth": sample.truth,
                    "images": file_names,
                }
            )
        write_step(output_dir / SAMPLES, state.global_step, entries)


def _short(text: str) -> str:
    """Returns a text on one line, of at most 100 letters."""
    one_line = " ".join(text.split())
    if len(one_line) > 100:
        return f"{one_line[:97]}..."
    return one_line
