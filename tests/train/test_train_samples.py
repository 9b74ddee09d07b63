"""Answers to held-out rows while training, against decoding token by token without a cache."""

import json
import shutil

import pytest
import tiny
import torch
import training
from datasets import Dataset
from PIL import Image
from train_data import inside
from transformers import TrainerState

from normalign_llava.data.rows.parse import FEATURES
from normalign_llava.train.callbacks.samples import _short, sample_callback
from normalign_llava.train.callbacks.step_lines import write_step
from normalign_llava.train.modules.model import base_model
from normalign_llava.train.options import NormAlignConfig


pytestmark = pytest.mark.slow

EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """With a head of its own: a tied one makes an untrained model repeat its last token."""
    return training.checkpoint(tmp_path_factory.mktemp("parts"), tied=False, seed=5)


IMAGE = {"type": "image", "text": None}


def text(words):
    return {"type": "text", "text": words}


def user(*content):
    return {"role": "user", "content": list(content)}


def assistant(answer):
    return {"role": "assistant", "content": [text(answer)]}


def parsed_row(number, images, *messages):
    stored_images = [{"path": None, "bytes": image["bytes"]} for image in images]
    return {
        "images": stored_images,
        "messages": list(messages),
        "learned": [True] * (len(messages) // 2),
        "source": "tiny",
        "row": number,
        "image_count": len(images),
        "length": 40,
    }


def held_out_rows():
    """The second has a broken image, the third two images and two turns, the last two none."""
    which_colour = user(IMAGE, text("which colour"))
    and_this = user(text("and this"), IMAGE)
    broken_image = {"path": None, "bytes": b"no image"}
    rows = [
        parsed_row(0, [inside("red")], which_colour, assistant("red")),
        parsed_row(1, [broken_image], which_colour, assistant("red")),
        parsed_row(
            2,
            [inside("green"), inside("blue")],
            which_colour,
            assistant("green"),
            and_this,
            assistant("blue"),
        ),
        parsed_row(3, [], user(text("say yes")), assistant("yes")),
        parsed_row(4, [], user(text("say no")), assistant("no")),
    ]
    return Dataset.from_list(rows, features=FEATURES)


PROMPTS = [
    "<|im_start|>user\n<image>which colour<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n<image>which colour<|im_end|>\n<|im_start|>assistant\ngreen<|im_end|>\n"
    "<|im_start|>user\nand this<image><|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nsay yes<|im_end|>\n<|im_start|>assistant\n",
]


def greedy_answer(trainer, prompt, images, max_new_tokens):
    """The greedy answer, token by token, without a cache."""
    processor = trainer.processing_class
    tokenizer = processor.tokenizer
    model = base_model(trainer.model).eval()
    inputs = processor(text=prompt, images=images or None, return_tensors="pt")
    pixel_values = inputs.get("pixel_values")
    input_ids = inputs["input_ids"]
    prompt_length = input_ids.shape[1]
    suppressed = model.generation_config.suppress_tokens
    for _ in range(max_new_tokens):
        with torch.no_grad():
            outputs = model(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                pixel_values=pixel_values,
            )
        logits = outputs.logits[0, -1]
        logits[suppressed] = -torch.inf
        next_token = logits.argmax()
        input_ids = torch.cat([input_ids, next_token[None, None]], dim=1)
        if next_token == tokenizer.eos_token_id:
            break
    answer_ids = input_ids[0, prompt_length:]
    return tokenizer.decode(answer_ids, skip_special_tokens=True).strip()


def read_samples(folder):
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def answering_trainer(untied, folder, **options):
    """A trainer with held-out rows, but for the one with a broken image, and evaluations."""
    held_out = held_out_rows().select([0, 2, 3, 4])
    options = {**EVALUATED, **options}
    return training.trainer(folder, untied, training.rows(8), held_out=held_out, **options)


@pytest.mark.parametrize("adapters", [{}, {"use_peft": True, "lora_r": 2}], ids=["full", "lora"])
def test_answers_equal_greedy_decoding(untied, tmp_path, capsys, monkeypatch, adapters):
    monkeypatch.setenv("COLUMNS", "12")  # lines stay whole in a narrow terminal too
    trainer = answering_trainer(
        untied,
        tmp_path,
        sample_count=3,
        sample_max_new_tokens=8,
        gradient_checkpointing=True,
        **adapters,
    )
    tiny.heeding(trainer.model)
    trainer.train()
    samples = read_samples(tmp_path)
    # As after another held-out data set.
    trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {})
    printed = capsys.readouterr().out
    assert "rows at step 1:" not in printed
    assert printed.count("rows at step 2:") == 1
    assert "rows at step 3:" not in printed
    assert printed.count("rows at step 4:") == 1
    assert printed.count("which colour: ") == 2
    assert printed.count("(true: yes)") == 2

    steps = [(sample["step"], sample["sample"]) for sample in samples]
    assert steps == [(2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)]
    colours = {
        "samples/0-0.png": "red",
        "samples/1-0.png": "green",
        "samples/1-1.png": "blue",
    }
    images = {}
    for image_name, colour in colours.items():
        images[image_name] = Image.new("RGB", (20, 20), colour)
        written_image = Image.open(tmp_path / image_name)
        assert written_image.tobytes() == images[image_name].tobytes()

    last_samples = samples[3:]
    first, second, third = last_samples
    assert first["images"] == ["samples/0-0.png"]
    assert first["question"] == "which colour"
    assert first["truth"] == "red"
    assert second["images"] == ["samples/1-0.png", "samples/1-1.png"]
    assert second["question"] == "and this"
    assert second["truth"] == "blue"
    assert third["images"] == []
    assert third["question"] == "say yes"
    assert third["truth"] == "yes"
    for prompt, sample in zip(PROMPTS, last_samples, strict=True):
        prompt_images = [images[image_name] for image_name in sample["images"]]
        expected = greedy_answer(trainer, prompt, prompt_images, max_new_tokens=8)
        assert sample["answer"] == expected
    answers = {sample["answer"] for sample in last_samples}
    assert len(answers) > 1


def test_training_is_bitwise_the_same_with_answers(untied, tmp_path):
    weights = {}
    for sample_count in (0, 2):
        folder = tmp_path / str(sample_count)
        trainer = answering_trainer(
            untied,
            folder,
            sample_count=sample_count,
            use_peft=True,
            lora_r=2,
            lora_dropout=0.3,
        )
        trainer.train()
        assert (folder / "samples.jsonl").exists() == (sample_count > 0)
        weights[sample_count] = training.weights(trainer.model)
    training.assert_equal(weights[2], weights[0])


@pytest.fixture
def evaluated_options(tmp_path):
    """Options that leave the number of answers at its default."""
    return NormAlignConfig(
        str(tmp_path),
        **training.SHORT,
        eval_strategy="steps",
        eval_steps=1,
    )


def test_four_rows_are_answered_by_default_without_one_with_a_broken_image(evaluated_options):
    callback = sample_callback(held_out_rows(), evaluated_options, is_sharded=False)
    truths = [sample.truth for sample in callback.samples]
    assert truths == ["red", "blue", "yes", "no"]


def test_rows_of_a_named_set_are_answered(evaluated_options):
    callback = sample_callback({"one": held_out_rows()}, evaluated_options, is_sharded=False)
    assert callback.count == 4
    assert len(callback.samples) == 4


def test_only_the_first_process_answers(evaluated_options, tmp_path, caplog):
    callback = sample_callback(held_out_rows(), evaluated_options, is_sharded=False)
    state = TrainerState(is_world_process_zero=False)
    callback.on_evaluate(evaluated_options, state, None)
    assert not (tmp_path / "samples.jsonl").exists()
    assert not caplog.text


def test_a_sharded_model_gives_no_answers_and_says_so(evaluated_options, caplog):
    assert sample_callback(held_out_rows(), evaluated_options, is_sharded=True) is None
    assert "sharded" in caplog.text


@pytest.mark.parametrize(
    "strategy, sample_count, warns",
    [
        pytest.param("no", None, False, id="not asked for"),
        pytest.param("no", 2, True, id="a number"),
        pytest.param("steps", None, True, id="evaluations"),
    ],
)
def test_answers_of_a_sharded_model_are_warned_of_if_they_are_asked_for(
    tmp_path, caplog, strategy, sample_count, warns
):
    train_options = training.arguments(
        tmp_path,
        eval_strategy=strategy,
        sample_count=sample_count,
        eval_steps=1,
    )
    assert sample_callback(held_out_rows(), train_options, is_sharded=True) is None
    assert ("sharded" in caplog.text) == warns


def test_no_rows_are_answered_if_none_are_held_out(evaluated_options):
    assert sample_callback(None, evaluated_options, is_sharded=False) is None


def test_as_many_rows_are_answered_as_the_options_say(evaluated_options):
    evaluated_options.sample_count = 2
    callback = sample_callback(held_out_rows(), evaluated_options, is_sharded=False)
    assert len(callback.samples) == 2
    evaluated_options.sample_count = 0
    assert sample_callback(held_out_rows(), evaluated_options, is_sharded=False) is None


def test_lines_of_this_step_and_later_ones_are_dropped(tmp_path):
    samples_path = tmp_path / "samples.jsonl"
    write_step(samples_path, 1, [{"answer": "ä"}])
    first_line = samples_path.read_text()
    assert json.loads(first_line) == {"step": 1, "answer": "ä"}
    for step in (2, 3):
        write_step(samples_path, step, [{"answer": "b"}, {"answer": "c"}])
    write_step(samples_path, 2, [{"answer": "d"}])
    expected = first_line + json.dumps({"step": 2, "answer": "d"}) + "\n"
    assert samples_path.read_text() == expected


def test_a_step_without_answers_leaves_no_line(tmp_path):
    samples_path = tmp_path / "samples.jsonl"
    write_step(samples_path, 1, [])
    assert samples_path.read_text() == ""
    write_step(samples_path, 2, [{"answer": "a"}])
    assert json.loads(samples_path.read_text()) == {"step": 2, "answer": "a"}


@pytest.mark.parametrize(
    "text, expected",
    [
        pytest.param("a\n b\t c", "a b c", id="several lines"),
        pytest.param("x" * 100, "x" * 100, id="100 letters"),
        pytest.param("x" * 101, "x" * 97 + "...", id="101 letters"),
    ],
)
def test_a_long_text_is_shown_on_one_line_of_a_hundred_letters(text, expected):
    assert _short(text) == expected


def test_a_resumed_run_answers_later_steps_again(untied, tmp_path):
    options = {
        "sample_count": 1,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = answering_trainer(untied, tmp_path, **options)
    trainer.train()
    expected = read_samples(tmp_path)
    (tmp_path / "samples.jsonl").write_text(json.dumps(expected[0]) + "\n")
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = answering_trainer(untied, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert read_samples(tmp_path) == expected
