# SPDX-License-Identifier: Apache-2.0
"""Files of a run with lines of JSON, each about a step, and the callbacks that write them.

`dynamics.jsonl` has how far decoder layers move visual and text tokens, on one batch (figure 5).
`samples.jsonl` has what the model answers to a few held-out rows at each evaluation.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import DataCollator, LlavaProcessor, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ...checkpoint.files import DYNAMICS, SAMPLES, atomic_write
from ...console import Console
from ...data.rows.images import ImageRules, open_and_find_problem
from ...data.rows.parse import ParsedRow
from ...diagnose.measure.depth import DepthProbe
from ...diagnose.measure.families import decoder_layers, token_positions
from ...diagnose.report import KINDS
from ...evaluation.answering import Message, answers
from ...evaluation.questions import text_of, with_images
from ..collator import ConversationCollator
from ..modules.model import base_model
from ..modules.precision import evaluating
from ..settings import RunConfig


logger = get_logger(__name__)  # logs in one process only


def write_step(file: Path, step: int, entries: Sequence[dict[str, Any]]) -> None:
    """Writes entries about a step, a line each, after the lines of earlier steps.

    Lines of this step or later ones are from before a run was resumed. They are dropped.
    """
    lines = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            if json.loads(line)["step"] < step:
                lines.append(line)
    for step_entry in entries:
        lines.append(json.dumps({"step": step, **step_entry}, ensure_ascii=False))
    with atomic_write(file) as partial:
        partial.write_text("\n".join([*lines, ""]), encoding="utf-8", errors="replace")


class CosineProbe(TrainerCallback):
    """Records the cosine similarity of a token's hidden states before and after every layer (RQ3).

    A line of `dynamics.jsonl` is `{"step": 0, "visual": [...], "text": [...]}`: for every layer the
    mean over image tokens, and over the other attended tokens. The last layer's output is taken
    before the final norm. A list is empty if the batch has no such tokens. Step 0 is before
    training. Lines of this step or later ones, from before a run was resumed, are dropped. The
    probe does not change the run.

    Args:
        steps: The steps to record.
        batch: A batch, the same in every process. Its labels are ignored.
    """

    def __init__(self, steps: Sequence[int], batch: dict[str, Tensor]):
        self.steps = frozenset(steps)
        self.batch = dict(batch)
        self.batch.pop("labels", None)
        self._means: dict[str, float] = {}

    @classmethod
    def of_rows(cls, rows: Iterable, collator: DataCollator, args: RunConfig) -> Self:
        """Returns the probe on the first `probe_rows` training rows, padded."""
        if isinstance(collator, ConversationCollator):
            collator = replace(collator, padding_free=False)
        first_rows = list(islice(rows, args.probe_rows))
        return cls(args.probe_steps or (), collator(first_rows))

    def collect(self) -> dict[str, float]:
        """Returns the means over the layers, if they were measured since the last call."""
        means = self._means
        self._means = {}
        return means

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Measures step 0, unless the run is resumed at a later one."""
        if state.global_step == 0:
            self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Measures every layer, and writes the line of this step."""
        if state.global_step not in self.steps:
            return
        batch = {name: tensor.to(args.device) for name, tensor in self.batch.items()}
        with evaluating(model, args):
            cosines = layer_cosines(model, batch)
        self._means = {}
        for kind, layer_means in cosines.items():
            if layer_means:
                self._means[f"cosine/{kind}"] = sum(layer_means) / len(layer_means)
        if state.is_world_process_zero:
            write_step(Path(args.output_dir) / DYNAMICS, state.global_step, [cosines])


def layer_cosines(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, list[float]]:
    """Returns the mean cosine of input and output of every decoder layer.

    The lists of `"visual"` and `"text"` tokens are empty if the batch has none.
    """
    unwrapped = base_model(model)
    input_ids = batch["input_ids"]
    image_token = unwrapped.config.image_token_id
    positions = token_positions(input_ids, batch.get("attention_mask"), image_token)
    nowhere = torch.zeros_like(input_ids, dtype=torch.bool)
    token_masks = torch.stack([positions.get(kind, nowhere).flatten() for kind in KINDS])
    depth_probe = DepthProbe(decoder_layers(unwrapped.model.language_model))
    with torch.no_grad(), depth_probe.watching(lambda: token_masks):
        model(**batch, use_cache=False, logits_to_keep=1)
    cosines: dict[str, list[float]] = {"visual": [], "text": []}
    curves = depth_probe.result().cosine
    for kind in cosines.keys() & curves.keys():
        cosines[kind] = curves[kind].mean
    return cosines


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
