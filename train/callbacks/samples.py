# SPDX-License-Identifier: Apache-2.0
"""What the model answers to a few held-out rows at each evaluation."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from transformers import LlavaProcessor, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ...checkpoint.files import SAMPLES
from ...console import Console
from ...data.rows.images import ImageRules, image_problem
from ...evaluation.answering import Message, answers
from ...evaluation.questions import text_of, with_images
from ..modules.model import base_model
from ..modules.precision import evaluating
from ..settings import RunConfig
from .step_lines import write_step


logger = get_logger(__name__)  # logs in one process only

DEFAULT_COUNT = 4


def sample_callback(held_out: Any, args: RunConfig, *, is_sharded: bool) -> "SampleCallback | None":
    """Returns the callback of a run; None if no rows are to be answered.

    Args:
        held_out: Parsed rows, or several data sets by name. Only the first one is used.
        args: The options of the run.
        is_sharded: Whether no process has the whole model. Then no row is answered, and a warning
            says so.
    """
    count = args.sample_count
    if count is None:
        count = DEFAULT_COUNT
    if held_out is None or count == 0:
        return None
    if is_sharded:
        if args.sample_count or args.eval_strategy != IntervalStrategy.NO:
            logger.warning(
                "Evaluations answer no held-out rows, since the model is sharded: each token would "
                "gather it. Use `normalign ask` on a checkpoint."
            )
        return None
    rows = held_out
    if isinstance(held_out, dict):
        rows = next(iter(held_out.values()))
    return SampleCallback(rows, count, args.sample_max_new_tokens)


@dataclass(frozen=True)
class Sample:
    """A held-out row: what comes before its last answer, and that answer."""

    prompt: list[Message]
    truth: str

    @property
    def question(self) -> str:
        """The text of the turn that is answered."""
        return text_of(self.prompt[-1])

    @property
    def images(self) -> list[Any]:
        """The images of all turns, in order."""
        images = []
        for message in self.prompt:
            for part in message["content"]:
                if part["type"] == "image":
                    images.append(part["image"])
        return images


def first_samples(rows: Iterable[dict[str, Any]], count: int) -> list[Sample]:
    """Returns the first `count` parsed rows whose images can be read."""
    rules = ImageRules()
    readable = (row for row in rows if image_problem(row["images"], rules) is None)
    return [_sample(row) for row in islice(readable, count)]


def _sample(row: dict[str, Any]) -> Sample:
    """Returns a parsed row, divided at its last answer."""
    messages = row["messages"]
    last = len(messages) - 1
    while messages[last]["role"] != "assistant":
        last -= 1
    prompt = with_images(messages[:last], row["images"])
    return Sample(prompt, text_of(messages[last]))


class SampleCallback(TrainerCallback):
    """Answers the same held-out rows at each evaluation, greedily, in the first process.

    `samples.jsonl` in `output_dir` gets a line for each answer: `{"step", "sample", "question",
    "answer", "truth", "images"}`, where `images` are files in `samples/`. Lines of this step or
    later ones, from before a run was resumed, are dropped. The model and the random state are left
    as they were.

    Args:
        rows: Parsed held-out rows, which are read at the first evaluation.
        count: How many of them are answered, from the first on.
        max_new_tokens: Longest answer.
    """

    def __init__(self, rows: Iterable[dict[str, Any]], count: int, max_new_tokens: int):
        self.rows = rows
        self.count = count
        self.max_new_tokens = max_new_tokens
        self._answered_at: int | None = None

    @cached_property
    def samples(self) -> list[Sample]:
        """The rows that are answered."""
        return first_samples(self.rows, self.count)

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
        texts = []
        with evaluating(model, args):
            for sample in self.samples:
                prompts = [sample.prompt]
                texts += answers(unwrapped, processing_class, prompts, self.max_new_tokens)
        self._print(state.global_step, texts)
        self._write(Path(args.output_dir), state.global_step, texts)

    def _print(self, step: int, texts: list[str]) -> None:
        """Prints questions, answers and true answers."""
        console = Console()
        console.print(f"Held-out rows at step {step}:", soft_wrap=True)
        for sample, text in zip(self.samples, texts, strict=True):
            question = _short(sample.question)
            line = f"  {question}: {_short(text)} (true: {_short(sample.truth)})"
            console.print(line, soft_wrap=True)

    def _write(self, output_dir: Path, step: int, texts: list[str]) -> None:
        """Writes the images, and a line for each answer."""
        entries = []
        for number, (sample, text) in enumerate(zip(self.samples, texts, strict=True)):
            entries.append(
                {
                    "sample": number,
                    "question": sample.question,
                    "answer": text,
                    "truth": sample.truth,
                    "images": _write_images(sample, number, output_dir),
                }
            )
        write_step(output_dir / SAMPLES, step, entries)


def _write_images(sample: Sample, number: int, output_dir: Path) -> list[str]:
    """Writes the images of a sample, and returns the names of their files in `output_dir`."""
    names = []
    for index, image in enumerate(sample.images):
        file_name = f"samples/{number}-{index}.png"
        file = output_dir / file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
        names.append(file_name)
    return names


def _short(text: str) -> str:
    """Returns a text on one line, of at most 100 letters."""
    line = " ".join(text.split())
    if len(line) > 100:
        return f"{line[:97]}..."
    return line
