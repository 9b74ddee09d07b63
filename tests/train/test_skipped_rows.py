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
from normalign_llava.train.collator import SKIPPED_ROWS, ConversationCollator, SkippedRows
from normalign_llava.train.run import main


TRUNCATED = train_data.image_bytes("red", (64, 64))[:60]
ROW_COUNT = 42
BAD_COUNT = 7


def parsed_rows() -> list[dict]:
    """Parsed rows; the images of the first `BAD_COUNT` are cut off."""
    good_image = train_data.inside("red")
    parsed_row = parse_row(train_data.llava("<image>Q", "A", good_image))
    train_rows = []
    for number in range(ROW_COUNT):
        image = good_image
        if number < BAD_COUNT:
            image = {"path": f"{number}.png", "bytes": TRUNCATED}
        train_rows.append(
            {
                **parsed_row,
                "images": [image],
                "source": "data.json",
                "row": number,
                "length": 0,
            }
        )
    return train_rows


def read_three_epochs(collator, workers: int, start_method: str | None) -> None:
    """Three epochs of shuffled rows in one data loader, whose workers stay."""
    loader = DataLoader(
        parsed_rows(),
        batch_size=3,
        shuffle=True,
        collate_fn=collator,
        num_workers=workers,
        multiprocessing_context=start_method,
        persistent_workers=workers > 0,
    )
    for _ in range(3):
        row_count = 0
        for batch in loader:
            row_count += len(batch["input_ids"])
        assert row_count == ROW_COUNT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "start_method"),
    [
        (0, None),
        (8, "fork"),
        pytest.param(2, "spawn", marks=pytest.mark.nightly),
    ],
)
def test_workers_and_epochs_share_one_count_of_different_rows(workers, start_method, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    enough = ConversationCollator(processor, skippable=BAD_COUNT)
    read_three_epochs(enough, workers, start_method)

    too_few = ConversationCollator(processor, skippable=BAD_COUNT - 1)
    message = f"met {BAD_COUNT} bad row.*, and {BAD_COUNT - 1} may be skipped.* Fix it"
    with pytest.raises(BadRow, match=message):
        read_three_epochs(too_few, workers, start_method)


def add_rows(path, allowed, seed, results) -> None:
    """Adds the same hundred rows in an order of its own, each twice."""
    numbers = [*range(100)] * 2
    random.Random(seed).shuffle(numbers)
    skipped_rows = SkippedRows(path)
    kept = []
    for number in numbers:
        if skipped_rows.add("data.json", number, allowed) is None:
            kept.append(number)
    results.put(kept)


@pytest.mark.parametrize("allowed", [100, 60])
def test_processes_that_add_at_once_keep_exactly_what_is_allowed(allowed, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    skipped_path = tmp_path / "skipped.jsonl"
    processes = []
    for seed in range(4):
        process = context.Process(target=add_rows, args=(skipped_path, allowed, seed, results))
        process.start()
        processes.append(process)
    kept_by_any = set()
    for _ in processes:
        kept_by_any.update(results.get(timeout=60))
    for process in processes:
        process.join()
    lines = skipped_path.read_text().splitlines()
    written = stored_numbers(skipped_path)
    assert len(lines) == allowed
    assert len(written) == allowed
    assert kept_by_any == written
    assert SkippedRows(skipped_path).add("data.json", min(written), allowed) is None
    assert SkippedRows(skipped_path).add("other.json", min(written), allowed) == allowed + 1


def stored_numbers(skipped_path) -> set[int]:
    """The row numbers in a file of skipped rows."""
    numbers = set()
    for line in skipped_path.read_text().splitlines():
        _, number = json.loads(line)
        numbers.add(number)
    return numbers


def test_a_row_that_may_not_be_skipped_makes_no_file(tmp_path):
    skipped_rows = SkippedRows(tmp_path / "out" / "skipped.jsonl")
    assert skipped_rows.add("data.json", 3, 0.5) == 1
    assert not skipped_rows.path.parent.exists()


def test_a_file_is_made_with_the_first_row_that_may_be_skipped(tmp_path):
    skipped_rows = SkippedRows(tmp_path / "out" / "skipped.jsonl")
    skipped_rows.add("data.json", 3, 0.5)
    assert skipped_rows.add("data.json", 3, 1) is None
    assert skipped_rows.path.exists()


def test_copies_share_a_temporary_file_which_ends_with_the_first():
    first = SkippedRows()
    unpickled = pickle.loads(pickle.dumps(first))
    assert unpickled.add("data.json", 3, 1) is None
    assert first.add("data.json", 4, 1) == 2
    forked_process = multiprocessing.get_context("fork").Process(target=gc.collect)
    forked_process.start()
    forked_process.join()
    assert first.path.exists()
    assert SkippedRows().path != first.path
    skipped_path = first.path
    del first
    gc.collect()
    assert not skipped_path.exists()


class RunWithBadImages:
    """A command that trains on 16 rows: 4 may be bad, and 8 are opened before."""

    def __init__(self, folder):
        self.data = folder / "data"
        self.out = folder / "out"
        raw_rows = []
        for number in range(16):
            raw_rows.append(train_data.llava("<image>\nwhat?", "red", f"{number}.png"))
            self.mend([number])
        parts_folder = folder / "parts"
        training.checkpoint(parts_folder)
        self.recipe = training.recipe(
            folder,
            parts_folder,
            global_batch_size=4,
            save_steps=1,
            bad_rows=0.3,
            dataset_name=str(train_data.write_json(self.data, raw_rows)),
            use_cpu=True,
        )

    def spoil(self, numbers) -> None:
        for number in numbers:
            (self.data / f"{number}.png").write_bytes(TRUNCATED)

    def mend(self, numbers) -> None:
        self.data.mkdir(exist_ok=True)
        for number in numbers:
            (self.data / f"{number}.png").write_bytes(train_data.image_bytes())

    def train(self, max_steps, *options, output=None) -> None:
        command_line = [
            self.recipe,
            "--dataloader_num_workers",
            "2",
            "--output_dir",
            str(output or self.out),
            "--max_steps",
            str(max_steps),
        ]
        main([*command_line, *options])

    def resume(self, max_steps) -> None:
        self.train(max_steps, "--resume_from_checkpoint")


@pytest.mark.slow
def test_a_run_of_two_epochs_and_its_resumption_count_in_one_share(tmp_path, monkeypatch):
    """Only images of 8 of 16 rows are opened first; 4 of the others may be bad."""
    monkeypatch.setattr(table, "MANY_ROWS", 8)
    sample = np.random.default_rng(0).choice(16, 8, replace=False)
    unopened = np.setdiff1d(np.arange(16), sample).tolist()
    training_run = RunWithBadImages(tmp_path)
    training_run.spoil(unopened[:4])
    training_run.train(6)
    skipped_file = training_run.out / SKIPPED_ROWS
    assert stored_numbers(skipped_file) == {*unopened[:4]}
    training_run.resume(8)
    assert len(skipped_file.read_text().splitlines()) == 4

    fifth = unopened[4]
    training_run.spoil([fifth])
    message = rf"row {fifth}: .*truncated.*met 5 bad row.*, and 4 may"
    with pytest.raises(ValueError, match=message):
        training_run.resume(12)
    training_run.mend([fifth])
    training_run.resume(12)  # the row was not counted, and is mended

    training_run.mend(unopened[:4])
    training_run.spoil(unopened[4:8])
    training_run.train(
        6, output=tmp_path / "other"
    )  # an earlier run's rows do not count in another folder
    assert stored_numbers(skipped_file) == {*unopened[:4]}
