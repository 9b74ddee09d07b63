"""Rows of every format are parsed; each kind of bad row has its reason."""

import pickle

import pytest
import tiny_parts
from huggingface_hub import constants
from train_data import assistant, llava, user

from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.rows.parse import DroppedRow, DroppedRows, control_tokens, parse_row


RULES = ImageRules("/images")


def shape(raw, **kwargs) -> list:
    """(role, parts) of a parsed row, an image being `...`."""
    row = parse_row(raw, RULES, **kwargs)
    assert all(set(part) == {"type", "text"} for message in row["messages"] for part in message["content"])
    assert sum(part["type"] == "image" for m in row["messages"] for part in m["content"]) == len(row["images"])
    return [(m["role"], [p["text"] if p["type"] == "text" else ... for p in m["content"]]) for m in row["messages"]]


def paths(raw) -> list:
    return [image["path"] for image in parse_row(raw, RULES)["images"]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<image>\nWhat?", [..., "What?"]),
        ("What?\n<image>", ["What?", ...]),
        ("<image>\r\nWhat?", [..., "What?"]),
        ("A\n<image>\nB", ["A", ..., "B"]),
        ("<image>\n\nB", [..., "\nB"]),
        ("A <image> B", ["A ", ..., " B"]),
        ("<image>", [...]),
    ],
)
def test_a_line_break_on_either_side_of_the_marker_alone_is_lost(text, parts):
    assert shape(llava(text, "yes", "a.png"))[0] == ("user", parts)


def test_trl_messages_of_every_kind():
    turns = [user("Q"), assistant("A"), user("Q2"), assistant("A2")]
    assert shape({"messages": turns, "images": ["a.png", "b.png"]})[0] == ("user", [..., ..., "Q"])
    marked = [user("Q"), assistant("A"), user("<image>\nQ2"), assistant("A2")]
    assert shape({"messages": marked, "images": ["a.png"]})[2] == ("user", [..., "Q2"])
    # Arrow gives every part all keys that any part has.
    first, second = {"type": "text", "text": "Q", "image": None}, {"type": "image", "text": None, "image": None}
    assert shape({"messages": [user([first, second]), assistant([first])], "images": ["a.png"]}) == [
        ("user", ["Q", ...]),
        ("assistant", ["Q"]),
    ]
    own = {"type": "image", "image": "own.png"}
    mixed = {"messages": [user([second, own, first]), assistant("A")], "images": ["column.png"]}
    assert paths(mixed) == ["/images/column.png", "/images/own.png"]
    assert shape({"messages": [user([]), assistant("A")]}) == [("user", [""]), ("assistant", ["A"])]


def test_prompt_and_completion():
    strings = parse_row({"prompt": "Q", "completion": " A"})
    assert [m["content"][0]["text"] for m in strings["messages"]] == ["Q", "A"] and strings["learned"] == [True]
    prompt = [user("Q"), assistant("not learned"), user("Q2")]
    row = {"prompt": prompt, "completion": [assistant("A"), user("Q3"), assistant("A3")], "images": ["a.png"]}
    assert parse_row(row, RULES)["learned"] == [False, True, True]
    assert shape(row)[0] == ("user", [..., "Q"]) and len(shape(row)) == 6
    assert shape({"prompt": "Is <image> red?", "completion": "yes", "image": "a.png"})[0][1] == ["Is ", ..., " red?"]


def test_files_that_datasets_found_itself(monkeypatch, tmp_path):
    def allowed(path, rules, struct=True):
        raw = {**llava("<image>Q", "A"), "image": {"path": path, "bytes": None} if struct else path}
        (image,) = parse_row(raw, rules)["images"]
        assert image == {"path": path, "bytes": None}

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = ImageRules(None, "user/data")
    for path in (str(tmp_path / "hub" / "a.png"), "hf://datasets/user/data@0c/a.png"):
        allowed(path, hub)
        allowed(f"zip://a.png::{path}", hub)
    allowed("/images/a.png", RULES)
    allowed("/images/a.png", RULES, struct=False)
    allowed("zip://a.png::/images/b.zip", RULES)
    allowed("/anywhere/a.png", ImageRules())
    for path in ("hf://datasets/user/other@0c/a.png", "/etc/passwd", f"{tmp_path}/hub/../token", "zip://a::/b.zip"):
        with pytest.raises(ValueError, match="nothing is fetched|leaves the cache of the Hub"):
            allowed(path, hub)
    with pytest.raises(ValueError, match="nothing is fetched"):
        allowed("hf://datasets/user/data@0c/a.png", hub, struct=False)


ADDRESSES = ("https://host/a.png", "file:///etc/a.png", "memory://a.png")


@pytest.mark.parametrize("rules", [RULES, ImageRules(), ImageRules(None, "user/data")])
@pytest.mark.parametrize(
    "address", [*ADDRESSES, "simplecache::file:///images/a.png", "file://x::hf://datasets/u/d@0/a"]
)
def test_addresses_are_refused_as_strings_and_as_structs(address, rules):
    for image in (address, {"path": address, "bytes": None}, {"path": address}):
        with pytest.raises(
            ValueError,
            match="address, and nothing is fetched: (download .* set image_folder|write its path, without file://)",
        ):
            parse_row({**llava("<image>Q", "A"), "image": image}, rules)


TURNS = llava("Q", "A")["conversations"]
BAD = {
    "more markers than images": (llava("<image><image>Q", "A", "a.png"), "2 places for images .* and 1 images"),
    "marker without an image": (llava("<image>Q", "A"), "1 places .* and 0 images"),
    "two columns": ({**llava("<image>Q", "A", "a.png"), "images": ["b.png"]}, "both image and images"),
    "absolute path": (llava("<image>Q", "A", "/etc/passwd"), "/etc/passwd leaves image_folder /images"),
    "path that leaves": (llava("<image>Q", "A", "sub/../../b.png"), r"sub/../../b.png leaves image_folder /images"),
    "empty answer": (llava("Q", " \n"), "the answer in turn 1 is empty"),
    "invisible characters": (llava("Q", "\u2060 \ufeff\u00ad\u2028\x07\u3000"), "the answer in turn 1 is empty"),
    "ends with the user": ({"conversations": [*TURNS, TURNS[0]]}, "the last turn is the user's"),
    "two answers": ({"conversations": [*TURNS, TURNS[1]]}, "turn 2 is the assistant's; user and assistant must take"),
    "late system turn": ({"messages": [user("Q"), assistant("A"), {"role": "system", "content": "S"}]}, "turn 2 is"),
    "unknown role": ({"messages": [{"role": "tool", "content": "Q"}, assistant("A")]}, "role 'tool'; known are human"),
    "half a surrogate pair": (llava("Q", "half \ud83d"), "turn 1, the assistant's, is not valid Unicode"),
    "turns of no kind": ({"messages": "Q"}, "messages must be a list of turns, got 'Q'"),
    "part of no kind": ({"messages": [user([{"type": "video"}]), assistant("A")]}, "neither a text part nor an image"),
    "marker in an answer": (llava("Q", "an <image>"), "turn 1, the assistant's, has <image> where no image is"),
    "marker in two text parts": (
        {"messages": [user([{"type": "text", "text": t} for t in ("<ima", "ge>")]), assistant("A")]},
        "turn 0, the user's, has <image>",
    ),
    "image of the assistant": (
        {"messages": [user("Q"), assistant([{"type": "image"}])], "images": ["a.png"]},
        "turn 1, the assistant's, has an image",
    ),
    "nothing to complete": ({"prompt": [user("Q"), assistant("A")], "completion": []}, "no assistant turn is learned"),
    "unknown format": ({"text": "T", "label": 1, "messages": None}, "columns: label, text; known are conversations"),
    "line that is no JSON": (b"[[[", r"the line is not valid JSON, or nested too deeply: b'\[\[\['"),
    "no row": ("{broken", "a row must be a mapping .* got '{broken'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_has_a_reason(kind):
    raw, reason = BAD[kind]
    with pytest.raises(ValueError, match=reason):
        parse_row(raw, RULES)


def test_the_tokenizers_own_image_token_may_not_stand_in_a_text():
    raw = llava("What does <|image|> mean?", "A")
    assert shape(raw)[0][1] == ["What does <|image|> mean?"]
    with pytest.raises(ValueError, match=r"turn 0, the user's, has <\|image\|> where no image is"):
        parse_row(raw, image_token="<|image|>")


def test_control_tokens_of_the_tokenizer_may_not_stand_in_a_text():
    tokenizer = tiny_parts.tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokens = control_tokens(tokenizer)
    joined = "\U0001f469\u200d\U0001f52c"  # an invisible character between two visible ones
    assert parse_row(llava("<s>", f"<think>{joined}"), control_tokens=tokens)
    for row, reason in (
        (llava("Q", "red<|im_end|>\n<|im_start|>user\nQ2"), r"turn 1, the assistant's, has <\|im_end\|>, .* control"),
        (llava("say <unk>", "A"), "turn 0, the user's, has <unk>"),
    ):
        assert parse_row(row)
        with pytest.raises(ValueError, match=reason):
            parse_row(row, control_tokens=tokens)


def test_an_empty_answer_in_the_prompt_is_not_learned_and_so_allowed():
    row = {"prompt": [user("Q"), assistant(""), user("Q2")], "completion": [assistant("A")]}
    assert parse_row(row)["learned"] == [False, True]
    with pytest.raises(ValueError, match="answer in turn 3 is empty"):
        parse_row({**row, "completion": [assistant("")]})


def test_dropped_rows_count_once_and_survive_a_torn_line(tmp_path):
    file = DroppedRows(tmp_path / "run" / "dropped_rows.jsonl")
    assert file.read() == []
    one, two = DroppedRow("b.json", 5, "a.png", "why"), DroppedRow("a.json", 7, None, "9 tokens", 9)
    for row in (one, two, one):
        file.add(row)
    assert file.read() == [two, one]
    pickle.loads(pickle.dumps(file)).add(two)
    assert len(set(file.path.read_text().splitlines())) == 2 and file.path.read_text().count("b.json") == 1
    with file.path.open("a") as lines:
        lines.write('{"source": "c.js')  # killed
    assert DroppedRows(file.path).read() == [two, one]
    assert str(one) == "b.json, row 5 (a.png): why" and str(two) == "a.json, row 7: 9 tokens"
