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
    placed,
    prompt,
    training_data,
)
from normalign_llava.fetched.fetch import SPEECHES, fetch_unpacked


pytestmark = [pytest.mark.usefixtures("archives"), pytest.mark.slow]
train_questions = cache(lambda: easy_vqa("train", 0))


@pytest.fixture
def read_once(monkeypatch):
    """Rows are made of the same questions, which take long to read, whatever their seed is."""
    monkeypatch.setattr(questions_of, "easy_vqa", lambda split, seed: train_questions())


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


@pytest.mark.usefixtures("read_once")
def test_questions_of_a_row_are_about_its_image():
    true = defaultdict(set)
    pixels = cache(lambda path: load_image(path).tobytes())
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


def test_a_drawing_is_placed_anywhere_in_many_sizes_and_mirrored_half_the_time(tmp_path):
    drawing = Image.new("RGBA", (64, 64), "blue")
    drawing.paste("red", (0, 0, 32, 64))
    drawing.save(tmp_path / "drawing.png")
    sides = Counter()
    corners = set()
    mirrored = 0
    random = Random(0)
    for _ in range(400):
        shown = placed(tmp_path / "drawing.png", random)
        assert shown.mode == "RGB" and shown.size == (64, 64)
        is_drawn = (np.asarray(shown) != 255).any(2)
        rows = np.flatnonzero(is_drawn.any(1))
        columns = np.flatnonzero(is_drawn.any(0))
        assert len(rows) == len(columns) and is_drawn.sum() == len(rows) ** 2
        sides[len(rows)] += 1
        corners.add((len(rows), rows[0], columns[0]))
        mirrored += shown.getpixel((int(columns[0]), int(rows[0])))[2] > 128
    assert sides.keys() == {*range(42, 65)}  # 65 % of 64 is 41.6
    assert abs(mirrored - 200) < 40  # four standard deviations
    small = {(top, left) for side, top, left in corners if side == 42}
    assert len({top for top, _ in small}) > 5 and len({left for _, left in small}) > 5
    assert any(top != left for top, left in small)


def test_a_conversation_about_one_image_or_several():
    asked = [Question("shape", f"Q{n}", f"A{n}", None, f"taught {n}") for n in range(2)]
    red, blue = (Image.new("RGB", (2, 2), colour) for colour in ("red", "blue"))
    for images, second in (([red], []), ([red, blue], [{"type": "image"}])):
        row = conversation(asked, images)
        assert row["messages"][:2] == prompt("Q0")
        texts = [{"type": "text", "text": text} for text in ("taught 0", "Q1", "taught 1")]
        assert row["messages"][2:] == [
            {"role": "assistant", "content": texts[:1]},
            {"role": "user", "content": [*second, texts[1]]},
            {"role": "assistant", "content": texts[2:]},
        ]
        assert len(row["images"]) == len(images)
    system, user = prompt("Q?", "a.png")
    assert system["content"] == [{"type": "text", "text": SYSTEM}]
    assert user["content"] == [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Q?"}]


@pytest.mark.usefixtures("read_once")
def test_a_share_of_the_rows_asks_for_the_names_of_two_emoji():
    drawn = {question.answer for question in emoji("train")}
    assert drawn == {*EMOJI}
    rows = training_data(200, emoji_share=0.25, seed=3)
    assert rows[:20] == training_data(20, emoji_share=0.25, seed=3)[:]
    assert rows[:5]["messages"] != training_data(5, emoji_share=0.25, seed=4)["messages"]
    images = training_data(100)["images"]  # 30 of them by default
    assert abs(sum(len(shown) == 2 for shown in images) - 30) < 19  # four standard deviations
    counts = Counter()
    for messages, images in zip(rows["messages"], rows["images"], strict=True):
        texts = [message["content"][-1]["text"] for message in messages]
        assert texts[0] == SYSTEM and len(texts) == 5
        is_emoji = texts[1] == texts[3] == "what is this?"
        counts[is_emoji] += 1
        assert len(images) == (2 if is_emoji else 1)
        if is_emoji:
            assert {texts[2], texts[4]} <= drawn and texts[2] != texts[4]
        else:
            assert sum(text.endswith((", yes", ", no")) for text in texts) == 1
            counts["yes or no first"] += texts[2].endswith((", yes", ", no"))
    assert abs(counts[True] - 50) < 25  # four standard deviations
    assert abs(counts["yes or no first"] - counts[False] / 2) < 25


def test_held_out_are_the_first_questions_of_every_kind_and_all_emoji():
    asked = held_out(3, seed=1)
    kinds = [question.kind for question in asked]
    assert kinds == [*["shape"] * 3, *["colour"] * 3, *["yes/no"] * 3, *["emoji"] * 12]
    test = easy_vqa("test", 1)
    for kind in ("shape", "colour", "yes/no"):
        of_kind = [question for question in test if question.kind == kind]
        assert of_kind[:3] == [question for question in asked if question.kind == kind]
    assert asked[9:] == emoji("test")
    other = held_out(3, seed=2)
    for first in (0, 3, 6):  # of each kind
        assert asked[first : first + 3] != other[first : first + 3]
    wordings = [question.text for question in test if question.kind == "yes/no"]
    assert wordings[::2] == wordings[1::2]  # yes and no to each
    assert len({*wordings[:40]}) > 10


def test_passages_follow_each_other():
    (file,) = fetch_unpacked(SPEECHES).rglob("1961_john_f_kennedy_d.txt")
    words = file.read_text(encoding="utf-8").split()
    expected = [" ".join(words[start : start + 7]) for start in (0, 7, 14)]
    assert passages(3, 7) == expected


def test_drawings_by_others_are_of_two_vendors_each_also_mirrored():
    asked = emoji_by_others()
    assert [question.answer for question in asked] == [*EMOJI] * 4
    assert [question.is_mirrored for question in asked] == [False] * 24 + [True] * 24
    images = [question.image for question in asked]
    assert images[:24] == images[24:] and len({*images}) == 24
    assert images[:12] == [question.image for question in emoji("test")]
    assert all("twitter" in str(image) for image in images[12:24])


def test_a_mirrored_question_is_shown_as_in_a_mirror(tmp_path):
    image = Image.new("RGB", (2, 1), "red")
    image.putpixel((1, 0), (0, 0, 255))
    image.save(tmp_path / "a.png")
    plain = Question("emoji", "Q", "A", tmp_path / "a.png", None)
    assert plain.shown().getpixel((0, 0)) == (255, 0, 0)
    assert plain._replace(is_mirrored=True).shown().getpixel((0, 0)) == (0, 0, 255)
