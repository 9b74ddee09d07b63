"""`normalign ask`: a checkpoint's and an adapter's answers, and errors that say what is there."""

import json
import shutil

import demo_parts
import pytest
import torch
import training
from asking import generate
from chat_families import byte_tokenizer
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoProcessor, GenerationConfig
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.cli import app
from normalign_llava.evaluation.answering import greedy_config
from normalign_llava.evaluation.questions import read_words


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
    file = tmp_path / "noise.png"
    tokens = ("--max-new-tokens", "12")
    file.write_bytes(training.image(1))
    expected = generate(checkpoint, QUESTION, Image.open(file), tokens=12)[0]
    assert ask(checkpoint, file, *tokens).stdout == expected + "\n"

    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    targets = r".*\.language_model\..*_proj"
    saved = ["multi_modal_projector"]
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


def test_what_is_not_there_is_named(checkpoint, tmp_path):
    (tmp_path / "broken.png").write_text("kite")
    (tmp_path / "noise.png").write_bytes(training.image(1))
    cases = {
        (checkpoint, "kite.png"): "does not exist",
        (checkpoint, "broken.png"): "broken.png cannot be used",
        (
            checkpoint.parent / "language",
            "noise.png",
        ): "is a language model. Give a vision-language",
    }
    for (model, image), reason in cases.items():
        result = ask(model, tmp_path / image)
        assert result.exit_code == 1 and reason in result.output
    hidden = shutil.ignore_patterns("*.safetensors")
    without = shutil.copytree(checkpoint, tmp_path / "model", ignore=hidden)
    questions = {
        "<image>\nWhat?": "has <image>. It",
        "what? " * 300: "the model reads 256.",
        " ": "empty",
    }
    for question, reason in questions.items():
        assert reason in ask(without, tmp_path / "noise.png", question=question).stderr


def answer_of_transformers(checkpoint, messages, tokens):
    """The greedy answer by transformers alone."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    as_tensors = dict(tokenize=True, return_dict=True, return_tensors="pt")
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, **as_tensors)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
    return processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def telling(tmp_path_factory):
    """A checkpoint whose answers differ by all that was said and shown."""
    folder = demo_parts.checkpoint(tmp_path_factory.mktemp("telling"))
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    for layer in model.get_decoder().layers:
        for name in ("q", "v", "o"):  # attention that is uneven, and that counts
            getattr(layer.self_attn, f"{name}_proj").weight.data *= 20
    model.save_pretrained(folder)
    return folder


def turn(role, text, *images):
    shown = [{"type": "image", "image": Image.open(image)} for image in images]
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}


@pytest.fixture
def images(tmp_path):
    """Two images with noise in them, in a folder of their own."""
    files = []
    (tmp_path / "images").mkdir()
    for seed in (1, 2):
        file = tmp_path / "images" / f"noise-{seed}.png"
        file.write_bytes(training.image(seed))
        files.append(file)
    return files


def test_an_answer_cannot_control_the_terminal(telling, images, tmp_path):
    folder = shutil.copytree(telling, tmp_path / "model")
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    escape = stored["model"]["vocab"].pop("X")
    stored["model"]["vocab"]["\x1b"] = escape
    file.write_text(json.dumps(stored))
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    others = set(range(model.config.text_config.vocab_size)) - {escape}
    model.generation_config.suppress_tokens = sorted(others)
    model.save_pretrained(folder)
    assert ask(folder, images[0], "--max-new-tokens", "3").stdout == "\\x1b" * 3 + "\n"


def test_several_images_none_and_a_system_turn(telling, images):
    def said(*words):
        command = ["ask", str(telling), *map(str, words), "--max-new-tokens", "8"]
        return CliRunner().invoke(app, command).stdout

    one = answer_of_transformers(telling, [turn("user", QUESTION, images[0])], 8)
    two = answer_of_transformers(telling, [turn("user", QUESTION, *images)], 8)
    none = answer_of_transformers(telling, [turn("user", QUESTION)], 8)
    briefly = [turn("system", "Be brief."), turn("user", QUESTION, images[0])]
    assert len({one, two, none, answer_of_transformers(telling, briefly, 8)}) == 4
    assert said(*images, QUESTION) == two + "\n"
    assert said(QUESTION) == none + "\n"
    system = said("--system", "Be brief.", images[0], QUESTION)
    assert system == answer_of_transformers(telling, briefly, 8) + "\n"


def test_without_a_question_it_converses(telling, images):
    first = [turn("user", QUESTION, images[0])]
    answer = answer_of_transformers(telling, first, 8)
    second = [*first, turn("assistant", answer.strip()), turn("user", "and now?", images[1])]
    again = answer_of_transformers(telling, [turn("user", "and now?", images[0])], 8)
    spoken = f"{QUESTION}\n/image {images[1]}\nand now?\n/new\n\nand now?\n"
    command = ["ask", str(telling), str(images[0]), "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, command, input=spoken)
    assert result.exit_code == 0, result.output
    expected = [answer, answer_of_transformers(telling, second, 8), again]
    assert result.stdout == "".join(f"{text}\n" for text in expected)


def test_a_turn_that_cannot_be_answered_is_left_out(telling, images):
    spoken = f"/image no.png\nis <image> one?\n{QUESTION}\n"
    command = ["ask", str(telling), str(images[0]), "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, command, input=spoken)
    answer = answer_of_transformers(telling, [turn("user", QUESTION, images[0])], 8)
    assert result.stdout == answer + "\n"
    assert "no.png" in result.stderr and "stands for an image" in result.stderr


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_folder_is_asked_into_a_file_that_is_resumed(telling, images, tmp_path):
    output = tmp_path / "answers" / "a.jsonl"
    command = ["ask", str(telling), str(images[0].parent), QUESTION, "--output", str(output)]
    command += ["--max-new-tokens", "8"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    expected = [
        answer_of_transformers(telling, [turn("user", QUESTION, image)], 8) for image in images
    ]
    rows = lines(output)
    assert [row["answer"] for row in rows] == [text.strip() for text in expected]
    assert [row["name"] for row in rows] == ["noise-1.png", "noise-2.png"]
    whole = output.read_text()
    # Stopped in the middle of the second line, and with a mark on the first.
    first, second = whole.splitlines(keepends=True)
    first = json.dumps({**json.loads(first), "answer": "kept"}) + "\n"
    output.write_text(first + second[:10])
    assert CliRunner().invoke(app, command).exit_code == 0
    assert output.read_text() == first + second
    other = CliRunner().invoke(app, [word.replace(QUESTION, "why?") for word in command])
    assert other.exit_code == 1 and "Give another --output" in other.stderr
    assert output.read_text() == first + second


def test_rows_of_data_are_asked_together_as_alone(telling, images, tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image><image>a?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "no"},
    ]
    both = ["images/noise-1.png", "images/noise-2.png"]
    rows = [
        {"messages": messages, "images": both},
        {"image": both[0], "question": QUESTION, "answer": "7"},
    ]
    data = tmp_path / "data.jsonl"
    output = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["ask", str(telling), "--data", str(data), "--output", str(output)]
    command += ["--max-new-tokens", "8", "--batch-size", "2", "--dtype", "float32"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    expected = [
        [turn("system", "Be brief."), turn("user", "a?", *images)],
        [turn("user", QUESTION, images[0])],
    ]
    written = lines(output)
    for row, conversation in zip(written, expected, strict=True):
        assert row["answer"] == answer_of_transformers(telling, conversation, 8).strip()
    assert [row["truth"] for row in written] == ["yes", "7"]
    assert "1 rows with several questions" in result.stderr


def test_words_are_images_or_the_question(images, tmp_path):
    folder = images[0].parent
    (first, second) = map(str, images)
    assert read_words([first, second, "What?"]) == ([*images], "What?")
    assert read_words([first]) == ([images[0]], None)
    assert read_words(["What is kite.png?"]) == ([], "What is kite.png?")
    assert read_words([str(folder), "What?"]) == ([folder], "What?")
    for words in ([first, "kit.png"], ["kit.png", "What?"], ["What?", first]):
        with pytest.raises(ValueError, match="does not exist"):
            read_words(words)


def test_decoding_is_greedy_whatever_the_model_s_file_says(telling, images, tmp_path):
    folder = shutil.copytree(telling, tmp_path / "model")
    file = folder / "generation_config.json"
    stored = json.loads(file.read_text())
    penalties = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "bad_words_ids": [[7]]}
    file.write_text(json.dumps({**stored, **penalties}))
    plain = answer_of_transformers(telling, [turn("user", QUESTION, images[0])], 12)
    assert plain != answer_of_transformers(folder, [turn("user", QUESTION, images[0])], 12)
    assert ask(folder, images[0], "--max-new-tokens", "12").stdout == plain + "\n"
    data = tmp_path / "data.csv"
    data.write_text(f"image,question,answer\nimages/noise-1.png,{QUESTION},7\n")
    assert evaluated(folder, data) == evaluated(telling, data)


def test_an_answer_ends_at_the_model_s_ends_and_at_the_tokenizer_s():
    tokenizer = byte_tokenizer()
    own = GenerationConfig(eos_token_id=[3, 5], suppress_tokens=[9], repetition_penalty=2.0)
    greedy = greedy_config(own, tokenizer)
    assert greedy.eos_token_id == [3, 5, tokenizer.eos_token_id]
    assert greedy.suppress_tokens == [9] and greedy.repetition_penalty is None
    assert greedy_config(GenerationConfig(eos_token_id=3)).eos_token_id == [3]


def test_an_adapter_of_another_trainer_is_asked_with_the_remedy_of_the_message(
    telling, images, tmp_path
):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(telling)
    targets = r".*\.language_model\..*(q|v)_proj"
    get_peft_model(model, LoraConfig(r=2, target_modules=targets)).save_pretrained(tmp_path / "dpo")
    data = tmp_path / "data.csv"
    data.write_text(f"image,question,answer\nimages/noise-1.png,{QUESTION},7\n")
    adapter = str(tmp_path / "dpo")
    commands = {
        "ask": ["ask", adapter, str(images[0]), QUESTION],
        "evaluate": ["evaluate", adapter, "--data", str(data)],
        "diagnose": ["diagnose", adapter, "--data", str(data), "--samples", "1"],
    }
    for command in commands.values():
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 1 and "--base-quantization" in refused.stderr
        moved = CliRunner().invoke(app, [*command, "--base-quantization", "none", "--base", "gone"])
        assert moved.exit_code == 1 and "gone" in moved.stderr
        done = CliRunner().invoke(app, [*command, "--base-quantization", "none"])
        assert done.exit_code == 0, done.output
    no_adapter = CliRunner().invoke(app, ["ask", str(telling), QUESTION, "--base", str(telling)])
    assert "is not an adapter" in no_adapter.stderr
