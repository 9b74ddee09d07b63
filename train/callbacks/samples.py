# SPDX-License-Identifier: Apache-2.0
"""What the model answers to a few held-out rows at each evaluation."""

import json
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

from ...checkpoint.files import SAMPLES, atomic_write
from ...data.rows.images import ImageRules, image_problem
from ...errors import Console
from ...evaluation.answering import Message, answers
from ...evaluation.questions import text_of, with_images
from ..modules.model import base_model
from ..modules.precision import evaluating
from ..settings import RunConfig


logger = get_logger(__name__)  # logs in one process only

DEFAULT_COUNT = 4


def sample_callback(held_out: Any, args: RunConfig, *, is_sharded: bool) -> "SampleCallback | None":
    """The callback of a run; None if no rows are to be answered.

    Args:
        held_out: Parsed rows, or several data sets by name, of which the first is used.
        is_sharded: Whether no process has the whole model. Then none is answered, which is logged.
    """
    count = DEFAULT_COUNT if args.sample_count is None else args.sample_count
    if held_out is None or count == 0:
        return None
    if is_sharded:
        if args.sample_count or args.eval_strategy != IntervalStrategy.NO:
            logger.warning(
                "Evaluations answer no held-out rows, since the model is sharded: each token would "
                "gather it. Use `normalign ask` on a checkpoint."
            )
        return None
    rows = next(iter(held_out.values())) if isinstance(held_out, dict) else held_out
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
        parts = [part for message in self.prompt for part in message["content"]]
        return [part["image"] for part in parts if part["type"] == "image"]


def first_samples(rows: Iterable[dict[str, Any]], count: int) -> list[Sample]:
    """The first `count` of the parsed rows, without those whose images cannot be read."""
    rules = ImageRules()
    readable = (row for row in rows if image_problem(row["images"], rules) is None)
    return [_sample(row) for row in islice(readable, count)]


def _sample(row: dict[str, Any]) -> Sample:
    messages = row["messages"]
    last = max(index for index, turn in enumerate(messages) if turn["role"] == "assistant")
    return Sample(with_images(messages[:last], row["images"]), text_of(messages[last]))


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
        answering = base_model(model)
        texts = []
        with evaluating(model, args):
            for sample in self.samples:
                texts += answers(answering, processing_class, [sample.prompt], self.max_new_tokens)
        folder = Path(args.output_dir)
        names = [self._images_of(number) for number in range(len(self.samples))]
        self._write_images(folder, names)
        lines = _lines_before(folder / SAMPLES, state.global_step)
        console = Console()
        console.print(f"Held-out rows at step {state.global_step}:", soft_wrap=True)
        for number, (sample, text) in enumerate(zip(self.samples, texts, strict=True)):
            entry = {"step": state.global_step, "sample": number, "question": sample.question}
            entry |= {"answer": text, "truth": sample.truth, "images": names[number]}
            lines.append(json.dumps(entry, ensure_ascii=False))
            said = f"  {_short(sample.question)}: {_short(text)} (true: {_short(sample.truth)})"
            console.print(said, soft_wrap=True)
        with atomic_write(folder / SAMPLES) as partial:
            content = "\n".join(lines) + "\n"
            partial.write_text(content, encoding="utf-8", errors="replace")

    def _images_of(self, number: int) -> list[str]:
        """The names of a sample's image files, in `output_dir`."""
        return [
            f"samples/{number}-{index}.png" for index in range(len(self.samples[number].images))
        ]

    def _write_images(self, folder: Path, names: list[list[str]]) -> None:
        for sample, files in zip(self.samples, names, strict=True):
            for image, name in zip(sample.images, files, strict=True):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                image.save(folder / name)


def _lines_before(file: Path, step: int) -> list[str]:
    """The lines of earlier steps."""
    if not file.exists():
        return []
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if json.loads(line)["step"] < step:
            kept.append(line)
    return kept


def _short(text: str) -> str:
    """A text on one line, of at most 100 letters."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."
