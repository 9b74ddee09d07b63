"""Batches without padding: the same losses and gradients, and passes of nearly equal size."""

import random
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
from normalign_llava.train.callbacks.checks import PackedAttentionCheck
from normalign_llava.train.prepare import accumulation_steps


IMAGE_COUNTS = [1, 0, 2, 1]  # images in each row of a batch
OPTIONS = {
    "global_batch_size": 6,
    "max_steps": 5,
    "probe_steps": [0],
    "eval_strategy": "steps",
    "eval_steps": 5,
    # AdamW would divide gradients that are 0 but for rounding by their own size.
    "optim": "sgd",
    "learning_rate": 0.1,
}
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
LENGTHS = random.Random(0).choices((20, 60, 300, 900), k=43)
ROW_COUNT = len(LENGTHS)


def padded_and_padding_free(checkpoint, image_counts=IMAGE_COUNTS):
    """The same rows as a padded batch and as a batch without padding."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    collate_padded = collator.ConversationCollator(processor)
    collate_free = replace(collate_padded, padding_free=True)
    dataset = training.rows(len(image_counts), image_counts.__getitem__)
    samples = list(dataset)
    return collate_padded(samples), collate_free(samples)


def loss_of_each_row(model, batch):
    """The sum of the loss over each row, `(rows,)`."""
    labels = batch.pop("labels")
    position_ids = batch.get("position_ids")
    logits = model(**batch, use_cache=False).logits[:, :-1]
    token_losses = functional.cross_entropy(
        logits.flatten(0, 1),
        labels[:, 1:].flatten(),
        reduction="none",
    )
    if position_ids is None:
        return token_losses.view(len(labels), -1).sum(1)
    starts = position_ids[0] == 0
    row_of_token = starts.cumsum(0) - 1
    row_count = row_of_token[-1] + 1
    token_losses = functional.pad(token_losses, (1, 0))
    return torch.zeros(row_count).index_add(0, row_of_token, token_losses)


def load_model(checkpoint, attention="sdpa"):
    torch.manual_seed(0)
    return NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint,
        attn_implementation={"text_config": attention},
    )


def named_gradients(model):
    gradients = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[parameter_name] = parameter.grad.clone()
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention, image_counts",
    [
        pytest.param("sdpa", IMAGE_COUNTS, id="sdpa"),
        pytest.param("eager", IMAGE_COUNTS, id="eager"),
        pytest.param("sdpa", [0, 0, 0], id="sdpa, no images"),
    ],
)
def test_losses_and_gradients_equal_the_padded_batch_s(checkpoint, attention, image_counts):
    model = load_model(checkpoint, attention)
    row_losses = []
    gradients = []
    for batch in padded_and_padding_free(checkpoint, image_counts):
        model.zero_grad()
        losses = loss_of_each_row(model, batch)
        losses.sum().backward()
        row_losses.append(losses)
        gradients.append(named_gradients(model))
    expected_losses = row_losses[0]
    losses = row_losses[1]
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    expected_gradients = gradients[0]
    free_gradients = gradients[1]
    assert free_gradients.keys() == expected_gradients.keys()
    # The gradient of a key's bias is 0 but for rounding.
    smallest_norm = 1e-3 * max(gradient.norm() for gradient in expected_gradients.values())
    for parameter_name, expected in expected_gradients.items():
        difference = free_gradients[parameter_name] - expected
        allowed = 1e-5 * max(expected.norm(), smallest_norm)
        assert difference.norm() <= allowed, parameter_name


@pytest.mark.slow
def test_flex_attention_keeps_rows_apart(checkpoint):
    padded_batch, free_batch = padded_and_padding_free(checkpoint)
    token_count = free_batch["input_ids"].shape[1]
    batch_of_one_row = {
        **free_batch,
        "position_ids": torch.arange(token_count)[None],
    }
    flex_model = load_model(checkpoint, "flex_attention")
    # On a CPU flex attention has no backward.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = loss_of_each_row(load_model(checkpoint), padded_batch)
        row_losses = loss_of_each_row(flex_model, free_batch)
        mixed_losses = loss_of_each_row(flex_model, batch_of_one_row)
    torch.testing.assert_close(row_losses, expected, rtol=1e-5, atol=1e-5)
    difference = (mixed_losses - expected).abs()
    assert difference.max() > 1e-2


def test_rows_of_a_sequence_have_their_places_and_no_label_after_another_row():
    """By hand: rows of 3 and 2 tokens, all of them labels, and an image."""
    pixel_values = torch.ones(1, 3, 2, 2)
    padded_batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "labels": torch.tensor([[5, 6, 7], [8, 9, -100]]),
        "pixel_values": pixel_values,
    }
    free_batch = collator.without_padding(padded_batch)
    assert free_batch.pop("pixel_values") is pixel_values
    found = {name: tensor.tolist() for name, tensor in free_batch.items()}
    assert found == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
    }


def balanced_sampler(
    row_count,
    rank=0,
    processes=1,
    drop_last=False,
    passes=2,
) -> samplers.BalancedSampler:
    """Without packing two passes of two rows a step in each process; in it, `passes`."""
    options = SimpleNamespace(
        train_batch_size=2,
        gradient_accumulation_steps=passes,
        global_batch_size=4 * processes,
        dataloader_drop_last=drop_last,
        world_size=processes,
        process_index=rank,
    )
    row_order = SeedableRandomSampler(range(row_count), data_seed=5)
    return samplers.BalancedSampler(row_order, LENGTHS[:row_count], options)


def balanced(lengths, passes, processes=1):
    """The rows of each pass of a step that has all rows."""
    options = SimpleNamespace(
        train_batch_size=1,
        gradient_accumulation_steps=passes // processes,
        global_batch_size=len(lengths),
        dataloader_drop_last=False,
        world_size=processes,
        process_index=0,
    )
    rows = range(len(lengths))
    return samplers.BalancedSampler(rows, lengths, options).passes(rows)


def test_rows_go_longest_first_to_the_pass_with_the_fewest_tokens():
    # By hand: 9, 7, 5 and 4 open passes; 3 joins 4, and 1 joins 5: 9, 7, 4 + 3, 5 + 1.
    assert balanced([4, 9, 1, 7, 5, 3], passes=4) == [[1], [3], [0, 5], [4, 2]]


@pytest.mark.parametrize(
    "lengths, expected",
    [
        # By hand: the first process has 9 and 4 tokens, the other 7 and 5.
        pytest.param([5, 9, 4, 7], [[1], [3], [2], [0]], id="4 passes"),
        pytest.param(
            [20, 19, 14, 12, 8, 7],
            [[0], [1], [3], [2], [4], [5]],
            id="6 passes",
        ),
    ],
)
def test_passes_of_two_processes_alternate_so_that_their_sums_are_close(lengths, expected):
    assert balanced(lengths, passes=len(lengths), processes=2) == expected


@pytest.mark.parametrize("passes", [1, 3, 8, 43])
def test_passes_differ_by_no_more_than_the_longest_row(passes):
    rows_of_passes = balanced(LENGTHS, passes)
    positions = chain.from_iterable(rows_of_passes)
    assert sorted(positions) == list(range(ROW_COUNT))
    token_counts = []
    for pass_rows in rows_of_passes:
        token_counts.append(sum(LENGTHS[position] for position in pass_rows))
    assert token_counts == sorted(token_counts, reverse=True)
    most = token_counts[0]
    fewest = token_counts[-1]
    assert fewest > 0
    assert most - fewest <= max(LENGTHS)


def rows_of_step(processes: list[list[list[int]]], step: int, passes: int) -> list[int]:
    """All rows of an optimizer step with so many passes in each process."""
    step_rows = []
    for process_passes in processes:
        step_passes = process_passes[step * passes : (step + 1) * passes]
        step_rows += chain.from_iterable(step_passes)
    return sorted(step_rows)


def batches_without_packing(row_count, rank, processes, drop_last, epoch):
    """Accelerate's batches of two rows for a process."""
    row_order = SeedableRandomSampler(range(row_count), data_seed=5)
    row_order.set_epoch(epoch)
    batches = BatchSampler(row_order, 2, drop_last)
    if processes > 1:
        batches = BatchSamplerShard(batches, processes, rank)
    return list(batches)


@pytest.mark.parametrize("passes", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("row_count", [5, 24, 41, 43])
@pytest.mark.parametrize("epoch", [0, 1])
def test_each_step_has_the_rows_that_accelerate_gives_without_packing(
    epoch, row_count, processes, drop_last, passes
):
    padded_batches = []
    packed_batches = []
    for rank in range(processes):
        padded_batches.append(
            batches_without_packing(row_count, rank, processes, drop_last, epoch),
        )
        sampler = balanced_sampler(row_count, rank, processes, drop_last, passes)
        sampler.set_epoch(epoch)
        process_passes = list(sampler)
        packed_batches.append(process_passes)
        assert len(process_passes) == len(sampler)
        assert len(sampler) == len(packed_batches[0])
        assert all(process_passes)  # no pass without a row
    # The Trainer counts the steps like this.
    step_count = -(-len(padded_batches[0]) // 2)
    packed_step_count = -(-len(packed_batches[0]) // passes)
    assert packed_step_count == step_count
    for step in range(step_count):
        expected = rows_of_step(padded_batches, step, passes=2)
        assert rows_of_step(packed_batches, step, passes) == expected


def packing_options(tmp_path, **options):
    """Options as the trainer has them when the rows are known."""
    run_config = training.settings(tmp_path, packing=True, **options)
    run_config.gradient_accumulation_steps = accumulation_steps(run_config)
    run_config.global_batch_size = samplers.rows_in_step(run_config)
    return run_config


def largest_pass(passes_in_step):
    """The most tokens in a pass of 2.5 epochs in steps of 8 rows: the third epoch counts whole."""
    token_counts = []
    for epoch in range(3):
        sampler = SeedableRandomSampler(range(ROW_COUNT), data_seed=0)
        sampler.set_epoch(epoch)
        row_order = list(sampler)
        for start in range(0, ROW_COUNT, 8):
            step_lengths = [LENGTHS[number] for number in row_order[start : start + 8]]
            passes = min(passes_in_step, len(step_lengths))
            for pass_rows in balanced(step_lengths, passes):
                token_counts.append(sum(step_lengths[position] for position in pass_rows))
    return max(token_counts)


LENGTH_LIMITS = [(1, 900), (1, 1500), (2, 900), (2, 500), (8, 4000)]


def length_limit_options(tmp_path, rows_in_pass, max_length):
    return packing_options(
        tmp_path,
        per_device_train_batch_size=rows_in_pass,
        global_batch_size=8,
        max_length=max_length,
        max_steps=-1,
        num_train_epochs=2.5,
    )


@pytest.mark.parametrize("rows_in_pass, max_length", LENGTH_LIMITS)
def test_passes_are_the_fewest_in_which_no_pass_has_too_many_tokens(
    tmp_path, rows_in_pass, max_length
):
    train_options = length_limit_options(tmp_path, rows_in_pass, max_length)
    dataset = Dataset.from_dict({"length": LENGTHS})
    passes = samplers.passes_in_step(train_options, dataset)
    token_limit = rows_in_pass * max_length
    assert largest_pass(passes) <= token_limit
    assert passes == 1 or largest_pass(passes - 1) > token_limit


@pytest.mark.parametrize("rows_in_pass, max_length", LENGTH_LIMITS)
def test_a_row_that_is_longer_than_a_pass_is_refused(tmp_path, rows_in_pass, max_length):
    train_options = length_limit_options(tmp_path, rows_in_pass, max_length)
    train_options.max_length = 899 // rows_in_pass
    dataset = Dataset.from_dict({"length": LENGTHS})
    with pytest.raises(ValueError, match="A row has 900 tokens.*Set --max_length 900, or leave"):
        samplers.passes_in_step(train_options, dataset)


def test_passes_suit_the_epochs_that_max_steps_takes(tmp_path):
    # An epoch is six steps: five of eight rows, the last of three.
    dataset = Dataset.from_dict({"length": [900] * 8 + [100] * 35})

    def passes_in_step(max_steps, epochs):
        train_options = packing_options(
            tmp_path,
            per_device_train_batch_size=1,
            global_batch_size=8,
            max_length=900,
            max_steps=max_steps,
            num_train_epochs=epochs,
        )
        return samplers.passes_in_step(train_options, dataset)

    two_epochs = passes_in_step(-1, 2)
    three_epochs = passes_in_step(-1, 3)
    assert two_epochs < three_epochs
    assert passes_in_step(-1, 2.5) == three_epochs
    assert passes_in_step(12, 1) == two_epochs
    assert passes_in_step(13, 1) == three_epochs
    assert passes_in_step(18, 1) == three_epochs
    assert passes_in_step(12, 50) == two_epochs


@pytest.mark.parametrize("global_batch_size, expected", [(None, 12), (8, 8)])
def test_rows_of_a_step_are_counted_over_all_processes(global_batch_size, expected):
    train_options = SimpleNamespace(
        train_batch_size=2,
        gradient_accumulation_steps=3,
        world_size=2,
        global_batch_size=global_batch_size,
    )
    assert samplers.rows_in_step(train_options) == expected


@pytest.mark.parametrize("processes, expected", [(1, 2), (2, 1)])
def test_processes_share_the_tokens_of_a_step(processes, expected):
    """By hand: four rows of 5 tokens, of which a pass holds two."""
    train_options = SimpleNamespace(
        train_batch_size=1,
        gradient_accumulation_steps=1,
        global_batch_size=4,
        world_size=processes,
        process_index=0,
        dataloader_drop_last=False,
        packing=True,
        train_sampling_strategy="sequential",
        max_length=10,
        seed=0,
        data_seed=None,
        max_steps=-1,
        num_train_epochs=1,
    )
    dataset = Dataset.from_dict({"length": [5] * 4})
    assert samplers.passes_in_step(train_options, dataset) == expected


def train_sampler(tmp_path, packing=False, **options):
    """The sampler of a run with seed 3 and eight rows a step."""
    train_options = training.settings(
        tmp_path,
        packing=packing,
        global_batch_size=8,
        seed=3,
        max_length=900,
        **options,
    )
    dataset = Dataset.from_dict({"length": LENGTHS})
    return samplers.train_sampler(train_options, dataset)


def packed_steps(tmp_path, **options):
    """The rows of each step with packing."""
    return list(train_sampler(tmp_path, packing=True, **options).steps())


@pytest.mark.parametrize("seed_options, seed", [({}, 3), ({"data_seed": 0}, 0)])
def test_length_groups_follow_the_seed_for_data_with_and_without_packing(
    tmp_path, seed_options, seed
):
    options = {**BY_LENGTH, **seed_options}
    expected = list(samplers.SeededLengthGroups(LENGTHS, 8, seed))
    assert list(train_sampler(tmp_path, **options)) == expected
    steps = packed_steps(tmp_path, **options)
    assert list(chain(*steps)) == expected


def test_packed_steps_in_the_order_of_the_data_are_of_eight_rows(tmp_path):
    steps = packed_steps(tmp_path, train_sampling_strategy="sequential")
    assert list(chain(*steps)) == list(range(ROW_COUNT))
    step_sizes = {len(step) for step in steps}
    assert step_sizes == {8, 3}


@pytest.mark.parametrize("seed_options, seed", [({}, 3), ({"data_seed": 0}, 0)])
def test_packed_steps_are_shuffled_by_the_seed_for_data(tmp_path, seed_options, seed):
    expected = list(SeedableRandomSampler(range(ROW_COUNT), data_seed=seed))
    steps = packed_steps(tmp_path, **seed_options)
    assert list(chain(*steps)) == expected


def test_the_sampler_of_the_trainer_is_kept_if_none_is_needed(tmp_path):
    dataset = Dataset.from_dict({"length": LENGTHS})
    train_options = training.settings(tmp_path)
    assert samplers.train_sampler(train_options, dataset) is None


def test_rows_without_lengths_are_not_grouped_here(tmp_path):
    dataset = Dataset.from_dict({"other": LENGTHS})
    train_options = training.settings(tmp_path, **BY_LENGTH)
    assert samplers.train_sampler(train_options, dataset) is None


def test_streams_are_not_grouped_by_length(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter([{"length": 3}]))
    assert stream.column_names is None
    train_options = training.settings(tmp_path, **BY_LENGTH)
    assert samplers.train_sampler(train_options, stream) is None


def test_packing_without_a_largest_number_of_tokens_is_refused(tmp_path, checkpoint):
    with pytest.raises(ValueError, match="packing fills .* up to max_length.* Set --max_length"):
        training.trainer(tmp_path, checkpoint, packing=True, max_length=None)


@pytest.mark.parametrize("option", ["padding_free", "packing"])
def test_a_language_model_that_mixes_rows_is_refused_before_the_first_step(tmp_path, option):
    mixing_checkpoint = training.checkpoint(
        tmp_path / "parts",
        cls=OPTConfig,
        word_embed_proj_dim=32,
        ffn_dim=64,
    )
    trainer = training.trainer(tmp_path / "run", mixing_checkpoint, **{option: True})
    with pytest.raises(ValueError, match="mix rows"):
        trainer.train()
    assert trainer.state.global_step == 0


def record_pass_sizes(model) -> list[int]:
    """Of each training pass from now on, the number of tokens."""
    sizes = []

    def record(module, arguments, keywords):
        if module.training:
            sizes.append(keywords["input_ids"].numel())

    model.register_forward_pre_hook(record, with_kwargs=True)
    return sizes


def logged(trainer, key):
    """The values of a key in the trainer's log."""
    return [line[key] for line in trainer.state.log_history if key in line]


def assert_weights_are_close(weights, expected_weights):
    # The weights of 4-bit layers are bytes: compare as doubles.
    for parameter_name, expected in expected_weights.items():
        expected = expected.double()
        difference = weights[parameter_name].double() - expected
        assert difference.norm() <= 1e-5 * expected.norm() + 1e-7, parameter_name


@pytest.mark.slow
def test_rows_of_a_step_are_packed_up_to_max_length(tmp_path, checkpoint):
    """Passes hold several rows, though one row was a pass, and steps stay what they were."""
    dataset = training.rows(
        20,
        images=lambda number: number % 2,
        turns=lambda number: 1 + number % 3,
    )
    dataset = dataset.select_columns(["images", "messages"])
    options = {
        **OPTIONS,
        "per_device_train_batch_size": 1,
        "eval_strategy": "no",
    }
    trainers = []
    sizes_of_passes = []
    for packing_options in ({}, {"packing": True, "max_length": 400}):
        run_folder = tmp_path / f"{packing_options}"
        trainer = training.trainer(run_folder, checkpoint, dataset, **options, **packing_options)
        assert trainer.facts["steps"] == 5
        assert trainer.facts["batch"]["rows"] == 6
        sizes_of_passes.append(record_pass_sizes(trainer.model))
        trainer.train()
        trainers.append(trainer)
    reference = trainers[0]
    packed = trainers[1]
    reference_sizes = sizes_of_passes[0]
    packed_sizes = sizes_of_passes[1]
    longest_row = max(packed.train_dataset.with_format(None)["length"][:])
    # An epoch of 20 rows has steps of 6, 6, 6 and 2 rows; the fifth step is of the next epoch.
    assert len(reference_sizes) == 3 * 6 + 2 + 6
    assert max(reference_sizes) == longest_row
    accumulation = packed.args.gradient_accumulation_steps
    assert len(packed_sizes) == 4 * accumulation + min(2, accumulation)
    assert len(packed_sizes) <= 14
    assert sum(packed_sizes) == sum(reference_sizes)
    assert longest_row < max(packed_sizes) <= 400
    assert logged(packed, "loss") == pytest.approx(logged(reference, "loss"), rel=1e-5)
    expected_norms = pytest.approx(logged(reference, "grad_norm"), rel=1e-4)
    assert logged(packed, "grad_norm") == expected_norms
    expected_weights = training.weights(reference.model)
    assert_weights_are_close(training.weights(packed.model), expected_weights)


def all_losses(trainer):
    """Of each step, of the rows held out, and the mean."""
    losses = []
    for line in trainer.state.log_history:
        losses += [line[key] for key in line if key.endswith("loss")]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, more_options",
    [
        pytest.param(
            "padding_free",
            {"gradient_checkpointing": True, **BY_LENGTH},
            id="padding_free",
        ),
        pytest.param(
            "padding_free",
            {
                "use_peft": True,
                "lora_r": 2,
                "lora_dropout": 0.0,
                "load_in_4bit": True,
            },
            id="padding_free, 4-bit",
        ),
        pytest.param("packing", BY_LENGTH, id="packing"),
    ],
)
def test_a_run_ends_as_with_padding(tmp_path, checkpoint, option, more_options):
    dataset = training.rows(
        20,
        images=lambda number: number % 3,
        turns=lambda number: 1 + number % 4,
    )
    # The trainer counts the tokens of rows without a length.
    dataset = dataset.select_columns(["images", "messages"])
    options = {
        **OPTIONS,
        **more_options,
        "held_out": training.rows(5, images=lambda number: number % 2),
    }
    losses = []
    weights = []
    for padding_options in ({}, {option: True}):
        torch.manual_seed(0)  # for adapters
        run_folder = tmp_path / f"{padding_options}"
        trainer = training.trainer(run_folder, checkpoint, dataset, **options, **padding_options)
        assert trainer.facts["batch"]["packed"] == ("packing" in padding_options)
        trainer.train()
        losses.append(all_losses(trainer))
        weights.append(training.weights(trainer.model))
    assert len(losses[0]) == 7  # 5 steps, held out, the mean
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_weights_are_close(weights[1], expected_weights=weights[0])


def check_before_training(train_options, model):
    PackedAttentionCheck().on_train_begin(train_options, None, None, model=model)


def test_a_language_model_that_keeps_rows_apart_is_accepted(tmp_path):
    text_config = tiny.text_config(cls=Gemma2Config, sliding_window=4)
    model = tiny.model(text=text_config)
    check_before_training(training.settings(tmp_path), model)


@pytest.mark.parametrize(
    "config_class, sizes",
    [
        pytest.param(Lfm2Config, {"layer_types": ["conv", "full_attention"]}, id="lfm2"),
        pytest.param(OPTConfig, {"word_embed_proj_dim": 32, "ffn_dim": 64}, id="opt"),
    ],
)
def test_a_language_model_that_mixes_rows_is_refused_by_its_name(tmp_path, config_class, sizes):
    text_config = tiny.text_config(cls=config_class, **sizes)
    model = tiny.model(text=text_config)
    train_options = training.settings(tmp_path)
    message = rf"padding_free .* {config_class.model_type}\. Leave it out"
    with pytest.raises(ValueError, match=message):
        check_before_training(train_options, model)


def test_dropout_is_not_taken_for_rows_that_mix(tmp_path):
    text_config = tiny.text_config(attention_dropout=0.9)
    model = tiny.model(text=text_config)
    model.train()
    check_before_training(training.settings(tmp_path), model)
    assert all(module.training for module in model.modules())


class LeakingModel(torch.nn.Module):
    """Changes the logits of a row behind others by a share of their norm, and by another share
    if the first of the others is another row.
    """

    def __init__(self, share_of_place: float, share_of_others: float):
        super().__init__()
        self.config = tiny.text_config()
        self.share_of_place = share_of_place
        self.share_of_others = share_of_others

    def forward(self, input_ids, position_ids, use_cache):
        logits = functional.one_hot(input_ids, 16).float()  # 6 logits of 96 are 1
        if input_ids.shape[1] > 6:
            logits = logits + self.share_of_place / 4
        if input_ids[0, 0] == 6:
            logits = logits + self.share_of_others / 4
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(
    "precision, allowed_place, allowed_others",
    [
        pytest.param(None, 1e-3, 1e-5, id="float32"),
        pytest.param("bf16", 0.05, 0.01, id="bf16"),
        pytest.param("fp16", 0.05, 0.01, id="fp16"),
    ],
)
def test_rows_are_apart_but_for_rounding_in_the_precision_of_steps(
    precision, allowed_place, allowed_others
):
    train_options = SimpleNamespace(
        device=torch.device("cpu"),
        bf16=precision == "bf16",
        fp16=precision == "fp16",
    )
    rounded = LeakingModel(0.8 * allowed_place, 0.8 * allowed_others)
    check_before_training(train_options, rounded)
    leaks_by_place = LeakingModel(1.2 * allowed_place, 0.0)
    leaks_by_others = LeakingModel(0.0, 1.2 * allowed_others)
    for leaking_model in (leaks_by_place, leaks_by_others):
        with pytest.raises(ValueError, match="padding_free would mix rows in a llama"):
            check_before_training(train_options, leaking_model)
