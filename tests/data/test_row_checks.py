"""Counts and messages of the checks of rows, from rows that are made by hand."""

import logging

import pytest
import tiny_parts
import train_data
from accelerate import PartialState
from datasets import Dataset
from tokenizers import AddedToken
from train_data import assistant, inside, llava, user

from normalign_llava.data.rows import checks
from normalign_llava.data.rows.checks import (
    Checks,
    SourceReport,
    bad_rows_message,
    by_kind,
    check_images_are_read,
    check_share,
    counted,
    encoded,
    log_unused_and_changed,
    parse_rows,
    share_of_bad_rows,
    too_many,
    unused_and_changed,
    warn_of_captions,
    warn_once,
)
from normalign_llava.data.rows.forms import PROMPT
from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.rows.parse import BadRow, DroppedRow, DroppedRows
from normalign_llava.data.sources import mixtures
from normalign_llava.data.sources.source import Source


def make_source(name="data.json", hub=None) -> Source:
    dataset = Dataset.from_dict({"question": ["Q"]})
    return Source(name, ImageRules(None, hub), dataset)


@pytest.mark.parametrize(
    ("option", "hub", "row_count", "share"),
    [
        (None, None, 10_000, 0.0),
        (None, None, 10_001, 0.01),
        (None, None, None, 0.0),  # a stream
        (None, "user/data", 3, 0.01),
        (None, "user/data", None, 0.01),
        ("stop", "user/data", 10_001, 0.0),
        ("skip", None, 3, 1.0),
        ("0.25", None, 3, 0.25),
        (0.5, "user/data", None, 0.5),
    ],
)
def test_the_share_that_may_be_bad(option, hub, row_count, share):
    assert share_of_bad_rows(option, make_source(hub=hub), row_count) == share


@pytest.mark.parametrize("bad_count", [1, 4, 9, 25])
def test_more_than_the_share_are_too_many(bad_count):
    assert too_many(bad_count, 1000, (bad_count - 0.01) / 1000)
    assert not too_many(bad_count, 1000, bad_count / 1000)


@pytest.mark.parametrize("bad_count", [1, 4, 9, 25])
def test_so_many_may_be_bad_that_their_mean_is_above_the_share(bad_count):
    """Of counts with the mean m, the roots have a standard deviation of 1/2."""
    highest_mean = (bad_count**0.5 + 3 / 2) ** 2
    assert too_many(bad_count, 1000, (highest_mean - 0.01) / 1000, deviations=3)
    assert not too_many(bad_count, 1000, (highest_mean + 0.01) / 1000, deviations=3)

    lowest_mean = bad_count - 3 * bad_count**0.5
    assert too_many(bad_count, 1000, (lowest_mean - 0.01) / 1000, deviations=-3)
    assert not too_many(bad_count, 1000, (lowest_mean + 0.01) / 1000, deviations=-3)


def dropped_row(number: int, reason: str, source="data.json", file=None) -> DroppedRow:
    return DroppedRow(source, number, file, reason)


def test_bad_rows_within_the_share_do_not_stop_a_run():
    check_share(make_source(), [dropped_row(0, "why")], 2, share=1.0)
    check_share(make_source(), [], 0, share=0.0)


def test_a_run_stops_if_all_rows_are_bad_whatever_may_be_skipped():
    with pytest.raises(BadRow, match=r"row 0: why\nFix them\.$"):
        check_share(make_source(), [dropped_row(0, "why")], 1, share=1.0)


ROWS_OF_FOUR_KINDS = [
    dropped_row(3, "turn 1 is empty"),
    dropped_row(5, "a.png is cut off", file="a.png"),
    dropped_row(6, "turn 7 is empty"),
    dropped_row(8, "b.png is cut off", file="b.png"),
    dropped_row(9, "has weight, got 'x'"),
    dropped_row(10, "has weight, got 5"),
    dropped_row(1, "turn 1 is empty", source="b.json"),
]
LINES_OF_FOUR_KINDS = [
    "  data.json, row 3: turn 1 is empty (2 rows)",
    "  data.json, row 5: a.png is cut off (2 rows)",
    "  data.json, row 9: has weight, got 'x' (2 rows)",
    "  b.json, row 1: turn 1 is empty",
]


def test_rows_of_one_kind_of_reason_share_a_line():
    assert by_kind(ROWS_OF_FOUR_KINDS) == LINES_OF_FOUR_KINDS


def test_kinds_of_reasons_after_the_first_ones_are_counted():
    assert by_kind(ROWS_OF_FOUR_KINDS, most=2) == [*LINES_OF_FOUR_KINDS[:2], "  and 3 more"]
    assert by_kind(ROWS_OF_FOUR_KINDS, most=4) == LINES_OF_FOUR_KINDS


def test_a_line_says_if_it_is_about_all_rows():
    empty = dropped_row(3, "turn 1 is empty")
    of_all = by_kind([empty] * 1500, total=1500)
    assert of_all == ["  data.json, row 3: turn 1 is empty (all 1,500 rows)"]

    of_two = by_kind([empty] * 2, total=3)
    assert of_two == ["  data.json, row 3: turn 1 is empty (2 rows)"]


SEVEN_ROWS = [dropped_row(number, letter) for number, letter in enumerate("abcdefg")]


def test_a_run_that_stops_shows_five_rows_and_how_to_skip_them():
    message = bad_rows_message(make_source(), SEVEN_ROWS, 10)
    assert message.count("data.json, row") == 5
    assert "and 2 more" in message
    assert "--bad_rows skip" in message
    assert "share" not in message
    assert "another file" not in message


def test_a_run_that_stops_shows_all_rows_if_asked():
    message = bad_rows_message(make_source(), SEVEN_ROWS, 10, shown=None)
    assert message.count("data.json, row") == 7


def test_a_run_that_stops_says_which_share_may_be_bad():
    message = bad_rows_message(make_source(), SEVEN_ROWS, 10, share=0.25)
    assert "These are 7 of 10 rows; a share of 0.25 may" in message
    without_share = bad_rows_message(make_source(), SEVEN_ROWS, 7, share=1.0)
    assert "a share" not in without_share


def test_skipping_is_not_proposed_if_all_rows_are_bad():
    message = bad_rows_message(make_source(), SEVEN_ROWS, 7)
    assert "skip" not in message


def test_skipping_is_not_proposed_where_data_are_measured():
    message = bad_rows_message(make_source(), SEVEN_ROWS, 10, use="measured")
    assert "cannot be measured" in message
    assert "--bad_rows" not in message


def test_naming_a_file_is_proposed_for_a_folder():
    message = bad_rows_message(make_source("folder"), SEVEN_ROWS, 10)
    assert "name it" in message


def test_images_that_are_read_are_not_reported(caplog):
    check_images_are_read("none unread", 4, 0, {})
    assert not caplog.records


def test_images_that_are_not_read_in_some_rows_are_a_warning(caplog):
    check_images_are_read("half of the rows", 4, 0, {"column img": 2})
    assert "half of the rows: what looks like" in caplog.text


def test_columns_of_unread_images_are_reported_the_commonest_first(caplog):
    check_images_are_read("some are read", 4, 1, {"column img": 1, "column photo": 2})
    columns = "column photo (2 rows), column img (1 row)"
    assert f"some are read: what looks like an image is not read: {columns}" in caplog.text


def test_five_columns_of_unread_images_are_reported(caplog):
    unread = {f"column {letter}": 1 for letter in "abcdefg"}
    check_images_are_read("many columns", 9, 1, unread)
    assert "column e (1 row)" in caplog.text
    assert "column f (1 row)" not in caplog.text


def test_images_that_are_not_read_in_most_rows_are_an_error():
    with pytest.raises(ValueError, match="most: what looks like .* column img .2 rows., column b"):
        check_images_are_read("most", 4, 0, {"column b": 1, "column img": 2})


@pytest.mark.parametrize(
    ("forms", "warns"),
    [
        ({"caption": 2}, True),
        ({"text": 1, "messages": 3}, True),
        ({}, False),
        ({"question": 3}, False),
    ],
)
def test_captions_are_reported_with_their_question(caplog, forms, warns):
    warn_of_captions(f"forms {forms}", forms)
    warned = repr(PROMPT) in caplog.text
    assert warned == warns


def test_columns_that_look_used_come_first_and_those_about_a_row_last():
    left_out = {
        "id": 9,
        "tools": 3,
        "score": 9,
        "photo": 1,
        "caption": 1200,
        "more": 5,
    }
    assert unused_and_changed(left_out, {"b": 1, "a": 2}) == {
        "columns not used": "caption, like an answer (1,200 rows), photo, like an image (1 row), "
        "more (5 rows), tools (3 rows), id, score",
        "note": "a (2 rows), b (1 row)",
    }


def test_nothing_is_reported_of_rows_without_columns_that_are_left_out():
    assert unused_and_changed({}, {}) == {}
    assert counted({}) == ""


def test_only_columns_that_look_used_are_a_warning(caplog):
    logger = logging.getLogger(__name__)
    caplog.set_level("INFO")
    log_unused_and_changed(logger, "mine", {"tools": 1}, {"one turn": 2})
    log_unused_and_changed(logger, "mine", {"tools": 1, "caption": 1}, {})
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING", "WARNING"]


def parse_numbered(raw_rows, rules, processor=None, start=0) -> list[dict]:
    """Returns the facts of the rows of `data.json`, numbered from `start`."""
    stored = [("data.json", number, raw_row) for number, raw_row in enumerate(raw_rows, start)]
    return parse_rows(stored, rules, processor)


IMAGE_PART = {"type": "image", "image": "a.png"}
RAW_ROWS = {
    "image in another column": {
        **llava("Q", "A"),
        "img": "a.png",
        "more": 1,
    },
    "images": {
        **llava("<image><image>Q", "A"),
        "image": [inside("red"), "a.png"],
        "img": "b.png",
    },
    "image in a turn": {"messages": [user([IMAGE_PART]), assistant("A")], "img": "b.png"},
    "no answer": {**llava("Q", ""), "img": "a.png"},
    "half a character": {**llava("Q", "half \ud83d"), "image": "a\ud83d.png"},
    "no mapping": "no row",
    "half a character in a column's name": {"caption\ud83d": 1},
}


@pytest.fixture
def parsed_rows(tmp_path) -> dict[str, dict]:
    """Parses `RAW_ROWS` together. Returns their facts."""
    row_facts = parse_numbered(RAW_ROWS.values(), ImageRules(str(tmp_path)), start=10)
    return dict(zip(RAW_ROWS, row_facts, strict=True))


def test_parsed_rows_have_their_numbers(parsed_rows):
    numbers = [row_facts["row"] for row_facts in parsed_rows.values()]
    assert numbers == [*range(10, 17)]


def test_facts_of_a_row_with_an_image_in_another_column(parsed_rows):
    row_facts = parsed_rows["image in another column"]
    assert row_facts["unread"] == "column img"
    assert row_facts["left_out"] == ["id", "more"]
    assert row_facts["image_count"] == 0
    assert row_facts["paths"] == []
    assert row_facts["file"] is None
    assert row_facts["length"] == 0


def test_facts_of_a_row_with_images(parsed_rows, tmp_path):
    row_facts = parsed_rows["images"]
    assert row_facts["unread"] is None
    assert row_facts["left_out"] == ["id", "img"]
    assert row_facts["image_count"] == 2
    assert row_facts["paths"] == [str(tmp_path / "a.png")]
    assert row_facts["file"] == "red.png"
    assert row_facts["reason"] is None


def test_facts_of_a_row_with_an_image_in_a_turn(parsed_rows):
    row_facts = parsed_rows["image in a turn"]
    assert row_facts["unread"] is None
    assert row_facts["left_out"] == ["img"]
    assert row_facts["image_count"] == 1


def test_the_reason_of_a_bad_row_names_an_unread_image(parsed_rows):
    assert parsed_rows["no answer"]["reason"] == (
        "the answer in turn 1 is empty; the column img looks like an image and is not read"
    )


def test_the_reason_of_a_bad_row_has_no_half_characters(parsed_rows):
    row_facts = parsed_rows["half a character"]
    assert "a?.png" in row_facts["reason"] + row_facts["file"]

    row_facts = parsed_rows["half a character in a column's name"]
    assert "columns: caption?; known are" in row_facts["reason"]


def test_facts_of_a_row_that_is_not_a_mapping(parsed_rows):
    row_facts = parsed_rows["no mapping"]
    assert row_facts["reason"].startswith("a row must be a mapping")
    assert row_facts["form"] == ""


def test_a_row_is_too_long_above_the_limit():
    row = {
        "source": "a.json",
        "row": 3,
        "file": "a.png",
        "length": 9,
    }
    assert Checks(None).too_long(row) is None
    assert Checks(None, max_length=9).too_long(row) is None

    dropped = Checks(None, max_length=8).too_long(row)
    assert dropped.source == "a.json"
    assert dropped.row == 3
    assert dropped.file == "a.png"
    assert dropped.tokens == 9
    assert dropped.reason == "9 tokens, more than max_length 8"


def test_a_tokenizer_that_pads_and_cuts_off_counts_whole_texts():
    """As it does after a batch was made with it. `<one>` is not a token inside a word."""
    tokenizer = tiny_parts.tokenizer()
    added_tokens = [
        AddedToken("<one>", special=True, single_word=True),
        AddedToken("<one>b", special=True),
    ]
    tokenizer.add_tokens(added_tokens, special_tokens=True)
    texts = ["a<one>", "a <one> b", "<one>b<s>", "<one><one>", "a b"]
    backend = tokenizer.backend_tokenizer
    expected = [backend.encode(text, add_special_tokens=False).ids for text in texts]

    backend.enable_padding(length=30)
    backend.enable_truncation(2)
    assert encoded(tokenizer, texts) == expected


def test_rows_of_several_messages_have_lengths_in_their_order():
    processor = train_data.processor()
    refusing = "{% if messages|length > 2 %}{{ raise_exception('too much talk') }}{% endif %}"
    processor.chat_template = refusing + processor.chat_template
    raw_rows = [
        llava("Q", "A"),
        llava("Q", "A"),
        llava("<image>Q", "A", "a.png"),
        llava("Qq", "A"),
    ]
    raw_rows[1]["conversations"] += raw_rows[0]["conversations"]
    first, refused, with_image, last = parse_numbered(raw_rows, ImageRules(), processor)

    assert refused["reason"] == "the chat template refuses it: too much talk"
    assert refused["length"] == 0

    text = processor.apply_chat_template(first["messages"], tokenize=False)
    length = len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert first["length"] == length
    assert with_image["length"] == length + 4  # the tokens of an image
    assert last["length"] == length + 1


def test_one_process_checks_all_rows():
    assert checks._own_chunks(7, 4) == [range(4), range(4, 7)]


def test_processes_check_rows_that_follow_each_other(monkeypatch):
    PartialState()
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 3)
    checked = []
    row_counts = []
    for rank in range(3):
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        own_rows = [rows.start for rows in checks._own_chunks(7, 1)]
        checked += own_rows
        row_counts.append(len(own_rows))
    assert checked == [*range(7)]
    assert sorted(row_counts) == [2, 2, 3]


def test_what_other_processes_found_is_among_the_problems(monkeypatch):
    expected = {7: ("b.png", "it is broken")}
    rows = Dataset.from_list([{"images": [inside("red")]}] * 3)

    def gather(own_problems):
        return [*own_problems, *expected.items()]

    monkeypatch.setattr(checks, "gather_object", gather)
    assert checks.image_problems(rows, "data", ImageRules()) == expected
    assert checks.unopened_image_problems([[]] * 3, ImageRules()) == expected


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, False)])
def test_one_process_of_several_warns_and_records(
    monkeypatch,
    tmp_path,
    caplog,
    rank,
    writes,
):
    PartialState()
    monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
    report = SourceReport("data.json", "train", dropped=[dropped_row(3, "why")])
    dropped_rows = DroppedRows(tmp_path / "dropped_rows.jsonl")
    mixtures._record_dropped(Checks(None, dropped_rows=dropped_rows), [report])
    assert dropped_rows.path.exists() == writes

    warning = f"of process {rank}"
    warn_once(warning)
    warned = warning in caplog.text
    assert warned == writes


def test_tokens_that_a_processor_reads_in_texts_make_bad_rows():
    processor = train_data.processor()
    processor.image_token = "<pic>"
    raw_rows = [llava("Is <pic> red?", "A"), llava("Q", "A<|im_end|>")]
    with_image_token, with_end_token = parse_numbered(raw_rows, ImageRules(), processor)
    image_reason = "turn 0, the user's, has <pic> where no image is"
    assert image_reason in with_image_token["reason"]
    end_reason = "turn 1, the assistant's, has <|im_end|>, a control token"
    assert end_reason in with_end_token["reason"]
