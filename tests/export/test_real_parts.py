"""llama.cpp's own script, SmolLM2 and real pictures: needs llama.cpp's sources in LLAMA_CPP.

With Q4_K_M too, if LLAMA_QUANTIZE is the path of llama.cpp's `llama-quantize`.
"""

import itertools
import os
import subprocess
from pathlib import Path

import gradio
import matplotlib
import pytest
import sklearn.datasets
import tiny_parts
import transformers
from llama_server import LlamaServer, answer_here, largest_difference
from PIL import Image

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.export.run import export_gguf
from normalign_llava.fetched.convert import convert_language


LLAMA_CPP = os.environ.get("LLAMA_CPP")
LLAMA_QUANTIZE = os.environ.get("LLAMA_QUANTIZE")
SIDE = 56
QUESTIONS = ("What is in the picture?", "Which colour is it?", "Is it outdoors?", "Describe it.")

needs_quantize = pytest.mark.skipif(
    not LLAMA_QUANTIZE, reason="needs llama-quantize in LLAMA_QUANTIZE"
)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not LLAMA_CPP, reason="needs llama.cpp's sources in LLAMA_CPP"),
]


def photographs():
    """Twenty photographs of installed packages and cut-outs of them, of 15 sizes."""
    samples = Path(matplotlib.get_data_path()) / "sample_data"
    files = [
        *sorted((Path(gradio.__file__).parent / "media_assets" / "images").glob("*.jp*g")),
        *sorted((Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg")),
        samples / "grace_hopper.jpg",
    ]
    whole = [Image.open(file).convert("RGB") for file in files]
    upper_halves = []
    left_thirds = []
    for photograph in whole:
        width, height = photograph.size
        upper_halves.append(photograph.crop((0, 0, width, height // 2)))
        left_thirds.append(photograph.crop((0, 0, width // 3, height)))
    return (whole + upper_halves + left_thirds)[:20]


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
    [
        ("f32", 20, 0.1),
        ("f16", 18, 0.1),
        ("q8_0", 8, 1.5),
        pytest.param("q4_k_m", 0, 3.0, marks=needs_quantize),
    ],
)
def test_twenty_answers_about_photographs_equal_transformers(
    tmp_path, checkpoint, text_type, fewest_alike, largest
):
    folder = tmp_path / "gguf"
    script_type = "f16" if text_type == "q4_k_m" else text_type
    report = export_gguf(checkpoint, folder, llama_cpp=LLAMA_CPP, text_type=script_type)
    text_file = folder / report.text_file
    if text_type != script_type:
        text_file = tmp_path / "quantized.gguf"
        command = [LLAMA_QUANTIZE, folder / report.text_file, text_file, text_type.upper()]
        subprocess.run(command, check=True, capture_output=True)
    server = LlamaServer(text_file, folder / report.vision_file)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype="float32")
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    images = photographs()
    assert len(images) == 20
    alike = 0
    for image, question in zip(images, itertools.cycle(QUESTIONS), strict=False):
        parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": parts}]
        expected = answer_here(model, processor, messages)
        answer = server.answer(messages)
        assert answer.prompt_tokens == expected.prompt_tokens
        assert largest_difference(answer, expected) < largest
        alike += answer.ids == expected.ids[: len(answer.ids)]
    assert alike >= fewest_alike
