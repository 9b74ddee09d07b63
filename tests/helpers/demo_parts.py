"""A checkpoint whose answers differ by image and question, and its inputs."""

from pathlib import Path

import numpy as np
import tiny_parts as parts
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint


def checkpoint(root: Path, context: int = 512, vision: str = "clip") -> Path:
    """A tiny checkpoint in `root`, in answers of which image and question show."""
    options = dict(tied=False, seed=4, max_position_embeddings=context)
    language = parts.language(root / "language", **options)
    build_checkpoint(parts.vision(root / "vision", vision), language, root / "model.v1.5")
    return root / "model.v1.5"


def load(folder: Path):
    """The model, whose decoder gives attention maps, and its processor."""
    eager = {"text_config": "eager"}
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=eager)
    return model.eval(), AutoProcessor.from_pretrained(folder)


def prompt(processor, image: Image.Image, question: str):
    """The model's inputs for a question about an image."""
    shown = {"type": "image", "image": image.convert("RGB")}
    messages = [{"role": "user", "content": [shown, {"type": "text", "text": question}]}]
    as_tensors = dict(tokenize=True, return_dict=True, return_tensors="pt")
    return processor.apply_chat_template(messages, add_generation_prompt=True, **as_tensors)


def noise(size: tuple[int, int]) -> Image.Image:
    """An image of random colours, `(width, height)`, the same every time."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
