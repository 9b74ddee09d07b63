# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's questions, from the real archives: what is held out, what is balanced, what the loss is on."""

from collections import Counter, defaultdict
from functools import cache

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.data.sources.mixtures import load_data
from normalign_llava.fetched.convert import convert_language, convert_vision
from normalign_llava.fetched.easy_vqa import (
    COLOURS,
    KINDS,
    SHAPES,
    SYSTEM,
    easy_vqa,
    emoji,
    held_out,
    load_image,
    training_data,
)
from normalign_llava.train.batches.collator import ConversationCollator


pytestmark = [pytest.mark.usefixtures("archives"), pytest.mark.slow]


train_questions = cache(lambda: easy_vqa("train", 0))


@cache
def pixels(path):
    return load_image(path).tobytes()


def test_no_image_of_the_test_split_is_trained_on():
    trained = {question.image.read_bytes() for question in train_questions()}
    held = {question.image.read_bytes() for question in easy_vqa("test", 0)}
    assert len(held) > 900 and not trained & held


def test_training_rows_show_training_images_and_google_drawings_only():
    google, fluent = emoji(40, 0)
    of_train = {pixels(question.image) for question in [*train_questions(), *google]}
    of_test = {pixels(question.image) for question in held_out(100, 40)}
    shown = {row["images"][0].tobytes() for row in training_data(200, 40)}
    assert len(shown) > 100
    assert shown <= of_train and not shown & of_test
    assert [q.answer for q in google] == [q.answer for q in fluent]
    assert len({q.answer for q in google}) == 40
    assert all("google" in str(q.image) and "fluent" in str(p.image) for q, p in zip(google, fluent, strict=True))


@pytest.mark.parametrize("split", ["train", "test"])
def test_yes_and_no_are_equally_frequent_for_every_wording(split):
    answers = defaultdict(Counter)
    for question in easy_vqa(split, 0):
        if question.kind == "yes/no":
            answers[question.text][question.answer] += 1
    assert len(answers) > 80
    assert all(counts["yes"] == counts["no"] > 0 for counts in answers.values())


def test_held_out_questions_are_as_many_of_each_kind_and_reveal_no_yes():
    questions = held_out(60, 40, seed=3)
    assert Counter(q.kind for q in questions) == {**dict.fromkeys(KINDS, 60), "emoji": 40}
    wordings = defaultdict(Counter)
    for question in questions:
        if question.kind == "yes/no":
            wordings[question.text][question.answer] += 1
        allowed = {"shape": SHAPES, "colour": COLOURS, "yes/no": ("yes", "no")}
        assert question.answer in allowed.get(question.kind, [question.answer])
    assert all(counts["yes"] == counts["no"] for counts in wordings.values())
    with pytest.raises(ValueError, match="must be even"):
        held_out(61, 40)


def test_the_seed_decides_what_is_drawn():
    first, again, other = (training_data(24, 40, seed=seed) for seed in (1, 1, 2))
    assert first["messages"] == again["messages"] != other["messages"]
    assert [row["images"][0].tobytes() for row in first] == [row["images"][0].tobytes() for row in again]
    assert held_out(20, 40, seed=1) == held_out(20, 40, seed=1) != held_out(20, 40, seed=2)


def test_questions_of_a_row_are_about_its_image():
    true = defaultdict(set)
    for question in train_questions():
        true[pixels(question.image)].add((question.text, question.taught))
    for row in training_data(60, 40, emoji_share=0.0):
        user, assistant = (
            [m["content"][-1]["text"] for m in row["messages"] if m["role"] == r] for r in ("user", "assistant")
        )
        assert set(zip(user, assistant, strict=True)) <= true[row["images"][0].tobytes()]


def test_what_is_taught_begins_with_what_is_seen():
    by_image = defaultdict(list)
    for question in train_questions():
        by_image[question.image].append(question)
    checked = 0
    for questions in by_image.values():
        told = {q.answer for q in questions if q.kind != "yes/no"}
        for question in questions:
            if question.kind != "yes/no":
                assert question.taught == question.answer
            elif question.taught:
                seen, fact, answer = question.taught.split(", ")
                colour, shape = seen.split()
                assert answer == question.answer and colour in COLOURS and shape in SHAPES
                assert told <= {colour, shape}
                named = colour in question.text or shape in question.text
                negated = " not " in question.text or " no " in question.text
                assert (answer == "yes") == (named != negated) and named == (not fact.startswith("not "))
                assert fact.removeprefix("not ") in question.text
                checked += 1
    assert checked > 5000


def test_transparency_becomes_white(tmp_path):
    drawing = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    drawing.putpixel((1, 0), (0, 0, 0, 0))
    drawing.save(tmp_path / "drawing.png")
    assert np.array(load_image(tmp_path / "drawing.png")).tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_the_loss_is_on_answers_and_end_of_turn_only(tmp_path):
    # The real tokenizer and template; a tiny vision encoder and language model would hide their quirks.
    untrained = tmp_path / "untrained"
    build_checkpoint(str(convert_vision(56)), str(convert_language()), untrained, feature_layer=-4)
    dataset = training_data(12, 40, seed=5)
    dataset.save_to_disk(tmp_path / "data")
    processor = AutoProcessor.from_pretrained(untrained)
    arguments = DataArguments(dataset_name=str(tmp_path / "data"))
    rows = load_data(arguments, processor, max_length=2048, seed=0, with_eval=False).train
    batch = ConversationCollator(processor)(list(rows))
    tokenizer = processor.tokenizer
    image = tokenizer.convert_tokens_to_ids("<image>")
    for tokens, labels, row in zip(batch["input_ids"], batch["labels"], dataset, strict=True):
        answers = [m["content"][0]["text"] for m in row["messages"] if m["role"] == "assistant"]
        assert tokenizer.decode(labels[labels != -100]) == "".join(f"{answer}<|im_end|>" for answer in answers)
        assert (tokens == image).sum() == (56 // 14) ** 2
        assert (labels[labels != -100] == tokens[labels != -100]).all()
        assert tokenizer.decode(tokens).startswith(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<image>"
        )
