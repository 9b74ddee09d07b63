"""`normalign data` says before training: counts, every fault, and what of a row is learned."""

import json

import pytest
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
