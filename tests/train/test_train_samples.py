# SPDX-License-Identifier: Apache-2.0
"""Answers to held-out examples: those of plain greedy decoding, written, and training not disturbed."""

import io
import json

import pytest
import torch
import training
from measured import make_trainer, rows as training_rows
from PIL import Image

from normalign_llava.train.callbacks.samples import SampleCallback
from normalign_llava.train.modules.model import base_model


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """With a head of its own: a tied one makes an untrained model repeat its last token."""
    return training.checkpoint(tmp_path_factory.mktemp("parts"), tied=False, seed=5)


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 12), colour).save(buffer, format="PNG")
    return buffer.getvalue()


def turn(role: str, *parts: str | None):
    return {"role": role, "content": [{"type": "text" if part else "image", "text": part} for part in parts]}


ROWS = [
    {
        "images": [{"path": None, "bytes": png("red")}],
        "messages": [turn("user", None, "which colour"), turn("assistant", "red")],
    },
    {
        "images": [{"path": None, "bytes": png("green")}, {"path": None, "bytes": png("blue")}],
        "messages": [
            turn("user", None, "which colour"),
            turn("assistant", "green"),
            turn("user", "and this", None),
            turn("assistant", "blue"),
        ],
    },
    {"images": [], "messages": [turn("user", "say yes"), turn("assistant", "yes")]},
]


def test_answers_are_those_of_greedy_decoding_and_lie_in_the_runs_folder(checkpoint, tmp_path):
    trainer = make_trainer(
        checkpoint, tmp_path, rank=2, gradient_checkpointing=True, eval_strategy="steps", eval_steps=2,
        eval_rows=training_rows(2), max_steps=4, learning_rate=1e-3,
    )  # fmt: skip
    trainer.add_callback(SampleCallback(ROWS, 8, 1000))
    with torch.no_grad():  # what was said before is to matter to an untrained model
        for name, parameter in trainer.model.named_parameters():
            parameter *= 30 if "v_proj" in name and "lora" not in name else 1
    trainer.train()
    folder = tmp_path / "samples"
    images = ["images/0-0.png", "images/1-0.png", "images/1-1.png"]
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert sorted(found) == [*images, "step-2.json", "step-4.json"]
    for name, colour in zip(images, ("red", "green", "blue"), strict=True):
        with Image.open(folder / name) as image:
            assert image.size == (20, 12) and image.getcolors() == Image.new("RGB", (20, 12), colour).getcolors()
    examples = json.loads((folder / "step-4.json").read_text(encoding="utf-8"))
    assert [example["images"] for example in examples] == [images[:1], images[1:], []]
    assert [example["truth"] for example in examples] == ["red", "blue", "yes"]
    many = "user: which colour\nassistant: green\nuser: and this"
    assert [example["question"] for example in examples] == ["which colour", many, "say yes"]
    assert [example["answer"] for example in examples] == [by_hand(trainer, number) for number in range(3)]
    assert len({example["answer"] for example in examples}) > 1


def by_hand(trainer, number: int) -> str:
    """Token by token, without a cache, from a prompt that is spelled out."""
    processor = trainer.processing_class
    prompts = (
        "<|im_start|>user\n<image>which colour<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n<image>which colour<|im_end|>\n<|im_start|>assistant\ngreen<|im_end|>\n"
        "<|im_start|>user\nand this<image><|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nsay yes<|im_end|>\n<|im_start|>assistant\n",
    )
    images = [Image.open(io.BytesIO(image["bytes"])) for image in ROWS[number]["images"]]
    inputs = processor(text=prompts[number], images=images or None, return_tensors="pt")
    ids, pixels, model = inputs["input_ids"], inputs.get("pixel_values"), base_model(trainer.model).eval()
    said = []
    end = processor.tokenizer.eos_token_id
    while len(said) < 8 and end not in said:
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels).logits
        said.append(logits[0, -1].argmax().item())
        ids = torch.cat([ids, torch.tensor([said[-1:]])], dim=1)
    return processor.tokenizer.decode(said, skip_special_tokens=True).strip()
