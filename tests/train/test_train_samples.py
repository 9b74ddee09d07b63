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
from normalign_llava.train.callbacks.step_lines import read_lines_before
from normalign_llava.train.modules.model import base_model
from normalign_llava.train.options import NormAlignConfig


pytestmark = pytest.mark.slow

EVALUATED = dict(eval_strategy="steps", eval_steps=2, max_steps=4, learning_rate=1e-3)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """With a head of its own: a tied one makes an untrained model repeat its last token."""
    return training.checkpoint(tmp_path_factory.mktemp("parts"), tied=False, seed=5)


def turn(role, *parts):
    """A parsed turn; None is an image."""
    content = [{"type": "text" if part else "image", "text": part} for part in parts]
    return {"role": role, "content": content}


def held_out_rows():
    broken = {"path": None, "bytes": b"no image"}
    first = turn("user", None, "which colour")
    second = turn("user", "and this", None)
    green = turn("assistant", "green")
    conversations = [
        ([inside("red")], [first, turn("assistant", "red")]),
        ([broken], [first, turn("assistant", "red")]),
        ([inside("green"), inside("blue")], [first, green, second, turn("assistant", "blue")]),
        ([], [turn("user", "say yes"), turn("assistant", "yes")]),
        ([], [turn("user", "say no"), turn("assistant", "no")]),
    ]
    rows = []
    for number, (images, messages) in enumerate(conversations):
        stored = [{"path": None, "bytes": image["bytes"]} for image in images]
        about = {"source": "tiny", "row": number, "image_count": len(images), "length": 40}
        learned = [True] * (len(messages) // 2)
        rows.append({"images": stored, "messages": messages, "learned": learned, **about})
    return Dataset.from_list(rows, features=FEATURES)


PROMPTS = [
    "<|im_start|>user\n<image>which colour<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n<image>which colour<|im_end|>\n<|im_start|>assistant\ngreen<|im_end|>\n"
    "<|im_start|>user\nand this<image><|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nsay yes<|im_end|>\n<|im_start|>assistant\n",
]


def decoded(trainer, prompt, images, tokens):
    """The greedy answer, token by token, without a cache."""
    processor = trainer.processing_class
    model = base_model(trainer.model).eval()
    inputs = processor(text=prompt, images=images or None, return_tensors="pt")
    ids = inputs["input_ids"]
    start = ids.shape[1]
    banned = model.generation_config.suppress_tokens
    while ids.shape[1] < start + tokens and ids[0, -1] != processor.tokenizer.eos_token_id:
        mask = torch.ones_like(ids)
        with torch.no_grad():
            pixels = inputs.get("pixel_values")
            logits = model(input_ids=ids, attention_mask=mask, pixel_values=pixels).logits[0, -1]
        logits[banned] = -torch.inf
        ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    return processor.tokenizer.decode(ids[0, start:], skip_special_tokens=True).strip()


def written(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def samples_of(untied, tmp_path, **options):
    """A trainer whose held-out row with a broken image evaluation skips."""
    rows = held_out_rows()
    return training.trainer(
        tmp_path, untied, training.rows(8), held_out=rows.select([0, 2, 3, 4]), **options
    )


@pytest.mark.parametrize("adapters", [{}, {"use_peft": True, "lora_r": 2}], ids=["full", "lora"])
def test_answers_are_those_of_greedy_decoding(untied, tmp_path, capsys, monkeypatch, adapters):
    monkeypatch.setenv("COLUMNS", "12")  # lines stay whole in a narrow terminal too
    options = {**EVALUATED, **adapters, "gradient_checkpointing": True}
    trainer = samples_of(untied, tmp_path, sample_count=3, sample_max_new_tokens=8, **options)
    tiny.heeding(trainer.model)
    trainer.train()
    rows = written(tmp_path)
    # As after another held-out data set.
    trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {})
    said = capsys.readouterr().out
    assert [said.count(f"rows at step {step}:") for step in range(1, 5)] == [0, 1, 0, 1]
    assert said.count("which colour: ") == 2 and said.count("(true: yes)") == 2
    assert [(row["step"], row["sample"]) for row in rows] == [
        (s, n) for s in (2, 4) for n in range(3)
    ]
    colours = {"samples/0-0.png": "red", "samples/1-0.png": "green", "samples/1-1.png": "blue"}
    images = {name: Image.new("RGB", (20, 20), colour) for name, colour in colours.items()}
    for name, image in images.items():
        assert Image.open(tmp_path / name).tobytes() == image.tobytes()
    last = rows[3:]
    assert [row["images"] for row in last] == [[*colours][:1], [*colours][1:], []]
    assert [row["truth"] for row in last] == ["red", "blue", "yes"]
    assert [row["question"] for row in last] == ["which colour", "and this", "say yes"]
    for prompt, row in zip(PROMPTS, last, strict=True):
        shown = [images[name] for name in row["images"]]
        assert row["answer"] == decoded(trainer, prompt, shown, tokens=8)
    assert len({row["answer"] for row in last}) > 1


def test_training_is_bitwise_the_same_with_answers(untied, tmp_path):
    runs = []
    for count in (0, 2):
        folder = tmp_path / str(count)
        options = {**EVALUATED, "use_peft": True, "lora_r": 2, "lora_dropout": 0.3}
        trainer = samples_of(untied, folder, sample_count=count, **options)
        trainer.train()
        assert (folder / "samples.jsonl").exists() == (count > 0)
        runs.append(training.weights(trainer.model))
    training.assert_equal(runs[1], runs[0])


def test_a_row_with_a_broken_image_is_passed_over_and_four_are_answered_by_default(
    untied, tmp_path, caplog
):
    args = NormAlignConfig(str(tmp_path), **training.SHORT, eval_strategy="steps", eval_steps=1)
    callback = sample_callback(held_out_rows(), args, is_sharded=False)
    assert [sample.truth for sample in callback.samples] == ["red", "blue", "yes", "no"]
    named = sample_callback({"one": held_out_rows()}, args, is_sharded=False)
    assert named.count == len(named.samples) == 4
    state = TrainerState(is_world_process_zero=False)
    callback.on_evaluate(args, state, None)  # the first process answers
    assert not (tmp_path / "samples.jsonl").exists()
    assert not caplog.text
    assert sample_callback(held_out_rows(), args, is_sharded=True) is None
    assert "sharded" in caplog.text
    caplog.clear()
    for strategy, count, told in (("no", None, False), ("no", 2, True), ("steps", None, True)):
        asked = training.arguments(
            tmp_path, eval_strategy=strategy, sample_count=count, eval_steps=1
        )
        assert sample_callback(held_out_rows(), asked, is_sharded=True) is None
        assert ("sharded" in caplog.text) == told
        caplog.clear()
    assert sample_callback(None, args, is_sharded=False) is None
    args.sample_count = 2
    assert len(sample_callback(held_out_rows(), args, is_sharded=False).samples) == 2
    args.sample_count = 0
    assert sample_callback(held_out_rows(), args, is_sharded=False) is None


def test_lines_of_this_step_and_later_ones_are_dropped(tmp_path):
    file = tmp_path / "samples.jsonl"
    assert read_lines_before(file, 2) == []
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    file.write_text("\n".join(lines) + "\n")
    assert read_lines_before(file, 2) == lines[:1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n b\t c", "a b c"),
        ("x" * 100, "x" * 100),
        ("x" * 101, "x" * 97 + "..."),
    ],
)
def test_a_long_text_is_shown_on_one_line_of_a_hundred_letters(text, shown):
    assert _short(text) == shown


def test_a_resumed_run_answers_later_steps_again(untied, tmp_path):
    options = {**EVALUATED, "sample_count": 1, "save_strategy": "steps", "save_steps": 2}
    trainer = samples_of(untied, tmp_path, **options)
    trainer.train()
    whole = written(tmp_path)
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole[:1]))
    shutil.rmtree(tmp_path / "checkpoint-4")
    again = samples_of(untied, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert written(tmp_path) == whole
