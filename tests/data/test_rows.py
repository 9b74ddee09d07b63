"""Rows of every format are parsed; each kind of bad row has its reason."""

import json
from random import Random

import chat_families
import pytest
import tiny_parts
from huggingface_hub import constants
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend
from train_data import assistant, llava, user
from transformers import PreTrainedTokenizerFast

from normalign_llava.data.rows.checks import encoded
from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.rows.parse import (
    BadRow,
    DroppedRow,
    DroppedRows,
    control_tokens,
    parse_row,
)


RULES = ImageRules("/images")


def parse_turns(raw_row) -> list[tuple[str, list]]:
    """Returns role and texts of each turn of a parsed row, an image being None."""
    parsed_row = parse_row(raw_row, RULES)
    image_count = 0
    turns = []
    for turn in parsed_row["messages"]:
        texts = []
        for part in turn["content"]:
            assert part.keys() == {"type", "text"}
            is_image = part["type"] == "image"
            assert is_image == (part["text"] is None)
            image_count += is_image
            texts.append(part["text"])
        turns.append((turn["role"], texts))
    assert image_count == len(parsed_row["images"])
    return turns


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<image>\nWhat?", [None, "What?"]),
        ("<image>\r\nWhat?", [None, "What?"]),
        ("What?\n<image>", ["What?", None]),
        ("\n<image>\r\n", [None]),
        ("A\n<image>\nB", ["A\n", None, "\nB"]),
        ("Before: <image>\nWhat?", ["Before: ", None, "\nWhat?"]),
        ("<image>\nA\n<image>", [None, "A", None]),
        ("<image>\n\nB", [None, "\nB"]),
        ("<image>\n<image>\nB", [None, None, "B"]),
        ("A\n<image>\r\n<image>", ["A", None, None]),
        ("A <image> B", ["A ", None, " B"]),
        ("<image>", [None]),
    ],
)
def test_line_breaks_beside_markers_are_lost_only_where_a_turn_begins_or_ends_with_them(
    text, expected
):
    images = [f"{number}.png" for number in range(text.count("<image>"))]
    turns = parse_turns(llava(text, "yes", images))
    assert turns[0] == ("user", expected)


TWO_QUESTIONS = [user("Q"), assistant("A"), user("Q2"), assistant("A2")]


def test_images_of_messages_without_markers_are_in_the_first_question():
    turns = parse_turns({"messages": TWO_QUESTIONS, "images": ["a.png", "b.png"]})
    assert turns[0] == ("user", [None, None, "Q"])


def test_images_of_messages_are_where_their_markers_are():
    messages = [user("Q"), assistant("A"), user("<image>\nQ2"), assistant("A2")]
    turns = parse_turns({"messages": messages, "images": ["a.png"]})
    assert turns[2] == ("user", [None, "Q2"])


def test_image_parts_have_their_own_image_or_one_of_the_column():
    question = [
        {"type": "image"},
        {"type": "image", "image": "own.png"},
        {"type": "text", "text": "Q"},
    ]
    raw_row = {"messages": [user(question), assistant("A")], "images": ["column.png"]}
    image_paths = [image["path"] for image in parse_row(raw_row, RULES)["images"]]
    assert image_paths == ["/images/column.png", "/images/own.png"]


def test_a_question_without_parts_is_empty():
    turns = parse_turns({"messages": [user([]), assistant("A")]})
    assert turns == [("user", [""]), ("assistant", ["A"])]


def test_the_images_of_a_question_with_its_answer_are_the_question_s():
    pairs = [
        {"question": "Q", "answer": "A", "image": "a.png"},
        {"user": "Q2", "assistant": "A2", "images": ["b.png", "c.png"]},
    ]
    assert parse_turns({"messages": pairs}) == [
        ("user", [None, "Q"]),
        ("assistant", ["A"]),
        ("user", [None, None, "Q2"]),
        ("assistant", ["A2"]),
    ]


def test_prompt_and_completion_may_be_texts():
    turns = parse_turns({"prompt": "Q", "completion": " A"})
    assert turns == [("user", ["Q"]), ("assistant", ["A"])]


def test_prompt_and_completion_may_be_turns():
    empty_answer = assistant("")  # It is not learned, so it may be empty.
    raw_row = {
        "prompt": [user("Q"), empty_answer, user("Q2")],
        "completion": [assistant("A"), user("R"), assistant("B")],
        "image": "a.png",
    }
    assert parse_row(raw_row, RULES)["learned"] == [False, True, True]
    turns = parse_turns(raw_row)
    assert turns[0] == ("user", [None, "Q"])
    assert len(turns) == 6


def test_a_prompt_may_have_a_marker():
    raw_row = {"prompt": "Is <image> red?", "completion": "yes", "image": "a.png"}
    _, texts = parse_turns(raw_row)[0]
    assert texts == ["Is ", None, " red?"]


def assert_is_allowed(image_path, rules, image=None):
    """The image of a row, by default as `datasets` gives it, is read from its path."""
    image = image or {"path": image_path, "bytes": None}
    raw_row = {**llava("<image>Q", "A"), "image": image}
    (parsed_image,) = parse_row(raw_row, rules)["images"]
    assert parsed_image == {"path": image_path, "bytes": None}


def test_files_of_a_hub_data_set_are_allowed(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    rules = ImageRules(None, "user/data")
    for image_path in (str(tmp_path / "hub" / "a.png"), "hf://datasets/user/data@0c/a.png"):
        assert_is_allowed(image_path, rules)
        assert_is_allowed(f"zip://a.png::{image_path}", rules)


def test_files_of_a_folder_are_allowed():
    assert_is_allowed("/images/a.png", RULES)
    assert_is_allowed("/images/a.png", RULES, image="/images/a.png")
    assert_is_allowed("zip://a.png::/images/b.zip", RULES)
    assert_is_allowed("/anywhere/a.png", ImageRules())


def test_other_files_are_refused_in_a_hub_data_set(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    rules = ImageRules(None, "user/data")
    for image_path in (
        "hf://datasets/user/other@0c/a.png",
        "/etc/passwd",
        f"{tmp_path}/hub/../token",
        "zip://a::/b.zip",
    ):
        with pytest.raises(ValueError, match="nothing is fetched|leaves the cache of the Hub"):
            assert_is_allowed(image_path, rules)


def test_an_address_that_a_row_writes_is_refused_in_a_hub_data_set():
    address = "hf://datasets/user/data@0c/a.png"
    with pytest.raises(ValueError, match="nothing is fetched"):
        assert_is_allowed(address, ImageRules(None, "user/data"), image=address)


@pytest.mark.parametrize("rules", [RULES, ImageRules(), ImageRules(None, "user/data")])
@pytest.mark.parametrize(
    "address",
    [
        "https://host/a.png",
        "file:///etc/a.png",
        "memory://a.png",
        "simplecache::file:///images/a.png",
        "file://x::hf://datasets/u/d@0/a",
    ],
)
def test_addresses_are_refused_as_strings_and_as_structs(address, rules):
    for image in (address, {"path": address, "bytes": None}, {"path": address}):
        with pytest.raises(ValueError, match="address; nothing is fetched"):
            parse_row({**llava("<image>Q", "A"), "image": image}, rules)


IN_BRACKETS = [
    '["cat", "dog"]',
    "['cat' 'dog']",
    '[{"type": "text", "text": "cat"}]',
    "[1, 2]",
    '{"type": "text", "text": "cat"}',
    '[{"type": "image"}]',
    '[{"answer": "cat"}]',
]


@pytest.mark.parametrize("text", IN_BRACKETS)
def test_an_answer_is_the_text_that_was_written(text):
    for raw_row in (
        {"question": "Q", "answer": text},
        {"prompt": "Q", "completion": text},
        {"prompt": [user("Q")], "completion": [assistant(text)]},
        {"messages": [user("Q"), assistant(text)]},
        {"texts": [{"user": "Q", "assistant": text}]},
        {"messages": json.dumps([user("Q"), assistant(text)])},
        llava("Q", text),
    ):
        assert parse_turns(raw_row) == [("user", ["Q"]), ("assistant", [text])]


@pytest.mark.parametrize("text", [text for text in IN_BRACKETS if not text.startswith("{")])
def test_a_caption_is_the_text_that_was_written(text):
    turns = parse_turns({"image": "a.png", "caption": text})
    assert turns[1] == ("assistant", [text])


# A user shows images by such parts.
@pytest.mark.parametrize("text", [text for text in IN_BRACKETS if "image" not in text])
def test_a_question_is_the_text_that_was_written(text):
    turns = parse_turns({"question": text, "answer": "A"})
    assert turns[0] == ("user", [text])


def test_parts_of_one_turn_are_all_learned():
    answer = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    turns = parse_turns({"question": "Q", "answer": answer})
    assert turns[1] == ("assistant", ["one two"])


def changes(**columns) -> list[str]:
    """Returns what is reported as changed in a row with an image."""
    return parse_row({"image": "a.png", **columns}, RULES)["changed"]


@pytest.mark.parametrize("captions", [["A", "B"], ["A", "B", "B"]])
def test_several_captions_are_reported(captions):
    (change,) = changes(caption=captions)
    assert "several captions" in change
    assert changes(captions=captions) == [change]
    assert changes(captions=json.dumps(captions)) == [change]


def test_one_caption_is_not_reported():
    assert changes(caption=["A", "A"]) == []
    assert changes(caption="A") == []
    assert changes(caption=["A"]) == []


def test_several_answers_are_reported_unless_one_is_named():
    assert "several answers" in changes(question="Q", answers=["A", "B"])[0]
    assert changes(question="Q", answer="A", answers=["A", "B"]) == []


def test_a_text_that_looks_like_a_list_is_reported():
    assert "--columns answers=COLUMN" in changes(question="Q", answer="['A', 'B']")[0]
    assert "--columns captions=COLUMN" in changes(caption="['A', 'B']")[0]
