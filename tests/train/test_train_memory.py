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


@pytest.fixture(scope="module")
def collator():
    return ConversationCollator(train_data.processor())


@pytest.mark.parametrize(("available", "reserved", "fits"), [(10, 0, True), (9, 0, False)])
def test_what_is_kept_free_does_not_count_as_room(available, reserved, fits):
    estimate = MemoryEstimate({"weights": 6, "activations": 4}, "", "a card", available, reserved)
    assert estimate.total == 10
    assert estimate.fits == fits
    assert estimate.verdict.startswith("Fits" if fits else "Does not fit")
    assert replace(estimate, available=available + 3, reserved=3).fits == fits
    assert not replace(estimate, available=10, reserved=1).fits


def test_the_estimate_says_the_size_of_each_part_and_of_all():
    parts = {"weights": 3 * 2**30, "activations": 2**30}
    estimate = MemoryEstimate(parts, "2 row(s)", "a card", 8 * 2**30, 2**30)
    printed = io.StringIO()
    Console(file=printed, width=100).print(estimate)
    lines = [line.split() for line in printed.getvalue().splitlines()]
    sizes = {line[0]: line[1] for line in lines if line[2:] == ["GiB"]}
    assert sizes == {"weights": "3.0", "activations": "1.0", "all": "4.0"}
    text = " ".join(sum(lines, []))
    assert "2 row(s)" in text
    assert "4.0 GiB of the 8.0 GiB of a card (1.0 GiB are kept free)" in text
    assert "kept free" not in replace(estimate, reserved=0).verdict


def test_the_memory_of_a_gpu_that_is_named_of_this_machine_or_of_its_container(
    tmp_path, monkeypatch
):
    for size, expected in (("24GiB", 24 * 2**30), ("80GB", 80 * 10**9)):
        args = training.settings(tmp_path, dry_run=True, device_memory=size)
        assert memory._device(args) == ("device_memory", expected, CONTEXT)
    monkeypatch.setattr(precision, "GROUPS", tmp_path)
    args = training.settings(tmp_path)
    total = psutil.virtual_memory().total
    limits = {"max": ("this machine", total, 0), str(total): ("this machine", total, 0)}
    limits |= {str(2**28): ("this container", 2**28, 0)}
    for limit, expected in limits.items():
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory._device(args) == expected


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_largest_batch_has_the_longest_rows_also_if_there_are_few(tmp_path, collator, count):
    rows = training.rows(3, images=lambda number: 1 + number % 2, turns=lambda number: 1 + number)
    args = training.settings(tmp_path, per_device_train_batch_size=count)
    batch = largest_batch(args, rows, collator)
    order = sorted(range(3), key=lambda number: -rows["length"][number])
    assert rows["length"][order[0]] > rows["length"][order[1]]
    chosen = [rows[order[place % 3]] for place in range(count)]
    expected = collator(chosen)
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name


def test_another_collator_gets_the_longest_rows_too(tmp_path):
    rows = training.rows(4, turns=lambda number: 1 + (number * 3) % 4)
    args = training.settings(tmp_path, per_device_train_batch_size=2)
    numbers = largest_batch(args, rows, lambda chosen: [row["row"] for row in chosen])
    assert numbers == sorted(range(4), key=lambda number: -rows["length"][number])[:2]


def test_with_packing_the_largest_batch_is_the_pass_of_most_tokens(tmp_path, collator):
    rows = training.rows(8, turns=lambda number: 1 + number % 4)
    free = replace(collator, padding_free=True)
    options = dict(packing=True, global_batch_size=4, per_device_train_batch_size=1)
    args = training.settings(tmp_path, **options, train_sampling_strategy="sequential")
    args.gradient_accumulation_steps = 2
    batch = largest_batch(args, rows, free)
    # By hand: of each step of four rows, the longest and the shortest are in one pass.
    lengths = rows["length"][:]
    sums = []
    for start in (0, 4):
        shortest, second, third, longest = sorted(lengths[start : start + 4])
        sums += [longest + shortest, second + third]
    assert batch["input_ids"].shape == (1, max(sums))


def test_a_bad_image_does_not_keep_the_largest_batch_from_being_made(tmp_path, collator):
    made = [training.row(number) for number in range(2)]
    made[1]["images"] = [{"path": None, "bytes": b"no image"}]
    rows = Dataset.from_list(made, features=FEATURES)
    listing = replace(collator, dropped_rows=DroppedRows(tmp_path / "dropped.jsonl"))
    batch = largest_batch(training.settings(tmp_path), rows, listing)
    assert len(batch["pixel_values"]) == 2
    assert not (tmp_path / "dropped.jsonl").exists()  # it is met again in training
    with pytest.raises(ValueError):
        collator(list(rows))


def test_of_rows_whose_lengths_are_unknown_the_first_is_repeated(tmp_path, collator):
    rows = training.rows(3).remove_columns("length")
    args = training.settings(tmp_path, max_length=None)
    batch = largest_batch(args, rows, collator)
    expected = collator([rows[0], rows[0]])
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name


@pytest.mark.parametrize("padding_free", [False, True])
def test_of_a_stream_the_first_row_is_filled_up_to_max_length(tmp_path, collator, padding_free):
    rows = training.rows(3, images=lambda number: 2)
    own = replace(collator, padding_free=padding_free)
    first = own([rows[0], rows[0]])
    length = rows["length"][0]
    for most in (None, length - 1, length, length + 40):
        options = dict(max_length=most, padding_free=padding_free, per_device_train_batch_size=2)
        args = training.settings(tmp_path, **options)
        batch = largest_batch(args, rows.to_iterable_dataset(), own)
        tokens = max(length, most or 0)
        shape = (1, 2 * tokens) if padding_free else (2, tokens)
        assert {batch[name].shape for name in batch if name != "pixel_values"} == {shape}
        assert torch.equal(batch["pixel_values"], first["pixel_values"])
        given = first["input_ids"].shape[1]
        for name in batch.keys() - {"pixel_values"}:
            assert torch.equal(batch[name][:, :given], first[name]), name
        filling = batch["labels"][:, given:]
        assert torch.equal(filling, batch["input_ids"][:, given:]) and (filling >= 0).all()
        if padding_free:  # still two rows
            assert (batch["position_ids"] == 0).sum() == 2
            ends = torch.arange(length, length + filling.shape[1])
            assert torch.equal(batch["position_ids"][0, given:], ends)
        else:
            assert (batch["attention_mask"] == 1).all()
