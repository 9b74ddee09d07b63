"""What decides how a row is read, one column or key at a time; and what is reported of others."""

import json

import pytest
from PIL import Image
from train_data import assistant, llava, user

from normalign_llava.data.rows.forms import (
    PROMPT,
    columns_proposal,
    image_name,
    is_row_metadata,
    looks_like,
    read_row,
    renamed,
    unread_image,
)
from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.rows.parse import parse_row
from normalign_llava.data.rows.questions import accepted_answers, options_of
from normalign_llava.data.rows.turns import LEARNED
from normalign_llava.data.rows.values import (
    as_text,
    is_empty,
    parsed,
    plain,
    transposed,
    unread_keys,
)


NAN = float("nan")
RULES = ImageRules("/images")
TURNS = llava("Q", "A")["conversations"]
QA = [user("Q"), assistant("A")]
SYSTEM = {"role": "system", "content": "S"}
TEXT = {"type": "text", "text": "Q"}
IMAGE = {"type": "image", "image": "a.png"}
PAIR = {"user": "Q", "assistant": "A"}
X_OR_Y = {"question": "Q", "choices": ["x", "y"]}
LISTED = "Q\nA. x\nB. y"


def turns_of_models(*model_names) -> list[dict]:
    """Returns a question and its answer for each name of a model."""
    model_turns = []
    for model_name in model_names:
        model_turns.append({"from": "human", "value": "Q"})
        model_turns.append({"from": model_name, "value": "A"})
    return model_turns


def printed_turns(raw_row) -> list[str]:
    """Returns the turns of a parsed row: an image is {}, and what is learned is in brackets."""
    parsed_row = parse_row(raw_row, RULES)
    learned = iter(parsed_row["learned"])
    turns = []
    for message in parsed_row["messages"]:
        turn_text = ""
        for part in message["content"]:
            if part["text"] is None:
                turn_text += "{}"
            else:
                turn_text += part["text"]
        if message["role"] == "assistant" and next(learned):
            turn_text = f"[[{turn_text}]]"
        if message["role"] == "system":
            turn_text = f"system: {turn_text}"
        turns.append(turn_text)
    return turns


# A case without `left_out` leaves out nothing.
READ = {
    "a known column before its other name": {
        "row": {"conversations": TURNS, "conversation": llava("R", "B")["conversations"]},
        "turns": ["Q", "[[A]]"],
        "left_out": ["conversation"],
    },
    "another name of an empty column": {
        "row": {"conversations": [], "conversation": TURNS},
        "turns": ["Q", "[[A]]"],
    },
    "an answer by number before a prompt": {
        "row": {"prompt": "P", **X_OR_Y, "answer_index": 1},
        "turns": [LISTED, "[[B]]"],
        "left_out": ["prompt"],
    },
    "a number that a table made a fraction": {
        "row": {**X_OR_Y, "answer_index": 1.0},
        "turns": [LISTED, "[[B]]"],
    },
    "a system column like the system turn": {
        "row": {"messages": [SYSTEM, *QA], "system": "S"},
        "turns": ["system: S", "Q", "[[A]]"],
    },
    "a film of a row with an image": {
        "row": {**llava("Q", "A", "a.png"), "video": "a.mp4"},
        "turns": ["{}Q", "[[A]]"],
        "left_out": ["id", "video"],
    },
    "a class of a completion": {
        "row": {"prompt": "Q", "completion": "A", "label": 0},
        "turns": ["Q", "[[A]]"],
        "left_out": ["label"],
    },
    "a wanted completion": {
        "row": {"prompt": "Q", "completion": "A", "label": True},
        "turns": ["Q", "[[A]]"],
        "left_out": ["label"],
    },
    "images after a system turn": {
        "row": {"messages": [SYSTEM, *QA], "images": ["a.png"]},
        "turns": ["system: S", "{}Q", "[[A]]"],
    },
    "a leading answer after a system turn": {
        "row": {"messages": [SYSTEM, assistant("Hi."), *QA]},
        "turns": ["system: S", "Q", "[[A]]"],
    },
    "user turns, of which one ends with an image": {
        "row": {"messages": [user([IMAGE]), user("Q"), assistant("A")]},
        "turns": ["{}Q", "[[A]]"],
    },
    "a hint that is nan": {
        "row": {"question": "Q", "hint": "nan", "A": "x", "B": "y", "answer": "A"},
        "turns": [LISTED, "[[A]]"],
        "left_out": ["hint"],
    },
    "a hint without options": {
        "row": {"question": "Q", "hint": "H", "answer": "A"},
        "turns": ["Q", "[[A]]"],
        "left_out": ["hint"],
    },
    "a column of options that is nan": {
        "row": {"question": "Q", "A": "x", "B": "y", "C": "nan", "D": NAN, "answer": "b"},
        "turns": [LISTED, "[[b]]"],
        "left_out": ["C"],
    },
    "columns beside a list of options": {
        "row": {**X_OR_Y, "A": "z", "answer": "x"},
        "turns": [LISTED, "[[x]]"],
        "left_out": ["A"],
    },
    "only one column of a letter": {
        "row": {"question": "Q", "A": "x", "answer": "yes"},
        "turns": ["Q", "[[yes]]"],
        "left_out": ["A"],
    },
    "options that are numbers": {
        "row": {"question": "Q", "choices": [3, 1], "answer": 3},
        "turns": ["Q\nA. 3\nB. 1", "[[3]]"],
    },
    "a number from 0": {
        "row": {**X_OR_Y, "answer": 1},
        "turns": [LISTED, "[[B]]"],
    },
    "an answer that is the text of an option": {
        "row": {**X_OR_Y, "answer": "Y."},
        "turns": [LISTED, "[[Y.]]"],
    },
    "one answer in a list": {
        "row": {**X_OR_Y, "answer": ["y"]},
        "turns": [LISTED, "[[y]]"],
    },
    "a sentence as the answer": {
        "row": {**X_OR_Y, "answer": "It is x."},
        "turns": [LISTED, "[[It is x.]]"],
    },
    "some options with their letter": {
        "row": {"question": "Q", "choices": ["A. x", "y"], "answer": "y"},
        "turns": ["Q\nA. A. x\nB. y", "[[y]]"],
    },
    "options that the question lists": {
        "row": {"question": "Q (A) x (B) y", "choices": ["x", "y"], "answer": "A"},
        "turns": ["Q (A) x (B) y", "[[A]]"],
    },
    "options of which the question lists one": {
        "row": {"question": "Is (A) x it?", "choices": ["x", "y"], "answer": "A"},
        "turns": ["Is (A) x it?\nA. x\nB. y", "[[A]]"],
    },
    "answers beside an answer that is another": {
        "row": {"question": "Q", "answer": "A", "answers": ["B", "C"]},
        "turns": ["Q", "[[A]]"],
        "left_out": ["answers"],
    },
    "an answer and the same in others": {
        "row": {"question": "Q", "answer": "A", "answers": ["A", "B"]},
        "turns": ["Q", "[[A]]"],
    },
    "answers with empty ones": {
        "row": {"question": "Q", "answers": ["", " ", "B"]},
        "turns": ["Q", "[[B]]"],
    },
    "answers as texts of mappings": {
        "row": {"question": "Q", "answers": [{"text": "B"}, {"text": "B"}, {"text": "A"}]},
        "turns": ["Q", "[[B]]"],
    },
    "a system text of a later pair": {
        "row": {"texts": [PAIR, PAIR | {"system": "S"}]},
        "turns": ["Q", "[[A]]", "Q", "[[A]]"],
        "left_out": ["texts.system"],
    },
    "a weight of the user": {
        "row": {"messages": [user("Q") | {"weight": 1}, assistant("A")]},
        "turns": ["Q", "[[A]]"],
        "left_out": ["messages.weight"],
    },
    "two keys that exclude an answer": {
        "row": {"messages": [*QA, user("R"), assistant("B") | {"loss": 0, "train": 1}]},
        "turns": ["Q", "[[A]]", "R", "B"],
    },
    "keys of parts": {
        "row": {"messages": [user([TEXT | {"lang": "en"}, IMAGE | {"alt": "x"}]), assistant("A")]},
        "turns": ["Q{}", "[[A]]"],
        "left_out": ["messages.content.lang", "messages.content.alt"],
    },
    "keys of an address": {
        "row": {
            "messages": [
                user([{"type": "image_url", "image_url": {"url": "a.png", "title": "x"}}]),
                assistant("A"),
            ]
        },
        "turns": ["{}", "[[A]]"],
        "left_out": ["messages.content.image_url.title"],
    },
    "a role before a pair": {
        "row": {"messages": [{"role": "user", "content": "Q", "input": "x", "output": "y"}, QA[1]]},
        "turns": ["Q", "[[A]]"],
        "left_out": ["messages.input", "messages.output"],
    },
    "an empty from beside a role": {
        "row": {"messages": [{"from": None, **QA[0]}, {"from": "", **QA[1]}]},
        "turns": ["Q", "[[A]]"],
    },
    "parts of text in a text": {
        "row": {"messages": [user(json.dumps([TEXT])), assistant("A")]},
        "turns": [json.dumps([TEXT]), "[[A]]"],
    },
    "markers in an answer": {
        "row": llava("Q", "<img>a.png</img>"),
        "turns": ["Q", "[[<img>a.png</img>]]"],
        "left_out": ["id"],
    },
    "white space around an answer": {
        "row": llava(" Q ", "\n A b \n"),
        "turns": [" Q ", "[[A b]]"],
        "left_out": ["id"],
    },
    "a column without a name": {
        "row": {"question": "Q", "answer": "A", "": "x"},
        "turns": ["Q", "[[A]]"],
        "left_out": ["(no name)"],
    },
    "empty columns": {
        "row": {
            **PAIR,
            "messages": QA,
            "x": [],
            "y": {"z": None},
            "w": [None, ""],
            "v": NAN,
            "u": b"",
        },
        "turns": ["Q", "[[A]]"],
        "left_out": ["user", "assistant"],
    },
    "options in columns of another name": {
        "row": {"question": "Q", "option_a": "x", "option_b": "y", "answer": "B"},
        "turns": [LISTED, "[[B]]"],
    },
    "another name of a column that its form does not read": {
        "row": {"messages": QA, "options": ["x", "y"]},
        "turns": ["Q", "[[A]]"],
        "left_out": ["options"],
    },
    "a caption with the number of a question": {
        "row": {"image": "a.png", "caption": "A", "question_id": 0},
        "turns": ["{}" + PROMPT, "[[A]]"],
        "left_out": ["question_id"],
    },
    "parts with all keys, as Arrow has them": {
        "row": {
            "messages": [
                user([{"type": "image", "image": None, "url": "a.png", "text": None}, TEXT]),
                assistant("A"),
            ]
        },
        "turns": ["{}Q", "[[A]]"],
    },
    "columns of options beside an empty list": {
        "row": {"question": "Q", "choices": [None, ""], "A": "x", "B": "y", "answer": "B"},
        "turns": [LISTED, "[[B]]"],
    },
    "options that the question lists with more space": {
        "row": {"question": "Q (A)  x (B)  y", "choices": ["x", "y"], "answer": "A"},
        "turns": ["Q (A)  x (B)  y", "[[A]]"],
    },
    "a text that a table made a fraction": {
        "row": {**X_OR_Y, "answer_index": "1.0"},
        "turns": [LISTED, "[[B]]"],
    },
    "a text with the number of a class": {
        "row": {"image": "a.png", "text": "A", "label": 3},
        "turns": ["{}" + PROMPT, "[[A]]"],
        "left_out": ["label"],
    },
    "a first turn without parts": {
        "row": {"messages": [user([]), user("Q"), assistant("A")]},
        "turns": ["Q", "[[A]]"],
    },
    "a last user turn without parts": {
        "row": {"messages": [user("Q"), user([]), assistant("A")]},
        "turns": ["Q", "[[A]]"],
    },
    "an empty list of images beside an image of a turn": {
        "row": {"messages": [user("Q") | {"images": [], "image": "a.png"}, assistant("A")]},
        "turns": ["{}Q", "[[A]]"],
    },
    "a system text of a turn with a role": {
        "row": {"messages": [user("Q") | {"system": "S"}, assistant("A")]},
        "turns": ["Q", "[[A]]"],
        "left_out": ["messages.system"],
    },
    "the number of a text": {
        "row": {"messages": [user([TEXT | {"index": 0}]), assistant("A")]},
        "turns": ["Q", "[[A]]"],
    },
    "numbers in place of texts": {
        "row": {"question": 5, "hint": 6, "input": 7, "choices": ["x", "y"], "answer": "x"},
        "turns": ["6\n5\n7\nA. x\nB. y", "[[x]]"],
    },
    "numbers as prompt and completion": {
        "row": {"prompt": 5, "completion": 7.0},
        "turns": ["5", "[[7]]"],
    },
    "a digit that is no number": {
        "row": {**X_OR_Y, "answer": "²"},
        "turns": [LISTED, "[[²]]"],
    },
    "several images of a turn and of a row": {
        "row": {
            "images": ["a.png"],
            "messages": [
                user([{"type": "image"}, TEXT]),
                assistant("A"),
                user("R") | {"images": ["b.png"] * 2},
                assistant("B"),
            ],
        },
        "turns": ["{}Q", "[[A]]", "{}{}R", "[[B]]"],
    },
    "what models are called": {
        "row": {"conversations": turns_of_models("gpt", "assistant", "model", "bot", "chatgpt")},
        "turns": ["Q", "[[A]]"] * 5,
    },
    "pairs by other names": {
        "row": {"conversations": [{"human": "Q", "gpt": "A"}, {"human": "R", "assistant": "B"}]},
        "turns": ["Q", "[[A]]", "R", "[[B]]"],
    },
    "a number as the system text of a pair": {
        "row": {"conversations": [{"input": "Q", "output": "A", "system": 5}]},
        "turns": ["Q", "[[A]]"],
        "left_out": ["conversations.system"],
    },
    "all keys that say what is learned": {
        "row": {
            "messages": [
                user("Q"),
                assistant("A") | {"trainable": 0},
                user("Q"),
                assistant("A") | dict.fromkeys(LEARNED, 1),
            ]
        },
        "turns": ["Q", "A", "Q", "[[A]]"],
    },
    "parts of every kind": {
        "row": {
            "messages": [
                user(
                    [
                        {"type": "input_image", "url": "a.png", "detail": "high"},
                        {"type": "image", "path": "b.png"},
                        {"type": "image_url", "image_url": {"url": "c.png", "detail": "low"}},
                        TEXT,
                    ]
                ),
                assistant([{"type": "output_text", "text": "A"}]),
            ]
        },
        "turns": ["{}{}{}Q", "[[A]]"],
    },
    "a caption": {
        "row": {"image": "a.png", "caption": "A", "label": 3},
        "turns": ["{}" + PROMPT, "[[A]]"],
        "left_out": ["label"],
    },
}


def in_tuples(value):
    """Returns the value with tuples for lists, as a generator may give them."""
    if isinstance(value, dict):
        return {key: in_tuples(element) for key, element in value.items()}
    if isinstance(value, list):
        return tuple(in_tuples(element) for element in value)
    return value


@pytest.mark.parametrize("case", READ.values(), ids=READ)
def test_a_row_is_read_as(case):
    raw_row = case["row"]
    assert printed_turns(raw_row) == case["turns"]
    assert printed_turns(in_tuples(raw_row)) == case["turns"]
    assert parse_row(raw_row, RULES)["left_out"] == case.get("left_out", [])


REFUSED = {
    "an empty question": (
        {"image": "a.png", "question": "", "answer": "A"},
        "its question is empty",
    ),
    "a label that is a number": (
        {"image": "a.png", "label": 3},
        "it has no assistant turn; its columns are image, label",
    ),
    "only an image": (
        {"image": "a.png"},
        "it has no assistant turn; add a metadata.csv",
    ),
    "an unknown column": (
        {"image": "a.png", "blip_caption": "A"},
        "form is not known. .* columns: blip_caption, image",
    ),
    "a caption without image": (
        {"caption": "A"},
        "its form is not known. It has the columns: caption; known",
    ),
    "a system column that is a number": (
        {"messages": QA, "system": 5},
        "its column system is not text",
    ),
    "a column of a film": (
        {"messages": QA, "video": "a.mp4"},
        "it has video, and only images are read",
    ),
    "a column of sounds": (
        {"messages": QA, "audios": ["a.wav"]},
        "it has audios, and only images are read",
    ),
    "a text with the id of a question": (
        {"image": "a.png", "text": "Q", "question_id": 0, "label": "A"},
        "question=text,answer=label",
    ),
    "an unwanted completion": (
        {"prompt": "Q", "completion": "A", "kto_tag": False},
        r"unwanted \(kto_tag false\)",
    ),
    "options and a question of turns": (
        {"question": TURNS, "choices": ["x", "y"], "answer": "x"},
        "its question is a list of turns",
    ),
    "an index above the options": (
        {**X_OR_Y, "answer_index": 2},
        "answer_index must be .* got 2",
    ),
    "a negative index": (
        {**X_OR_Y, "answer_index": -1},
        "must be a choice's .* got -1",
    ),
    "an index that is a raised digit": (
        {**X_OR_Y, "answer_index": "²"},
        "must be a choice's .* got '²'",
    ),
    "a number above the options": (
        {**X_OR_Y, "answer": 2},
        "'2' is not just one of the choices",
    ),
    "a negative number": (
        {**X_OR_Y, "answer": -1},
        "'-1' is not just one of the choices",
    ),
    "a letter above the options": (
        {**X_OR_Y, "answer": "C"},
        "'C' is not just one of the choices",
    ),
    "options that are numbers": (
        {"question": "Q", "choices": ["1", "0"], "answer": "1"},
        "another's letter or number",
    ),
    "options that are each other's letters": (
        {"question": "Q", "choices": ["b", "a"], "answer": "b"},
        "another's letter or number$",
    ),
    "one option": (
        {"question": "Q", "choices": ["x"], "answer": "x"},
        "must be 2 to 26 different texts",
    ),
    "options that are images": (
        {"question": "Q", "choices": ["a.PNG", "b.JPG"], "answer": "a.PNG"},
        "texts, and no images",
    ),
    "an answer after a system turn": (
        {"messages": [SYSTEM, QA[1]]},
        "turn 1 is the assistant's",
    ),
    "an empty option": (
        {"question": "Q", "choices": ["x", " "], "answer": "x"},
        "must be 2 to 26 different texts",
    ),
    "options without B": (
        {"question": "Q", "choices": {"A": "x", "C": "y"}, "answer": "A"},
        "2 to 26 different texts",
    ),
    "27 options": (
        {"question": "Q", "choices": list("abcdefghijklmnopqrstuvwxyz1"), "answer": "1"},
        "2 to 26",
    ),
    "two answers after a system turn": (
        {"messages": [SYSTEM, QA[1], QA[1]]},
        "the user first",
    ),
    "only a question": (
        {"messages": [QA[0]]},
        "it has no assistant turn",
    ),
    "a question at the end": (
        {"messages": ["Q", "A", "R"]},
        "the last turn is the user's",
    ),
    "an empty list of turns": (
        {"messages": "[]", "system": "S"},
        "it has no assistant turn",
    ),
    "only an answer": (
        {"messages": [QA[1]]},
        "turn 0 is the assistant's",
    ),
    "texts that are no turns": (
        {"texts": ["Q", "A"]},
        "turn 0 of texts needs role and content, got 'Q'",
    ),
    "a marker of sound": (
        llava("<audio>\nQ", "A"),
        "it has <audio> in a text",
    ),
    "a column of one sound": (
        {"messages": QA, "audio": "a.wav"},
        "it has audio, and only images are read",
    ),
    "a turn without a role": (
        {"messages": [QA[0], {"content": "A"}]},
        "turn 1 of messages needs role and content, got",
    ),
    "a part without its text": (
        {"messages": [QA[0], assistant([{"type": "text", "text": None}])]},
        "neither a text nor an",
    ),
    "a content that is a number": (
        {"messages": [user(3.5j), QA[1]]},
        "turn 0 must have text or a list of parts, got 3.5j",
    ),
    "two parts for one image": (
        {"image": "a.png", "messages": [user([{"type": "image", "index": 0}] * 2), QA[1]]},
        "2 <image>",
    ),
    "parts in another order than their images": (
        {
            "images": ["a.png", "b.png"],
            "messages": [
                user([{"type": "image", "index": 1}, {"type": "image", "index": 0}]),
                QA[1],
            ],
        },
        "its part for image 0 has the index 1",
    ),
    "two parts of one index": (
        {
            "images": ["a.png", "b.png"],
            "messages": [user([{"type": "image", "index": 0}] * 2), QA[1]],
        },
        "its part for image 1 has the index 0",
    ),
    "an empty text as image": (
        {**llava("<image>Q", "A"), "image": ["a.png", ""]},
        "image has nothing in place of image 1",
    ),
}


@pytest.mark.parametrize(("raw_row", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_row_is_refused_because(raw_row, reason):
    with pytest.raises(ValueError, match=reason):
        parse_row(raw_row, RULES)


def test_lists_of_images_may_be_in_a_text():
    raw_row = {**llava("Q", "A"), "images": '["a.png", "b.png"]'}
    image_paths = [image["path"] for image in parse_row(raw_row, RULES)["images"]]
    assert image_paths == ["/images/a.png", "/images/b.png"]


def learned_answer(row) -> str:
    return row.messages[1]["content"][0]["text"]


def test_the_commonest_of_several_answers_is_learned_and_all_are_accepted():
    read_row_with_proposal = read_row({"question": "Q", "answers": ["one", "two", "two"]})
    assert learned_answer(read_row_with_proposal) == "two"
    assert read_row_with_proposal.accepted == ["one", "two", "two"]


def test_an_answer_among_the_accepted_ones_is_learned():
    read_row_with_proposal = read_row({"question": "Q", "answer": "two", "answers": ["one", "two"]})
    assert learned_answer(read_row_with_proposal) == "two"
    assert read_row_with_proposal.accepted == ["one", "two"]
    assert read_row_with_proposal.changed == []


def test_answers_without_the_answer_are_not_accepted():
    read_row_with_proposal = read_row({"question": "Q", "answer": "two", "answers": ["one"]})
    assert read_row_with_proposal.accepted == []


def test_a_mapping_in_a_text_is_not_reported_as_several_answers():
    read_row_with_proposal = read_row({"question": "Q", "answer": '{"answer": ["one"]}'})
    assert read_row_with_proposal.changed == []


def test_markers_are_reported_of_a_row_that_has_images():
    turn_text = "Is <image_1> red?"
    with_image = {**llava(f"<image>{turn_text}", "A"), "image": "a.png"}
    assert parse_row(with_image, RULES)["left_out"] == ["id", "text <image_1>"]
    assert parse_row(llava(turn_text, "A"), RULES)["left_out"] == ["id"]


INSIDE = {"path": "b.png", "bytes": b"x"}


@pytest.mark.parametrize(
    ("raw_row", "expected"),
    [
        ({"image": "a.png"}, "a.png"),
        ({"image": ["a.png", "b.png"]}, "a.png"),
        ({"images": [INSIDE, {"path": "c.png", "bytes": None}]}, "b.png"),
        ({"images": [], "image": "a.png"}, "a.png"),
        ({"images": ["a.png"], "image": "b.png"}, "a.png"),
        ({"image": INSIDE}, "b.png"),
        ({"image": "a\ud83d.png"}, "a?.png"),
        ({"image": "data:image/png;base64,AAAA"}, None),
        ({"image": "x" * 4096}, "x" * 4096),
        ({"image": "x" * 4097}, None),
        ({"image": ""}, None),
        ({"image": b"x"}, None),
        ({"question": "Q"}, None),
        ("no row", None),
    ],
)
def test_the_first_image_names_a_row(raw_row, expected):
    assert image_name(raw_row) == expected


@pytest.mark.parametrize(
    "name",
    [
        "text <image_1>",
        "image",
        "Images",
        "img",
        "photo_2",
        "Photo_2",
        "frame_1",
        "pics",
        "image_path",
        "page image 3",
        "messages. img ",
    ],
)
def test_a_column_looks_like_an_image_by_its_name(name):
    assert looks_like(name) == "an image"


@pytest.mark.parametrize(
    "name",
    [
        "answer",
        "messages.content",
        "re_caption",
        "gpt_answer",
        "Captions",
        "label",
    ],
)
def test_a_column_looks_like_an_answer_by_its_name(name):
    assert looks_like(name) == "an answer"


@pytest.mark.parametrize(
    "name",
    [
        "query",
        "input_prompt",
        "options",
        "system",
        "original_question",
        " Query ",
    ],
)
def test_a_column_looks_like_a_question_by_its_name(name):
    assert looks_like(name) == "a question"


@pytest.mark.parametrize(
    "name",
    [
        "tools",
        "image_id",
        "frame_of_mind_id",
        "question_id",
        "image_width",
        "imagery",
        "messages.id",
        "scores",
    ],
)
def test_a_column_of_another_name_looks_like_nothing_that_is_read(name):
    assert looks_like(name) is None


@pytest.mark.parametrize(
    ("raw_row", "expected"),
    [
        ({"images": ["a.png"], "img": "b.png"}, None),
        ({"image": "a.png", "img": "b.png"}, None),
        ({"image": [], "images": None, "img": "b.png"}, "column img"),
        ({"id": "a.png"}, None),
        ({"img": 0}, None),
        ({"img": {"path": None}}, None),
        ({"img": [""]}, None),
        ({"seen": ["a.png", "b"]}, "column seen"),
        ({"seen": []}, None),
        ({"seen": {"path": None, "url": "http://host/a.PNG?size=3"}}, "column seen"),
        ({"seen": {"path": "a.webp"}}, "column seen"),
        ({"seen": {"bytes": b"x"}}, "column seen"),
        ({"seen": b"x"}, "column seen"),
        ({"seen": Image.new("RGB", (1, 1))}, "column seen"),
        ({"seen": "a.txt"}, None),
        ({"seen": 7}, None),
    ],
)
def test_what_looks_like_an_image_in_a_row_without_any(raw_row, expected):
    assert unread_image(raw_row, []) == expected


PREFERRED = {"preferred_output": QA, "non_preferred_output": QA}


@pytest.mark.parametrize(
    ("raw_row", "columns"),
    [
        (
            {"problem": "Q", "answer": "['A', 'B']"},
            "question=problem,answers=answer",
        ),
        (
            {"img": "a.png", "description": "['A', 'B']"},
            "image=img,captions=description",
        ),
        (
            {"image": "a.png", "img_path": "b.png", "query": "Q", "label": "A"},
            "question=query,answer=label",
        ),
        (
            {"query": {"x": 1}, "problem": "Q", "response": "A"},
            "question=problem,answer=response",
        ),
        (
            {"Image": "a.png", "query": "Q", "label": "A"},
            "image=Image,question=query,answer=label",
        ),
        (
            {"asked": [QA[0]], "dialog": QA},
            "messages=dialog",
        ),
        (
            {"said": [QA[1]], "dialog": QA},
            "messages=dialog",
        ),
        (
            PREFERRED,
            "messages=preferred_output",
        ),
        (
            {"history": QA, "turns": QA},
            "messages=turns",
        ),
        (
            {"images": ["a.png"], "img_path": "b.png", "query": "Q", "label": "A"},
            "question=query,answer=label",
        ),
        (
            {"dialog": {"role": ["user", "assistant"], "content": ["Q", "A"]}},
            "messages=dialog",
        ),
        (
            {"image": "", "img": "b.png", "query": "Q", "label": "A"},
            "image=img,question=query,answer=label",
        ),
        (
            {"photo": "b.png", "image_path": "a.png", "query": "Q", "label": "A"},
            "image=image_path,question=query,answer=label",
        ),
    ],
)
def test_columns_are_proposed(raw_row, columns):
    proposed = columns_proposal(raw_row)
    assert proposed.endswith(f"with --columns {columns}")
    names_dpo = "DPO" in proposed
    assert names_dpo == (raw_row is PREFERRED)


@pytest.mark.parametrize(
    "raw_row",
    [
        {"query": "Q", "score": 3},
        {"non_preferred_output": QA, "rejected": QA, "history": QA},
        "no row",
    ],
)
def test_no_columns_are_proposed(raw_row):
    assert columns_proposal(raw_row) == ""


QUESTION_NAMES = "query instruction problem prefix human user prompt input inputs text"
ANSWER_NAMES = (
    "response output outputs solution suffix assistant gpt completion label target ground_truth"
)
CAPTION_NAMES = "captions description caption_str sentences re_caption raw ground_truth summary"
IMAGE_NAMES = (
    "image_path img_path image_file image_file_name image_filename file_name filename filepath "
    "image_name img_name image_base64_str img picture photo path"
)


@pytest.mark.parametrize("name", QUESTION_NAMES.split())
def test_a_column_of_a_usual_name_is_proposed_as_question(name):
    proposed = columns_proposal({name: "Q", "solution": "A"})
    assert proposed.endswith(f"question={name},answer=solution")


@pytest.mark.parametrize("name", ANSWER_NAMES.split())
def test_a_column_of_a_usual_name_is_proposed_as_answer(name):
    proposed = columns_proposal({"query": "Q", name: "A"})
    assert proposed.endswith(f"question=query,answer={name}")


@pytest.mark.parametrize("name", CAPTION_NAMES.split())
def test_a_column_of_a_usual_name_is_proposed_as_caption(name):
    proposed = columns_proposal({"img": "a.png", name: "A"})
    assert proposed.endswith(f"image=img,caption={name}")


@pytest.mark.parametrize("name", IMAGE_NAMES.split())
def test_a_column_of_a_usual_name_is_proposed_as_image(name):
    proposed = columns_proposal({name: "a.png", "query": "Q", "label": "A"})
    assert proposed.endswith(f"image={name},question=query,answer=label")


ABOUT_NAMES = (
    "id ids uid uuid idx index key hash md5 sha256 url urls uri link links source sources "
    "origin dataset split subset type types category categories topic subject field "
    "domain task skill grade difficulty lang language score scores rating ratings rank "
    "similarity watermark pwatermark unsafe punsafe nsfw width height size shape "
    "license licence author date time timestamp version status error_message exif "
    "model meta metadata name __index_level_0__"
)
OTHER_ABOUT_NAMES = [
    "Unnamed: 0",
    "(no name)",
    "my.id",
    "image_width",
    "data-source",
    "id_",
    "URL",
    "license_",
]


@pytest.mark.parametrize("name", [*ABOUT_NAMES.split(), *OTHER_ABOUT_NAMES])
def test_a_column_is_about_a_row_by_its_name(name):
    assert is_row_metadata(name)


@pytest.mark.parametrize("name", ["ideas", "answer", "urlx", "name of it", "hints", "page"])
def test_a_column_of_another_name_is_not_about_a_row(name):
    assert not is_row_metadata(name)


def unread_image_in(text) -> str | None:
    question = f"Is {text} red?"
    message = {"content": [{"text": None}, {"text": question}]}
    return unread_image({}, [message])


@pytest.mark.parametrize(
    "marker",
    [
        "<image_1>",
        "<image1>",
        "<|image_pad|>",
        "<start_of_image>",
        "<image-start>",
        "<img>",
        "<image here>",
        "<IMAGE_PLACEHOLDER>",
        "<IMG_CONTEXT>",
        "<image_patch>",
        "<image/>",
        "<|image|>",
        "<Image>",
        "[IMG]",
        "[image]",
        "<image 12>",
    ],
)
def test_a_text_with_a_marker_should_show_an_image(marker):
    assert unread_image_in(marker) == f"text {marker}"


@pytest.mark.parametrize(
    "text",
    [
        "![image](a.png)",
        "[image](a.png)",
        "<imagery>",
        "image_1",
        "<images>",
    ],
)
def test_a_text_without_a_marker_need_not_show_an_image(text):
    assert unread_image_in(text) is None


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"question": "answer", "answer": "question"},
            {"question": "A", "answer": "Q", "text": "T", "more": 1},
        ),
        (
            {"question": "text"},
            {"question": "T", "answer": "A", "more": 1},
        ),
        (
            {"image": "absent"},
            {"question": "Q", "answer": "A", "text": "T", "more": 1},
        ),
    ],
)
def test_columns_that_change_places_keep_their_values(columns, expected):
    raw_row = {"question": "Q", "answer": "A", "text": "T", "more": 1}
    assert renamed(raw_row, columns) == expected


@pytest.mark.parametrize(
    "choices",
    [
        ["(A) x", "(B) y"],
        [{"text": "x"}, {"text": "y"}],
        {"a": "x", "b": "y"},
        "['x', 'y']",
        ["A: x", "B) y"],
    ],
)
def test_options_have_letters(choices):
    assert options_of({"choices": choices}) == {"A": "x", "B": "y"}


def test_options_in_columns_are_in_the_order_of_their_letters():
    from_b_to_i = {letter: letter.lower() for letter in "BCDEFGHI"}
    options = options_of({"J": "x", "A": "y", **from_b_to_i})
    assert options == {"A": "y", **from_b_to_i, "J": "x"}


def test_26_options_have_letters():
    choices = [f"{number} apples" for number in range(26)]
    options = options_of({"choices": choices})
    assert list(options.values()) == choices


def test_one_column_of_an_option_is_none():
    assert options_of({"A": "nan", "B": "y"}) == {}
    assert options_of({}) == {}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3.0, "3"),
        (3.5, "3.5"),
        (7, "7"),
        (True, True),
        (NAN, None),
        ("x", "x"),
        (None, None),
    ],
)
def test_a_number_of_a_table_becomes_a_text(value, expected):
    assert as_text(value) == expected


@pytest.mark.parametrize(
    "value",
    [None, "", b"", NAN, [], {}, [None, ""], {"a": [], "b": None}, (NAN,)],
)
def test_a_value_of_nothing_is_empty(value):
    assert is_empty(value)


@pytest.mark.parametrize("value", [0, False, " ", b"x", [0], {"a": 0}, [None, "x"]])
def test_a_value_of_something_is_not_empty(value):
    assert not is_empty(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["a"]', ["a"]),
        ("['a']", ["a"]),
        (" ['a'] ", ["a"]),
        ("{'a': None}", {"a": None}),
    ],
)
def test_a_list_or_mapping_in_a_text_is_parsed(text, expected):
    assert parsed(text) == expected


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("a", id="text"),
        pytest.param("[a", id="open"),
        pytest.param("['a' b]", id="name"),
        pytest.param(3, id="number"),
        pytest.param(None, id="nothing"),
        pytest.param("[" * 5000, id="deep"),
        pytest.param(f"[{'-' * 9000}1]", id="many-signs"),
        pytest.param(f"[{'1+' * 20_000}1]", id="long-sum"),
    ],
)
def test_another_value_is_not_parsed(value):
    assert parsed(value) == value


def test_a_long_list_is_parsed_only_as_json():
    """Python's form is slow to read."""
    values = ["a" * 2**16]
    assert parsed(str(values)) == str(values)
    assert parsed(json.dumps(values)) == values


def test_lists_by_column_become_mappings():
    columns = {"a": [1, 2], "b": [3, 4]}
    assert transposed(columns) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]


@pytest.mark.parametrize("value", [{"a": [1, 2], "b": [3]}, {"a": [1], "b": 3}, {}, [1], "a"])
def test_another_value_is_not_transposed(value):
    assert transposed(value) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"text": ["a", " ", "b"], "answer_start": [1, 2, 3]}, ["a", "b"]),
        ([3.0, "a"], ["3", "a"]),
        (["a", True], []),
        ([TEXT], []),
        ("a", []),
    ],
)
def test_accepted_answers(value, expected):
    assert accepted_answers(value) == expected


@pytest.mark.parametrize("text", [' "The  Cat." ', "**_'the cat'_** (!)"])
def test_a_plain_text_has_no_marks_around_it(text):
    assert plain(text) == "the cat"


def test_what_is_left_out_has_a_name_that_is_cut_off():
    values = {
        "x": 1,
        "y": 2,
        "z": None,
        "w" * 99: 1,
        7: "b",
    }
    assert unread_keys(values, {"y"}, "a.") == ["a.x", f"a.{'w' * 78}", "a.7"]


def test_what_is_left_out_of_several_turns_is_named_once():
    messages = [user("Q") | {"x": 1}, assistant("A") | {"x": 1}]
    assert read_row({"messages": messages}).left_out == ["messages.x"]


def test_content_beside_a_pair_is_left_out():
    messages = [PAIR | {"content": "x"}]
    assert read_row({"messages": messages}).left_out == ["messages.content"]


def test_a_part_whose_type_is_a_list_is_refused():
    question_part = {"type": ["text"]}
    with pytest.raises(ValueError, match="neither a text nor an image part"):
        read_row({"messages": [user([question_part]), assistant("A")]})
    with pytest.raises(ValueError, match="needs role and content"):
        read_row({"question": [question_part], "answer": "A"})
