"""Packing: forward passes of nearly equal numbers of tokens, of the rows that each step has without it."""

import random

import pytest
import training
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler

from normalign_llava.train.packing import BalancedSampler, balanced
from normalign_llava.train.prepare import accumulation_steps


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


def test_accumulation_is_the_least_with_which_no_pass_has_more_tokens():
    def largest(accumulation, epochs):
        sizes = []
        for epoch in range(epochs):
            order = SeedableRandomSampler(range(43), data_seed=5)
            order.set_epoch(epoch)
            rows = list(order)
            for start in range(0, 43, 8):
                step = [LENGTHS[row] for row in rows[start : start + 8]]
                sizes += [sum(step[i] for i in part) for part in balanced(step, min(accumulation, len(step)))]
        return max(sizes)

    balanced_sampler = sampler(rows_per_pass=1, accumulation=8)
    balanced_sampler.grad_accum = 1
    found = balanced_sampler.fit(1500, epochs=3)
    assert found > 1 and largest(found, 3) <= 1500 < largest(found - 1, 3)
    with pytest.raises(ValueError, match="the longest row has 900 tokens, more than tokens_per_device 899"):
        balanced_sampler.fit(899, epochs=1)


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
def test_tokens_per_device_changes_no_step(tmp_path, checkpoint):
    data = rows_of_different_lengths(checkpoint)
    unpacked = training.trainer(tmp_path / "unpacked", checkpoint, data, **OPTIONS)
    unpacked.train()
    tokens = 2 * max(unpacked.train_dataset.with_format(None)["length"])
    options = {**OPTIONS, "packing": True, "tokens_per_device": tokens, "per_device_train_batch_size": None}
    packed = training.trainer(tmp_path / "packed", checkpoint, data, **options)
    assert packed.facts["batch"]["rows"] == 6 and packed.facts["steps"] == 5
    assert packed.args.gradient_accumulation_steps > 1
    sizes = []
    packed.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    packed.train()
    assert max(sizes) <= tokens < sum(sizes) / 5
    assert_same(ended(packed), ended(unpacked))


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
        ({"tokens_per_device": 512, "per_device_train_batch_size": None}, "Add packing"),
        ({"tokens_per_device": 512, "packing": True}, "Set global_batch_size"),
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


def test_the_rows_of_a_step_are_dealt_to_all_processes(tmp_path):
    args = training.arguments(tmp_path, packing=True, tokens_per_device=512, global_batch_size=3)
    assert accumulation_steps(args, world_size=3) == 1
    with pytest.raises(ValueError, match="global_batch_size 3"):
        accumulation_steps(args, world_size=2)
