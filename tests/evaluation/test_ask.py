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


def run_command(*words, typed=None):
    command = [str(word) for word in words]
    return CliRunner().invoke(app, command, input=typed, env={"COLUMNS": "500"})


def ask(model, image, *options, question=QUESTION):
    return run_command("ask", model, image, question, *options)


def write_question(tmp_path, image):
    """A table with one question, and its true answer."""
    data_path = tmp_path / "data.csv"
    data_path.write_text(f"image,question,answer\n{image},{QUESTION},7\n")
    return data_path


def evaluate_answers(model, data_path):
    """The model's answers to questions of one's own."""
    outcome = run_command("evaluate", model, "--data", data_path)
    assert outcome.exit_code == 0, outcome.output
    folder = model / "evaluation" / f"own_{data_path.name}"
    (samples_path,) = folder.glob("samples_*.jsonl")
    return [sample["resps"] for sample in read_lines(samples_path)]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def noise_image(tmp_path):
    image_path = tmp_path / "noise.png"
    image_path.write_bytes(training.image(1))
    return image_path


def test_the_answer_is_the_one_of_generate(checkpoint, noise_image):
    expected, *_ = generate(checkpoint, QUESTION, Image.open(noise_image), tokens=12)
    outcome = ask(checkpoint, noise_image, "--max-new-tokens", 12)
    assert outcome.stdout == expected + "\n"


@pytest.fixture
def adapter(checkpoint, tmp_path):
    """An adapter far from its start; beside it, merged, is the model that it makes."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    config = LoraConfig(
        r=4,
        target_modules=r".*\.language_model\..*_proj",
        modules_to_save=["multi_modal_projector"],
    )
    adapted_model = get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted_model.named_parameters():
            if "lora_" in name or "to_save" in name:
                parameter += torch.randn_like(parameter)
    adapter_folder = tmp_path / "adapter"
    adapted_model.save_pretrained(adapter_folder)
    (adapter_folder / "training.json").write_text('{"quantization": null}')
    merged_folder = shutil.copytree(checkpoint, tmp_path / "merged")
    adapted_model.merge_and_unload().save_pretrained(merged_folder)
    return adapter_folder


def test_the_answer_of_an_adapter_is_the_one_of_the_merged_model(adapter, checkpoint, noise_image):
    image = Image.open(noise_image)
    answer_of_base, *_ = generate(checkpoint, QUESTION, image, tokens=12)
    expected, *_ = generate(adapter.parent / "merged", QUESTION, image, tokens=12)
    assert expected != answer_of_base
    outcome = ask(adapter, noise_image, "--max-new-tokens", 12)
    assert outcome.stdout == expected + "\n"


def test_an_adapter_is_evaluated_as_the_merged_model(adapter, noise_image, tmp_path):
    data_path = write_question(tmp_path, noise_image.name)
    answers = evaluate_answers(adapter, data_path)
    assert answers == evaluate_answers(adapter.parent / "merged", data_path)


@pytest.mark.parametrize(
    ("image_name", "reason"),
    [
        ("kite.png", "does not exist"),
        ("broken.png", "broken.png cannot be used"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(checkpoint, tmp_path, image_name, reason):
    (tmp_path / "broken.png").write_text("kite")
    outcome = ask(checkpoint, tmp_path / image_name)
    assert outcome.exit_code == 1
    assert reason in outcome.output


def test_a_language_model_is_not_asked(checkpoint, noise_image):
    outcome = ask(checkpoint.parent / "language", noise_image)
    assert outcome.exit_code == 1
    assert "is a language model. Give a vision-language" in outcome.output


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        pytest.param("<image>\nWhat?", "has <image>. It", id="image token"),
        pytest.param("what? " * 300, "the model reads 256.", id="long"),
        pytest.param(" ", "empty", id="empty"),
    ],
)
def test_a_question_is_refused_before_weights_are_read(
    checkpoint, noise_image, tmp_path, question, reason
):
    ignored = shutil.ignore_patterns("*.safetensors")
    without_weights = shutil.copytree(checkpoint, tmp_path / "model", ignore=ignored)
    assert reason in ask(without_weights, noise_image, question=question).stderr


def answer_of_transformers(checkpoint, messages, max_new_tokens=8):
    """The greedy answer by transformers, without this package's functions."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    inputs = processor.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    sequences = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    prompt_length = inputs["input_ids"].shape[1]
    return processor.decode(sequences[0, prompt_length:], skip_special_tokens=True)


@pytest.fixture(scope="module")
def telling(tmp_path_factory):
    """A checkpoint whose answers differ by all that was said and shown."""
    folder = demo_parts.checkpoint(tmp_path_factory.mktemp("telling"))
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    # Attention becomes uneven, and counts.
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.data *= 20
        layer.self_attn.v_proj.weight.data *= 20
        layer.self_attn.o_proj.weight.data *= 20
    model.save_pretrained(folder)
    return folder


def make_turn(role, text, *images):
    shown = [{"type": "image", "image": Image.open(image)} for image in images]
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}


@pytest.fixture
def images(tmp_path):
    """Two images with noise in them, in a folder of their own."""
    folder = tmp_path / "images"
    folder.mkdir()
    image_paths = []
    for seed in (1, 2):
        image_path = folder / f"noise-{seed}.png"
        image_path.write_bytes(training.image(seed))
        image_paths.append(image_path)
    return image_paths


def test_an_answer_cannot_control_the_terminal(telling, images, tmp_path):
    folder = shutil.copytree(telling, tmp_path / "model")
    tokenizer_path = folder / "tokenizer.json"
    tokenizer = json.loads(tokenizer_path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    escape = vocabulary.pop("X")
    vocabulary["\x1b"] = escape
    tokenizer_path.write_text(json.dumps(tokenizer))

    # The model says nothing but the escape character.
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    suppressed = set(range(model.config.text_config.vocab_size)) - {escape}
    model.generation_config.suppress_tokens = sorted(suppressed)
    model.save_pretrained(folder)
    assert ask(folder, images[0], "--max-new-tokens", 3).stdout == "\\x1b" * 3 + "\n"


def test_answers_differ_by_images_and_the_system_turn(telling, images):
    answers = set()
    for messages in (
        [make_turn("user", QUESTION, images[0])],
        [make_turn("user", QUESTION, *images)],
        [make_turn("user", QUESTION)],
        [make_turn("system", "Be brief."), make_turn("user", QUESTION, images[0])],
    ):
        answers.add(answer_of_transformers(telling, messages))
    assert len(answers) == 4


def test_a_question_about_several_images_is_answered(telling, images):
    expected = answer_of_transformers(telling, [make_turn("user", QUESTION, *images)])
    outcome = run_command("ask", telling, *images, QUESTION, "--max-new-tokens", 8)
    assert outcome.stdout == expected + "\n"


def test_a_question_without_an_image_is_answered(telling):
    expected = answer_of_transformers(telling, [make_turn("user", QUESTION)])
    outcome = run_command("ask", telling, QUESTION, "--max-new-tokens", 8)
    assert outcome.stdout == expected + "\n"


def test_a_question_is_answered_after_a_system_turn(telling, images):
    messages = [make_turn("system", "Be brief."), make_turn("user", QUESTION, images[0])]
    expected = answer_of_transformers(telling, messages)
    outcome = ask(telling, images[0], "--system", "Be brief.", "--max-new-tokens", 8)
    assert outcome.stdout == expected + "\n"


def converse(model, image, *lines):
    typed = "".join(f"{line}\n" for line in lines)
    return run_command("ask", model, image, "--max-new-tokens", 8, typed=typed)


def test_without_a_question_it_converses(telling, images):
    first_image, second_image = images
    outcome = converse(
        telling,
        first_image,
        QUESTION,
        f"/image {second_image}",
        "and now?",
        "/new",
        "",
        "and now?",
    )
    assert outcome.exit_code == 0, outcome.output

    first_turn = make_turn("user", QUESTION, first_image)
    first_answer = answer_of_transformers(telling, [first_turn])
    conversation = [
        first_turn,
        make_turn("assistant", first_answer.strip()),
        make_turn("user", "and now?", second_image),
    ]
    second_answer = answer_of_transformers(telling, conversation)
    new_conversation = [make_turn("user", "and now?", first_image)]
    new_answer = answer_of_transformers(telling, new_conversation)
    assert outcome.stdout == f"{first_answer}\n{second_answer}\n{new_answer}\n"


def test_a_turn_that_cannot_be_answered_is_left_out(telling, images):
    outcome = converse(telling, images[0], "/image no.png", "is <image> one?", QUESTION)
    answer = answer_of_transformers(telling, [make_turn("user", QUESTION, images[0])])
    assert outcome.stdout == answer + "\n"
    assert "no.png" in outcome.stderr
    assert "stands for an image" in outcome.stderr


@pytest.fixture
def ask_folder(telling, images, tmp_path):
    """Asks about each image of a folder, into a file."""
    output_path = tmp_path / "answers" / "a.jsonl"

    def ask_about_each(question=QUESTION):
        options = ("--output", output_path, "--max-new-tokens", 8)
        return ask(telling, images[0].parent, *options, question=question)

    return ask_about_each, output_path


def test_a_folder_is_asked_into_a_file(ask_folder, telling, images):
    ask_about_each, output_path = ask_folder
    outcome = ask_about_each()
    assert outcome.exit_code == 0, outcome.output
    expected = []
    for image in images:
        answer = answer_of_transformers(telling, [make_turn("user", QUESTION, image)])
        expected.append(answer.strip())
    rows = read_lines(output_path)
    assert [row["answer"] for row in rows] == expected
    assert [row["name"] for row in rows] == ["noise-1.png", "noise-2.png"]


def test_a_file_of_answers_is_resumed(ask_folder):
    ask_about_each, output_path = ask_folder
    ask_about_each()
    first_line, second_line = output_path.read_text().splitlines(keepends=True)
    # It was stopped in the middle of the second line; a mark is on the first.
    marked_line = json.dumps({**json.loads(first_line), "answer": "kept"}) + "\n"
    output_path.write_text(marked_line + second_line[:10])

    assert ask_about_each().exit_code == 0
    assert output_path.read_text() == marked_line + second_line


def test_a_file_of_other_answers_is_left_alone(ask_folder):
    ask_about_each, output_path = ask_folder
    ask_about_each()
    before = output_path.read_text()
    outcome = ask_about_each("why?")
    assert outcome.exit_code == 1
    assert "Give another --output" in outcome.stderr
    assert output_path.read_text() == before


def test_rows_of_data_are_asked_together_as_one_by_one(telling, images, tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image><image>a?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "no"},
    ]
    rows = [
        {"messages": messages, "images": ["images/noise-1.png", "images/noise-2.png"]},
        {"image": "images/noise-1.png", "question": QUESTION, "answer": "7"},
    ]
    data_path = tmp_path / "data.jsonl"
    data_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output_path = tmp_path / "a.jsonl"
    options = ("--max-new-tokens", 8, "--batch-size", 2, "--dtype", "float32")
    outcome = run_command("ask", telling, "--data", data_path, "--output", output_path, *options)
    assert outcome.exit_code == 0, outcome.output

    first_messages = [make_turn("system", "Be brief."), make_turn("user", "a?", *images)]
    second_messages = [make_turn("user", QUESTION, images[0])]
    first_row, second_row = read_lines(output_path)
    assert first_row["answer"] == answer_of_transformers(telling, first_messages).strip()
    assert first_row["truth"] == "yes"
    assert second_row["answer"] == answer_of_transformers(telling, second_messages).strip()
    assert second_row["truth"] == "7"
    assert "1 rows with several questions" in outcome.stderr


def test_words_are_images_or_the_question(images):
    first_image, second_image = images
    words = [str(first_image), str(second_image), "What?"]
    assert read_words(words) == ([first_image, second_image], "What?")
    assert read_words([str(first_image)]) == ([first_image], None)
    assert read_words(["What is kite.png?"]) == ([], "What is kite.png?")
    folder = first_image.parent
    assert read_words([str(folder), "What?"]) == ([folder], "What?")


def test_words_that_are_neither_images_nor_a_last_question_are_refused(images):
    first_image = str(images[0])
    for words in ([first_image, "kit.png"], ["kit.png", "What?"], ["What?", first_image]):
        with pytest.raises(ValueError, match="does not exist"):
            read_words(words)


@pytest.fixture
def with_penalties(telling, tmp_path):
    """A model whose file has penalties that change its answers."""
    folder = shutil.copytree(telling, tmp_path / "model")
    config_path = folder / "generation_config.json"
    config = json.loads(config_path.read_text())
    penalties = {
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
        "bad_words_ids": [[7]],
    }
    config_path.write_text(json.dumps({**config, **penalties}))
    return folder


def test_answers_are_greedy_whatever_the_model_s_file_says(telling, with_penalties, images):
    messages = [make_turn("user", QUESTION, images[0])]
    expected = answer_of_transformers(telling, messages, max_new_tokens=12)
    with_penalties_in_use = answer_of_transformers(with_penalties, messages, max_new_tokens=12)
    assert with_penalties_in_use != expected
    outcome = ask(with_penalties, images[0], "--max-new-tokens", 12)
    assert outcome.stdout == expected + "\n"


@pytest.mark.usefixtures("images")
def test_evaluation_is_greedy_whatever_the_model_s_file_says(telling, with_penalties, tmp_path):
    data_path = write_question(tmp_path, "images/noise-1.png")
    answers = evaluate_answers(with_penalties, data_path)
    assert answers == evaluate_answers(telling, data_path)


def test_an_answer_ends_at_the_model_s_ends_and_at_the_tokenizer_s():
    tokenizer = byte_tokenizer()
    own_config = GenerationConfig(
        eos_token_id=[3, 5],
        suppress_tokens=[9],
        repetition_penalty=2.0,
    )
    greedy = greedy_config(own_config, tokenizer)
    assert greedy.eos_token_id == [3, 5, tokenizer.eos_token_id]
    assert greedy.suppress_tokens == [9]
    assert greedy.repetition_penalty is None


def test_without_a_tokenizer_an_answer_ends_at_the_model_s_end():
    assert greedy_config(GenerationConfig(eos_token_id=3)).eos_token_id == [3]


@pytest.fixture
def foreign_adapter(telling, tmp_path):
    """An adapter of another trainer, without a record of its training."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(telling)
    config = LoraConfig(r=2, target_modules=r".*\.language_model\..*(q|v)_proj")
    get_peft_model(model, config).save_pretrained(tmp_path / "dpo")
    return tmp_path / "dpo"


@pytest.mark.parametrize("name", ["ask", "evaluate", "diagnose"])
def test_an_adapter_of_another_trainer_is_opened_with_the_remedy_of_the_message(
    foreign_adapter, images, tmp_path, name
):
    data_path = write_question(tmp_path, "images/noise-1.png")
    commands = {
        "ask": ["ask", foreign_adapter, images[0], QUESTION],
        "evaluate": ["evaluate", foreign_adapter, "--data", data_path],
        "diagnose": ["diagnose", foreign_adapter, "--data", data_path, "--samples", 1],
    }
    command = commands[name]
    refused = run_command(*command)
    assert refused.exit_code == 1
    assert "--base-quantization" in refused.stderr

    without_base = run_command(*command, "--base-quantization", "none", "--base", "gone")
    assert without_base.exit_code == 1
    assert "gone" in without_base.stderr

    done = run_command(*command, "--base-quantization", "none")
    assert done.exit_code == 0, done.output


def test_a_base_is_refused_for_a_model(telling):
    outcome = run_command("ask", telling, QUESTION, "--base", telling)
    assert "is not an adapter" in outcome.stderr
