"""Batches without padding: the same losses and gradients, and passes of nearly equal size."""

import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import tiny
import torch
import training
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from datasets import Dataset, IterableDataset
from torch.nn import functional
from torch.utils.data import BatchSampler
from transformers import AutoProcessor, Gemma2Config, Lfm2Config, OPTConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.train import collator, samplers
from normalign_llava.train.callbacks.packed_attention import PackedAttentionCheck
from normalign_llava.train.prepare import accumulation_steps


IMAGES = [1, 0, 2, 1]  # in the rows of a batch
OPTIONS = dict(global_batch_size=6, max_steps=5, probe_steps=[0])
# AdamW would divide gradients that are 0 but for rounding by their own size.
OPTIONS |= dict(eval_strategy="steps", eval_steps=5, optim="sgd", learning_rate=0.1)
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
LENGTHS = random.Random(0).choices((20, 60, 300, 900), k=43)


def batches(checkpoint, images=IMAGES):
    """The same rows padded, and without padding."""
    padded = collator.ConversationCollator(AutoProcessor.from_pretrained(checkpoint))
    rows = list(training.rows(len(images), images.__getitem__))
    return [collate(rows) for collate in (padded, replace(padded, padding_free=True))]


def losses(model, batch):
    """The sum of the loss over each row, `(rows,)`."""
    labels = batch.pop("labels")
    positions = batch.get("position_ids")
    logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
    values = functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    if positions is None:
        return values.view(len(labels), -1).sum(1)
    rows = (positions[0] == 0).cumsum(0) - 1  # of every token
    return torch.zeros(rows[-1] + 1).index_add(0, rows, functional.pad(values, (1, 0)))


def loaded(checkpoint, attention="sdpa"):
    torch.manual_seed(0)
    options = {"attn_implementation": {"text_config": attention}}
    return NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind, images", [("sdpa", IMAGES), ("eager", IMAGES), ("sdpa", [0] * 3)])
def test_losses_and_gradients_are_those_of_the_padded_batch(checkpoint, kind, images):
    model = loaded(checkpoint, kind)
    sums = []
    gradients = []
    for batch in batches(checkpoint, images):
        model.zero_grad()
        sums.append(losses(model, batch))
        sums[-1].sum().backward()
        named = model.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    padded, free = gradients
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)
    assert free.keys() == padded.keys()
    # The gradient of a key's bias is 0 but for rounding.
    least = 1e-3 * max(value.norm() for value in padded.values())
    for name, gradient in padded.items():
        assert (free[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), least), name


@pytest.mark.slow
def test_flex_attention_keeps_rows_apart(checkpoint):
    padded, free = batches(checkpoint)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # on a CPU it has no backward
        expected = losses(loaded(checkpoint), padded)
        found = losses(loaded(checkpoint, "flex_attention"), dict(free))
        free["position_ids"] = torch.arange(free["input_ids"].shape[1])[None]
        mixed = losses(loaded(checkpoint, "flex_attention"), free)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (mixed - expected).abs().max() > 1e-2


def test_rows_of_a_sequence_have_their_places_and_no_label_after_another_row():
    """By hand: rows of 3 and 2 tokens, all of them labels, and an image."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
    padded = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]), "attention_mask": mask}
    images = torch.ones(1, 3, 2, 2)
    found = collator.without_padding({**padded, "labels": labels, "pixel_values": images})
    assert found.pop("pixel_values") is images
    assert {name: value.tolist() for name, value in found.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
    }


def sampler(count, rank=0, processes=1, drop_last=False, passes=2) -> samplers.BalancedSampler:
    """Without packing two passes of two rows a step in each process; in it, `passes`."""
    args = SimpleNamespace(train_batch_size=2, gradient_accumulation_steps=passes)
    args.global_batch_size = 4 * processes
    args.dataloader_drop_last = drop_last
    args.world_size = processes
    args.process_index = rank
    order = SeedableRandomSampler(range(count), data_seed=5)
    return samplers.BalancedSampler(order, LENGTHS[:count], args)


def test_rows_go_longest_first_to_the_pass_with_the_fewest_tokens():
    # By hand: 9, 7, 5 and 4 open passes; 3 joins 4, and 1 joins 5: 9, 7, 4 + 3, 5 + 1.
    assert samplers.balanced([4, 9, 1, 7, 5, 3], passes=4) == [[1], [3], [0, 5], [4, 2]]


def test_passes_of_two_processes_alternate_so_that_their_sums_are_close():
    # By hand: passes of 9, 7, 5 and 4 tokens. The first process has 9 and 4, the other 7 and 5.
    assert samplers.balanced([5, 9, 4, 7], passes=4, processes=2) == [[1], [3], [2], [0]]
    six = [20, 19, 14, 12, 8, 7]
    assert samplers.balanced(six, passes=6, processes=2) == [[0], [1], [3], [2], [4], [5]]


@pytest.mark.parametrize("passes", [1, 3, 8, 43])
def test_passes_differ_by_no_more_than_the_longest_row(passes):
    found = samplers.balanced(LENGTHS, passes)
    assert sorted(position for rows in found for position in rows) == list(range(43))
    tokens = [sum(LENGTHS[position] for position in rows) for rows in found]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[-1] > 0 and tokens[0] - tokens[-1] <= max(LENGTHS)


def rows_of_step(processes: list[list[list[int]]], step: int, passes: int) -> list[int]:
    """All rows of an optimizer step with so many passes in each process."""
    rows = []
    for of_process in processes:
        rows += chain.from_iterable(of_process[step * passes : (step + 1) * passes])
    return sorted(rows)


@pytest.mark.parametrize("passes", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("count", [5, 24, 41, 43])
def test_each_step_has_the_rows_that_accelerate_gives_without_packing(
    count, processes, drop_last, passes
):
    for epoch in (0, 1):
        padded = []
        packed = []
        for rank in range(processes):
            order = SeedableRandomSampler(range(count), data_seed=5)
            order.set_epoch(epoch)
            batches = BatchSampler(order, 2, drop_last)
            shard = BatchSamplerShard(batches, processes, rank) if processes > 1 else batches
            padded.append(list(shard))
            divided = sampler(count, rank, processes, drop_last, passes)
            divided.set_epoch(epoch)
            packed.append(list(divided))
            assert len(packed[-1]) == len(divided) == len(packed[0])
            assert all(packed[-1])  # no pass without a row
        steps = -(-len(padded[0]) // 2)
        assert -(-len(packed[0]) // passes) == steps  # as the Trainer counts them
        for step in range(steps):
            expected, got = (
                sorted(
                    row for own in which for rows in own[step * n : step * n + n] for row in rows
                )
                for which, n in ((padded, 2), (packed, passes))
            )
            assert got == expected


def arguments(tmp_path, **options):
    """Options as the trainer has them when the rows are known."""
    args = training.settings(tmp_path, packing=True, **options)
    args.gradient_accumulation_steps = accumulation_steps(args)
    args.global_batch_size = samplers.rows_in_step(args)
    return args


@pytest.mark.parametrize(
    "rows_in_pass, max_length", [(1, 900), (1, 1500), (2, 900), (2, 500), (8, 4000)]
)
def test_passes_are_the_fewest_in_which_no_pass_has_too_many_tokens(
    tmp_path, rows_in_pass, max_length
):
    options = dict(per_device_train_batch_size=rows_in_pass, global_batch_size=8, max_steps=-1)
    args = arguments(tmp_path, max_length=max_length, num_train_epochs=2.5, **options)
    rows = Dataset.from_dict({"length": LENGTHS})

    def largest(passes):
        sizes = []
        for epoch in range(3):  # a part of the third
            order = SeedableRandomSampler(range(43), data_seed=0)
            order.set_epoch(epoch)
            order = list(order)
            for start in range(0, 43, 8):
                step = [LENGTHS[row] for row in order[start : start + 8]]
                dealt = samplers.balanced(step, min(passes, len(step)))
                sizes += [sum(step[position] for position in own) for own in dealt]
        return max(sizes)

    found = samplers.passes_in_step(args, rows)
    assert largest(found) <= rows_in_pass * max_length
    assert found == 1 or largest(found - 1) > rows_in_pass * max_length
    args.max_length = 899 // rows_in_pass
    with pytest.raises(ValueError, match="A row has 900 tokens.*Set --max_length 900, or leave"):
        samplers.passes_in_step(args, rows)


def test_passes_are_those_of_the_epochs_that_max_steps_takes(tmp_path):
    rows = Dataset.from_dict(
        {"length": [900] * 8 + [100] * 35}
    )  # six steps of eight, the last of 3
    options = dict(per_device_train_batch_size=1, global_batch_size=8, max_length=900)

    def passes(steps, epochs):
        args = arguments(tmp_path, max_steps=steps, num_train_epochs=epochs, **options)
        return samplers.passes_in_step(args, rows)

    two = passes(-1, 2)
    three = passes(-1, 3)
    assert two < three == passes(-1, 2.5)
    assert [passes(steps, 1) for steps in (12, 13, 18)] == [two, three, three]
    assert passes(12, 50) == two


def test_rows_of_a_step_are_those_of_all_processes(tmp_path):
    args = SimpleNamespace(train_batch_size=2, gradient_accumulation_steps=3, world_size=2)
    for asked, rows in ((None, 12), (8, 8)):
        args.global_batch_size = asked
        assert samplers.rows_in_step(args) == rows


@pytest.mark.parametrize("processes, passes", [(1, 2), (2, 1)])
def test_processes_share_the_tokens_of_a_step(processes, passes):
    """By hand: four rows of 5 tokens, of which a pass holds two."""
    args = SimpleNamespace(train_batch_size=1, gradient_accumulation_steps=1, global_batch_size=4)
    args.world_size = processes
    args.process_index = 0
    args.dataloader_drop_last = False
    args.packing = True
    args.train_sampling_strategy = "sequential"
    args.max_length = 10
    args.seed = 0
    args.data_seed = None
    args.max_steps = -1
    args.num_train_epochs = 1
    rows = Dataset.from_dict({"length": [5] * 4})
    assert samplers.passes_in_step(args, rows) == passes


def test_the_order_of_rows_is_that_of_the_strategy_and_of_the_seed_for_data(tmp_path):
    rows = Dataset.from_dict({"length": LENGTHS})

    def order(packing=False, **own):
        options = dict(packing=packing, global_batch_size=8, seed=3, max_length=900, **own)
        args = training.settings(tmp_path, **options)
        sampler = samplers.train_sampler(args, rows)
        return list(sampler.steps()) if packing else list(sampler)

    grouped = {"train_sampling_strategy": "group_by_length"}
    for own, seed in ((grouped, 3), ({**grouped, "data_seed": 0}, 0)):
        expected = list(samplers.SeededLengthGroups(LENGTHS, 8, seed))
        assert order(**own) == expected
        assert list(chain(*order(packing=True, **own))) == expected
    steps = order(packing=True, train_sampling_strategy="sequential")
    assert list(chain(*steps)) == [*range(43)] and {len(step) for step in steps} == {8, 3}
    for seed, own in ((3, {}), (0, {"data_seed": 0})):
        assert list(chain(*order(packing=True, **own))) == list(
            SeedableRandomSampler(range(43), data_seed=seed)
        )
    args = training.settings(tmp_path)
    assert samplers.train_sampler(args, rows) is None  # the Trainer's own
    args = training.settings(tmp_path, **grouped)
    assert samplers.train_sampler(args, rows.rename_column("length", "other")) is None
    stream = IterableDataset.from_generator(lambda: iter([{"length": 3}]))
    assert stream.column_names is None and samplers.train_sampler(args, stream) is None


def test_packing_without_a_largest_number_of_tokens_is_refused(tmp_path, checkpoint):
    with pytest.raises(ValueError, match="packing fills .* up to max_length.* Set --max_length"):
        training.trainer(tmp_path, checkpoint, packing=True, max_length=None)


def test_a_language_model_that_mixes_rows_is_refused_before_the_first_step(tmp_path):
    sizes = {"word_embed_proj_dim": 32, "ffn_dim": 64}
    folder = training.checkpoint(tmp_path / "parts", cls=OPTConfig, **sizes)
    for own in ({"padding_free": True}, {"packing": True}):
        trainer = training.trainer(tmp_path / "run", folder, **own)
        with pytest.raises(ValueError, match="mix rows"):
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.mark.slow
def test_rows_of_a_step_are_packed_up_to_max_length(tmp_path, checkpoint):
    """Passes hold several rows, though one row was a pass, and steps stay what they were."""
    rows = training.rows(20, images=lambda number: number % 2, turns=lambda number: 1 + number % 3)
    rows = rows.select_columns(["images", "messages"])
    options = {**OPTIONS, "per_device_train_batch_size": 1, "eval_strategy": "no"}
    ended = []
    passes = []
    for own in ({}, {"packing": True, "max_length": 400}):
        trainer = training.trainer(tmp_path / f"{own}", checkpoint, rows, **options, **own)
        sizes = []

        def seen(module, args, kwargs, sizes=sizes):
            if module.training:
                sizes.append(kwargs["input_ids"].numel())

        trainer.model.register_forward_pre_hook(seen, with_kwargs=True)
        assert trainer.facts["steps"] == 5 and trainer.facts["batch"]["rows"] == 6
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
        ended.append((losses, norms, training.weights(trainer.model)))
        passes.append(sizes)
    longest = max(trainer.train_dataset.with_format(None)["length"][:])
    assert len(passes[0]) == 3 * 6 + 2 + 6 and max(passes[0]) == longest  # 20 rows an epoch
    accumulation = trainer.args.gradient_accumulation_steps
    assert len(passes[1]) == 4 * accumulation + min(2, accumulation) <= 14
    assert sum(passes[1]) == sum(passes[0])
    assert longest < max(passes[1]) <= 400
    assert ended[1][0] == pytest.approx(ended[0][0], rel=1e-5)
    assert ended[1][1] == pytest.approx(ended[0][1], rel=1e-4)
    for name, weight in ended[0][2].items():
        off = (ended[1][2][name] - weight).norm()
        assert off <= 1e-5 * weight.norm() + 1e-7, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, options",
    [
        ("padding_free", {"gradient_checkpointing": True, **BY_LENGTH}),
        ("padding_free", dict(use_peft=True, lora_r=2, lora_dropout=0.0, load_in_4bit=True)),
        ("packing", BY_LENGTH),
    ],
)
def test_a_run_ends_as_with_padding(tmp_path, checkpoint, how, options):
    rows = training.rows(20, images=lambda number: number % 3, turns=lambda number: 1 + number % 4)
    rows = rows.select_columns(["images", "messages"])  # of which the trainer counts the tokens
    options = {**OPTIONS, **options, "held_out": training.rows(5, images=lambda number: number % 2)}
    losses = []
    weights = []
    for own in ({}, {how: True}):
        torch.manual_seed(0)  # for adapters
        trainer = training.trainer(tmp_path / f"{own}", checkpoint, rows, **options, **own)
        assert trainer.facts["batch"]["packed"] == ("packing" in own)
        trainer.train()
        log = trainer.state.log_history
        losses.append([line[key] for line in log for key in line if key.endswith("loss")])
        weights.append(training.weights(trainer.model))
    assert len(losses[0]) == 7  # of steps, held out, the mean
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, weight in weights[0].items():
        off = (weights[1][name].double() - weight.double()).norm()  # of 4-bit layers, bytes
        assert off <= 1e-5 * weight.double().norm() + 1e-7, name


@pytest.mark.parametrize(
    "cls, settings, apart",
    [
        (Gemma2Config, {"sliding_window": 4}, True),
        (Lfm2Config, {"layer_types": ["conv", "full_attention"]}, False),
        (OPTConfig, {"word_embed_proj_dim": 32, "ffn_dim": 64}, False),
    ],
)
def test_a_language_model_that_mixes_rows_is_refused_by_its_name(tmp_path, cls, settings, apart):
    model = tiny.model(text=tiny.text_config(cls=cls, **settings))
    refused = pytest.raises(ValueError, match=rf"padding_free .* {cls.model_type}\. Leave it out")
    with nullcontext() if apart else refused:
        check = PackedAttentionCheck()
        args = training.settings(tmp_path)
        check.on_train_begin(args, None, None, model=model)


def test_dropout_is_not_taken_for_rows_that_mix(tmp_path):
    model = tiny.model(text=tiny.text_config(attention_dropout=0.9)).train()
    check = PackedAttentionCheck()
    args = training.settings(tmp_path)
    check.on_train_begin(args, None, None, model=model)
    assert all(module.training for module in model.modules())


class Leaks(torch.nn.Module):
    """Changes the logits of a row behind others by a share of their norm, and by another share
    if the first of the others is another row.
    """

    def __init__(self, by_place: float, by_others: float):
        super().__init__()
        self.config = tiny.text_config()
        self.by_place = by_place
        self.by_others = by_others

    def forward(self, input_ids, position_ids, use_cache):
        logits = functional.one_hot(input_ids, 16).float()  # 6 logits of 96 are 1
        if input_ids.shape[1] > 6:
            logits = logits + self.by_place / 4
        if input_ids[0, 0] == 6:
            logits = logits + self.by_others / 4
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("half", [None, "bf16", "fp16"])
def test_rows_are_apart_but_for_rounding_in_the_precision_of_steps(half):
    args = SimpleNamespace(device=torch.device("cpu"), bf16=half == "bf16", fp16=half == "fp16")
    place, others = (0.05, 0.01) if half else (1e-3, 1e-5)
    check = PackedAttentionCheck()
    check.on_train_begin(args, None, None, model=Leaks(0.8 * place, 0.8 * others))
    for leaks in (Leaks(1.2 * place, 0.0), Leaks(0.0, 1.2 * others)):
        with pytest.raises(ValueError, match="padding_free would mix rows in a llama"):
            check.on_train_begin(args, None, None, model=leaks)
