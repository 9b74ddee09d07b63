# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the model answers to a few held-out examples at each evaluation: a file, a sheet to look at, the trackers."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import nn
from transformers import ProcessorMixin, TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from ..data.images import open_image
from .depth_probe import evaluating
from .progress import bar


SAMPLES = "samples"
"""The folder in a run's folder that examples are written to."""

SHEET_WIDTH, IMAGE_SIZE, LABEL_WIDTH, MARGIN, FONT_SIZE, MOST_LINES = 1100, 224, 96, 20, 18, 12
"""Measures of the sheet: in pixels, and the most lines of a text."""

COLOURS = {"question": "#222222", "answer": "#1a56b0", "truth": "#1b7a3d"}
"""What is shown of an example, and in which colour."""


class SampleCallback(TrainerCallback):
    """Answers the same held-out examples at each evaluation, greedily.

    A step's examples are in `samples/step-N.json`, a list of `{"images": ["images/0-0.png"], "question", "answer",
    "truth"}`, and side by side in `samples/step-N.png`; the images are written once. Sheet and texts also go to
    TensorBoard, wandb or trackio, whichever the run reports to. The model is left as it was found, with its random
    state. Every process generates, since sharded weights need all of them; the first one writes.

    Args:
        rows: Canonical rows. The prompt is what comes before the last assistant turn, whose text is the truth.
        max_new_tokens: Longest answer in tokens.
        max_image_pixels: Images with more pixels are refused.
        trackers: The trainer's callbacks, `trainer.callback_handler.callbacks`, among which trackers are looked for.

    Raises:
        ValueError: An image is missing, unreadable or too large; the file is named.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        max_new_tokens: int,
        max_image_pixels: int,
        trackers: Sequence[TrainerCallback] = (),
    ):
        self.rows = list(rows)
        self.images = [[open_image(image, max_image_pixels) for image in row["images"]] for row in self.rows]
        self.max_new_tokens = max_new_tokens
        self.trackers = trackers
        self._done: int | None = None

    def on_evaluate(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Generates, writes and sends, once a step: several held-out sets make several evaluations of one step."""
        if not self.rows or self._done == state.global_step:
            return
        with_images = zip(self.rows, self.images, strict=True)
        with evaluating(model, args):
            answers = [
                answer(model, processing_class, prompt(row), shown, self.max_new_tokens)
                for row, shown in bar(
                    args, state, iterable=with_images, total=len(self.rows), desc="Answering samples"
                )
            ]
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / SAMPLES
            if self._done is None:
                _save_images(folder, self.images)
            examples = [
                {
                    "images": [_image_name(number, index) for index in range(len(row["images"]))],
                    "question": question(prompt(row)),
                    "answer": text,
                    "truth": _text(row["messages"][len(prompt(row))]),
                }
                for number, (row, text) in enumerate(zip(self.rows, answers, strict=True))
            ]
            sheet = contact_sheet(examples, self.images, title=f"Step {state.global_step:,}")
            name = f"step-{state.global_step}"
            content = json.dumps(examples, indent=2, ensure_ascii=False)
            (folder / f"{name}.json").write_text(content + "\n", encoding="utf-8")
            sheet.save(folder / f"{name}.png")
            for tracker in self.trackers:
                _send(tracker, state.global_step, sheet, examples)
        self._done = state.global_step


def prompt(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a canonical row before its last assistant turn."""
    last = max(index for index, message in enumerate(row["messages"]) if message["role"] == "assistant")
    return row["messages"][:last]


def question(messages: list[dict[str, Any]]) -> str:
    """A prompt as text: a single user turn as it is, several turns with who speaks."""
    if len(messages) == 1:
        return _text(messages[0])
    return "\n".join(f"{message['role']}: {_text(message)}" for message in messages)


def answer(
    model: nn.Module,
    processor: ProcessorMixin,
    messages: list[dict[str, Any]],
    images: list[Image.Image],
    max_new_tokens: int,
) -> str:
    """What the model says to `messages`, greedily, without special tokens.

    Args:
        model: The model, with or without adapters, in evaluation mode.
        processor: Its processor.
        messages: Content parts; an image part stands for the next of `images`.
        images: As many as there are image parts.
        max_new_tokens: Longest answer in tokens.
    """
    following = iter(images)
    conversation = [
        {"role": message["role"], "content": [_part(part, following) for part in message["content"]]}
        for message in messages
    ]
    inputs = processor.apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    generated = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, use_cache=True)
    return processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def contact_sheet(examples: list[dict[str, Any]], images: list[list[Image.Image]], title: str) -> Image.Image:
    """A sheet with an example to a row: its images on the left; question, answer and truth on the right.

    Args:
        examples: `question`, `answer` and `truth` of each.
        images: The images of each; they are drawn small.
        title: What stands above.

    Returns:
        An RGB image of `SHEET_WIDTH` pixels, as high as it needs to be. Pillow's font has no Chinese, for one; the
        texts themselves are in the JSON file.
    """
    font, line_height = ImageFont.load_default(FONT_SIZE), round(1.4 * FONT_SIZE)
    label_left = 2 * MARGIN + IMAGE_SIZE
    text_left = label_left + LABEL_WIDTH
    blocks = []
    for example in examples:
        lines = []
        for label in COLOURS:
            wrapped = _wrap(example[label], font, SHEET_WIDTH - MARGIN - text_left)
            lines += [(label if number == 0 else "", line, COLOURS[label]) for number, line in enumerate(wrapped)]
        blocks.append(lines)
    gap = MARGIN // 2  # above answer and truth
    heights = [max(IMAGE_SIZE, len(lines) * line_height + 2 * gap) + 2 * MARGIN for lines in blocks]
    sheet = Image.new("RGB", (SHEET_WIDTH, 2 * MARGIN + line_height + sum(heights)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, fill="black", font=font)
    top = 2 * MARGIN + line_height
    for lines, shown, height in zip(blocks, images, heights, strict=True):
        draw.line((MARGIN, top, SHEET_WIDTH - MARGIN, top), fill="#dddddd")
        sheet.paste(_tiles(shown), (MARGIN, top + MARGIN))
        y = top + MARGIN - gap
        for label, line, colour in lines:
            y += gap if label else 0
            draw.text((label_left, y), label, fill="#888888", font=font)
            draw.text((text_left, y), line, fill=colour, font=font)
            y += line_height
        top += height
    return sheet


def _part(part: dict[str, Any], images: Iterator[Image.Image]) -> dict[str, Any]:
    return {"type": "image", "image": next(images)} if part["type"] == "image" else part


def _text(message: dict[str, Any]) -> str:
    return " ".join(part["text"].strip() for part in message["content"] if part["type"] == "text")


def _image_name(example: int, image: int) -> str:
    return f"images/{example}-{image}.png"


def _save_images(folder: Path, images: list[list[Image.Image]]) -> None:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for example, shown in enumerate(images):
        for number, image in enumerate(shown):
            image.save(folder / _image_name(example, number))


def _tiles(images: list[Image.Image]) -> Image.Image:
    square = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white" if images else "#f2f2f2")
    if not images:
        font = ImageFont.load_default(FONT_SIZE)
        middle = IMAGE_SIZE // 2
        ImageDraw.Draw(square).text((middle, middle), "no image", fill="#888888", font=font, anchor="mm")
        return square
    columns = math.ceil(math.sqrt(len(images)))
    size = IMAGE_SIZE // columns
    for number, image in enumerate(images):
        # Up as well as down: images of a few pixels would be lost on the sheet.
        small = ImageOps.contain(image, (size - 2, size - 2))
        square.paste(small, (number % columns * size, number // columns * size))
    return square


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines = []
    for paragraph in text.splitlines() or ["(nothing)"]:
        line = ""
        for word in re.findall(r"\s*\S+", paragraph):
            if font.getlength(line + word) <= width:
                line += word
                continue
            lines.append(line)
            line = word.lstrip()
            while font.getlength(line) > width:  # no spaces, as in Chinese
                fitting = next(n for n in range(len(line), 0, -1) if n == 1 or font.getlength(line[:n]) <= width)
                lines.append(line[:fitting])
                line = line[fitting:]
        lines.append(line)
    lines = [line for line in lines if line] or ["(nothing)"]
    return lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], "..."]


def _send(tracker: TrainerCallback, step: int, sheet: Image.Image, examples: list[dict[str, Any]]) -> None:
    # The Trainer's own callbacks hold the writers; another writer would open a second run.
    texts = ["\n\n".join(f"**{label}** {example[label]}" for label in COLOURS) for example in examples]
    markdown = "\n\n---\n\n".join(texts)
    if isinstance(tracker, TensorBoardCallback) and tracker.tb_writer is not None:
        tracker.tb_writer.add_image("samples/sheet", np.asarray(sheet), step, dataformats="HWC")
        tracker.tb_writer.add_text("samples/text", markdown, step)
        tracker.tb_writer.flush()
    elif isinstance(tracker, WandbCallback):
        wandb, rows = tracker._wandb, [[example[label] for label in COLOURS] for example in examples]
        media = {"samples/sheet": wandb.Image(sheet), "samples/text": wandb.Table(list(COLOURS), rows)}
        wandb.log({**media, "train/global_step": step})
    elif isinstance(tracker, TrackioCallback):
        trackio = tracker._trackio
        media = {"samples/sheet": trackio.Image(sheet), "samples/text": trackio.Markdown(markdown)}
        trackio.log({**media, "train/global_step": step})
