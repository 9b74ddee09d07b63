"""Which rows come in which order: mixtures, held-out rows, resumed streams and length groups."""

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import train_data
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader
from train_data import answers, llava, read, write_json
from transformers import TrainerControl

from normalign_llava import NormAlignTrainer
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.samplers import SeededLengthGroups


pytestmark = pytest.mark.usefixtures("cache")
LENGTHS = np.random.default_rng(0).integers(10, 2000, 1003).tolist()


@pytest.fixture(scope="module")
def processor():
    return train_data.processor()


def test_the_order_follows_from_seed_and_epoch():
    one = SeededLengthGroups(LENGTHS, 8, seed=3)
    orders = []
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


def sources(folder, counts, shares=(1, 1, 1)) -> list[dict]:
    """Sources whose answers are `a0`, `a1`, ..., `b0`, ...; those of `a` come with images."""
    listed = []
    for (name, count), share in zip(counts.items(), shares, strict=False):
        question, image = ("<image>Q", "red.png") if name == "a" else ("Q", None)
        rows = [llava(question, f"{name}{n}", image) for n in range(count)]
        listed.append({"path": str(write_json(folder / name, rows)), "fraction": share})
    return listed


def mixture(processor, listed, seed=0, **kwargs):
    return read(None, processor, seed=seed, datasets=listed, **kwargs)


@pytest.mark.parametrize(
    "shares, used",
    [((0.5, 0.25, 0.25), (40, 20, 20)), ((2, 1, 1), (40, 20, 20)), ((0.9, 0.05, 0.05), (50, 3, 3))],
)
def test_shares_are_exact_and_rows_of_the_seed_come_once(processor, tmp_path, shares, used):
    listed = sources(tmp_path, {"a": 50, "b": 30, "c": 20}, shares)
    data, again, other = (mixture(processor, listed, seed) for seed in (0, 0, 1))
    rows = answers(data.train)
    assert rows == answers(again.train) != answers(other.train) and len(set(rows)) == len(rows)
    for mixed in (data, other):
        letters = "".join(answer[0] for answer in answers(mixed.train))
        assert tuple(map(letters.count, "abc")) == used
    counted = [(source.valid, source.used) for source in data.report.sources]
    assert counted == list(zip((50, 30, 20), used, strict=True))


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


def test_a_resumed_stream_continues_with_the_next_batches(processor, tmp_path):
    listed = sources(tmp_path, {"a": 60, "b": 40})

    def prepared(workers=0, buffer=16):
        options = {"dataset_streaming": True, "shuffle_buffer_size": buffer}
        rows = mixture(processor, listed, **options).train
        collate = ConversationCollator(processor)
        loader = DataLoader(rows, 4, num_workers=workers, collate_fn=collate)
        return Accelerator(cpu=True).prepare(loader)

    def first(loader, count) -> list:
        batches = islice(loader, count)
        return [{name: value.tolist() for name, value in batch.items()} for batch in batches]

    whole = first(prepared(), 40)  # both sources begin again on the way
    assert first(skip_first_batches(prepared(), 33), 7) == whole[33:]
    in_order = first(prepared(buffer=1), 40)
    assert all(batch not in in_order for batch in whole[33:])  # so the buffer is resumed too
    # `datasets` seeds its buffer anew in a worker. One is all that a single shard can use.
    assert first(prepared(workers=2), 5) == first(prepared(workers=1), 5)


def test_the_epoch_reaches_the_sampler_within_those_of_accelerate():
    groups = SeededLengthGroups(LENGTHS[:16], 4, seed=3)
    sampler = BatchSamplerShard(BatchSampler(groups, 2, drop_last=False), num_processes=2)
    state = SimpleNamespace(global_step=4, max_steps=4)  # resumed at the end
    trainer = SimpleNamespace(state=state, control=TrainerControl())
    NormAlignTrainer._run_epoch(trainer, None, 2, SimpleNamespace(batch_sampler=sampler))
    expected = SeededLengthGroups(LENGTHS[:16], 4, seed=3)
    assert list(groups) != list(expected)
    expected.set_epoch(2)
    assert list(groups) == list(expected)
    assert trainer.control.should_training_stop
