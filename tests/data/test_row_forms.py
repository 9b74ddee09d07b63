"""What decides how a row is read, one column or key at a time; and what is told of the others."""

import json

import pytest
from PIL import Image
from train_data import assistant, llava, user

from normalign_llava.data.rows.forms import (
    PROMPT,
    image_name,
    is_about,
    looks_like,
    proposal,
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
TEXT = {"type": "text", "text": "Q"}
IMAGE = {"type": "image", "image": "a.png"}
PAIR = {"user": "Q", "assistant": "A"}


def said(raw) -> list[str]:
    """The turns of a parsed row: an image is {}, and what is learned is in brackets."""
    row = parse_row(raw, RULES)
    learned = iter(row["learned"])
    turns = []
    for message in row["messages"]:
        text = "".join(
            "{}" if part["text"] is None else part["text"] for part in message["content"]
        )
        if message["role"] == "assistant" and next(learned):
            text = f"[[{text}]]"
        turns.append(f"system: {text}" if message["role"] == "system" else text)
    return turns


READ = {
    "a known column before its other name": (
        {"conversations": TURNS, "conversation": llava("R", "B")["conversations"]},
        ["Q", "[[A]]"], ["conversation"]),
    "another name of an empty column": (
        {"conversations": [], "conversation": TURNS}, ["Q", "[[A]]"], []),
    "an answer by number before a prompt": (
        {"prompt": "P", "question": "Q", "choices": ["x", "y"], "answer_index": 1},
        ["Q\nA. x\nB. y", "[[B]]"], ["prompt"]),
    "a number that a table made a fraction": (
        {"question": "Q", "choices": ["x", "y"], "answer_index": 1.0},
        ["Q\nA. x\nB. y", "[[B]]"], []),
    "a system column like the system turn": (
        {"messages": [{"role": "system", "content": "S"}, *QA], "system": "S"},
        ["system: S", "Q", "[[A]]"], []),
    "a film of a row with an image": (
        {**llava("Q", "A", "a.png"), "video": "a.mp4"}, ["{}Q", "[[A]]"], ["id", "video"]),
    "a class of a completion": (
        {"prompt": "Q", "completion": "A", "label": 0}, ["Q", "[[A]]"], ["label"]),
    "a wanted completion": (
        {"prompt": "Q", "completion": "A", "label": True}, ["Q", "[[A]]"], ["label"]),
    "images after a system turn": (
        {"messages": [{"role": "system", "content": "S"}, *QA], "images": ["a.png"]},
        ["system: S", "{}Q", "[[A]]"], []),
    "a leading answer after a system turn": (
        {"messages": [{"role": "system", "content": "S"}, assistant("Hi."), *QA]},
        ["system: S", "Q", "[[A]]"], []),
    "user turns, of which one ends with an image": (
        {"messages": [user([IMAGE]), user("Q"), assistant("A")]}, ["{}Q", "[[A]]"], []),
    "a hint that is nan": (
        {"question": "Q", "hint": "nan", "A": "x", "B": "y", "answer": "A"},
        ["Q\nA. x\nB. y", "[[A]]"], ["hint"]),
    "a hint without options": (
        {"question": "Q", "hint": "H", "answer": "A"}, ["Q", "[[A]]"], ["hint"]),
    "a column of options that is nan": (
        {"question": "Q", "A": "x", "B": "y", "C": "nan", "D": NAN, "answer": "b"},
        ["Q\nA. x\nB. y", "[[b]]"], ["C"]),
    "columns beside a list of options": (
        {"question": "Q", "choices": ["x", "y"], "A": "z", "answer": "x"},
        ["Q\nA. x\nB. y", "[[x]]"], ["A"]),
    "one column of a letter alone": (
        {"question": "Q", "A": "x", "answer": "yes"}, ["Q", "[[yes]]"], ["A"]),
    "options that are numbers": (
        {"question": "Q", "choices": [3, 1], "answer": 3}, ["Q\nA. 3\nB. 1", "[[3]]"], []),
    "a number from 0": (
        {"question": "Q", "choices": ["x", "y"], "answer": 1}, ["Q\nA. x\nB. y", "[[B]]"], []),
    "an answer that is the text of an option": (
        {"question": "Q", "choices": ["x", "y"], "answer": "Y."},
        ["Q\nA. x\nB. y", "[[Y.]]"], []),
    "one answer in a list": (
        {"question": "Q", "choices": ["x", "y"], "answer": ["y"]},
        ["Q\nA. x\nB. y", "[[y]]"], []),
    "a sentence as the answer": (
        {"question": "Q", "choices": ["x", "y"], "answer": "It is x."},
        ["Q\nA. x\nB. y", "[[It is x.]]"], []),
    "some options with their letter": (
        {"question": "Q", "choices": ["A. x", "y"], "answer": "y"},
        ["Q\nA. A. x\nB. y", "[[y]]"], []),
    "options that the question lists": (
        {"question": "Q (A) x (B) y", "choices": ["x", "y"], "answer": "A"},
        ["Q (A) x (B) y", "[[A]]"], []),
    "options of which the question lists one": (
        {"question": "Is (A) x it?", "choices": ["x", "y"], "answer": "A"},
        ["Is (A) x it?\nA. x\nB. y", "[[A]]"], []),
    "answers beside an answer that is another": (
        {"question": "Q", "answer": "A", "answers": ["B", "C"]}, ["Q", "[[A]]"], ["answers"]),
    "an answer and the same in others": (
        {"question": "Q", "answer": "A", "answers": ["A", "B"]}, ["Q", "[[A]]"], []),
    "answers with empty ones": (
        {"question": "Q", "answers": ["", " ", "B"]}, ["Q", "[[B]]"], []),
    "answers as texts of mappings": (
        {"question": "Q", "answers": [{"text": "B"}, {"text": "B"}, {"text": "A"}]},
        ["Q", "[[B]]"], []),
    "a system text of a later pair": (
        {"texts": [PAIR, PAIR | {"system": "S"}]}, ["Q", "[[A]]", "Q", "[[A]]"], ["texts.system"]),
    "a weight of the user": (
        {"messages": [user("Q") | {"weight": 1}, assistant("A")]},
        ["Q", "[[A]]"], ["messages.weight"]),
    "two keys that exclude an answer": (
        {"messages": [*QA, user("R"), assistant("B") | {"loss": 0, "train": 1}]},
        ["Q", "[[A]]", "R", "B"], []),
    "keys of parts": (
        {"messages": [user([TEXT | {"lang": "en"}, IMAGE | {"alt": "x"}]), assistant("A")]},
        ["Q{}", "[[A]]"], ["messages.content.lang", "messages.content.alt"]),
    "keys of an address": (
        {"messages": [user([{"type": "image_url", "image_url": {"url": "a.png", "title": "x"}}]),
                      assistant("A")]},
        ["{}", "[[A]]"], ["messages.content.image_url.title"]),
    "a role before a pair": (
        {"messages": [{"role": "user", "content": "Q", "input": "x", "output": "y"}, QA[1]]},
        ["Q", "[[A]]"], ["messages.input", "messages.output"]),
    "an empty from beside a role": (
        {"messages": [{"from": None, **QA[0]}, {"from": "", **QA[1]}]}, ["Q", "[[A]]"], []),
    "parts of text in a text": (
        {"messages": [user(json.dumps([TEXT])), assistant("A")]},
        [json.dumps([TEXT]), "[[A]]"], []),
    "markers in an answer": (llava("Q", "<img>a.png</img>"), ["Q", "[[<img>a.png</img>]]"], ["id"]),
    "white space around an answer": (llava(" Q ", "\n A b \n"), [" Q ", "[[A b]]"], ["id"]),
    "a column without a name": ({"question": "Q", "answer": "A", "": "x"}, ["Q", "[[A]]"],
        ["(no name)"]),
    "empty columns": (
        {**PAIR, "messages": QA, "x": [], "y": {"z": None}, "w": [None, ""], "v": NAN, "u": b""},
        ["Q", "[[A]]"], ["user", "assistant"]),
    "options in columns of another name": (
        {"question": "Q", "option_a": "x", "option_b": "y", "answer": "B"},
        ["Q\nA. x\nB. y", "[[B]]"], []),
    "another name of a column that its form does not read": (
        {"messages": QA, "options": ["x", "y"]}, ["Q", "[[A]]"], ["options"]),
    "a caption with the number of a question": (
        {"image": "a.png", "caption": "A", "question_id": 0},
        ["{}" + PROMPT, "[[A]]"], ["question_id"]),
    "parts with all keys, as Arrow has them": (
        {"messages": [user([{"type": "image", "image": None, "url": "a.png", "text": None}, TEXT]),
                      assistant("A")]},
        ["{}Q", "[[A]]"], []),
    "columns of options beside an empty list": (
        {"question": "Q", "choices": [None, ""], "A": "x", "B": "y", "answer": "B"},
        ["Q\nA. x\nB. y", "[[B]]"], []),
    "options that the question lists with more space": (
        {"question": "Q (A)  x (B)  y", "choices": ["x", "y"], "answer": "A"},
        ["Q (A)  x (B)  y", "[[A]]"], []),
    "a text that a table made a fraction": (
        {"question": "Q", "choices": ["x", "y"], "answer_index": "1.0"},
        ["Q\nA. x\nB. y", "[[B]]"], []),
    "a text with the number of a class": (
        {"image": "a.png", "text": "A", "label": 3}, ["{}" + PROMPT, "[[A]]"], ["label"]),
    "a first turn without parts": (
        {"messages": [user([]), user("Q"), assistant("A")]}, ["Q", "[[A]]"], []),
    "a last user turn without parts": (
        {"messages": [user("Q"), user([]), assistant("A")]}, ["Q", "[[A]]"], []),
    "an empty list of images beside an image of a turn": (
        {"messages": [user("Q") | {"images": [], "image": "a.png"}, assistant("A")]},
        ["{}Q", "[[A]]"], []),
    "a system text of a turn with a role": (
        {"messages": [user("Q") | {"system": "S"}, assistant("A")]},
        ["Q", "[[A]]"], ["messages.system"]),
    "the number of a text": (
        {"messages": [user([TEXT | {"index": 0}]), assistant("A")]}, ["Q", "[[A]]"], []),
    "numbers in place of texts": (
        {"question": 5, "hint": 6, "input": 7, "choices": ["x", "y"], "answer": "x"},
        ["6\n5\n7\nA. x\nB. y", "[[x]]"], []),
    "numbers as prompt and completion": (
        {"prompt": 5, "completion": 7.0}, ["5", "[[7]]"], []),
    "a digit that is no number": (
        {"question": "Q", "choices": ["x", "y"], "answer": "²"}, ["Q\nA. x\nB. y", "[[²]]"], []),
    "several images of a turn and of a row": (
        {"images": ["a.png"], "messages": [
            user([{"type": "image"}, TEXT]), assistant("A"), user("R") | {"images": ["b.png"] * 2},
            assistant("B")]},
        ["{}Q", "[[A]]", "{}{}R", "[[B]]"], []),
    "what models are called": (
        {"conversations": [turn for name in ("gpt", "assistant", "model", "bot", "chatgpt")
                           for turn in ({"from": "human", "value": "Q"},
                                        {"from": name, "value": "A"})]},
        ["Q", "[[A]]"] * 5, []),
    "pairs by other names": (
        {"conversations": [{"human": "Q", "gpt": "A"}, {"human": "R", "assistant": "B"}]},
        ["Q", "[[A]]", "R", "[[B]]"], []),
    "a number as the system text of a pair": (
        {"conversations": [{"input": "Q", "output": "A", "system": 5}]},
        ["Q", "[[A]]"], ["conversations.system"]),
    "all keys that say what is learned": (
        {"messages": [user("Q"), assistant("A") | {"trainable": 0}, user("Q"),
                      assistant("A") | dict.fromkeys(LEARNED, 1)]},
        ["Q", "A", "Q", "[[A]]"], []),
    "parts of every kind": (
        {"messages": [
            user([{"type": "input_image", "url": "a.png", "detail": "high"},
                  {"type": "image", "path": "b.png"},
                  {"type": "image_url", "image_url": {"url": "c.png", "detail": "low"}}, TEXT]),
            assistant([{"type": "output_text", "text": "A"}])]},
        ["{}{}{}Q", "[[A]]"], []),
    "a caption": ({"image": "a.png", "caption": "A", "label": 3},
        ["{}" + PROMPT, "[[A]]"], ["label"]),
}  # fmt: skip


def in_tuples(value):
    """The value with tuples for lists, as a generator may give them."""
    if isinstance(value, dict):
        return {key: in_tuples(element) for key, element in value.items()}
    return tuple(map(in_tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("name", READ)
def test_a_row_is_read_as(name):
    raw, turns, left_out = READ[name]
    assert said(raw) == said(in_tuples(raw)) == turns
    assert parse_row(raw, RULES)["left_out"] == left_out


REFUSED = [
    ({"image": "a.png", "question": "", "answer": "A"}, "its question is empty"),
    ({"image": "a.png", "label": 3}, "it has no assistant turn; its columns are image, label"),
    ({"image": "a.png"}, "it has no assistant turn; add a metadata.csv"),
    ({"image": "a.png", "blip_caption": "A"}, "form is not known. .* columns: blip_caption, image"),
    ({"caption": "A"}, "its form is not known. It has the columns: caption; known"),
    ({"messages": QA, "system": 5}, "its column system is not text"),
    ({"messages": QA, "video": "a.mp4"}, "it has video, and only images are read"),
    ({"messages": QA, "audios": ["a.wav"]}, "it has audios, and only images are read"),
    ({"image": "a.png", "text": "Q", "question_id": 0, "label": "A"}, "question=text,answer=label"),
    ({"prompt": "Q", "completion": "A", "kto_tag": False}, r"unwanted \(kto_tag false\)"),
    ({"question": TURNS, "choices": ["x", "y"], "answer": "x"}, "its question is a list of turns"),
    ({"question": "Q", "choices": ["x", "y"], "answer_index": 2}, "answer_index must be .* got 2"),
    ({"question": "Q", "choices": ["x", "y"], "answer_index": -1}, "must be a choice's .* got -1"),
    (
        {"question": "Q", "choices": ["x", "y"], "answer_index": "²"},
        "must be a choice's .* got '²'",
    ),
    ({"question": "Q", "choices": ["x", "y"], "answer": 2}, "'2' is not just one of the choices"),
    ({"question": "Q", "choices": ["x", "y"], "answer": -1}, "'-1' is not just one of the choices"),
    ({"question": "Q", "choices": ["x", "y"], "answer": "C"}, "'C' is not just one of the choices"),
    ({"question": "Q", "choices": ["1", "0"], "answer": "1"}, "another's letter or number"),
    ({"question": "Q", "choices": ["b", "a"], "answer": "b"}, "another's letter or number$"),
    ({"question": "Q", "choices": ["x"], "answer": "x"}, "must be 2 to 26 different texts"),
    ({"question": "Q", "choices": ["a.PNG", "b.JPG"], "answer": "a.PNG"}, "texts, and no images"),
    ({"messages": [{"role": "system", "content": "S"}, QA[1]]}, "turn 1 is the assistant's"),
    ({"question": "Q", "choices": ["x", " "], "answer": "x"}, "must be 2 to 26 different texts"),
    ({"question": "Q", "choices": {"A": "x", "C": "y"}, "answer": "A"}, "2 to 26 different texts"),
    ({"question": "Q", "choices": list("abcdefghijklmnopqrstuvwxyz1"), "answer": "1"}, "2 to 26"),
    ({"messages": [{"role": "system", "content": "S"}, QA[1], QA[1]]}, "the user first"),
    ({"messages": [QA[0]]}, "it has no assistant turn"),
    ({"messages": ["Q", "A", "R"]}, "the last turn is the user's"),
    ({"messages": "[]", "system": "S"}, "it has no assistant turn"),
    ({"messages": [QA[1]]}, "turn 0 is the assistant's"),
    ({"texts": ["Q", "A"]}, "turn 0 of texts needs role and content, got 'Q'"),
    (llava("<audio>\nQ", "A"), "it has <audio> in a text"),
    ({"messages": QA, "audio": "a.wav"}, "it has audio, and only images are read"),
    ({"messages": [QA[0], {"content": "A"}]}, "turn 1 of messages needs role and content, got"),
    ({"messages": [QA[0], assistant([{"type": "text", "text": None}])]}, "neither a text nor an"),
    ({"messages": [user(3.5j), QA[1]]}, "turn 0 must have text or a list of parts, got 3.5j"),
    (
        {"image": "a.png", "messages": [user([{"type": "image", "index": 0}] * 2), QA[1]]},
        "2 <image>",
    ),
    (
        {
            "images": ["a.png", "b.png"],
            "messages": [
                user([{"type": "image", "index": 1}, {"type": "image", "index": 0}]),
                QA[1],
            ],
        },
        "its part for image 0 has the index 1",
    ),
    (
        {
            "images": ["a.png", "b.png"],
            "messages": [user([{"type": "image", "index": 0}] * 2), QA[1]],
        },
        "its part for image 1 has the index 0",
    ),
    ({**llava("<image>Q", "A"), "image": ["a.png", ""]}, "image has nothing in place of image 1"),
]


@pytest.mark.parametrize(("raw", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_a_row_is_refused_because(raw, reason):
    with pytest.raises(ValueError, match=reason):
        parse_row(raw, RULES)


def test_lists_of_images_may_be_in_a_text():
    row = parse_row({**llava("Q", "A"), "images": '["a.png", "b.png"]'}, RULES)
    assert [image["path"] for image in row["images"]] == ["/images/a.png", "/images/b.png"]


def test_the_commonest_of_several_answers_is_learned_and_all_are_accepted():
    row = read_row({"question": "Q", "answers": ["one", "two", "two"]})
    assert row.messages[1]["content"][0]["text"] == "two"
    assert row.accepted == ["one", "two", "two"]
    row = read_row({"question": "Q", "answer": "two", "answers": ["one", "two"]})
    assert row.messages[1]["content"][0]["text"] == "two"
    assert row.accepted == ["one", "two"] and row.changed == []
    assert read_row({"question": "Q", "answer": "two", "answers": ["one"]}).accepted == []
    assert read_row({"question": "Q", "answer": '{"answer": ["one"]}'}).changed == []


def test_markers_are_told_of_a_row_that_has_images():
    told = parse_row({**llava("<image>Is <image_1> red?", "A"), "image": "a.png"}, RULES)
    assert told["left_out"] == ["id", "text <image_1>"]
    assert parse_row(llava("Is <image_1> red?", "A"), RULES)["left_out"] == ["id"]


def test_the_first_image_names_a_row():
    inside = {"path": "b.png", "bytes": b"x"}
    for raw, name in (
        ({"image": "a.png"}, "a.png"),
        ({"image": ["a.png", "b.png"]}, "a.png"),
        ({"images": [inside, {"path": "c.png", "bytes": None}]}, "b.png"),
        ({"images": [], "image": "a.png"}, "a.png"),
        ({"images": ["a.png"], "image": "b.png"}, "a.png"),
        ({"image": inside}, "b.png"),
        ({"image": "a\ud83d.png"}, "a?.png"),
        ({"image": "data:image/png;base64,AAAA"}, None),
        ({"image": "x" * 4096}, "x" * 4096),
        ({"image": "x" * 4097}, None),
        ({"image": ""}, None),
        ({"image": b"x"}, None),
        ({"question": "Q"}, None),
        ("no row", None),
    ):
        assert image_name(raw) == name, raw


LOOKS = {
    "an image": [
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
    ],
    "an answer": ["answer", "messages.content", "re_caption", "gpt_answer", "Captions", "label"],
    "a question": ["query", "input_prompt", "options", "system", "original_question"],
    None: [
        "tools",
        "image_id",
        "frame_of_mind_id",
        "question_id",
        "image_width",
        "imagery",
        "messages.id",
        "scores",
    ],
}


@pytest.mark.parametrize("what", LOOKS)
def test_a_name_tells_what_a_column_looks_like(what):
    assert {name: looks_like(name) for name in LOOKS[what]} == dict.fromkeys(LOOKS[what], what)
    assert looks_like("messages. img ") == "an image"
    assert looks_like(" Query ") == "a question"


def test_what_looks_like_an_image_in_a_row_without_any():
    picture = Image.new("RGB", (1, 1))
    for raw, column in (
        ({"images": ["a.png"], "img": "b.png"}, None),
        ({"image": "a.png", "img": "b.png"}, None),
        ({"image": [], "images": None, "img": "b.png"}, "img"),
        ({"id": "a.png"}, None),
        ({"img": 0}, None),
        ({"img": {"path": None}}, None),
        ({"img": [""]}, None),
        ({"seen": ["a.png", "b"]}, "seen"),
        ({"seen": []}, None),
        ({"seen": {"path": None, "url": "http://host/a.PNG?size=3"}}, "seen"),
        ({"seen": {"path": "a.webp"}}, "seen"),
        ({"seen": {"bytes": b"x"}}, "seen"),
        ({"seen": b"x"}, "seen"),
        ({"seen": picture}, "seen"),
        ({"seen": "a.txt"}, None),
        ({"seen": 7}, None),
    ):
        assert unread_image(raw, []) == (f"column {column}" if column else None), raw


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"problem": "Q", "answer": "['A', 'B']"}, "question=problem,answers=answer"),
        ({"img": "a.png", "description": "['A', 'B']"}, "image=img,captions=description"),
        ({"image": "a.png", "img_path": "b.png", "query": "Q", "label": "A"},
            "question=query,answer=label"),
        ({"query": {"x": 1}, "problem": "Q", "response": "A"}, "question=problem,answer=response"),
        ({"Image": "a.png", "query": "Q", "label": "A"}, "image=Image,question=query,answer=label"),
        ({"asked": [QA[0]], "dialog": QA}, "messages=dialog"),
        ({"said": [QA[1]], "dialog": QA}, "messages=dialog"),
        ({"preferred_output": QA, "non_preferred_output": QA}, "messages=preferred_output"),
        ({"history": QA, "turns": QA}, "messages=turns"),
        ({"images": ["a.png"], "img_path": "b.png", "query": "Q", "label": "A"},
            "question=query,answer=label"),
        ({"dialog": {"role": ["user", "assistant"], "content": ["Q", "A"]}}, "messages=dialog"),
        ({"query": "Q", "score": 3}, None),
        ({"image": "", "img": "b.png", "query": "Q", "label": "A"},
            "image=img,question=query,answer=label"),
        ({"photo": "b.png", "image_path": "a.png", "query": "Q", "label": "A"},
            "image=image_path,question=query,answer=label"),
        ({"non_preferred_output": QA, "rejected": QA, "history": QA}, None),
        ("no row", None),
    ],
)  # fmt: skip
def test_columns_are_proposed(row, columns):
    told = proposal(row)
    assert told.endswith(f"with --columns {columns}") if columns else told == ""
    assert ("DPO" in told) == ("preferred_output" in row)


ASKING = "query instruction problem prefix human user prompt input inputs text"
ANSWERING = "response output outputs solution suffix assistant gpt completion label target"
ANSWERING += " ground_truth"
TELLING = "captions description caption_str sentences re_caption raw ground_truth summary"
SHOWING = "image_path img_path image_file image_file_name image_filename file_name filename"
SHOWING += " filepath image_name img_name image_base64_str img picture photo path"


def test_columns_of_every_usual_name_are_proposed():
    for name in ASKING.split():
        assert proposal({name: "Q", "solution": "A"}).endswith(f"question={name},answer=solution")
    for name in ANSWERING.split():
        assert proposal({"query": "Q", name: "A"}).endswith(f"question=query,answer={name}")
    for name in TELLING.split():
        assert proposal({"img": "a.png", name: "A"}).endswith(f"image=img,caption={name}")
    for name in SHOWING.split():
        row = {name: "a.png", "query": "Q", "label": "A"}
        assert proposal(row).endswith(f"image={name},question=query,answer=label")


ABOUT = "id ids uid uuid idx index key hash md5 sha256 url urls uri link links source sources"
ABOUT += " origin dataset split subset type types category categories topic subject field"
ABOUT += " domain task skill grade difficulty lang language score scores rating ratings rank"
ABOUT += " similarity watermark pwatermark unsafe punsafe nsfw width height size shape"
ABOUT += " license licence author date time timestamp version status error_message exif"
ABOUT += " model meta metadata name __index_level_0__"


def test_columns_that_tell_about_a_row():
    for name in ABOUT.split():
        assert is_about(name), name
    for name in (
        "Unnamed: 0",
        "(no name)",
        "my.id",
        "image_width",
        "data-source",
        "id_",
        "URL",
        "license_",
    ):
        assert is_about(name), name
    for name in ("ideas", "answer", "urlx", "name of it", "hints", "page"):
        assert not is_about(name), name


MARKED = ["<image_1>", "<image1>", "<|image_pad|>", "<start_of_image>", "<image-start>", "<img>"]
MARKED += ["<image here>", "<IMAGE_PLACEHOLDER>", "<IMG_CONTEXT>", "<image_patch>", "<image/>"]
MARKED += ["<|image|>", "<Image>", "[IMG]", "[image]", "<image 12>"]


def test_texts_that_should_show_an_image():
    def shown(text):
        return unread_image({}, [{"content": [{"text": None}, {"text": f"Is {text} red?"}]}])

    for text in MARKED:
        assert shown(text) == f"text {text}"
    for text in ("![image](a.png)", "[image](a.png)", "<imagery>", "image_1", "<images>"):
        assert shown(text) is None


def test_columns_that_change_places_keep_their_values():
    row = {"question": "Q", "answer": "A", "text": "T", "more": 1}
    swapped = renamed(row, {"question": "answer", "answer": "question"})
    assert swapped == {"question": "A", "answer": "Q", "text": "T", "more": 1}
    assert renamed(row, {"question": "text"}) == {"question": "T", "answer": "A", "more": 1}
    assert renamed(row, {"image": "absent"}) == row


def test_options_by_letter():
    assert options_of({"choices": ["(A) x", "(B) y"]}) == {"A": "x", "B": "y"}
    assert options_of({"choices": [{"text": "x"}, {"text": "y"}]}) == {"A": "x", "B": "y"}
    assert options_of({"choices": {"a": "x", "b": "y"}}) == {"A": "x", "B": "y"}
    assert options_of({"choices": "['x', 'y']"}) == {"A": "x", "B": "y"}
    assert options_of({"choices": ["A: x", "B) y"]}) == {"A": "x", "B": "y"}
    assert options_of({"J": "x", "A": "y"} | dict(zip("BCDEFGHI", "bcdefghi", strict=True))) == {
        "A": "y",
        **dict(zip("BCDEFGHI", "bcdefghi", strict=True)),
        "J": "x",
    }
    many = [f"{number} apples" for number in range(26)]
    assert list(options_of({"choices": many}).values()) == many
    assert options_of({"A": "nan", "B": "y"}) == options_of({}) == {}


def test_values_of_tables():
    numbers = [as_text(value) for value in (3.0, 3.5, 7, True, NAN, "x", None)]
    assert numbers == ["3", "3.5", "7", True, None, "x", None]
    empty = (None, "", b"", NAN, [], {}, [None, ""], {"a": [], "b": None}, (NAN,))
    assert all(map(is_empty, empty))
    assert not any(map(is_empty, (0, False, " ", b"x", [0], {"a": 0}, [None, "x"])))
    assert parsed('["a"]') == parsed("['a']") == parsed(" ['a'] ") == ["a"]
    assert parsed("{'a': None}") == {"a": None}
    deep = ("[" * 5000, f"[{'-' * 9000}1]", f"[{'1+' * 20_000}1]")
    for text in ("a", "[a", "['a' b]", 3, None, *deep):
        assert parsed(text) == text
    long = str(["a" * 2**16])  # in Python's form, which is slow to read
    assert parsed(long) == long and parsed(json.dumps(["a" * 2**16])) == ["a" * 2**16]
    assert transposed({"a": [1, 2], "b": [3, 4]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    for value in ({"a": [1, 2], "b": [3]}, {"a": [1], "b": 3}, {}, [1], "a"):
        assert transposed(value) == value
    assert accepted_answers({"text": ["a", " ", "b"], "answer_start": [1, 2, 3]}) == ["a", "b"]
    assert accepted_answers([3.0, "a"]) == ["3", "a"] and accepted_answers(["a", True]) == []
    assert accepted_answers([TEXT]) == accepted_answers("a") == []
    assert plain(' "The  Cat." ') == plain("**_'the cat'_** (!)") == "the cat"


def test_what_is_left_out_is_named_once():
    values = {"x": 1, "y": 2, "z": None, "w" * 99: 1, 7: "b"}
    assert unread_keys(values, {"y"}, "a.") == ["a.x", f"a.{'w' * 78}", "a.7"]
    turns = [user("Q") | {"x": 1}, assistant("A") | {"x": 1}]
    assert read_row({"messages": turns}).left_out == ["messages.x"]


def test_content_beside_a_pair_is_left_out():
    assert read_row({"messages": [PAIR | {"content": "x"}]}).left_out == ["messages.content"]


def test_a_part_whose_type_is_a_list_is_refused():
    with pytest.raises(ValueError, match="neither a text nor an image part"):
        read_row({"messages": [user([{"type": ["text"]}]), assistant("A")]})
    with pytest.raises(ValueError, match="needs role and content"):
        read_row({"question": [{"type": ["text"]}], "answer": "A"})
