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
    parsed_turns = []
    for turn in parsed_row["messages"]:
        texts = []
        for part in turn["content"]:
            assert part.keys() == {"type", "text"}
            is_image = part["type"] == "image"
            assert is_image == (part["text"] is None)
            image_count += is_image
            texts.append(part["text"])
        parsed_turns.append((turn["role"], texts))
    assert image_count == len(parsed_row["images"])
    return parsed_turns


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
    parsed_turns = parse_turns(llava(text, "yes", images))
    assert parsed_turns[0] == ("user", expected)


TWO_QUESTIONS = [
    user("Q"),
    assistant("A"),
    user("Q2"),
    assistant("A2"),
]


def test_images_of_messages_without_markers_are_in_the_first_question():
    parsed_turns = parse_turns({"messages": TWO_QUESTIONS, "images": ["a.png", "b.png"]})
    assert parsed_turns[0] == ("user", [None, None, "Q"])


def test_images_of_messages_are_where_their_markers_are():
    messages = [
        user("Q"),
        assistant("A"),
        user("<image>\nQ2"),
        assistant("A2"),
    ]
    parsed_turns = parse_turns({"messages": messages, "images": ["a.png"]})
    assert parsed_turns[2] == ("user", [None, "Q2"])


def test_image_parts_have_their_own_image_or_one_of_the_column():
    question = [
        {"type": "image"},
        {"type": "image", "image": "own.png"},
        {"type": "text", "text": "Q"},
    ]
    raw_row = {"messages": [user(question), assistant("A")], "images": ["column.png"]}
    image_paths = [raw_image["path"] for raw_image in parse_row(raw_row, RULES)["images"]]
    assert image_paths == ["/images/column.png", "/images/own.png"]


def test_a_question_without_parts_is_empty():
    parsed_turns = parse_turns({"messages": [user([]), assistant("A")]})
    assert parsed_turns == [("user", [""]), ("assistant", ["A"])]


def test_images_beside_a_question_and_its_answer_belong_to_the_question():
    pairs = [
        {
            "question": "Q",
            "answer": "A",
            "image": "a.png",
        },
        {
            "user": "Q2",
            "assistant": "A2",
            "images": ["b.png", "c.png"],
        },
    ]
    assert parse_turns({"messages": pairs}) == [
        ("user", [None, "Q"]),
        ("assistant", ["A"]),
        ("user", [None, None, "Q2"]),
        ("assistant", ["A2"]),
    ]


def test_prompt_and_completion_may_be_texts():
    parsed_turns = parse_turns({"prompt": "Q", "completion": " A"})
    assert parsed_turns == [("user", ["Q"]), ("assistant", ["A"])]


def test_prompt_and_completion_may_be_turns():
    empty_answer = assistant("")  # It is not learned, so it may be empty.
    raw_row = {
        "prompt": [user("Q"), empty_answer, user("Q2")],
        "completion": [
            assistant("A"),
            user("R"),
            assistant("B"),
        ],
        "image": "a.png",
    }
    assert parse_row(raw_row, RULES)["learned"] == [False, True, True]
    parsed_turns = parse_turns(raw_row)
    assert parsed_turns[0] == ("user", [None, "Q"])
    assert len(parsed_turns) == 6


def test_a_prompt_may_have_a_marker():
    raw_row = {
        "prompt": "Is <image> red?",
        "completion": "yes",
        "image": "a.png",
    }
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
    for raw_image in (address, {"path": address, "bytes": None}, {"path": address}):
        with pytest.raises(ValueError, match="address; nothing is fetched"):
            parse_row({**llava("<image>Q", "A"), "image": raw_image}, rules)


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
    parsed_turns = parse_turns({"image": "a.png", "caption": text})
    assert parsed_turns[1] == ("assistant", [text])


# A user shows images by such parts.
@pytest.mark.parametrize("text", [text for text in IN_BRACKETS if "image" not in text])
def test_a_question_is_the_text_that_was_written(text):
    parsed_turns = parse_turns({"question": text, "answer": "A"})
    assert parsed_turns[0] == ("user", [text])


def test_parts_of_one_turn_are_all_learned():
    answer = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    parsed_turns = parse_turns({"question": "Q", "answer": answer})
    assert parsed_turns[1] == ("assistant", ["one two"])


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
    assert (
        changes(
            question="Q",
            answer="A",
            answers=["A", "B"],
        )
        == []
    )


def test_a_text_that_looks_like_a_list_is_reported():
    assert "--columns answers=COLUMN" in changes(question="Q", answer="['A', 'B']")[0]
    assert "--columns captions=COLUMN" in changes(caption="['A', 'B']")[0]


TURNS = llava("Q", "A")["conversations"]
MESSAGES = [user("Q"), assistant("A")]
NOT_LEARNED = assistant("A") | {"weight": 0}


def with_question(*parts) -> list[dict]:
    return [user([*parts]), assistant("A")]


def system(content) -> dict:
    return {"role": "system", "content": content}


BAD_ROWS = {
    # Images
    "more markers than images": (
        llava("<image><image>Q", "A", "a.png"),
        "2 <image> or image parts for 1 images",
    ),
    "two columns of images": (
        {**llava("<image>Q", "A", "a.png"), "images": ["b.png"]},
        "both image and images",
    ),
    "an image is missing": (
        {**llava("<image>Q", "A"), "images": [None, "a.png"]},
        "has nothing in place of image 0",
    ),
    "an absolute path": (
        llava("<image>Q", "A", "/etc/passwd"),
        "/etc/passwd leaves image_folder /images",
    ),
    "a path that goes up": (
        llava("<image>Q", "A", "sub/../../b.png"),
        r"sub/../../b.png leaves image_folder /images",
    ),
    "a long text as image": (
        llava("<image>Q", "A", "Q" * 6000),
        "neither a valid path nor an image",
    ),
    "an index of no image": (
        {"image": "a.png", "messages": with_question({"type": "image", "index": 1})},
        "index 1",
    ),
    "an image in an answer": (
        {"image": "a.png", "messages": [user("Q"), assistant([{"type": "image"}])]},
        "'s, has an image",
    ),
    "an image in a system turn": (
        {"image": "a.png", "messages": [system([{"type": "image"}]), *MESSAGES]},
        "turn 0, the system's, has an image",
    ),
    "an image elsewhere": (
        {"messages": with_question({"type": "image", "file_id": "x"})},
        "has file_id, but none of",
    ),
    "a video part": (
        {"messages": with_question({"type": "video"})},
        "neither a text nor an image part",
    ),
    "a column of videos": (
        {**llava("<video>Q", "A"), "videos": ["a.mp4"]},
        "it has videos, and only images are read",
    ),
    "a video marker": (
        llava("<video>\nQ", "A"),
        "it has <video> in a text",
    ),
    "markers of objects": (
        {"messages": [user("Find <ref-object>"), assistant("<bbox>")]},
        "it has <ref-object> in",
    ),
    # Turns
    "an empty answer": (
        llava("Q", " \n"),
        "the answer in turn 1 is empty",
    ),
    "a last question": (
        {"conversations": [*TURNS, TURNS[0]]},
        "the last turn is the user's",
    ),
    "two answers in a row": (
        {"conversations": [*TURNS, TURNS[1]]},
        "turn 2 is the assistant's; turns must alternate",
    ),
    "a system turn and a system column": (
        {"messages": [system("S"), *MESSAGES], "system": "T"},
        "its column system",
    ),
    "an empty answer after one that is not learned": (
        {"messages": [user("Q"), NOT_LEARNED, user("Q"), assistant("")]},
        "in turn 3 is empty",
    ),
    "an unknown role": (
        {"messages": [{"role": "tool", "content": "Q"}, assistant("A")]},
        "role 'tool'; known are human",
    ),
    "messages that are a text": (
        {"messages": "Q"},
        "messages must be a list of turns, got 'Q'",
    ),
    "a fractional weight": (
        {"messages": [user("Q"), assistant("A") | {"weight": 0.5}]},
        "turn 1 has weight 0.5",
    ),
    "no learned answer": (
        {"messages": [user("Q"), NOT_LEARNED]},
        "no answer is learned",
    ),
    # Texts
    "half a character": (
        llava("Q", "half \ud83d"),
        "turn 1, the assistant's, is not valid Unicode",
    ),
    "a marker in an answer": (
        llava("Q", "an <image>"),
        "turn 1, the assistant's, has <image> where no image is",
    ),
    "a marker from two parts": (
        {
            "messages": with_question(
                {"type": "text", "text": "<i"},
                {"type": "text", "text": "mage>"},
            )
        },
        "<image>",
    ),
    # Options
    "an answer that may be an index": (
        {
            "question": "Q",
            "options": ["3", "4", "2", "1"],
            "answer": "3",
        },
        "answer_index=answer",
    ),
    "an index that no option has": (
        {
            "question": "Q",
            "choices": ["a b", "c d"],
            "answer": 2,
        },
        "answer '2' is not just one of",
    ),
    "options and several answers": (
        {
            "question": "Q",
            "choices": ["a", "b"],
            "answer": ["A", "B"],
        },
        "options and several",
    ),
    "a letter without option": (
        {
            "question": "Q",
            "A": "x",
            "C": "y",
            "answer": "A",
        },
        "different texts.* 'C': 'y'",
    ),
    "an option that is missing": (
        {
            "question": "Q",
            "choices": ["x", float("nan")],
            "answer": "A",
        },
        "different texts",
    ),
    "options of one text": (
        {
            "question": "Q",
            "choices": ["a", "A."],
            "answer": "a",
        },
        "different texts",
    ),
    "options that are images": (
        {
            "question": "Q",
            "choices": ["a.png", "b.png"],
            "answer": 0,
        },
        "no images",
    ),
    # Columns
    "an empty question": (
        {"question": " ", "answer": "A"},
        "its question is empty.*--columns caption=answer",
    ),
    "an answer that is a bool": (
        {"question": "Q", "answer": True},
        "answer must be text or a list of turns, got True",
    ),
    "a caption that is JSON": (
        {"image": "a.png", "text": '{"question": "Q"}'},
        "is JSON, not a caption: question",
    ),
    "a text with a label": (
        {
            "image": "a.png",
            "text": "Q",
            "label": "A",
        },
        "question=text,answer=label; .* caption=text",
    ),
    "a text with the id of a question": (
        {
            "image": "a.png",
            "text": "Q",
            "question_id": 0,
        },
        "--columns question=text, .* caption=text",
    ),
    "an unwanted completion": (
        {
            "prompt": "Q",
            "completion": "A",
            "label": False,
        },
        "is unwanted .label false., for KTO",
    ),
    "unknown columns": (
        {
            "text": "T",
            "label": 1,
            "messages": None,
        },
        "columns: label, text; known are conversations",
    ),
    # Rows
    "a line that is not JSON": (
        b"[[[",
        r"the line is not valid JSON, or nested too deeply: b'\[\[\['",
    ),
    "a row that is a text": (
        "{broken",
        "a row must be a mapping .* got '{broken'",
    ),
}


@pytest.mark.parametrize(("raw_row", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_has_a_reason(raw_row, reason):
    with pytest.raises(ValueError, match=reason):
        parse_row(raw_row, RULES)


@pytest.fixture
def token_options():
    """Options of `parse_row` for a tokenizer with the image token `<|image|>`."""
    tokenizer = tiny_parts.tokenizer()
    tokenizer.add_tokens(["<think>"])
    return {"control_tokens": control_tokens(tokenizer), "image_token": "<|image|>"}


def test_tokens_that_are_not_control_tokens_may_stand_in_a_text(token_options):
    assert parse_row(llava("<s>", "<think>A"), **token_options)


@pytest.mark.parametrize(
    ("raw_row", "reason"),
    [
        (
            llava("Q", "A<|im_end|>\n<|im_start|>user\nQ2"),
            r"turn 1.* has <\|im_end\|>, a control",
        ),
        (
            llava("say <unk>", "A"),
            "turn 0, the user's, has <unk>",
        ),
        (
            llava("Q", "A", system="a<|im_end|>"),
            r"turn 0, the system's, has <\|im_end\|>",
        ),
        (
            llava("<|image|>?", "A"),
            r"turn 0, the user's, has <\|image\|> where no image is",
        ),
    ],
)
def test_control_tokens_of_the_tokenizer_may_not_stand_in_a_text(token_options, raw_row, reason):
    assert parse_row(raw_row)
    with pytest.raises(ValueError, match=reason):
        parse_row(raw_row, **token_options)


def test_of_control_tokens_that_begin_alike_the_longest_is_named():
    tokenizer = tiny_parts.tokenizer(extra=["<|im"])
    tokenizer.add_tokens(AddedToken("<|im", special=True), special_tokens=True)
    assert control_tokens(tokenizer).search("a<|im_end|>b")[0] == "<|im_end|>"


def test_a_tokenizer_without_added_tokens_has_its_special_ones():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    assert control_tokens(tokenizer).search("a<|im_end|>b") is None
    tokenizer.pad_token = "<pad>"
    assert control_tokens(tokenizer).search("a<pad>b")[0] == "<pad>"


WITH_FILE = DroppedRow("b.json", 5, "a.png", "why")
WITH_TOKENS = DroppedRow("a.json", 7, None, "9 tokens", 9)


@pytest.fixture
def dropped_rows(tmp_path):
    """A file with both rows, in the order of `WITH_FILE` and `WITH_TOKENS`."""
    written = DroppedRows(tmp_path / "run" / "dropped_rows.jsonl")
    written.add(WITH_FILE)
    written.add(WITH_TOKENS)
    return written


def append(dropped_rows, text):
    with dropped_rows.path.open("a") as dropped_lines:
        dropped_lines.write(text)


def test_dropped_rows_count_once(dropped_rows):
    dropped_rows.add(WITH_FILE)
    assert dropped_rows.read() == [WITH_TOKENS, WITH_FILE]

    line_of_another_process = json.dumps({**vars(WITH_FILE), "reason": "another"}) + "\n"
    append(dropped_rows, line_of_another_process)
    assert dropped_rows.read() == [WITH_TOKENS, WITH_FILE]

    of_a_resumed_run = DroppedRows(dropped_rows.path)
    of_a_resumed_run.add(WITH_TOKENS)
    assert len(dropped_rows.path.read_text().splitlines()) == 3


def test_dropped_rows_survive_a_torn_line(dropped_rows):
    append(dropped_rows, '{"source": "c.js')
    assert DroppedRows(dropped_rows.path).read() == [WITH_TOKENS, WITH_FILE]


def test_a_dropped_row_says_where_it_is_and_why():
    assert str(WITH_FILE) == "b.json, row 5 (a.png): why"
    assert str(WITH_TOKENS) == "a.json, row 7: 9 tokens"


def test_what_a_worker_of_a_data_loader_says_of_a_bad_row_is_its_reason():
    message = (
        "Caught BadRow in DataLoader worker process 0.\nTraceback:\n  x\nparse.BadRow: row 0: why\n"
    )
    assert str(BadRow(message)) == "row 0: why"
    assert str(BadRow("row 0: why")) == "row 0: why"


def spaced_tokenizer(legacy: bool):
    """Returns Llama 2's tokenizer with tokens that remove the spaces beside them.

    It puts a space before a text or, if `legacy`, before every piece.
    """
    tokenizer = chat_families.llama_tokenizer(legacy)
    for token in (
        AddedToken("<cut>", special=True, rstrip=True),
        AddedToken("<eat>", special=True, lstrip=True),
    ):
        tokenizer.add_tokens(token, special_tokens=True)
    return tokenizer


def spaced_once_tokenizer():
    return spaced_tokenizer(legacy=False)


def spaced_always_tokenizer():
    return spaced_tokenizer(legacy=True)


def plain_tokenizer():
    """Returns a tokenizer without special tokens. It knows "the"."""
    tokens = [*" thea1|<_", "th", "the"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("t", "h"), ("th", "e")]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, merges)))


def normalizing_tokenizer():
    """Returns a tokenizer that finds its special token only where the normalized text begins."""
    tokenizer = plain_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Prepend("_")
    tokenizer.add_tokens(
        AddedToken("<a>", special=True, normalized=True),
        special_tokens=True,
    )
    return tokenizer


WORDS = ["a", " b", "\n", " ", "  the", "\u00dc", "1", "<", "|", ". ", "\u65e5"]


@pytest.mark.parametrize(
    "make_tokenizer",
    [
        tiny_parts.tokenizer,
        chat_families.byte_tokenizer,
        spaced_once_tokenizer,
        spaced_always_tokenizer,
        plain_tokenizer,
        normalizing_tokenizer,
    ],
)
def test_tokens_of_pieces_are_those_of_the_whole_text(make_tokenizer):
    tokenizer = make_tokenizer()
    added_tokens = tokenizer.added_tokens_decoder.values()
    words = [token.content for token in added_tokens if token.special]
    words += 2 * WORDS
    random = Random(0)
    texts = []
    for _ in range(500):
        word_count = random.randrange(25)
        texts.append("".join(random.choices(words, k=word_count)))
    backend = tokenizer.backend_tokenizer
    expected = [backend.encode(raw_text, add_special_tokens=False).ids for raw_text in texts]
    assert encoded(tokenizer, texts) == expected
    assert encoded(tokenizer, []) == []
