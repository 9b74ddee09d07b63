# SPDX-License-Identifier: Apache-2.0
"""The largest batch of a run, and whether what it takes fits."""

import io
from dataclasses import replace

import psutil
import pytest
import torch
import train_data
import training
from datasets import Dataset
from rich.console import Console

from normalign_llava.checkpoint import precision
from normalign_llava.data.rows.parse import FEATURES, DroppedRows
from normalign_llava.train import memory
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.memory import CONTEXT, MemoryEstimate, largest_batch


GIB = 2**30


@pytest.fixture(scope="module")
def collator():
    return ConversationCollator(train_data.processor())


def estimate(
    parts: dict[str, int],
    batch: str = "",
    available: int = 0,
    reserved: int = 0,
) -> MemoryEstimate:
    return MemoryEstimate(parts, batch, "a card", available, reserved)


def longest_first(train_rows: Dataset) -> list[int]:
    lengths = train_rows["length"][:]

    def negative_length(number: int) -> int:
        return -lengths[number]

    return sorted(range(len(lengths)), key=negative_length)


def assert_same_batch(batch, expected) -> None:
    assert batch.keys() == expected.keys()
    for input_name, expected_tensor in expected.items():
        assert torch.equal(batch[input_name], expected_tensor), input_name


@pytest.mark.parametrize(
    ("available", "fits", "verdict"),
    [
        (10, True, "Fits"),
        (9, False, "Does not fit"),
    ],
)
def test_what_is_kept_free_does_not_count_as_room(available, fits, verdict):
    without_reserve = estimate({"weights": 6, "activations": 4}, available=available)
    assert without_reserve.total == 10
    assert without_reserve.fits == fits
    assert without_reserve.verdict.startswith(verdict)
    with_reserve = replace(without_reserve, available=available + 3, reserved=3)
    assert with_reserve.fits == fits


def test_memory_that_just_fits_does_not_fit_with_a_reserve():
    just_fitting = estimate({"weights": 6, "activations": 4}, available=10, reserved=0)
    assert just_fitting.fits
    assert not replace(just_fitting, reserved=1).fits


def test_the_estimate_says_the_size_of_each_part_and_of_all():
    printed = io.StringIO()
    parts = {"weights": 3 * GIB, "activations": GIB}
    measured = estimate(parts, "2 row(s)", available=8 * GIB, reserved=GIB)
    Console(file=printed, width=100).print(measured)
    words = printed.getvalue().split()
    sizes = {}
    for line in printed.getvalue().splitlines():
        columns = line.split()
        if columns[2:] == ["GiB"]:
            sizes[columns[0]] = columns[1]
    assert sizes == {"weights": "3.0", "activations": "1.0", "all": "4.0"}
    text = " ".join(words)
    assert "2 row(s)" in text
    assert "4.0 GiB of the 8.0 GiB of a card (1.0 GiB are kept free)" in text
    assert "kept free" not in replace(measured, reserved=0).verdict


@pytest.mark.parametrize(
    ("device_memory", "expected_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("80GB", 80 * 10**9),
    ],
)
def test_the_memory_of_a_gpu_can_be_given(tmp_path, device_memory, expected_bytes):
    settings = training.settings(
        tmp_path,
        dry_run=True,
        device_memory=device_memory,
    )
    expected = ("device_memory", expected_bytes, CONTEXT)
    assert memory._device(settings) == expected


TOTAL_MEMORY = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        pytest.param(
            "max",
            ("this machine", TOTAL_MEMORY, 0),
            id="no limit",
        ),
        pytest.param(
            str(TOTAL_MEMORY),
            ("this machine", TOTAL_MEMORY, 0),
            id="all memory",
        ),
        pytest.param(
            str(2**28),
            ("this container", 2**28, 0),
            id="a part",
        ),
    ],
)
def test_the_memory_of_this_machine_or_of_its_container_is_found(
    tmp_path, monkeypatch, limit, expected
):
    monkeypatch.setattr(precision, "GROUPS", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    settings = training.settings(tmp_path)
    assert memory._device(settings) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_largest_batch_has_the_longest_rows_also_if_there_are_few(
    tmp_path, collator, batch_size
):
    train_rows = training.rows(
        3,
        images=lambda number: 1 + number % 2,
        turns=lambda number: 1 + number,
    )
    settings = training.settings(tmp_path, per_device_train_batch_size=batch_size)
    batch = largest_batch(settings, train_rows, collator)
    order = longest_first(train_rows)
    lengths = train_rows["length"]
    assert lengths[order[0]] > lengths[order[1]]
    chosen = [train_rows[order[place % 3]] for place in range(batch_size)]
    assert_same_batch(batch, collator(chosen))


def test_another_collator_gets_the_longest_rows_too(tmp_path):
    def row_numbers(chosen):
        return [sample_row["row"] for sample_row in chosen]

    train_rows = training.rows(4, turns=lambda number: 1 + (number * 3) % 4)
    settings = training.settings(tmp_path, per_device_train_batch_size=2)
    expected = longest_first(train_rows)[:2]
    assert largest_batch(settings, train_rows, row_numbers) == expected


def test_with_packing_the_largest_batch_is_the_pass_of_most_tokens(tmp_path, collator):
    """Of each step of four rows, the longest and the shortest are in one pass."""
    train_rows = training.rows(8, turns=lambda number: 1 + number % 4)
    settings = training.settings(
        tmp_path,
        packing=True,
        global_batch_size=4,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
    )
    settings.gradient_accumulation_steps = 2
    batch = largest_batch(settings, train_rows, replace(collator, padding_free=True))
    lengths = train_rows["length"][:]
    pass_lengths = []
    for start in (0, 4):
        shortest, second, third, longest = sorted(lengths[start : start + 4])
        pass_lengths.append(longest + shortest)
        pass_lengths.append(second + third)
    assert batch["input_ids"].shape == (1, max(pass_lengths))


def test_a_bad_image_does_not_keep_the_largest_batch_from_being_made(tmp_path, collator):
    parsed_rows = [training.row(0), training.row(1)]
    parsed_rows[1]["images"] = [{"path": None, "bytes": b"no image"}]
    train_rows = Dataset.from_list(parsed_rows, features=FEATURES)
    dropped_path = tmp_path / "dropped.jsonl"
    recording = replace(collator, dropped_rows=DroppedRows(dropped_path))
    batch = largest_batch(training.settings(tmp_path), train_rows, recording)
    assert len(batch["pixel_values"]) == 2
    assert not dropped_path.exists()  # it is met again in training
    with pytest.raises(ValueError):
        collator(list(train_rows))


def test_of_rows_whose_lengths_are_unknown_the_first_is_repeated(tmp_path, collator):
    train_rows = training.rows(3).remove_columns("length")
    settings = training.settings(tmp_path, max_length=None)
    batch = largest_batch(settings, train_rows, collator)
    first_row = train_rows[0]
    assert_same_batch(batch, collator([first_row, first_row]))


TWO_IMAGES = training.row(0, images=2, turns=1)
FIRST_LENGTH = TWO_IMAGES["length"]
MAX_LENGTHS = {
    "none": None,
    "shorter": FIRST_LENGTH - 1,
    "the same": FIRST_LENGTH,
    "longer": FIRST_LENGTH + 40,
}


@pytest.fixture(params=MAX_LENGTHS.values(), ids=MAX_LENGTHS.keys())
def max_length(request):
    """A limit around the length of the first row of `largest_batch_of_a_stream`."""
    return request.param


def largest_batch_of_a_stream(tmp_path, collator, max_length):
    """The largest batch of two rows, and the collator's batch of the first row twice."""
    train_rows = training.rows(3, images=lambda number: 2)
    assert train_rows["length"][0] == FIRST_LENGTH
    settings = training.settings(
        tmp_path,
        max_length=max_length,
        padding_free=collator.padding_free,
        per_device_train_batch_size=2,
    )
    batch = largest_batch(settings, train_rows.to_iterable_dataset(), collator)
    return batch, collator([train_rows[0], train_rows[0]])


def assert_filled_up(batch, first, shape) -> None:
    """Every row has the tokens of `first`, and after them labelled ones."""
    row_length = first["input_ids"].shape[1]
    assert torch.equal(batch["pixel_values"], first["pixel_values"])
    for input_name in batch.keys() - {"pixel_values"}:
        assert batch[input_name].shape == shape, input_name
        assert torch.equal(batch[input_name][:, :row_length], first[input_name]), input_name
    added_labels = batch["labels"][:, row_length:]
    assert torch.equal(added_labels, batch["input_ids"][:, row_length:])
    assert (added_labels >= 0).all()


def test_of_a_stream_the_first_row_is_filled_up_to_max_length(tmp_path, collator, max_length):
    batch, first = largest_batch_of_a_stream(tmp_path, collator, max_length)
    row_length = max(FIRST_LENGTH, max_length or 0)
    assert_filled_up(batch, first, (2, row_length))
    assert (batch["attention_mask"] == 1).all()


def test_of_a_stream_without_padding_the_last_row_of_the_pass_is_filled_up(
    tmp_path, collator, max_length
):
    padding_free = replace(collator, padding_free=True)
    batch, first = largest_batch_of_a_stream(tmp_path, padding_free, max_length)
    token_count = 2 * max(FIRST_LENGTH, max_length or 0)
    assert_filled_up(batch, first, (1, token_count))
    positions = batch["position_ids"][0]
    assert (positions == 0).sum() == 2  # two rows
    added = token_count - 2 * FIRST_LENGTH
    expected = torch.arange(FIRST_LENGTH, FIRST_LENGTH + added)
    assert torch.equal(positions[2 * FIRST_LENGTH :], expected)
