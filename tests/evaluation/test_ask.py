"""`normalign ask`: a checkpoint's and an adapter's answers, and errors that say what is there."""

import json
import shutil

import pytest
import torch
import training
from asking import generate
from chat_families import byte_tokenizer
from peft import LoraConfig, get_peft_model
from PIL import Image
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.cli import app
from normalign_llava.evaluation.ask import AnswerPrinter


pytestmark = pytest.mark.slow

QUESTION = "what is 7 plus 0?"


def ask(model, image, *words, question=QUESTION):
    command = ["ask", str(model), str(image), question, *words]
    return CliRunner().invoke(app, command, env={"COLUMNS": "500"})


def evaluated(model, data):
    """The model's answers to questions of one's own."""
    result = CliRunner().invoke(app, ["evaluate", str(model), "--data", str(data)])
    assert result.exit_code == 0, result.output
    (file,) = (model / "evaluation" / f"own_{data.name}").glob("samples_*.jsonl")
    return [json.loads(line)["resps"] for line in file.read_text().splitlines()]


def test_answers_are_those_of_generate(checkpoint, tmp_path):
    file, tokens = tmp_path / "noise.png", ("--max-new-tokens", "12")
    file.write_bytes(training.image(1))
    expected = generate(checkpoint, QUESTION, Image.open(file), tokens=12)[0]
    assert ask(checkpoint, file, *tokens).stdout == expected + "\n"

    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    targets, saved = r".*\.language_model\..*_proj", ["multi_modal_projector"]
    config = LoraConfig(r=4, target_modules=targets, modules_to_save=saved)
    adapted = get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "to_save" in name:
                parameter += torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "training.json").write_text('{"quantization": null}')
    merged = shutil.copytree(checkpoint, tmp_path / "merged")
    adapted.merge_and_unload().save_pretrained(merged)
    of_adapter = generate(merged, QUESTION, Image.open(file), tokens=12)[0]
    assert ask(tmp_path / "adapter", file, *tokens).stdout == of_adapter + "\n" != expected + "\n"
    (data := tmp_path / "data.csv").write_text(f"image,question,answer\nnoise.png,{QUESTION},7\n")
    assert evaluated(tmp_path / "adapter", data) == evaluated(merged, data)


def test_words_are_printed_as_they_come_and_cannot_control_the_terminal(capsys):
    tokenizer = byte_tokenizer()
    printer = AnswerPrinter(tokenizer, skip_prompt=True, skip_special_tokens=True)
    printer.put(torch.tensor([tokenizer.encode("What?")]))
    printed = []
    for token in [*tokenizer.encode("é \x1b a\n"), tokenizer.eos_token_id]:
        printer.put(torch.tensor([token]))
        printed.append(capsys.readouterr().out)
    assert printed == ["", "é", " ", "", r"\x1b ", "a", "\n", ""]


def test_what_is_not_there_is_named(checkpoint, tmp_path):
    (tmp_path / "broken.png").write_text("kite")
    (tmp_path / "noise.png").write_bytes(training.image(1))
    cases = {
        (checkpoint, "kite.png"): "There is no file",
        (checkpoint, "broken.png"): "broken.png cannot be used",
        (checkpoint.parent / "language", "noise.png"): "is a language model without vision",
    }
    for (model, image), reason in cases.items():
        result = ask(model, tmp_path / image)
        assert result.exit_code == 1 and reason in result.output
    hidden = shutil.ignore_patterns("*.safetensors")
    without = shutil.copytree(checkpoint, tmp_path / "model", ignore=hidden)
    questions = {"<image>\nWhat?": "has <image>.", "what? " * 300: "model takes 256.", " ": "empty"}
    for question, reason in questions.items():
        assert reason in ask(without, tmp_path / "noise.png", question=question).stderr
