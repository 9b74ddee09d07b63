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
from train_data import answers
from transformers import TrainerControl

from normalign_llava import NormAlignTrainer
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.samplers import SeededLengthGroups


pytestmark = pytest.mark.usefixtures("cache")
LENGTHS = np.random.default_rng(0).integers(10, 2000, 1003).tolist()


@pytest.fixture(scope="module")
def processor():
    return train_data.processor()


def epoch_order(sampler, epoch) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_the_order_follows_from_seed_and_epoch():
    sampler = SeededLengthGroups(LENGTHS, 8, seed=3)
    first = epoch_order(sampler, 0)
    torch.rand(1)  # as dropout does
    second = epoch_order(sampler, 1)
    torch.rand(1)
    repeated = epoch_order(sampler, 0)
    assert repeated == first
    assert list(sampler) == first
    assert second != first
    order_of_another_seed = list(SeededLengthGroups(LENGTHS, 8, seed=5))
    assert order_of_another_seed not in (first, second)
    assert sorted(first) == list(range(1003))
    assert sorted(second) == list(range(1003))


def test_rows_of_a_batch_are_of_nearly_equal_length():
    sampler = SeededLengthGroups(LENGTHS, 8, seed=3)
    row_order = epoch_order(sampler, 0)
    batches = np.take(LENGTHS, row_order[:1000]).reshape(-1, 8)
    ranges = np.ptp(batches, axis=1)
    assert ranges.mean() < 0.1 * np.ptp(LENGTHS)


def write_sources(folder, counts, shares=(1, 1, 1)) -> list[dict]:
    """Sources with answers `a0`, `a1`, ..., `b0`, ...; only the ones of `a` come with images."""
    sources = []
    for (name, count), share in zip(counts.items(), shares, strict=False):
        rows = []
        for number in range(count):
            answer = f"{name}{number}"
            if name == "a":
                rows.append(train_data.llava("<image>Q", answer, "red.png"))
            else:
                rows.append(train_data.llava("Q", answer))
        data_path = train_data.write_json(folder / name, rows)
        sources.append({"path": str(data_path), "fraction": share})
    return sources


def read_mixture(processor, sources, seed=0, **options):
    return train_data.read(None, processor, seed=seed, datasets=sources, **options)


def rows_of_each_source(mixed_answers) -> list[int]:
    letters = "".join(answer[0] for answer in mixed_answers)
    return [letters.count("a"), letters.count("b"), letters.count("c")]


@pytest.mark.parametrize(
    "shares, used",
    [
        ((0.5, 0.25, 0.25), [40, 20, 20]),
        ((2, 1, 1), [40, 20, 20]),
        ((0.9, 0.05, 0.05), [50, 3, 3]),
    ],
)
def test_shares_are_exact_and_rows_of_the_seed_come_once(processor, tmp_path, shares, used):
    sources = write_sources(tmp_path, {"a": 50, "b": 30, "c": 20}, shares)
    mixture = read_mixture(processor, sources)
    mixed_answers = answers(mixture.train)
    assert len(set(mixed_answers)) == len(mixed_answers)
    assert answers(read_mixture(processor, sources).train) == mixed_answers
    answers_of_another_seed = answers(read_mixture(processor, sources, seed=1).train)
    assert answers_of_another_seed != mixed_answers
    assert rows_of_each_source(mixed_answers) == used
    assert rows_of_each_source(answers_of_another_seed) == used
    assert [source.valid for source in mixture.report.sources] == [50, 30, 20]
    assert [source.used for source in mixture.report.sources] == used


@pytest.fixture
def sources(tmp_path):
    """20 rows with images, and 3 without."""
    return write_sources(tmp_path, {"a": 20, "b": 3})


@pytest.fixture
def load(processor, sources):
    """Reads the 20 rows for training with an evaluation."""

    def read(with_eval=True, **options):
        return train_data.read(sources[0]["path"], processor, with_eval=with_eval, **options)

    return read


def test_no_rows_are_held_out_without_an_evaluation(load):
    assert load(with_eval=False).eval is None


def test_a_share_of_the_rows_is_held_out_by_the_seed(load):
    data = load(test_split_size=0.2)
    held_out = answers(data.eval)
    assert len(data.train) == 16
    assert len(data.eval) == 4
    all_answers = [*answers(data.train), *held_out]
    assert set(all_answers) == {f"a{number}" for number in range(20)}
    assert answers(load(test_split_size=0.2).eval) == held_out
    assert answers(load(test_split_size=0.2, seed=1).eval) != held_out


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in memory"),
        pytest.param({"dataset_streaming": True}, id="streamed"),
        pytest.param({"test_split_size": 0.2}, id="not split"),
    ],
)
def test_held_out_rows_may_come_from_another_data_set(load, sources, options):
    train_path = sources[0]["path"]
    held_out_path = sources[1]["path"]
    data = load(eval_dataset_name=held_out_path, **options)
    assert answers(data.eval) == ["b0", "b1", "b2"]
    assert len(list(islice(data.train, 20))) == 20
    train_report, held_out_report = data.report.sources
    assert train_report.source == train_path
    assert train_report.split == "train"
    assert held_out_report.source == held_out_path
    assert held_out_report.split == "eval"


REMEDY = "eval_dataset_name or test_split_size, or leave eval_strategy at 'no'"


@pytest.mark.parametrize(
    "options, message",
    [
        pytest.param(
            {},
            f"no held-out data. .*a/data.json is one file, and has no split 'test'.*{REMEDY}",
            id="no split",
        ),
        pytest.param(
            {"test_split_size": 0.2, "dataset_streaming": True},
            "test_split_size needs data in memory.* Give eval_da",
            id="streamed",
        ),
    ],
)
def test_an_evaluation_without_held_out_rows_is_refused(load, options, message):
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_an_evaluation_of_a_mixture_without_held_out_rows_is_refused(processor, sources):
    with pytest.raises(ValueError, match=f"A mixture has no test split. .*{REMEDY}"):
        read_mixture(processor, sources, with_eval=True)


def read_batches(loader, count) -> list[dict]:
    batches = []
    for batch in islice(loader, count):
        batches.append({name: tensor.tolist() for name, tensor in batch.items()})
    return batches


@pytest.fixture
def stream_loader(processor, tmp_path):
    """Makes a loader of a streamed mixture in batches of four rows."""
    sources = write_sources(tmp_path, {"a": 60, "b": 40})

    def make_loader(workers=0, buffer_size=16):
        mixture = read_mixture(
            processor,
            sources,
            dataset_streaming=True,
            shuffle_buffer_size=buffer_size,
        )
        loader = DataLoader(
            mixture.train,
            4,
            num_workers=workers,
            collate_fn=ConversationCollator(processor),
        )
        return Accelerator(cpu=True).prepare(loader)

    return make_loader


def test_a_resumed_stream_continues_with_the_next_batches(stream_loader):
    expected = read_batches(stream_loader(), 40)[33:]  # both sources begin again on the way
    resumed_loader = skip_first_batches(stream_loader(), 33)
    assert read_batches(resumed_loader, 7) == expected
    # No batch is as without a buffer: so the buffer is resumed too.
    batches_in_order = read_batches(stream_loader(buffer_size=1), 40)
    for batch in expected:
        assert batch not in batches_in_order


def test_one_worker_is_all_that_a_stream_of_one_shard_can_use(stream_loader):
    # `datasets` seeds its buffer anew in a worker.
    expected = read_batches(stream_loader(workers=1), 5)
    assert read_batches(stream_loader(workers=2), 5) == expected


def test_the_epoch_reaches_the_sampler_within_accelerate_s():
    groups = SeededLengthGroups(LENGTHS[:16], 4, seed=3)
    sampler = BatchSamplerShard(BatchSampler(groups, 2, drop_last=False), num_processes=2)
    trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=4, max_steps=4),  # resumed at the end
        control=TrainerControl(),
    )
    NormAlignTrainer._run_epoch(trainer, None, 2, SimpleNamespace(batch_sampler=sampler))
    reference = SeededLengthGroups(LENGTHS[:16], 4, seed=3)
    assert list(groups) != list(reference)
    assert list(groups) == epoch_order(reference, 2)
    assert trainer.control.should_training_stop
