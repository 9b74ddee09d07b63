# SPDX-License-Identifier: Apache-2.0
"""The quickstart's questions, from the real archives: what is held out, balanced and taught."""

from collections import Counter, defaultdict
from functools import cache
from random import Random

import numpy as np
import pytest
from PIL import Image

from normalign_llava.fetched import easy_vqa as questions_of
from normalign_llava.fetched.easy_vqa import (
    CHOICES,
    EMOJI,
    SYSTEM,
    Question,
    conversation,
    easy_vqa,
    emoji,
    emoji_by_others,
    held_out,
    load_image,
    passages,
    placed_at_random,
    prompt,
    training_data,
)
from normalign_llava.fetched.fetch import SPEECHES, fetch_unpacked


pytestmark = [pytest.mark.usefixtures("archives"), pytest.mark.slow]


@cache
def train_questions():
    return easy_vqa("train", 0)


@cache
def image_pixels(image_path) -> bytes:
    return load_image(image_path).tobytes()


@pytest.fixture
def read_once(monkeypatch):
    """Rows are made of the same questions, which take long to read, whatever their seed is."""
    monkeypatch.setattr(questions_of, "easy_vqa", lambda split, seed: train_questions())


def image_contents(questions) -> set[bytes]:
    return {question.image.read_bytes() for question in questions}


def test_no_image_of_the_test_split_or_drawing_of_the_test_is_trained_on():
    trained_images = image_contents([*train_questions(), *emoji("train")])
    held_out_images = image_contents([*easy_vqa("test", 0), *emoji_by_others()])
    assert len(held_out_images) > 900
    assert not trained_images & held_out_images


@pytest.mark.parametrize("split", ["train", "test"])
def test_yes_and_no_are_equally_frequent_for_every_wording(split):
    counts_by_wording = defaultdict(Counter)
    for question in easy_vqa(split, 0):
        if question.kind == "yes/no":
            counts_by_wording[question.text][question.answer] += 1
    assert len(counts_by_wording) > 80
    for counts in counts_by_wording.values():
        assert counts["yes"] == counts["no"]
        assert counts["yes"] > 0


def message_text(message) -> str:
    return message["content"][-1]["text"]


@pytest.mark.usefixtures("read_once")
def test_questions_of_a_row_are_about_its_image():
    taught_of_image = defaultdict(set)
    for question in train_questions():
        pixels = image_pixels(question.image)
        taught_of_image[pixels].add((question.text, question.taught))

    for row in training_data(60, emoji_share=0.0):
        # The first turn is the system's.
        texts = [message_text(message) for message in row["messages"][1:]]
        pairs = set(zip(texts[::2], texts[1::2], strict=True))
        pixels = row["images"][0].tobytes()
        assert pairs <= taught_of_image[pixels]


@pytest.fixture
def questions_by_image():
    grouped = defaultdict(list)
    for question in train_questions():
        grouped[question.image].append(question)
    return grouped


def test_shapes_and_colours_are_taught_as_they_are_answered():
    for question in train_questions():
        if question.kind != "yes/no":
            assert question.taught == question.answer


def test_an_answer_of_yes_or_no_is_taught_with_what_is_seen(questions_by_image):
    """As in: `red circle, not a square, no`."""
    checked = 0
    for questions in questions_by_image.values():
        true_answers = {question.answer for question in questions if question.kind != "yes/no"}
        for question in questions:
            if question.kind != "yes/no" or not question.taught:
                continue
            seen, fact, answer = question.taught.split(", ")
            colour, shape = seen.split()
            assert colour in CHOICES["colour"]
            assert shape in CHOICES["shape"]
            assert true_answers <= {colour, shape}
            assert answer == question.answer

            is_named = colour in question.text or shape in question.text
            is_negated = " not " in question.text or " no " in question.text
            assert (answer == "yes") == (is_named != is_negated)
            assert is_named != fact.startswith("not ")
            assert fact.removeprefix("not ") in question.text
            checked += 1
    assert checked > 5000


class Placement:
    """Where a drawing is in an image, how large, and whether it is mirrored."""

    def __init__(self, image):
        assert image.mode == "RGB"
        assert image.size == (64, 64)
        is_drawn = (np.asarray(image) != 255).any(2)
        rows = np.flatnonzero(is_drawn.any(1))
        columns = np.flatnonzero(is_drawn.any(0))
        assert len(rows) == len(columns)
        assert is_drawn.sum() == len(rows) ** 2
        self.side = len(rows)
        self.top = int(rows[0])
        self.left = int(columns[0])
        blue = image.getpixel((self.left, self.top))[2]
        self.is_mirrored = blue > 128


@pytest.fixture
def placements(tmp_path):
    """400 of a drawing whose left half is red and whose right half is blue."""
    drawing = Image.new("RGBA", (64, 64), "blue")
    drawing.paste("red", (0, 0, 32, 64))
    drawing.save(tmp_path / "drawing.png")
    random = Random(0)
    return [Placement(placed_at_random(tmp_path / "drawing.png", random)) for _ in range(400)]


def test_a_drawing_is_placed_in_many_sizes(placements):
    sides = {placement.side for placement in placements}
    assert sides == {*range(42, 65)}  # 65 % of 64 is 41.6


def test_a_drawing_is_mirrored_half_the_time(placements):
    mirrored_count = sum(placement.is_mirrored for placement in placements)
    assert abs(mirrored_count - 200) < 40  # four standard deviations


def test_a_small_drawing_is_placed_anywhere(placements):
    small = [placement for placement in placements if placement.side == 42]
    assert len({placement.top for placement in small}) > 5
    assert len({placement.left for placement in small}) > 5
    assert any(placement.top != placement.left for placement in small)


@pytest.mark.parametrize(
    ("colours", "second_image"),
    [
        pytest.param(["red"], [], id="one image"),
        pytest.param(["red", "blue"], [{"type": "image"}], id="several"),
    ],
)
def test_a_conversation_about_one_image_or_several(colours, second_image):
    questions = [
        Question("shape", "Q0", "A0", None, "taught 0"),
        Question("shape", "Q1", "A1", None, "taught 1"),
    ]
    images = [Image.new("RGB", (2, 2), colour) for colour in colours]
    row = conversation(questions, images)
    assert len(row["images"]) == len(images)
    assert row["messages"][:2] == prompt("Q0")
    assert row["messages"][2:] == [
        {"role": "assistant", "content": [{"type": "text", "text": "taught 0"}]},
        {"role": "user", "content": [*second_image, {"type": "text", "text": "Q1"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "taught 1"}]},
    ]


def test_a_prompt_has_the_system_turn_and_the_image_before_the_question():
    system_turn, user_turn = prompt("Q?", "a.png")
    assert system_turn["content"] == [{"type": "text", "text": SYSTEM}]
    assert user_turn["content"] == [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "Q?"},
    ]


@pytest.fixture
def rows_with_emoji(read_once):
    """200 rows, a quarter of them of emoji."""
    return training_data(200, emoji_share=0.25, seed=3)


def test_training_data_depend_on_the_seed(rows_with_emoji):
    assert rows_with_emoji[:20] == training_data(20, emoji_share=0.25, seed=3)[:]
    with_other_seed = training_data(5, emoji_share=0.25, seed=4)
    assert rows_with_emoji[:5]["messages"] != with_other_seed["messages"]


@pytest.mark.usefixtures("read_once")
def test_three_tenths_of_the_rows_ask_for_emoji_by_default():
    emoji_count = 0
    for images in training_data(100)["images"]:
        if len(images) == 2:
            emoji_count += 1
    assert abs(emoji_count - 30) < 19  # four standard deviations


def ends_with_yes_or_no(text) -> bool:
    return text.endswith((", yes", ", no"))


def test_a_share_of_the_rows_asks_for_the_names_of_two_emoji(rows_with_emoji):
    drawn_names = {question.answer for question in emoji("train")}
    assert drawn_names == {*EMOJI}

    emoji_count = 0
    for row in rows_with_emoji:
        system, question, answer, second_question, second_answer = map(
            message_text, row["messages"]
        )
        assert system == SYSTEM
        if question == "what is this?" and second_question == "what is this?":
            emoji_count += 1
            assert len(row["images"]) == 2
            assert {answer, second_answer} <= drawn_names
            assert answer != second_answer
    assert abs(emoji_count - 50) < 25  # four standard deviations


def test_the_other_rows_ask_one_question_of_yes_or_no_in_either_place(rows_with_emoji):
    row_count = 0
    yes_or_no_first = 0
    for row in rows_with_emoji:
        _, question, answer, second_question, second_answer = map(message_text, row["messages"])
        if question == "what is this?" and second_question == "what is this?":
            continue
        row_count += 1
        assert len(row["images"]) == 1
        assert ends_with_yes_or_no(answer) != ends_with_yes_or_no(second_answer)
        yes_or_no_first += ends_with_yes_or_no(answer)
    assert abs(yes_or_no_first - row_count / 2) < 25  # four standard deviations


def test_held_out_are_the_first_questions_of_every_kind_and_all_emoji():
    shown_questions = held_out(3, seed=1)
    kinds = [question.kind for question in shown_questions]
    assert kinds == ["shape"] * 3 + ["colour"] * 3 + ["yes/no"] * 3 + ["emoji"] * 12

    test_questions = easy_vqa("test", 1)
    for kind in ("shape", "colour", "yes/no"):
        of_kind = [question for question in test_questions if question.kind == kind]
        assert of_kind[:3] == [question for question in shown_questions if question.kind == kind]
    assert shown_questions[9:] == emoji("test")


@pytest.mark.parametrize("first_of_kind", [0, 3, 6])
def test_held_out_questions_of_every_kind_depend_on_the_seed(first_of_kind):
    of_kind = slice(first_of_kind, first_of_kind + 3)
    assert held_out(3, seed=1)[of_kind] != held_out(3, seed=2)[of_kind]


def test_each_wording_of_the_test_follows_itself_with_yes_and_no():
    wordings = [question.text for question in easy_vqa("test", 1) if question.kind == "yes/no"]
    assert wordings[::2] == wordings[1::2]
    assert len({*wordings[:40]}) > 10


def test_passages_follow_each_other():
    (speech_path,) = fetch_unpacked(SPEECHES).rglob("1961_john_f_kennedy_d.txt")
    words = speech_path.read_text(encoding="utf-8").split()
    expected = [
        " ".join(words[:7]),
        " ".join(words[7:14]),
        " ".join(words[14:21]),
    ]
    assert passages(3, 7) == expected


def test_drawings_by_others_are_of_two_vendors_each_also_mirrored():
    questions = emoji_by_others()
    assert [question.answer for question in questions] == [*EMOJI] * 4
    mirrored = [question.is_mirrored for question in questions]
    assert mirrored == [False] * 24 + [True] * 24

    image_paths = [question.image for question in questions]
    assert image_paths[:24] == image_paths[24:]
    assert len({*image_paths}) == 24
    assert image_paths[:12] == [question.image for question in emoji("test")]
    for image_path in image_paths[12:24]:
        assert "twitter" in str(image_path)


def test_a_mirrored_question_is_shown_as_in_a_mirror(tmp_path):
    red = (255, 0, 0)
    blue = (0, 0, 255)
    image = Image.new("RGB", (2, 1), red)
    image.putpixel((1, 0), blue)
    image.save(tmp_path / "a.png")

    question = Question("emoji", "Q", "A", tmp_path / "a.png", None)
    assert question.shown().getpixel((0, 0)) == red
    mirrored_question = question._replace(is_mirrored=True)
    assert mirrored_question.shown().getpixel((0, 0)) == blue
