"""`normalign data` says before training: counts, every fault, and what of a row is learned."""

import json
import re

import pytest
from paths import DOCS
from train_data import image_bytes, llava, mixed_rows, read, write_json
from typer.testing import CliRunner

from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.cli import app
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.data_check import check_data


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
    pieces = check_data(DataSource(str(path)), str(checkpoint)).example
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
    image, text, before = processor.image_token_id, "", False
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
    with pytest.raises(ValueError, match="has no row 9; it has 9, from 0 on"):
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
