# SPDX-License-Identifier: Apache-2.0
"""A dry run: what it needs and writes, what it counts, and that what it proposes fits."""

import shutil

import pytest
import torch
import training
import yaml
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.train.memory import CONTEXT, largest_batch
from normalign_llava.train.run import remedy


pytestmark = pytest.mark.slow


def device(size: int) -> str:
    """`device_memory` of a GPU with so many bytes besides those that are kept free, rounded up a little."""
    return f"{(size + CONTEXT + 64) / 2**30:.12f}GiB"


def dry_run(*words):
    """The exit status of a dry run, and what it prints, on one line."""
    done = CliRunner().invoke(app, ["train", *words, "--dry_run"])
    return done.exit_code, " ".join(done.output.split())


def test_a_dry_run_reads_no_weights_and_writes_nothing(tmp_path, parts):
    checkpoint = tmp_path / "without-weights"
    shutil.copytree(parts / "model", checkpoint, ignore=shutil.ignore_patterns("*.safetensors"))
    file = training.recipe(tmp_path, parts, model_name_or_path=str(checkpoint))
    before = sorted(tmp_path.rglob("*"))
    status, shown = dry_run(file, "--device_memory", "24GiB")
    assert status == 0 and "Without gradient checkpointing: " in shown and "activations" in shown
    assert "of the 24.0 GiB of device_memory (1.0 GiB are kept free)." in shown
    least = ["--per_device_train_batch_size", "1", "--gradient_checkpointing", "--load_in_4bit", "--dtype", "bfloat16"]
    status, shown = dry_run(file, "--device_memory", "1GiB", "--stage", "align", *least)
    assert status == 1 and "Does not fit" in shown
    assert "Nothing that was tried fits" in shown
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_finds_what_stops_training(tmp_path, parts):
    pickled = tmp_path / "pickled"
    shutil.copytree(parts / "model", pickled, ignore=shutil.ignore_patterns("*.safetensors*"))
    (pickled / "pytorch_model.bin").write_bytes(b"")
    file = training.recipe(tmp_path, parts)
    for words, message in (
        (["--device_memory", "24"], "--device_memory must have a unit, as 24GiB has, got 24"),
        (["--global_batch_size", "3"], "3 is not a multiple"),
        (["--model_name_or_path", str(pickled)], "has no weights in safetensors"),
    ):
        status, shown = dry_run(file, *words)
        assert status == 1 and message in shown


@pytest.mark.parametrize("options", [{}, dict(use_peft=True, load_in_4bit=True, dtype="bfloat16")])
def test_shapes_alone_take_what_loaded_weights_take_and_checkpointing_is_asked_about(checkpoint, tmp_path, options):
    without, checkpointed = (
        training.trainer(tmp_path, checkpoint, dry_run=True, gradient_checkpointing=value, **options)
        for value in (False, True)
    )
    assert all(parameter.is_meta for name, parameter in without.model.named_parameters() if ".norm." not in name)
    more, less = without.estimate_memory(), checkpointed.estimate_memory()
    assert less.total < more.total
    for trainer in (without, checkpointed, without):
        assert trainer.estimate_memory(True) == less
        assert trainer.estimate_memory(False) == more
    loaded = training.trainer(tmp_path, checkpoint, **options)  # later, so that nothing of the others remains
    assert without.facts["modules"] == loaded.facts["modules"] and loaded.estimate_memory() == more
    if not options:
        assert more.parts["weights"] == sum(x.nbytes for x in [*loaded.model.parameters(), *loaded.model.buffers()])
        frozen = training.trainer(tmp_path, checkpoint, dry_run=True, vision_learning_rate=0.0).estimate_memory(False)
        assert frozen.parts["activations"] < more.parts["activations"]


def test_training_goes_on_as_if_nothing_was_estimated(checkpoint, tmp_path):
    options = dict(use_peft=True, lora_dropout=0.1, gradient_checkpointing=True)
    plain, estimated = (training.trainer(tmp_path, checkpoint, **options) for _ in range(2))
    random = torch.get_rng_state()
    estimated.estimate_memory()
    assert torch.equal(torch.get_rng_state(), random)
    for trainer in (plain, estimated):
        torch.manual_seed(0)
        trainer.train()
    training.assert_equal(training.weights(estimated.model), training.weights(plain.model))
    for name in ("num_tokens", "entropy", "mean_token_accuracy", "loss"):
        assert plain.state.log_history[0][name] == estimated.state.log_history[0][name]


def test_the_batches_of_a_step_wait_in_memory(checkpoint, tmp_path):
    """2 images of 3 x 16 x 16 float32 numbers, and 2 rows of ids, mask and labels, 8 bytes each."""
    options = dict(dry_run=True, vision_learning_rate=0.0, language_learning_rate=0.0)
    trainers = [
        training.trainer(tmp_path, checkpoint, gradient_accumulation_steps=steps, **options) for steps in (2, 8)
    ]
    two, eight = (trainer.estimate_memory() for trainer in trainers)
    batch = 2 * 3 * 16 * 16 * 4 + batch_of(trainers[0])["input_ids"].numel() * 3 * 8
    assert (two.parts["batches"], eight.parts["batches"]) == (2 * batch, 8 * batch)
    assert eight.total - two.total == 6 * batch


def batch_of(trainer):
    return largest_batch(trainer.args, trainer.train_dataset, trainer.data_collator)


def test_the_longest_rows_decide_and_memory_grows_with_them(checkpoint, tmp_path):
    rows = training.rows(8, images=lambda number: 1 + number % 3, turns=lambda number: 1 + number % 4)
    trainer = training.trainer(tmp_path, checkpoint, rows, dry_run=True, vision_learning_rate=0.0)
    small = trainer.estimate_memory()
    assert batch_of(trainer)["input_ids"].shape == (2, max(trainer.train_dataset["length"]))
    trainer.args.per_device_train_batch_size = 8
    large = trainer.estimate_memory()
    assert (small.batch[:8], large.batch[:8]) == ("2 row(s)", "8 row(s)")
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
