"""`normalign data` says before training: counts, every fault, and what of a row is learned."""

import json
import re

import numpy as np
import pytest
import tiny
import tiny_parts
import train_data
import training
from chat_families import TEMPLATES, byte_tokenizer
from paths import DOCS
from train_data import assistant, image_bytes, inside, llava, mixed_rows, read, user, write_json
from training import image as image_of_noise
from typer.testing import CliRunner

from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.cli import app
from normalign_llava.data.rows import checks
from normalign_llava.data.rows.checks import SourceReport
from normalign_llava.data.rows.parse import parse_row
from normalign_llava.data.sources import table
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.data_check import DataCheck, _example, check_data


pytestmark = pytest.mark.usefixtures("cache")


def command(*words):
    return CliRunner().invoke(app, ["data", *map(str, words)], env={"COLUMNS": "200"})


def test_counts_and_lengths_are_those_of_training(tmp_path, checkpoint):
    path = write_json(tmp_path, mixed_rows())
    check = check_data(DataSource(str(path)), str(checkpoint))
    trained = read(path, open_checkpoint(checkpoint).processor)
    (report,) = trained.report.sources
    report.skippable = 0  # of training alone
    assert check.report == report and report.found == 5 and check.faults == []


def test_the_marked_text_is_what_the_collator_labels(tmp_path, checkpoint):
    pair = {"image": "red.png", "prompt": "Which?", "completion": "A red one. "}
    path = write_json(tmp_path, [llava("No image.", "None."), pair])
    processor = open_checkpoint(checkpoint).processor
    data = read(path, processor).train
    batch = ConversationCollator(processor)([data[1]])
    learned = processor.tokenizer.decode(batch["labels"][batch["labels"] >= 0])
    pieces = check_data(DataSource(str(path)), str(checkpoint)).examples[0].pieces
    assert "A red one." in learned
    assert [text for text, is_learned in pieces if is_learned] == [learned]
    images = int((batch["input_ids"] == processor.image_token_id).sum())
    assert (f"{processor.image_token} x {images}", False) in pieces
    shown = command(path, "--model", checkpoint)
    assert shown.exit_code == 0 and f"[[{learned}]]" in shown.output and "Which?" in shown.output


def test_every_fault_comes_at_once(tmp_path, checkpoint):
    missing, outside = (llava("<image>Q", "A", path) for path in ("none.png", "/etc/passwd"))
    rows = [llava("Q", ""), llava("<image>Q", "A"), missing, {"a": 1}, "no row"]
    rows += [outside, {"messages": "Q"}, llava("Q", ""), llava("Q", "<|im_end|>")]
    rows += [{"question": "Q", "answer": {"a": 5}}, {"question": "Q", "answer": {"a": 6}}]
    path = write_json(tmp_path, rows)
    (tmp_path / "broken.png").write_bytes(image_bytes()[:40])
    found = command(path, "--model", checkpoint)
    assert found.exit_code == 1
    assert all(f"data.json, row {number}" in found.output for number in (0, 1, 2, 3, 4, 5, 6, 8, 9))
    assert "got {'a': 5} (2 rows)" in found.output and "is empty (2 rows)" in found.output
    good, broken = (llava("<image>Q", "A", path) for path in ("red.png", "broken.png"))
    write_json(tmp_path, [{"a": 1}, good, broken])
    found = command(path)
    assert "row 0: its form" in found.output and "broken.png: " in found.output


def test_data_without_rows_and_images_that_are_not_read_are_faults(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "red.png").write_bytes(image_bytes())
    unread = json.dumps({**llava("Q", "A"), "img": "red.png"})
    for name, content, said in (
        ("empty.jsonl", "", "empty.jsonl has no rows."),
        ("unread.jsonl", unread, "what looks like an image is not read: column img"),
        ("images", None, "add a metadata.csv with file_name, question and answer"),
        ("none.jsonl", None, "There is no data file"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        found = command(tmp_path / name)
        assert found.exit_code == 1 and said in found.output


def marked(processor, row) -> str:
    """The text of a row with what is learned in brackets, token by token."""
    batch = ConversationCollator(processor)([row])
    image = processor.image_token_id
    text = ""
    before = False
    for token, label in zip(
        batch["input_ids"][0].tolist(), batch["labels"][0].tolist(), strict=True
    ):
        if (label >= 0) != before:
            text += "]]" if before else "[["
            before = label >= 0
        text += "" if token == image else processor.tokenizer.decode([token])
    return text + "]]" * before


def test_several_rows_or_one_of_a_number_are_shown(tmp_path, checkpoint):
    rows = [llava(f"Question {number}?", f"answer {number}") for number in range(9)]
    rows[4] = llava("<image>Which?", "red", "red.png")
    rows[6] = llava("Q", "")
    path = write_json(tmp_path, rows)
    processor = open_checkpoint(checkpoint).processor
    data = read(path, processor, bad_rows="skip").train
    expected = {row["row"]: marked(processor, row) for row in data}
    for numbers, words in (
        ([0, 2, 5, 8], {"examples": 4}),
        ([4], {"examples": 1}),
        ([4], {}),
        ([2], {"rows": [2]}),
        ([8, 4], {"rows": [8, 4]}),
    ):
        check = check_data(DataSource(str(path)), str(checkpoint), **words)
        text = re.sub(r"<image> x \d+", "", str(check.rendered()))
        shown = dict(re.findall(r"row (\d+)[^\n]*:\n\n(.*?)(?=\s*data.json, row|\Z)", text, re.S))
        assert list(map(int, shown)) == (numbers if "rows" in words else sorted(numbers))
        for number in numbers:
            assert shown[str(number)].strip() == expected[number].strip(), number
    bad = str(check_data(DataSource(str(path)), rows=[6]).rendered())
    assert "row 6" in bad and "Not trained on: the answer in turn 1 is empty" in bad
    with pytest.raises(ValueError, match="has no row 9. It has 9, from 0 on"):
        check_data(DataSource(str(path)), rows=[9])


def test_the_command_shows_turns_without_a_checkpoint_and_reads_what_filters_say(tmp_path):
    rows = [{"question": f"Q{n}", "answer": f"A{n}", "score": n} for n in range(6)]
    rows[1]["prompt"] = "unused"
    path = write_json(tmp_path, rows)
    found = command(path, "--row", 1, "--row", 4)
    assert found.exit_code == 0, found.output
    assert "row 1:\n\nuser: Q1\nassistant: [[A1]]" in found.output
    assert "user: Q4\nassistant: [[A4]]" in found.output and "Q2" not in found.output
    assert re.search(r"columns not used.*prompt, like a question \(1 row\), score", found.output)
    found = command(path, "--filters", "score>=4", "--examples", 5)
    assert re.findall(r"assistant: \[\[(A\d)\]\]", found.output) == ["A4", "A5"]
    missing = command(path, "--row", 7)
    assert missing.exit_code == 1 and "has no row 7" in missing.output


def test_the_line_of_the_page_shows_rows_in_python(tmp_path, checkpoint, monkeypatch, capsys):
    (line,) = re.findall(r"`(print\(check_data\(.*?)`", (DOCS / "data.md").read_text())
    write_json(tmp_path, mixed_rows(), "my-data.json")
    (tmp_path / "my-checkpoint").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    exec(line, {"check_data": check_data, "DataSource": DataSource})
    printed = capsys.readouterr().out
    assert printed.count("my-data.json, row ") == 5 and "[[green" in printed


def cells(table) -> dict[str, str]:
    """The rows of a table of two columns."""
    titles, texts = (list(column.cells) for column in table.columns)
    return dict(zip(titles, texts, strict=True))


def test_the_table_has_every_count():
    counts = dict(found=1234, bad=2, valid=1232, images=1500, shortest=3, median=7.0, longest=1024)
    mappings = dict(forms={"few": 2, "most": 1230}, files={"in/one.json": 1000, "two.json": 234})
    report = SourceReport("data", "train", **counts, **mappings)
    check = DataCheck(report, [], stops=True, examples=[], has_lengths=True)
    table = cells(check.table("my data"))
    assert table == {
        "rows": "1,234",
        "in one.json": "1,000",
        "in two.json": "234",
        "that cannot be trained on": "2",
        "of the form most": "1,230",
        "of the form few": "2",
        "images in the others": "1,500",
        "lengths": "3 to 1,024 tokens, median 7",
    }
    assert [*table][4:6] == ["of the form most", "of the form few"]  # the commonest first
    check.stops = False
    said = cells(check.table("my data"))["that cannot be trained on"]
    assert said.startswith("2 (") and "skips" in said
    report.bad = 0
    assert cells(check.table("my data"))["that cannot be trained on"] == "0"
    check.has_lengths = False
    assert "--model" in cells(check.table("my data"))["lengths"]
    for has_lengths in (True, False):
        check.has_lengths = has_lengths
        report.valid = 0
        assert cells(check.table("my data"))["lengths"] == "none"
    report.left_out = {"score": 5}
    report.changed = {"it was cut": 3}
    report.images = None
    table = cells(check.table("my data"))
    assert table["images in the others"] == "0"
    assert "score" in table["columns not used"] and "it was cut" in table["note"]


@pytest.mark.parametrize(("bad", "stops"), [(1, False), (2, False), (3, True)])
def test_of_many_rows_training_skips_a_hundredth(tmp_path, monkeypatch, bad, stops):
    for module in (checks, table):
        monkeypatch.setattr(module, "MANY_ROWS", 150)
    rows = [llava(f"Question {number}?", "yes") for number in range(200)]
    for number in range(bad):
        rows[10 * number] = llava("Q", "")
    path = write_json(tmp_path, rows)
    check = check_data(DataSource(str(path)))
    assert check.stops == stops and len(check.faults) == 1
    assert ("a share of 0.01 may be bad" in check.faults[0]) == stops
    found = command(path)
    assert found.exit_code == int(stops) and "row 0: " in found.output


def test_every_image_is_opened_if_that_is_asked_for(tmp_path, monkeypatch, checkpoint):
    for module in (checks, table):
        monkeypatch.setattr(module, "MANY_ROWS", 100)
    monkeypatch.setattr(checks, "DEFAULT_SHARE", 0.1)
    drawn = np.random.default_rng(0).choice(np.arange(120), 100, replace=False)
    (other, *_) = sorted({*range(120)} - {*drawn.tolist()})
    rows = [llava("<image>Q", "A", "red.png") for _ in range(120)]
    rows[other]["image"] = "broken.png"
    path = write_json(tmp_path, rows)
    whole = image_of_noise(1)
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    assert check_data(DataSource(str(path))).faults == []
    (fault,) = check_data(DataSource(str(path)), check_images=True).faults
    assert f"row {other}: " in fault and "broken.png" in fault
    (shown,) = check_data(DataSource(str(path)), str(checkpoint), rows=[other]).examples
    assert "broken.png" in shown.title and not any(learned for _, learned in shown.pieces)


def test_captions_and_a_checkpoint_that_is_not_there_are_told_of(tmp_path, caplog):
    path = write_json(tmp_path, [{"image": "red.png", "caption": "A red square."}])
    assert check_data(DataSource(str(path))).faults == []
    assert "captions are trained as answers" in caplog.text and str(path) in caplog.text
    with pytest.raises(ValueError, match="none .*normalign build"):
        check_data(DataSource(str(path)), str(tmp_path / "none"))


def test_an_image_in_a_row_has_no_name_and_the_first_token_of_all_may_be_learned():
    processor = train_data.processor(byte_tokenizer(), TEMPLATES["smollm2"])
    letter = processor.tokenizer.decode([0])
    assert letter.strip()
    row = {**training.row(3), **parse_row(llava("<image>Q", letter, inside("red")))}
    example = _example(row, ConversationCollator(processor))
    assert example.title == "tiny, row 3"
    learned = "".join(text for text, is_learned in example.pieces if is_learned)
    assert learned.startswith(letter) and len(learned) > 1


def test_turns_are_shown_with_images_in_their_places_and_what_is_learned_marked(tmp_path):
    asked = [{"type": "text", "text": "Compare "}, {"type": "image"}, {"type": "image"}]
    prompt = [user(asked), assistant("first"), user("and now?")]
    row = {"images": ["red.png", "sub/blue.png"], "prompt": prompt}
    row["completion"] = [assistant("second")]
    path = write_json(tmp_path, [row])
    (example,) = check_data(DataSource(str(path)), rows=[0]).examples
    assert example.title == "data.json, row 0 (red.png, blue.png)"
    text = "".join(piece for piece, _ in example.pieces)
    assert text.splitlines() == [
        *("user: Compare <image><image>", "assistant: first"),
        *("user: and now?", "assistant: second"),
    ]
    assert [piece for piece, learned in example.pieces if learned] == ["second"]


def test_what_is_learned_is_underlined_in_a_terminal_and_rows_are_apart(tmp_path):
    rows = [llava("what?", "this"), llava("and?", "that")]
    check = check_data(DataSource(str(write_json(tmp_path, rows))), rows=[0, 1])
    text = check.rendered(terminal=True)
    marked = [text.plain[span.start : span.end] for span in text.spans]
    assert marked == ["this", "that"] and all("underline" in span.style for span in text.spans)
    assert "[[" not in text.plain
    plain = str(check.rendered())
    assert plain.replace("[[", "").replace("]]", "") == text.plain
    assert not plain.startswith("\n") and plain.count("\n\ndata.json, row 1:") == 1

    nothing = check_data(DataSource(str(tmp_path / "data.json")))
    assert nothing.examples == []


def test_a_number_is_that_of_a_row_in_each_file(tmp_path, checkpoint):
    write_json(tmp_path / "data", [llava("one?", "1"), llava("two?", "2")], "a.jsonl")
    write_json(tmp_path / "data", [llava("three?", "3"), llava("", "")], "b.jsonl")
    for file in (tmp_path / "data").rglob("*.png"):
        file.unlink()
    source = DataSource(str(tmp_path / "data"))
    shown = check_data(source, rows=[0]).examples
    assert [example.title for example in shown] == ["a.jsonl, row 0", "b.jsonl, row 0"]
    good, bad = check_data(source, rows=[1]).examples
    assert (good.title, bad.title) == ("a.jsonl, row 1", "b.jsonl, row 1")
    assert bad.pieces[0][0].startswith("Not trained on: ") and not bad.pieces[0][1]
    # The first row, if none has an image.
    assert check_data(source, str(checkpoint)).examples[0].title == "a.jsonl, row 0"
    (tmp_path / "bad.jsonl").write_text(json.dumps(llava("", "")))
    assert check_data(DataSource(str(tmp_path / "bad.jsonl")), str(checkpoint)).examples == []


def test_a_checkpoint_of_another_kind_counts_no_tokens(tmp_path):
    llava_model = tiny_parts.llava(tmp_path / "llava", tiny.llava())
    path = write_json(tmp_path, mixed_rows())
    with pytest.raises(ValueError, match="is a 'llava' model"):
        check_data(DataSource(str(path)), llava_model)
