"""`normalign ask`: a checkpoint's and an adapter's answers, and errors that say what is there."""

import shutil

import pytest
import torch
import training
from asking import generate
from peft import LoraConfig, get_peft_model
from PIL import Image
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.cli import app


pytestmark = pytest.mark.slow

QUESTION = "what is 7 plus 0?"


@pytest.fixture
def image(tmp_path):
    (tmp_path / "noise.png").write_bytes(training.image(1))
    return tmp_path / "noise.png"


def ask(*words):
    return CliRunner().invoke(app, ["ask", *map(str, words)], env={"COLUMNS": "500"})


def test_answers_are_those_of_generate(checkpoint, image, tmp_path):
    expected = generate(checkpoint, QUESTION, Image.open(image), tokens=12)[0]
    assert ask(checkpoint, image, QUESTION, "--max-new-tokens", 12).stdout == expected + "\n"

    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    targets = {"target_modules": r".*\.language_model\..*_proj", "modules_to_save": ["multi_modal_projector"]}
    adapted = get_peft_model(model, LoraConfig(r=4, **targets))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in (each for name, each in adapted.named_parameters() if "lora_" in name or "to_save" in name):
            parameter += torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "training.json").write_text('{"quantization": null}')
    merged = shutil.copytree(checkpoint, tmp_path / "merged")
    adapted.merge_and_unload().save_pretrained(merged)
    of_adapter = generate(merged, QUESTION, Image.open(image), tokens=12)[0]
    assert ask(tmp_path / "adapter", image, QUESTION, "--max-new-tokens", 12).stdout == of_adapter + "\n"
    assert of_adapter != expected


def test_what_is_not_there_is_named(checkpoint, image, tmp_path):
    (tmp_path / "broken.png").write_text("kite")
    cases = {
        (checkpoint, tmp_path / "kite.png"): f"{tmp_path / 'kite.png'}. In {tmp_path}: broken.png, noise.png.",
        (checkpoint, tmp_path / "broken.png"): "broken.png cannot be used",
        ("./no-model", image): "no-model is no file or folder here",
        (checkpoint.parent / "language", image): "language is a language model, which answers no questions about",
    }
    for words, reason in cases.items():
        done = ask(*words, QUESTION)
        assert done.exit_code == 1 and reason in done.output
