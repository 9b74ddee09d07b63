"""A checkpoint whose answers differ by image and question, and its inputs."""

from pathlib import Path

import numpy as np
import tiny_parts as parts
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint


def checkpoint(root: Path, context: int = 512, vision: str = "clip") -> Path:
    """A tiny checkpoint in `root`, in answers of which image and question show."""
    language_model = parts.language(
        root / "language",
        tied=False,
        seed=4,
        max_position_embeddings=context,
    )
    encoder = parts.vision(root / "vision", vision)
    folder = root / "model.v1.5"
    build_checkpoint(encoder, language_model, folder)
    return folder


def load(folder: Path):
    """The model, whose decoder gives attention maps, and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder,
        attn_implementation={"text_config": "eager"},
    )
    return model.eval(), AutoProcessor.from_pretrained(folder)


def prompt(processor, image: Image.Image, question: str):
    """The model's inputs for a question about an image."""
    content = [
        {"type": "image", "image": image.convert("RGB")},
        {"type": "text", "text": question},
    ]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def noise(size: tuple[int, int]) -> Image.Image:
    """An image of random colours, `(width, height)`, the same every time."""
    width, height = size
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)
