# SPDX-License-Identifier: Apache-2.0
"""A dry run: what it needs and writes, what it counts, and that what it proposes fits."""

import shutil

import pytest
import torch
import training
import yaml
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.cli import app
from normalign_llava.train.dry_run import remedy
from normalign_llava.train.memory import CONTEXT, largest_batch


pytestmark = pytest.mark.slow


def device(size: int) -> str:
    """`device_memory` of a GPU with so many bytes besides those that are kept free, rounded up a little."""
    return f"{(size + CONTEXT + 64) / 2**30:.12f}GiB"


def test_a_dry_run_reads_no_weights_and_writes_nothing(tmp_path, parts):
    checkpoint = tmp_path / "without-weights"
    shutil.copytree(parts / "model", checkpoint, ignore=shutil.ignore_patterns("*.safetensors"))
    file = training.recipe(tmp_path, parts, model_name_or_path=str(checkpoint))
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["train", file, "--dry_run", "--device_memory", "24GiB"])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "Without gradient checkpointing: " in shown
    assert "activations" in shown and "of the 24.0 GiB of device_memory (1.0 GiB are kept free)." in shown
    done = CliRunner().invoke(app, ["train", file, "--dry_run", "--device_memory", "1GiB", "--stage", "align"])
    assert done.exit_code == 1 and "Does not fit" in done.output
    tried = "--load_in_4bit true --dtype bfloat16 --per_device_train_batch_size 1."
    assert f"Nothing that was tried fits, not even {tried}" in " ".join(done.output.split())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device_memory", "24"], "--device_memory must have a unit, as 24GiB has, got 24"),
        (["--dry_run", "false", "--device_memory", "24GiB"], "--device_memory is for a dry run"),
        (["--global_batch_size", "3"], "3 is not a multiple"),
    ],
)
def test_a_dry_run_finds_what_stops_training(tmp_path, parts, words, message):
    done = CliRunner().invoke(app, ["train", training.recipe(tmp_path, parts), "--dry_run", *words])
    assert done.exit_code == 1 and message in " ".join(done.output.split())


def test_a_dry_run_refuses_pickled_weights(tmp_path, parts):
    checkpoint = tmp_path / "pickled"
    shutil.copytree(parts / "model", checkpoint, ignore=shutil.ignore_patterns("*.safetensors*"))
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    file = training.recipe(tmp_path, parts, model_name_or_path=str(checkpoint))
    done = CliRunner().invoke(app, ["train", file, "--dry_run"])
    assert done.exit_code == 1 and "has no weights in safetensors" in " ".join(done.output.split())


@pytest.mark.parametrize("options", [{}, dict(use_peft=True, load_in_4bit=True, dtype="bfloat16")])
def test_shapes_alone_take_what_loaded_weights_take(checkpoint, tmp_path, options):
    dry = training.trainer(tmp_path, checkpoint, dry_run=True, **options)
    loaded = training.trainer(tmp_path, checkpoint, **options)  # later, so that nothing of the first remains
    assert all(parameter.is_meta for name, parameter in dry.model.named_parameters() if ".norm." not in name)
    assert dry.facts["modules"] == loaded.facts["modules"]
    assert dry.estimate_memory() == loaded.estimate_memory()


def test_training_goes_on_as_if_nothing_was_estimated(checkpoint, tmp_path):
    options = dict(use_peft=True, lora_dropout=0.1, gradient_checkpointing=True)
    plain, estimated = (training.trainer(tmp_path, checkpoint, **options) for _ in range(2))
    random = torch.get_rng_state()
    estimated.estimate_memory()
    assert torch.equal(torch.get_rng_state(), random)
    for trainer in (plain, estimated):
        torch.manual_seed(0)
        trainer.train()
    after = training.weights(plain.model)
    assert all(torch.equal(after[name], each) for name, each in estimated.model.named_parameters())
    for name in ("num_tokens", "entropy", "mean_token_accuracy", "loss"):
        assert plain.state.log_history[0][name] == estimated.state.log_history[0][name]


@pytest.mark.parametrize("options", [{}, dict(use_peft=True), dict(use_peft=True, load_in_4bit=True)])
def test_checkpointing_that_is_asked_about_counts_as_if_it_were_set(checkpoint, tmp_path, options):
    without, given = (
        training.trainer(tmp_path, checkpoint, dry_run=True, gradient_checkpointing=value, **options)
        for value in (False, True)
    )
    for trainer in (without, given, without):
        assert trainer.estimate_memory(True) == given.estimate_memory()
        assert trainer.estimate_memory(False) == without.estimate_memory()
    assert given.estimate_memory().total < without.estimate_memory().total


def test_checkpointing_takes_less_and_a_frozen_tower_keeps_nothing(checkpoint, tmp_path):
    def parts(**options):
        return training.trainer(tmp_path, checkpoint, dry_run=True, **options).estimate_memory().parts

    plain, frozen = parts(), parts(vision_learning_rate=0.0)
    less = parts(gradient_checkpointing=True, vision_learning_rate=0.0)
    assert less["activations"] < frozen["activations"] < plain["activations"]
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    assert plain["weights"] == sum(each.nbytes for each in [*model.parameters(), *model.buffers()])


def test_the_batches_of_a_step_wait_in_memory(checkpoint, tmp_path):
    """2 images of 3 x 16 x 16 float32 numbers, and 2 rows of ids, mask and labels, 8 bytes each."""
    options = dict(dry_run=True, vision_learning_rate=0.0, language_learning_rate=0.0)
    two, eight = (
        training.trainer(tmp_path, checkpoint, gradient_accumulation_steps=steps, **options).estimate_memory()
        for steps in (2, 8)
    )
    batch = 2 * 3 * 16 * 16 * 4 + 2 * two.tokens // 2 * 3 * 8
    assert (two.parts["batches"], eight.parts["batches"]) == (2 * batch, 8 * batch)
    assert eight.total - two.total == 6 * batch


def with_lengths(trainer, rows):
    """Rows with their true lengths, which those of `training.rows` lack."""
    lengths = [len(trainer.data_collator([row])["input_ids"][0]) for row in rows]
    return rows.remove_columns("length").add_column("length", lengths)


@pytest.fixture(scope="module")
def mixed(checkpoint, tmp_path_factory):
    """A trainer on shapes, and rows of several lengths."""
    data = training.rows(8, images=lambda number: 1 + number % 3, turns=lambda number: 1 + number % 4)
    options = dict(dry_run=True, per_device_train_batch_size=8, global_batch_size=8, vision_learning_rate=0.0)
    trainer = training.trainer(tmp_path_factory.mktemp("mixed"), checkpoint, data, **options)
    trainer.train_dataset = with_lengths(trainer, data)
    return trainer


def batch_of(trainer):
    return largest_batch(trainer.args, trainer.train_dataset, trainer.data_collator)


def estimate_with(trainer, rows):
    trainer.args.per_device_train_batch_size = rows
    return trainer.estimate_memory()


def test_the_longest_rows_decide_and_memory_grows_with_them(mixed):
    lengths = sorted(mixed.train_dataset["length"])
    mixed.args.per_device_train_batch_size = 2
    assert batch_of(mixed)["input_ids"].shape == (2, lengths[-1])
    small, large = (estimate_with(mixed, rows) for rows in (2, 8))
    assert (small.rows, large.rows) == (2, 8)
    assert 2 < large.parts["activations"] / small.parts["activations"] < 5


def test_the_smallest_change_that_fits_is_named(checkpoint, tmp_path):
    def make(words, size=2**30):
        given = dict(zip(words[::2], words[1::2], strict=True))
        options = {name.removeprefix("--"): yaml.safe_load(value) for name, value in given.items()}
        options = {"per_device_train_batch_size": 4, "global_batch_size": 8, **options}
        return training.trainer(tmp_path, checkpoint, device_memory=device(size), dry_run=True, **options)

    def answer(size, *words):
        return remedy(make(words, size), lambda more: make([*words, *more], size))

    def total(*words):
        return make(words).estimate_memory().total

    two, one = (["--per_device_train_batch_size", size] for size in "21")
    checkpointing, adapters = ["--gradient_checkpointing", "true"], ["--use_peft", "true"]
    for words in (two, one):
        assert answer(total(*words)).startswith(f"Would fit: {' '.join(words)}. Fits")
    assert answer(total(*one, *checkpointing), *one).startswith("Would fit: --gradient_checkpointing true. Fits")
    less = [*one, *checkpointing]
    assert answer(total(*less, *adapters), *less).startswith("Would fit: --use_peft true. Fits")
    tried = "--use_peft true --load_in_4bit true --dtype bfloat16"
    assert answer(1, *less).endswith(f"not even {tried}. Fewer tokens may: lower --max_length.")
