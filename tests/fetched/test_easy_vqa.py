# SPDX-License-Identifier: Apache-2.0
"""The quickstart's questions, from the real archives: what is held out, balanced and taught."""

from collections import Counter, defaultdict
from functools import cache

import pytest

from normalign_llava.fetched.easy_vqa import (
    CHOICES,
    easy_vqa,
    emoji,
    emoji_by_others,
    load_image,
    training_data,
)


pytestmark = [pytest.mark.usefixtures("archives"), pytest.mark.slow]
train_questions = cache(lambda: easy_vqa("train", 0))


def test_no_image_of_the_test_split_or_drawing_of_the_test_is_trained_on():
    trained = {question.image.read_bytes() for question in [*train_questions(), *emoji("train")]}
    held = {question.image.read_bytes() for question in [*easy_vqa("test", 0), *emoji_by_others()]}
    assert len(held) > 900 and not trained & held


@pytest.mark.parametrize("split", ["train", "test"])
def test_yes_and_no_are_equally_frequent_for_every_wording(split):
    answers = defaultdict(Counter)
    for question in easy_vqa(split, 0):
        if question.kind == "yes/no":
            answers[question.text][question.answer] += 1
    assert len(answers) > 80
    assert all(counts["yes"] == counts["no"] > 0 for counts in answers.values())


def test_questions_of_a_row_are_about_its_image():
    true, pixels = defaultdict(set), cache(lambda path: load_image(path).tobytes())
    for question in train_questions():
        true[pixels(question.image)].add((question.text, question.taught))
    for row in training_data(60, emoji_share=0.0):
        _, *texts = (message["content"][-1]["text"] for message in row["messages"])
        pairs = set(zip(texts[::2], texts[1::2], strict=True))
        assert pairs <= true[row["images"][0].tobytes()]


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
                assert colour in CHOICES["colour"] and shape in CHOICES["shape"]
                assert answer == question.answer and told <= {colour, shape}
                named = colour in question.text or shape in question.text
                negated = " not " in question.text or " no " in question.text
                assert (answer == "yes") == (named != negated) and named != fact.startswith("not ")
                assert fact.removeprefix("not ") in question.text
                checked += 1
    assert checked > 5000
