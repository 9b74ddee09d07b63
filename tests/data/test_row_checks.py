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
    log_not_read,
    not_read,
    parse_rows,
    share_of_bad_rows,
    too_many,
    warn_of_captions,
)
from normalign_llava.data.rows.forms import PROMPT
from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.rows.once import warn_once
from normalign_llava.data.rows.parse import BadRow, DroppedRow, DroppedRows
from normalign_llava.data.sources import mixtures
from normalign_llava.data.sources.source import Source


def source(name="data.json", hub=None) -> Source:
    return Source(name, ImageRules(None, hub), Dataset.from_dict({"question": ["Q"]}))


@pytest.mark.parametrize(
    ("option", "hub", "rows", "share"),
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
def test_the_share_that_may_be_bad(option, hub, rows, share):
    assert share_of_bad_rows(option, source(hub=hub), rows) == share


@pytest.mark.parametrize("bad", [1, 4, 9, 25])
def test_so_many_may_be_bad_that_their_mean_is_above_the_share(bad):
    """Of counts with the mean m, the roots have a standard deviation of 1/2."""
    highest = (bad**0.5 + 3 / 2) ** 2
    assert too_many(bad, 1000, (highest - 0.01) / 1000, deviations=3)
    assert not too_many(bad, 1000, (highest + 0.01) / 1000, deviations=3)
    lowest = bad - 3 * bad**0.5
    assert too_many(bad, 1000, (lowest - 0.01) / 1000, deviations=-3)
    assert not too_many(bad, 1000, (lowest + 0.01) / 1000, deviations=-3)
    assert too_many(bad, 1000, (bad - 0.01) / 1000) and not too_many(bad, 1000, bad / 1000)


def dropped(row: int, reason: str, source="data.json", file=None) -> DroppedRow:
    return DroppedRow(source, row, file, reason)


def test_all_bad_rows_stop_whatever_may_be_skipped():
    check_share(source(), [dropped(0, "why")], 2, share=1.0)
    check_share(source(), [], 0, share=0.0)
    with pytest.raises(BadRow, match=r"row 0: why\nFix them\.$"):
        check_share(source(), [dropped(0, "why")], 1, share=1.0)


def test_rows_of_one_kind_of_reason_share_a_line():
    rows = [dropped(3, "turn 1 is empty"), dropped(5, "a.png is cut off", file="a.png")]
    rows += [dropped(6, "turn 7 is empty"), dropped(8, "b.png is cut off", file="b.png")]
    rows += [dropped(9, "has weight, got 'x'"), dropped(10, "has weight, got 5")]
    rows += [dropped(1, "turn 1 is empty", source="b.json")]
    lines = by_kind(rows)
    assert lines == [
        "  data.json, row 3: turn 1 is empty (2 rows)",
        "  data.json, row 5: a.png is cut off (2 rows)",
        "  data.json, row 9: has weight, got 'x' (2 rows)",
        "  b.json, row 1: turn 1 is empty",
    ]
    assert by_kind(rows, most=2) == [*lines[:2], "  and 3 more"]
    assert by_kind(rows, most=4) == lines
    assert by_kind(rows[:1] * 1500, total=1500) == [lines[0].replace("2 rows", "all 1,500 rows")]
    assert by_kind(rows[:1] * 2, total=3) == lines[:1]


def test_a_run_that_stops_says_what_can_be_done():
    rows = [dropped(number, letter) for number, letter in enumerate("abcdefg")]
    own = bad_rows_message(source(), rows, 10)
    assert own.count("data.json, row") == 5 and "and 2 more" in own
    assert "--bad_rows skip" in own and "share" not in own and "another file" not in own
    assert bad_rows_message(source(), rows, 10, shown=None).count("data.json, row") == 7
    assert "These are 7 of 10 rows; a share of 0.25 may" in bad_rows_message(
        source(), rows, 10, share=0.25
    )
    assert "a share" not in bad_rows_message(source(), rows, 7, share=1.0)
    assert "skip" not in bad_rows_message(source(), rows, 7)
    measured = bad_rows_message(source(), rows, 10, use="measured")
    assert "cannot be measured" in measured and "--bad_rows" not in measured
    assert "name it" in bad_rows_message(source("folder"), rows, 10)


def test_images_that_are_not_read_in_most_rows_are_an_error(caplog):
    check_images_are_read("none unread", 4, 0, {})
    assert not caplog.records
    check_images_are_read("half of the rows", 4, 0, {"column img": 2})
    check_images_are_read("some are read", 4, 1, {"column img": 1, "column photo": 2})
    assert "half of the rows: what looks like" in caplog.text
    listed = "column photo (2 rows), column img (1 row)"
    assert f"some are read: what looks like an image is not read: {listed}" in caplog.text
    check_images_are_read("many columns", 9, 1, {f"column {letter}": 1 for letter in "abcdefg"})
    assert "column e (1 row)" in caplog.text and "column f (1 row)" not in caplog.text
    with pytest.raises(ValueError, match="most: what looks like .* column img .2 rows., column b"):
        check_images_are_read("most", 4, 0, {"column b": 1, "column img": 2})


@pytest.mark.parametrize(
    ("forms", "warns"), [({"caption": 2}, True), ({"text": 1, "messages": 3}, True), ({}, False),
                         ({"question": 3}, False)],
)  # fmt: skip
def test_captions_are_told_of_with_their_question(caplog, forms, warns):
    warn_of_captions(f"forms {forms}", forms)
    assert (repr(PROMPT) in caplog.text) == warns


def test_columns_that_look_used_come_first_and_those_about_a_row_last():
    left_out = {"id": 9, "tools": 3, "score": 9, "photo": 1, "caption": 1200, "more": 5}
    assert not_read(left_out, {"b": 1, "a": 2}) == {
        "columns not used": "caption, like an answer (1,200 rows), photo, like an image (1 row), "
        "more (5 rows), tools (3 rows), id, score",
        "note": "a (2 rows), b (1 row)",
    }
    assert not_read({}, {}) == {} and counted({}) == ""


def test_only_columns_that_look_used_are_a_warning(caplog):
    logger = logging.getLogger(__name__)
    caplog.set_level("INFO")
    log_not_read(logger, "mine", {"tools": 1}, {"one turn": 2})
    log_not_read(logger, "mine", {"tools": 1, "caption": 1}, {})
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]


def test_facts_of_parsed_rows(tmp_path):
    rows = [
        {**llava("Q", "A"), "img": "a.png", "more": 1},
        {**llava("<image><image>Q", "A"), "image": [inside("red"), "a.png"], "img": "b.png"},
        {**llava("Q", ""), "img": "a.png"},
        {**llava("Q", "half \ud83d"), "image": "a\ud83d.png"},
        "no row",
        {"caption\ud83d": 1},
        {"messages": [user([{"type": "image", "image": "a.png"}]), assistant("A")], "img": "b.png"},
    ]
    stored = [("data.json", 10 + number, raw) for number, raw in enumerate(rows)]
    parsed = parse_rows(stored, ImageRules(str(tmp_path)), None)
    assert [row["row"] for row in parsed] == [*range(10, 17)]
    read, shown, unread, broken, other, odd, in_turn = parsed
    assert "columns: caption?; known are" in odd["reason"]
    assert (read["unread"], read["left_out"]) == ("column img", ["id", "more"])
    assert (read["image_count"], read["paths"], read["file"], read["length"]) == (0, [], None, 0)
    assert (shown["unread"], shown["left_out"]) == (None, ["id", "img"])
    assert (shown["image_count"], shown["paths"]) == (2, [str(tmp_path / "a.png")])
    assert shown["file"] == "red.png" and shown["reason"] is None
    assert unread["reason"] == (
        "the answer in turn 1 is empty; the column img looks like an image and is not read"
    )
    assert "a?.png" in broken["reason"] + broken["file"]
    assert other["reason"].startswith("a row must be a mapping") and other["form"] == ""
    assert (in_turn["unread"], in_turn["left_out"], in_turn["image_count"]) == (None, ["img"], 1)


def test_a_row_is_too_long_above_the_limit():
    row = {"source": "a.json", "row": 3, "file": "a.png", "length": 9}
    assert Checks(None).too_long(row) is Checks(None, max_length=9).too_long(row) is None
    long = Checks(None, max_length=8).too_long(row)
    assert (long.source, long.row, long.file, long.tokens) == ("a.json", 3, "a.png", 9)
    assert long.reason == "9 tokens, more than max_length 8"


def test_a_tokenizer_that_pads_and_cuts_off_counts_whole_texts():
    """As it does after a batch was made with it. `<one>` is no token inside a word."""
    tokenizer = tiny_parts.tokenizer()
    one = AddedToken("<one>", special=True, single_word=True)
    tokenizer.add_tokens([one, AddedToken("<one>b", special=True)], special_tokens=True)
    texts = ["a<one>", "a <one> b", "<one>b<s>", "<one><one>", "a b"]
    backend = tokenizer.backend_tokenizer
    whole = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    backend.enable_padding(length=30)
    backend.enable_truncation(2)
    assert encoded(tokenizer, texts) == whole


def test_rows_of_several_messages_have_lengths_in_their_order():
    processor = train_data.processor()
    refusing = "{% if messages|length > 2 %}{{ raise_exception('too much talk') }}{% endif %}"
    processor.chat_template = refusing + processor.chat_template
    rows = [llava("Q", "A"), llava("Q", "A"), llava("<image>Q", "A", "a.png"), llava("Qq", "A")]
    rows[1]["conversations"] += rows[0]["conversations"]
    stored = [("data.json", number, raw) for number, raw in enumerate(rows)]
    first, talk, shown, last = parse_rows(stored, ImageRules(), processor)
    assert talk["reason"] == "the chat template refuses it: too much talk" and talk["length"] == 0
    text = processor.apply_chat_template(first["messages"], tokenize=False)
    length = len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert first["length"] == length and last["length"] == length + 1
    assert shown["length"] == length + 4  # the tokens of an image


def test_this_process_alone_checks_all_rows():
    assert checks._own_chunks(7, 4) == [range(4), range(4, 7)]


def test_processes_check_rows_that_follow_each_other(monkeypatch):
    PartialState()
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 3)
    shares = []
    for rank in range(3):
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        shares.append(checks._own_chunks(7, 1))
    assert [rows.start for share in shares for rows in share] == [*range(7)]
    assert sorted(map(len, shares)) == [2, 2, 3]


def test_what_other_processes_found_is_among_the_problems(monkeypatch):
    found = {7: ("b.png", "it is broken")}
    monkeypatch.setattr(checks, "gather_object", lambda own: [*own, *found.items()])
    rows = Dataset.from_list([{"images": [inside("red")]}] * 3)
    assert checks.image_problems(rows, "data", ImageRules()) == found
    assert checks.unopened_image_problems([[]] * 3, ImageRules()) == found


def test_one_process_of_several_warns_and_records(monkeypatch, tmp_path, caplog):
    PartialState()
    report = SourceReport("data.json", "train", dropped=[dropped(3, "why")])
    for rank, written in ((1, False), (0, True)):
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        file = DroppedRows(tmp_path / f"{rank}.jsonl")
        mixtures._record_dropped(Checks(None, dropped_rows=file), [report])
        assert file.path.exists() == written
        warn_once(f"of process {rank}")
        assert (f"of process {rank}" in caplog.text) == written


def test_tokens_that_a_processor_reads_in_texts_make_bad_rows():
    processor = train_data.processor()
    processor.image_token = "<pic>"
    rows = [llava("Is <pic> red?", "A"), llava("Q", "A<|im_end|>")]
    stored = [("data.json", number, raw) for number, raw in enumerate(rows)]
    shown, ended = parse_rows(stored, ImageRules(), processor)
    assert "turn 0, the user's, has <pic> where no image is" in shown["reason"]
    assert "turn 1, the assistant's, has <|im_end|>, a control token" in ended["reason"]
