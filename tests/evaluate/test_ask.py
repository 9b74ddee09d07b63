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
    done = CliRunner().invoke(app, ["ask", *map(str, words)], env={"COLUMNS": "500"})
    return done.exit_code, done.output if done.exit_code else done.stdout


def test_answers_are_those_of_generate(checkpoint, image, tmp_path):
    expected = generate(checkpoint, QUESTION, Image.open(image), tokens=12)[0]
    assert ask(checkpoint, image, QUESTION, "--max-new-tokens", 12) == (0, expected + "\n")

    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    targets = {"target_modules": r".*\.language_model\..*_proj", "modules_to_save": ["multi_modal_projector"]}
    adapted = get_peft_model(model, LoraConfig(r=4, **targets))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter += torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "training.json").write_text('{"quantization": null}')
    merged = shutil.copytree(checkpoint, tmp_path / "merged")
    adapted.merge_and_unload().save_pretrained(merged)
    of_adapter = generate(merged, QUESTION, Image.open(image), tokens=12)[0]
    assert ask(tmp_path / "adapter", image, QUESTION, "--max-new-tokens", 12) == (0, of_adapter + "\n")
    assert of_adapter != expected


def test_what_is_not_there_is_named(checkpoint, image, tmp_path):
    status, said = ask(checkpoint, tmp_path / "noise.jpg", QUESTION)
    assert status == 1 and f"There is no image file {tmp_path / 'noise.jpg'}. {tmp_path} has noise.png." in said
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} has no images." in ask(checkpoint, tmp_path / "empty", QUESTION)[1]
    assert "no-model is no file or folder here" in ask("./no-model", image, QUESTION)[1]
    (tmp_path / "broken.png").write_text("kite")
    assert "broken.png cannot be used" in ask(checkpoint, tmp_path / "broken.png", QUESTION)[1]
    language = ask(checkpoint.parent / "language", image, QUESTION)[1]
    assert "language is a language model, which answers no questions about images." in language
