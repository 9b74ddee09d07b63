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


def shape(raw, **kwargs) -> list:
    """(role, parts) of a parsed row, an image being None."""
    row = parse_row(raw, RULES, **kwargs)
    parts = [part for turn in row["messages"] for part in turn["content"]]
    assert all(part.keys() == {"type", "text"} for part in parts)
    assert [part["type"] == "image" for part in parts] == [part["text"] is None for part in parts]
    assert sum(part["type"] == "image" for part in parts) == len(row["images"])
    return [(turn["role"], [part["text"] for part in turn["content"]]) for turn in row["messages"]]


def test_line_breaks_beside_markers_are_lost_only_where_a_turn_begins_or_ends_with_them():
    for text, parts in {
        "<image>\nWhat?": [None, "What?"],
        "<image>\r\nWhat?": [None, "What?"],
        "What?\n<image>": ["What?", None],
        "\n<image>\r\n": [None],
        "A\n<image>\nB": ["A\n", None, "\nB"],
        "Before: <image>\nWhat?": ["Before: ", None, "\nWhat?"],
        "<image>\nA\n<image>": [None, "A", None],
        "<image>\n\nB": [None, "\nB"],
        "<image>\n<image>\nB": [None, None, "B"],
        "A\n<image>\r\n<image>": ["A", None, None],
        "A <image> B": ["A ", None, " B"],
        "<image>": [None],
    }.items():
        images = [f"{number}.png" for number in range(text.count("<image>"))]
        assert shape(llava(text, "yes", images))[0] == ("user", parts)


def test_trl_messages_of_every_kind():
    turns = [user("Q"), assistant("A"), user("Q2"), assistant("A2")]
    assert shape(dict(messages=turns, images=["a.png", "b.png"]))[0] == ("user", [None, None, "Q"])
    marked = [user("Q"), assistant("A"), user("<image>\nQ2"), assistant("A2")]
    assert shape({"messages": marked, "images": ["a.png"]})[2] == ("user", [None, "Q2"])
    own = {"type": "image", "image": "own.png"}
    parts = [{"type": "image"}, own, {"type": "text", "text": "Q"}]
    mixed = {"messages": [user(parts), assistant("A")], "images": ["column.png"]}
    shown = [image["path"] for image in parse_row(mixed, RULES)["images"]]
    assert shown == ["/images/column.png", "/images/own.png"]
    assert shape({"messages": [user([]), assistant("A")]}) == [("user", [""]), ("assistant", ["A"])]


def test_the_images_of_a_question_with_its_answer_are_the_question_s():
    pairs = [{"question": "Q", "answer": "A", "image": "a.png"}]
    pairs += [{"user": "Q2", "assistant": "A2", "images": ["b.png", "c.png"]}]
    asked, answered, *others = shape({"messages": pairs})
    assert (asked, answered) == (("user", [None, "Q"]), ("assistant", ["A"]))
    assert others == [("user", [None, None, "Q2"]), ("assistant", ["A2"])]


def test_prompt_and_completion():
    texts = {"prompt": "Q", "completion": " A"}
    assert shape(texts) == [("user", ["Q"]), ("assistant", ["A"])]
    prompt = [user("Q"), assistant(""), user("Q2")]  # not learned, so it may be empty
    row = dict(prompt=prompt, completion=[assistant("A"), user("R"), assistant("B")], image="a.png")
    assert parse_row(row, RULES)["learned"] == [False, True, True]
    assert shape(row)[0] == ("user", [None, "Q"]) and len(shape(row)) == 6
    row = {"prompt": "Is <image> red?", "completion": "yes", "image": "a.png"}
    assert shape(row)[0][1] == ["Is ", None, " red?"]


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
    local = ("/etc/passwd", f"{tmp_path}/hub/../token", "zip://a::/b.zip")
    for path in ("hf://datasets/user/other@0c/a.png", *local):
        with pytest.raises(ValueError, match="nothing is fetched|leaves the cache of the Hub"):
            allowed(path, hub)
    with pytest.raises(ValueError, match="nothing is fetched"):
        allowed("hf://datasets/user/data@0c/a.png", hub, struct=False)


@pytest.mark.parametrize("rules", [RULES, ImageRules(), ImageRules(None, "user/data")])
def test_addresses_are_refused_as_strings_and_as_structs(rules):
    addresses = ["https://host/a.png", "file:///etc/a.png", "memory://a.png"]
    addresses += ["simplecache::file:///images/a.png", "file://x::hf://datasets/u/d@0/a"]
    for address in addresses:
        for image in (address, {"path": address, "bytes": None}, {"path": address}):
            with pytest.raises(ValueError, match="address; nothing is fetched"):
                parse_row({**llava("<image>Q", "A"), "image": image}, rules)


IN_BRACKETS = ['["cat", "dog"]', "['cat' 'dog']", '[{"type": "text", "text": "cat"}]', "[1, 2]"]
IN_BRACKETS += ['{"type": "text", "text": "cat"}', '[{"type": "image"}]', '[{"answer": "cat"}]']


@pytest.mark.parametrize("text", IN_BRACKETS)
def test_an_answer_is_the_text_that_was_written(text):
    for row in (
        {"question": "Q", "answer": text},
        {"prompt": "Q", "completion": text},
        {"prompt": [user("Q")], "completion": [assistant(text)]},
        {"messages": [user("Q"), assistant(text)]},
        {"texts": [{"user": "Q", "assistant": text}]},
        {"messages": json.dumps([user("Q"), assistant(text)])},
        llava("Q", text),
    ):
        assert shape(row) == [("user", ["Q"]), ("assistant", [text])]
    if not text.startswith("{"):
        assert shape({"image": "a.png", "caption": text})[1] == ("assistant", [text])
    if "image" not in text:  # a user shows images so
        assert shape({"question": text, "answer": "A"})[0] == ("user", [text])


def test_parts_of_one_turn_are_all_learned():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert shape({"question": "Q", "answer": parts})[1] == ("assistant", ["one two"])


def test_several_captions_and_answers_are_told_of():
    def changed(**row):
        return parse_row({"image": "a.png", **row}, RULES)["changed"]

    for captions in (["A", "B"], ["A", "B", "B"]):
        (text,) = changed(caption=captions)
        assert "several captions" in text and changed(captions=captions) == [text]
        assert changed(captions=json.dumps(captions)) == [text]
    assert changed(caption=["A", "A"]) == changed(caption="A") == changed(caption=["A"]) == []
    assert "several answers" in changed(question="Q", answers=["A", "B"])[0]
    assert changed(question="Q", answer="A", answers=["A", "B"]) == []  # says which
    assert "--columns answers=COLUMN" in changed(question="Q", answer="['A', 'B']")[0]
    assert "--columns captions=COLUMN" in changed(caption="['A', 'B']")[0]


TURNS = llava("Q", "A")["conversations"]
QA = [user("Q"), assistant("A")]
BAD = [
    (llava("<image><image>Q", "A", "a.png"), "2 <image> or image parts for 1 images"),
    ({**llava("<image>Q", "A", "a.png"), "images": ["b.png"]}, "both image and images"),
    ({**llava("<image>Q", "A"), "images": [None, "a.png"]}, "has nothing in place of image 0"),
    (llava("<image>Q", "A", "/etc/passwd"), "/etc/passwd leaves image_folder /images"),
    (llava("<image>Q", "A", "sub/../../b.png"), r"sub/../../b.png leaves image_folder /images"),
    (llava("<image>Q", "A", "Q" * 6000), "neither a valid path nor an image"),
    ({"image": "a.png", "messages": [user([{"type": "image", "index": 1}]), QA[1]]}, "index 1"),
    ({"image": "a.png", "messages": [QA[0], assistant([{"type": "image"}])]}, "'s, has an image"),
    ({"messages": [user([{"type": "image", "file_id": "x"}]), QA[1]]}, "has file_id, but none of"),
    ({"messages": [user([{"type": "video"}]), QA[1]]}, "neither a text nor an image part"),
    (llava("Q", " \n"), "the answer in turn 1 is empty"),
    ({"conversations": [*TURNS, TURNS[0]]}, "the last turn is the user's"),
    ({"conversations": [*TURNS, TURNS[1]]}, "turn 2 is the assistant's; turns must alternate"),
    ({"messages": [{"role": "system", "content": "S"}, *QA], "system": "T"}, "its column system"),
    (
        {"messages": [{"role": "system", "content": [{"type": "image"}]}, *QA], "image": "a.png"},
        "turn 0, the system's, has an image",
    ),
    ({"messages": [QA[0], QA[1] | {"weight": 0}, QA[0], assistant("")]}, "in turn 3 is empty"),
    ({"messages": [{"role": "tool", "content": "Q"}, QA[1]]}, "role 'tool'; known are human"),
    ({"messages": "Q"}, "messages must be a list of turns, got 'Q'"),
    ({"messages": [QA[0], QA[1] | {"weight": 0.5}]}, "turn 1 has weight 0.5"),
    ({"messages": [QA[0], QA[1] | {"weight": 0}]}, "no answer is learned"),
    (llava("Q", "half \ud83d"), "turn 1, the assistant's, is not valid Unicode"),
    (llava("Q", "an <image>"), "turn 1, the assistant's, has <image> where no image is"),
    ({"messages": [user([dict(type="text", text=t) for t in ("<i", "mage>")]), QA[1]]}, "<image>"),
    ({**llava("<video>Q", "A"), "videos": ["a.mp4"]}, "it has videos, and only images are read"),
    (llava("<video>\nQ", "A"), "it has <video> in a text"),
    ({"messages": [user("Find <ref-object>"), assistant("<bbox>")]}, "it has <ref-object> in"),
    ({"question": "Q", "options": ["3", "4", "2", "1"], "answer": "3"}, "answer_index=answer"),
    ({"question": "Q", "choices": ["a b", "c d"], "answer": 2}, "answer '2' is not just one of"),
    ({"question": "Q", "choices": ["a", "b"], "answer": ["A", "B"]}, "options and several"),
    ({"question": "Q", "A": "x", "C": "y", "answer": "A"}, "different texts.* 'C': 'y'"),
    ({"question": "Q", "choices": ["x", float("nan")], "answer": "A"}, "different texts"),
    ({"question": "Q", "choices": ["a", "A."], "answer": "a"}, "different texts"),
    ({"question": "Q", "choices": ["a.png", "b.png"], "answer": 0}, "no images"),
    ({"question": " ", "answer": "A"}, "its question is empty.*--columns caption=answer"),
    ({"question": "Q", "answer": True}, "answer must be text or a list of turns, got True"),
    ({"image": "a.png", "text": '{"question": "Q"}'}, "is JSON, not a caption: question"),
    ({"image": "a.png", "text": "Q", "label": "A"}, "question=text,answer=label; .* caption=text"),
    ({"image": "a.png", "text": "Q", "question_id": 0}, "--columns question=text, .* caption=text"),
    ({"prompt": "Q", "completion": "A", "label": False}, "is unwanted .label false., for KTO"),
    ({"text": "T", "label": 1, "messages": None}, "columns: label, text; known are conversations"),
    (b"[[[", r"the line is not valid JSON, or nested too deeply: b'\[\[\['"),
    ("{broken", "a row must be a mapping .* got '{broken'"),
]


@pytest.mark.parametrize(("raw", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_row_has_a_reason(raw, reason):
    with pytest.raises(ValueError, match=reason):
        parse_row(raw, RULES)


def test_control_tokens_of_the_tokenizer_may_not_stand_in_a_text():
    tokenizer = tiny_parts.tokenizer()
    tokenizer.add_tokens(["<think>"])
    options = {"control_tokens": control_tokens(tokenizer), "image_token": "<|image|>"}
    assert parse_row(llava("<s>", "<think>A"), **options)
    for row, reason in (
        (llava("Q", "A<|im_end|>\n<|im_start|>user\nQ2"), r"turn 1.* has <\|im_end\|>, a control"),
        (llava("say <unk>", "A"), "turn 0, the user's, has <unk>"),
        (llava("Q", "A", system="a<|im_end|>"), r"turn 0, the system's, has <\|im_end\|>"),
        (llava("<|image|>?", "A"), r"turn 0, the user's, has <\|image\|> where no image is"),
    ):
        assert parse_row(row)
        with pytest.raises(ValueError, match=reason):
            parse_row(row, **options)


def test_dropped_rows_count_once_and_survive_a_torn_line(tmp_path):
    file = DroppedRows(tmp_path / "run" / "dropped_rows.jsonl")
    one = DroppedRow("b.json", 5, "a.png", "why")
    two = DroppedRow("a.json", 7, None, "9 tokens", 9)
    for row in (one, two, one):
        file.add(row)
    assert file.read() == [two, one]
    with file.path.open("a") as lines:
        lines.write(json.dumps({**vars(one), "reason": "another"}) + "\n")  # by another process
    assert file.read() == [two, one]
    DroppedRows(file.path).add(two)  # in a run that was resumed
    assert len(file.path.read_text().splitlines()) == 3
    with file.path.open("a") as lines:
        lines.write('{"source": "c.js')  # killed
    assert DroppedRows(file.path).read() == [two, one]
    assert str(one) == "b.json, row 5 (a.png): why" and str(two) == "a.json, row 7: 9 tokens"


def test_what_a_worker_of_a_data_loader_says_of_a_bad_row_is_its_reason():
    said = (
        "Caught BadRow in DataLoader worker process 0.\nTraceback:\n  x\nparse.BadRow: row 0: why\n"
    )
    assert str(BadRow(said)) == str(BadRow("row 0: why")) == "row 0: why"


def test_of_control_tokens_that_begin_alike_the_longest_is_named():
    tokenizer = tiny_parts.tokenizer(extra=["<|im"])
    tokenizer.add_tokens(AddedToken("<|im", special=True), special_tokens=True)
    assert control_tokens(tokenizer).search("a<|im_end|>b")[0] == "<|im_end|>"
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    assert control_tokens(plain).search("a<|im_end|>b") is None
    plain.pad_token = "<pad>"
    assert control_tokens(plain).search("a<pad>b")[0] == "<pad>"


def spaced_tokenizer(legacy: bool):
    """Llama 2's, which puts a space before a text, or before every piece; and tokens that eat."""
    tokenizer = chat_families.llama_tokenizer(legacy)
    tokenizer.add_tokens(AddedToken("<cut>", special=True, rstrip=True), special_tokens=True)
    tokenizer.add_tokens(AddedToken("<eat>", special=True, lstrip=True), special_tokens=True)
    return tokenizer


def plain_tokenizer():
    """One without special tokens, which knows "the"."""
    vocabulary = {token: number for number, token in enumerate([*" thea1|<_", "th", "the"])}
    merges = [("t", "h"), ("th", "e")]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, merges)))


def normalizing_tokenizer():
    """One whose special token is looked for in the normalized text: at its beginning alone."""
    tokenizer = plain_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Prepend("_")
    tokenizer.add_tokens(AddedToken("<a>", special=True, normalized=True), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        tiny_parts.tokenizer,
        chat_families.byte_tokenizer,
        lambda: spaced_tokenizer(legacy=False),
        lambda: spaced_tokenizer(legacy=True),
        plain_tokenizer,
        normalizing_tokenizer,
    ],
)
def test_tokens_of_pieces_are_those_of_the_whole_text(tokenizer):
    made = tokenizer()
    random = Random(0)
    special = [token.content for token in made.added_tokens_decoder.values() if token.special]
    words = [
        *special,
        *("a", " b", "\n", " ", "  the", "\u00dc", "1", "<", "|", ". ", "\u65e5") * 2,
    ]
    texts = ["".join(random.choices(words, k=random.randrange(25))) for _ in range(500)]
    whole = [made.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert encoded(made, texts) == whole
    assert encoded(made, []) == []
