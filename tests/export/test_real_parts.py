"""llama.cpp's own script, SmolLM2 and real pictures: needs llama.cpp's sources in LLAMA_CPP."""

import os
from pathlib import Path

import gradio
import matplotlib
import pytest
import tiny_parts
import transformers
from llama_server import LlamaServer, answer_here, largest_difference
from PIL import Image

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.export.run import export_gguf
from normalign_llava.fetched.convert import convert_language


LLAMA_CPP = os.environ.get("LLAMA_CPP")
SIDE = 56
QUESTIONS = ("What is in the picture?", "Which colour is it?", "Is it outdoors?", "Describe it.")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not LLAMA_CPP, reason="needs llama.cpp's sources in LLAMA_CPP"),
]


def pictures():
    """Photographs and drawings of several sizes and aspect ratios, from installed packages."""
    files = [
        *Path(gradio.__file__).parent.rglob("*.jpg"),
        Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg",
        Path(matplotlib.get_data_path()) / "sample_data" / "logo2.png",
        Path(matplotlib.get_data_path()) / "images" / "matplotlib_large.png",
    ]
    return [Image.open(file).convert("RGB") for file in files]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    vision = tiny_parts.siglip(
        folder / "vision", SIDE, hidden_size=96, intermediate_size=192, num_hidden_layers=4
    )
    build_checkpoint(vision, str(convert_language()), folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("text_type", "fewest_alike", "largest"),
    [("f32", 20, 0.1), ("f16", 18, 0.1), ("q8_0", 8, 0.5)],
)
def test_twenty_answers_about_pictures_of_the_right_size_equal_transformers(
    tmp_path, checkpoint, text_type, fewest_alike, largest
):
    report = export_gguf(checkpoint, tmp_path / "gguf", llama_cpp=LLAMA_CPP, text_type=text_type)
    folder = tmp_path / "gguf"
    server = LlamaServer(folder / report.text_file, folder / report.vision_file)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype="float32")
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    images = [image.resize((SIDE, SIDE)) for image in pictures()[:5]]
    assert len(images) == 5
    alike = 0
    for image in images:
        for question in QUESTIONS:
            parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
            messages = [{"role": "user", "content": parts}]
            expected = answer_here(model, processor, messages)
            answer = server.answer(messages)
            assert answer.prompt_tokens == expected.prompt_tokens
            assert largest_difference(answer, expected) < largest
            alike += answer.ids == expected.ids[: len(answer.ids)]
    assert alike >= fewest_alike
