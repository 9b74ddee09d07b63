# SPDX-License-Identifier: Apache-2.0
"""What the model answers to a few held-out examples at each evaluation: in a file."""

import copy
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import DataCollator, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ...checkpoint.files import write_json
from ...data.rows.images import decode_image
from ..collator import ConversationCollator
from ..modules.model import evaluating
from ..options.arguments import NormAlignConfig


logger = get_logger(__name__)  # logs in one process only


def held_out_samples(
    held_out: Any, collator: DataCollator, args: NormAlignConfig, sharded: bool
) -> "SampleCallback | None":
    """The callback that answers the first held-out rows that can be read; None if none are to be answered."""
    count = args.sample_count
    if count is None and sharded:
        if args.eval_strategy != IntervalStrategy.NO:
            logger.warning(
                "Evaluations answer no examples: each token would gather the whole model, which is sharded. Ask for "
                "some with --sample_count 4."
            )
        return None
    if not isinstance(collator, ConversationCollator):
        return None
    rows = next(iter(held_out.values())) if isinstance(held_out, dict) else held_out
    examples = islice(collator.readable(rows), 4 if count is None else count)
    return SampleCallback(examples, args.sample_max_new_tokens, collator.max_image_pixels)


class SampleCallback(TrainerCallback):
    """Answers the same held-out examples at each evaluation, greedily.

    A step's examples are in `samples/step-N.json`, a list of `{"images": ["images/0-0.png"], "question", "answer",
    "truth"}`; the images are written once. The model and the random state are left as they were. Every process
    generates, since sharded weights need all of them; the first one writes.

    Of each parsed row, the prompt is what comes before the last assistant turn, whose text is the truth.
    """

    def __init__(self, rows: Iterable[dict[str, Any]], max_new_tokens: int, max_image_pixels: int):
        self.examples = []
        for row in rows:
            images = [decode_image(image, max_image_pixels) for image in row["images"]]
            messages, following = copy.deepcopy(row["messages"]), iter(images)
            for part in (part for message in messages for part in message["content"]):
                if part["type"] == "image":
                    part["image"] = next(following)
            last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
            self.examples.append((messages[:last], images, _text(messages[last])))
        self.max_new_tokens = max_new_tokens
        self._last_step: int | None = None

    def on_evaluate(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Generates and writes, once a step even if there are several held-out data sets."""
        if not self.examples or self._last_step == state.global_step:
            return
        folder, written = Path(args.output_dir) / "samples", []
        with evaluating(model, args):
            for number, (prompt, images, truth) in enumerate(self.examples):
                names = [f"images/{number}-{index}.png" for index in range(len(images))]
                inputs = processing_class.apply_chat_template(
                    prompt, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
                ).to(model.device)
                ids = model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False, use_cache=True)
                answer = processing_class.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
                roles = [f"{turn['role']}: " if len(prompt) > 1 else "" for turn in prompt]
                question = "\n".join(role + _text(turn) for role, turn in zip(roles, prompt, strict=True))
                written.append({"images": names, "question": question, "answer": answer.strip(), "truth": truth})
        if state.is_world_process_zero:
            if self._last_step is None:
                (folder / "images").mkdir(parents=True, exist_ok=True)
                for example, (_, images, _) in zip(written, self.examples, strict=True):
                    for name, image in zip(example["images"], images, strict=True):
                        image.save(folder / name)
            write_json(folder / f"step-{state.global_step}.json", written)
        self._last_step = state.global_step


def _text(message: dict[str, Any]) -> str:
    return " ".join(part["text"].strip() for part in message["content"] if part["type"] == "text")
