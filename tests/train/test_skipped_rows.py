"""Rows with bad images that training met: one count for workers, epochs and resumed runs."""

import gc
import json
import multiprocessing
import pickle
import random

import numpy as np
import pytest
import train_data
import training
from torch.utils.data import DataLoader
from transformers import AutoProcessor

from normalign_llava.data.rows.parse import BadRow, parse_row
from normalign_llava.data.sources import table
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.keeping.skipped import SKIPPED_ROWS, SkippedRows
from normalign_llava.train.run import main


TRUNCATED = train_data.image_bytes("red", (64, 64))[:60]
BAD = 7


def rows(count=42) -> list[dict]:
    """Parsed rows; the images of the first `BAD` are cut off."""
    made = []
    for number in range(count):
        good = train_data.inside("red")
        image = {"path": f"{number}.png", "bytes": TRUNCATED} if number < BAD else good
        row = {**parse_row(train_data.llava("<image>Q", "A", good)), "images": [image]}
        made.append({**row, "source": "data.json", "row": number, "length": 0})
    return made


def read(collate, workers: int, kind: str | None, epochs=3) -> None:
    """Several epochs of shuffled rows in one data loader, whose workers stay."""
    settings = {"multiprocessing_context": kind, "persistent_workers": True} if workers else {}
    loader = DataLoader(
        rows(), 3, shuffle=True, collate_fn=collate, num_workers=workers, **settings
    )
    for _ in range(epochs):
        assert sum(len(batch["input_ids"]) for batch in loader) == 42


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers, kind",
    [(0, None), (8, "fork"), pytest.param(2, "spawn", marks=pytest.mark.nightly)],
)
def test_workers_and_epochs_share_one_count_of_different_rows(workers, kind, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    read(ConversationCollator(processor, skippable=BAD), workers, kind)
    with pytest.raises(BadRow, match=f"met {BAD} bad row.*, and {BAD - 1} may be skipped.* Fix it"):
        read(ConversationCollator(processor, skippable=BAD - 1), workers, kind)


def add(path, allowed, seed, results) -> None:
    """Adds the same hundred rows in an order of its own, each twice."""
    order = [*range(100)] * 2
    random.Random(seed).shuffle(order)
    counted = SkippedRows(path)
    kept = []
    for number in order:
        if counted.add("data.json", number, allowed) is None:
            kept.append(number)
    results.put(kept)


@pytest.mark.parametrize("allowed", [100, 60])
def test_processes_that_add_at_once_keep_exactly_what_is_allowed(allowed, tmp_path):
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    path = tmp_path / "skipped.jsonl"
    processes = [fork.Process(target=add, args=(path, allowed, n, results)) for n in range(4)]
    for process in processes:
        process.start()
    kept = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    stored = {number for _, number in lines}
    assert len(lines) == len(stored) == allowed
    assert set().union(*map(set, kept)) == stored
    assert SkippedRows(path).add("data.json", min(stored), allowed) is None
    assert SkippedRows(path).add("other.json", min(stored), allowed) == allowed + 1


def test_a_file_is_made_with_the_first_row_that_may_be_skipped(tmp_path):
    counted = SkippedRows(tmp_path / "out" / "skipped.jsonl")
    assert counted.add("data.json", 3, 0.5) == 1 and not counted.path.parent.exists()
    assert counted.add("data.json", 3, 1) is None and counted.path.exists()


def test_copies_share_a_temporary_file_which_ends_with_the_first():
    counted = SkippedRows()
    copy = pickle.loads(pickle.dumps(counted))
    assert copy.add("data.json", 3, 1) is None and counted.add("data.json", 4, 1) == 2
    forked = multiprocessing.get_context("fork").Process(target=gc.collect)
    forked.start()
    forked.join()
    assert counted.path.exists() and SkippedRows().path != counted.path
    path = counted.path
    del counted
    gc.collect()
    assert not path.exists()


@pytest.mark.slow
def test_a_run_of_two_epochs_and_its_resumption_count_in_one_share(tmp_path, monkeypatch):
    """Images of 8 of 16 rows alone are opened first; 4 of the others may be bad."""
    monkeypatch.setattr(table, "MANY_ROWS", 8)
    parts = tmp_path / "parts"
    data = tmp_path / "data"
    training.checkpoint(parts)
    sample = np.random.default_rng(0).choice(16, 8, replace=False).tolist()
    unopened = sorted({*range(16)} - {*sample})
    pictures = [train_data.llava("<image>\nwhat?", "red", f"{number}.png") for number in range(16)]
    path = train_data.write_json(data, pictures)
    for number in range(16):
        is_bad = number in unopened[:4]
        content = TRUNCATED if is_bad else train_data.image_bytes()
        (data / f"{number}.png").write_bytes(content)
    settings = dict(global_batch_size=4, save_steps=1, bad_rows=0.3, dataset_name=str(path))
    file = training.recipe(tmp_path, parts, **settings, use_cpu=True)
    words = [file, "--dataloader_num_workers", "2", "--output_dir", str(tmp_path / "out")]
    main([*words, "--max_steps", "6"])
    counted = tmp_path / "out" / SKIPPED_ROWS
    met = {number for _, number in map(json.loads, counted.read_text().splitlines())}
    assert met == {*unopened[:4]}
    main([*words, "--max_steps", "8", "--resume_from_checkpoint"])
    assert len(counted.read_text().splitlines()) == 4
    (data / f"{unopened[4]}.png").write_bytes(TRUNCATED)
    again = [*words, "--max_steps", "12", "--resume_from_checkpoint"]
    message = rf"row {unopened[4]}: .*truncated.*met 5 bad row.*, and 4 may"
    with pytest.raises(ValueError, match=message):
        main(again)
    (data / f"{unopened[4]}.png").write_bytes(train_data.image_bytes())
    main(again)  # the row was not counted, and is mended
    for number in unopened[:4]:
        (data / f"{number}.png").write_bytes(train_data.image_bytes())
    for number in unopened[4:8]:
        (data / f"{number}.png").write_bytes(TRUNCATED)
    other = [*words[:-1], str(tmp_path / "other"), "--max_steps", "6"]
    main(other)  # rows of an earlier run do not count in another folder
    met = {number for _, number in map(json.loads, counted.read_text().splitlines())}
    assert met == {*unopened[:4]}
