"""Which rows come in which order: mixtures, held-out rows, resumed streams and length groups."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
import train_data
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader
from train_data import answers, llava, read, write_json

from normalign_llava.train.collator import ConversationCollator, SeededLengthGroups


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def processor():
    return train_data.processor()


# ------------------------------------------------------------------------------------ length groups
LENGTHS = np.random.default_rng(0).integers(10, 2000, 1003).tolist()


def test_the_order_follows_from_seed_and_epoch():
    one, orders = SeededLengthGroups(LENGTHS, 8, seed=3), []
    for epoch in (0, 1, 0):
        one.set_epoch(epoch)
        orders.append(list(one))
        torch.rand(1)  # as dropout does
    first, second, again = orders
    assert first == again == list(one) != second
    assert list(SeededLengthGroups(LENGTHS, 8, seed=5)) not in orders
    assert sorted(first) == sorted(second) == list(range(1003))
    batches = np.take(LENGTHS, first[:1000]).reshape(-1, 8)
    assert np.ptp(batches, axis=1).mean() < 0.1 * np.ptp(LENGTHS)


# ----------------------------------------------------------------------------------------- mixtures
def sources(folder, counts, **fractions) -> list[dict]:
    """Sources whose answers are `a0`, `a1`, ..., `b0`, ...; those of `a` come with images."""
    listed = []
    for name, count in counts.items():
        question, image = ("<image>Q", "red.png") if name == "a" else ("Q", None)
        rows = [llava(question, f"{name}{n}", image) for n in range(count)]
        path = str(write_json(folder / name, rows))
        listed.append({"path": path, "fraction": fractions.get(name, 1)})
    return listed


def mixture(processor, listed, seed=0, **kwargs):
    return read(None, processor, seed=seed, datasets=listed, **kwargs)


@pytest.mark.parametrize(
    ("fractions", "expected"),
    [
        ({"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 40, "b": 20, "c": 20}),
        ({"a": 2, "b": 1, "c": 1}, {"a": 40, "b": 20, "c": 20}),
        ({"a": 0.9, "b": 0.05, "c": 0.05}, {"a": 50, "b": 3, "c": 3}),
    ],
)
def test_shares_are_exact_and_rows_of_the_seed_come_once(processor, tmp_path, fractions, expected):
    counts = {"a": 50, "b": 30, "c": 20}
    listed = sources(tmp_path, counts, **fractions)
    data, again, other = (mixture(processor, listed, seed) for seed in (0, 0, 1))
    rows = answers(data.train)
    assert rows == answers(again.train) != answers(other.train) and len(set(rows)) == len(rows)
    for mixed in (data, other):
        assert Counter(answer[0] for answer in answers(mixed.train)) == expected
    used = [(source.valid, source.used) for source in data.report.sources]
    assert used == [(count, expected[name]) for name, count in counts.items()]


# ----------------------------------------------------------------------------------------- held out
def test_held_out_rows(processor, tmp_path):
    ours = sources(tmp_path, {"a": 20, "b": 3})
    path, held = (source["path"] for source in ours)

    def load(with_eval=True, **options):
        return read(path, processor, with_eval=with_eval, **options)

    assert load(with_eval=False).eval is None
    parted, again, other = (load(test_split_size=0.2, seed=seed) for seed in (0, 0, 1))
    assert len(parted.train) == 16 and len(parted.eval) == 4
    assert {*answers(parted.train), *answers(parted.eval)} == {f"a{n}" for n in range(20)}
    assert answers(parted.eval) == answers(again.eval) != answers(other.eval)
    for options in ({}, {"dataset_streaming": True}, {"test_split_size": 0.2}):
        given = load(eval_dataset_name=held, **options)
        assert answers(given.eval) == ["b0", "b1", "b2"]
        assert len(list(islice(given.train, 20))) == 20
        read_from = [(source.source, source.split) for source in given.report.sources]
        assert read_from == [(path, "train"), (held, "eval")]
    streamed = {"test_split_size": 0.2, "dataset_streaming": True}
    remedy = "eval_dataset_name or test_split_size, or leave eval_strategy at 'no'"
    for options, message in (
        ({}, f"no held-out data. .*a/data.json is one file, and has no split 'test'.*{remedy}"),
        (streamed, "test_split_size needs data in memory.* Give eval_da"),
    ):
        with pytest.raises(ValueError, match=message):
            load(**options)
    with pytest.raises(ValueError, match=f"A mixture has no test split. .*{remedy}"):
        mixture(processor, ours, with_eval=True)


# ------------------------------------------------------------------------------------------ streams
def test_a_resumed_stream_continues_with_the_next_batches(processor, tmp_path):
    listed = sources(tmp_path, {"a": 60, "b": 40})

    def prepared(workers=0):
        rows = mixture(processor, listed, dataset_streaming=True, shuffle_buffer_size=16).train
        collate = ConversationCollator(processor)
        loader = DataLoader(rows, 4, num_workers=workers, collate_fn=collate)
        return Accelerator(cpu=True).prepare(loader)

    def first(loader, count) -> list:
        batches = islice(loader, count)
        return [{name: value.tolist() for name, value in batch.items()} for batch in batches]

    whole = first(prepared(), 40)  # both sources begin again on the way
    assert first(skip_first_batches(prepared(), 33), 7) == whole[33:]
    # `datasets` seeds its buffer anew in a worker. One is all that a single shard can use.
    assert first(prepared(workers=2), 5) == first(prepared(workers=1), 5)
