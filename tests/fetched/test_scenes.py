# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Scenes of emoji: that answers are true and balanced, and that nothing of the test is trained on."""

import re
from collections import Counter
from itertools import combinations

import pytest

from normalign_llava.fetched import scenes
from normalign_llava.fetched.easy_vqa import easy_vqa, emoji, held_out, load_image, training_data


pytestmark = [pytest.mark.usefixtures("archives"), pytest.mark.slow]


def asked():
    return {"presence": scenes.presence(25, 0), "counting": scenes.counting(25, 0), "sides": scenes.sides(50, 0)}


def truth(question):
    """The answer, found in the scene from the wording alone."""
    names = [name for _, name in question.scene]
    if said := re.fullmatch(r"Is there an? (\w+) in the image\?", question.text):
        return "yes" if said[1] in names else "no"
    if said := re.fullmatch(r"How many (\w+)s are in the image\?", question.text):
        return str(names.count(said[1]))
    one, other = re.fullmatch(r"Is the (\w+) to the left or the right of the (\w+)\?", question.text).groups()
    column = {name: cell % 3 for cell, name in question.scene}
    assert column[one] != column[other]
    return "left" if column[one] < column[other] else "right"


def test_answers_are_true_and_balanced():
    for kind, questions in asked().items():
        assert all(question.answer == truth(question) for question in questions)
        counts = Counter((question.kind, question.answer) for question in questions)
        assert len(set(counts.values())) == 1, kind
        cells = [[cell for cell, _ in question.scene] for question in questions]
        assert all(len(set(each)) == len(each) and set(each) <= set(range(9)) for each in cells)


def test_negatives_are_chosen_as_pope_chooses_them():
    questions = scenes.presence(25, 0)
    drawn = list(dict.fromkeys(question.scene for question in questions))
    names = [{name for _, name in scene} for scene in drawn]
    frequency = Counter(name for each in names for name in each)
    together = Counter(frozenset(pair) for each in names for pair in combinations(each, 2))
    for scene, there in zip(drawn, names, strict=True):
        of_scene = [question for question in questions if question.scene == scene]
        yes = {kind: {q.text for q in of_scene if q.kind == kind and q.answer == "yes"} for kind in scenes.SETTINGS}
        assert yes["random"] == yes["popular"] == yes["adversarial"]
        absent = set(scenes.OBJECTS) - there
        for setting, score in (
            ("popular", frequency.__getitem__),
            ("adversarial", lambda name, there=there: sum(together[frozenset((name, each))] for each in there)),
        ):
            chosen = {q.text.split()[3] for q in of_scene if q.kind == setting and q.answer == "no"}
            assert len(chosen) == 2 and chosen <= absent
            assert min(map(score, chosen)) >= max(map(score, absent - chosen))


@pytest.mark.nightly
def test_no_image_or_drawing_of_the_suite_is_trained_on():
    held = {load_image(question.image).tobytes() for question in held_out(100)}
    held |= {scenes.draw(scene).tobytes() for scene in {q.scene for each in asked().values() for q in each}}
    trained = {load_image(path).tobytes() for path in {question.image for question in easy_vqa("train", 0)}}
    trained |= {load_image(question.image).tobytes() for question in emoji("train")}
    trained |= {image.convert("RGB").tobytes() for row in training_data(400) for image in row["images"]}
    assert len(held) > 400 and len(trained) > 4000 and not held & trained
