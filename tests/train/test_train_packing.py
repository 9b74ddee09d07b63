"""Packing: forward passes of nearly equal numbers of tokens, of the rows that each step has without it."""

import random

import pytest
import training
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler

from normalign_llava.train.packing import BalancedSampler, balanced


LENGTHS = [random.Random(0).choice((20, 60, 300, 900)) for _ in range(43)]


def sampler(count=43, *, rank=0, processes=1, rows_per_pass=2, accumulation=2, drop_last=False) -> BalancedSampler:
    return BalancedSampler(
        SeedableRandomSampler(range(count), data_seed=5),
        LENGTHS[:count],
        rows_per_step=rows_per_pass * accumulation * processes,
        rows_per_pass=rows_per_pass,
        accumulation=accumulation,
        processes=processes,
        rank=rank,
        drop_last=drop_last,
    )


def test_rows_go_longest_first_to_the_pass_with_the_fewest_tokens():
    # By hand: 9, 7, 5 and 4 open a pass each; 3 joins 4, and 1 joins 5. Sums, largest first: 9, 7, 4 + 3, 5 + 1.
    assert balanced([4, 9, 1, 7, 5, 3], passes=4) == [[1], [3], [0, 5], [4, 2]]


@pytest.mark.parametrize("passes", [1, 3, 8, 43])
def test_passes_differ_by_no_more_than_the_longest_row(passes):
    found = balanced(LENGTHS, passes)
    assert sorted(position for rows in found for position in rows) == list(range(43))
    tokens = [sum(LENGTHS[position] for position in rows) for rows in found]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] - tokens[-1] <= max(LENGTHS) and tokens[-1] > 0


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("count", [5, 24, 41, 43])
def test_each_step_has_the_rows_that_accelerate_gives_without_packing(count, processes, drop_last):
    rows_per_pass = accumulation = 2
    for epoch in (0, 1):
        given, packed = [], []
        for rank in range(processes):
            order = SeedableRandomSampler(range(count), data_seed=5)
            order.set_epoch(epoch)
            batches = BatchSampler(order, rows_per_pass, drop_last)
            given.append(list(BatchSamplerShard(batches, processes, rank) if processes > 1 else batches))
            balanced_sampler = sampler(count, rank=rank, processes=processes, drop_last=drop_last)
            balanced_sampler.set_epoch(epoch)
            packed.append(list(balanced_sampler))
            assert len(packed[-1]) == len(balanced_sampler)
        assert len({len(passes) for passes in packed}) == 1
        assert [len(passes) for passes in packed] == [len(batches) for batches in given]
        for start in range(0, len(packed[0]), accumulation):
            expected, found = (
                sorted(row for each in which for rows in each[start : start + accumulation] for row in rows)
                for which in (given, packed)
            )
            assert found == expected


OPTIONS = {"global_batch_size": 6, "max_steps": 5, "optim": "sgd", "learning_rate": 0.1, "logging_steps": 1}


def rows_of_different_lengths(checkpoint):
    data = training.rows(20, images=lambda number: number % 3, turns=lambda number: 1 + number % 4)
    return data.select_columns(["images", "messages"])  # of which the trainer counts the tokens


def ended(trainer):
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, training.weights(trainer.model)


def assert_same(found, expected, tolerance=1e-5):
    assert found[0] == pytest.approx(expected[0], rel=tolerance) and len(found[0]) == 5
    for name, weight in expected[1].items():
        assert (found[1][name] - weight).norm() <= tolerance * weight.norm() + 1e-7, name


@pytest.mark.slow
def test_packing_keeps_the_steps_of_another_sampler(tmp_path, checkpoint):
    data, ends = rows_of_different_lengths(checkpoint), []
    options = {**OPTIONS, "train_sampling_strategy": "group_by_length"}
    for packing in (False, True):
        trainer = training.trainer(tmp_path / str(packing), checkpoint, data, packing=packing, **options)
        trainer.train()
        ends.append(ended(trainer))
    assert_same(*reversed(ends))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"padding_free": True, "neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"packing": True, "average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"packing": True, "accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler"),
        ({"packing": True, "pad_to_multiple_of": 8}, "pad_to_multiple_of"),
        ({"packing": True, "train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    ],
)
def test_options_that_contradict_packing_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        training.arguments(tmp_path, **options)
