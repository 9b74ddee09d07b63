"""What tests of the demo share: a checkpoint whose answers differ, its answers without the demo, files to upload."""

import socket
from pathlib import Path

import numpy as np
import tiny_parts as parts
import torch
from PIL import Image

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.hub_cards.space.demo import load


def checkpoint(root: Path, context: int = 512, vision: str = "clip", **language_model) -> Path:
    """A tiny checkpoint in `root`, in answers of which image and question show."""
    language = parts.language(root / "language", tied=False, seed=4, max_position_embeddings=context, **language_model)
    build_checkpoint(parts.vision(root / "vision", vision), language, root / "model.v1.5")
    return root / "model.v1.5"


def direct_answer(folder: Path, image: Path, question: str, max_new_tokens: int) -> str:
    """What the checkpoint says when generate is called with nothing of the demo around."""
    model, processor = load(str(folder))
    inputs = prompt(processor, Image.open(image), question)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def prompt(processor, image: Image.Image, question: str):
    """The model's inputs for a question about an image."""
    content = [{"type": "image", "image": image.convert("RGB")}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def plain(file: Path, color: str, size: tuple[int, int] = (30, 40)) -> Path:
    """An image file of one colour."""
    Image.new("RGB", size, color).save(file)
    return file


def noise(size: tuple[int, int]) -> Image.Image:
    """An image of random colours, `(width, height)`, the same every time."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
