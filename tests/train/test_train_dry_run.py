# SPDX-License-Identifier: Apache-2.0
"""What is counted before training: parameters, memory; what a dry run needs, writes, proposes."""

import shutil
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import training
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import BitsAndBytesConfig, TrainerCallback
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.checkpoint import precision
from normalign_llava.cli import app
from normalign_llava.train import run
from normalign_llava.train.keeping.summary import modules
from normalign_llava.train.memory import (
    CONTEXT,
    MemoryEstimate,
    _take_as_trained,
    largest_batch,
    peak_bytes,
)
from normalign_llava.train.modules.model import base_model
from normalign_llava.train.modules.sharding import sharding
from normalign_llava.train.modules.sizes import static_bytes
from normalign_llava.train.options import parse
from normalign_llava.train.run import make_trainer, remedy


pytestmark = pytest.mark.slow

GIB = 2**30
LEARNING_RATES = {
    "vision": 2e-6,
    "projector": 1e-3,
    "norm": 3e-4,
    "language": 2e-5,
}


def dry_run(*command_line) -> tuple[int, str]:
    """The exit status of a dry run, and what it prints, on one line."""
    result = CliRunner().invoke(app, ["train", *command_line, "--dry_run"])
    return result.exit_code, " ".join(result.output.split())


def stored_bytes(model) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def trained_bytes(model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


class UnloadableRun:
    """A recipe whose checkpoint has no weights, in a folder with an earlier run."""

    def __init__(self, folder, parts):
        self.folder = folder
        self.checkpoint = folder / "without-weights"
        no_weights = shutil.ignore_patterns("*.safetensors*")
        shutil.copytree(parts / "model", self.checkpoint, ignore=no_weights)
        self.recipe = training.recipe(folder, parts, model_name_or_path=str(self.checkpoint))
        (folder / "out").mkdir()
        (folder / "out" / "dropped_rows.jsonl").touch()

    def paths(self):
        return sorted(self.folder.rglob("*"))


@pytest.fixture
def unloadable(tmp_path, parts):
    return UnloadableRun(tmp_path, parts)


def test_a_dry_run_reads_no_weights_and_writes_nothing(unloadable):
    before = unloadable.paths()
    status, printed = dry_run(unloadable.recipe, "--device_memory", "24GiB")
    assert status == 0
    assert "Without gradient checkpointing: " in printed
    assert "activations" in printed
    assert "of the 24.0 GiB of device_memory (1.0 GiB are kept free)." in printed
    assert unloadable.paths() == before


def test_a_dry_run_of_the_least_that_does_not_fit_finds_nothing_that_fits(unloadable):
    before = unloadable.paths()
    status, printed = dry_run(
        unloadable.recipe,
        "--per_device_train_batch_size=1",
        "--gradient_checkpointing",
        "--load_in_4bit",
        "--dtype=bfloat16",
        "--stage=align",
        "--device_memory=1GiB",
    )
    assert status == 1
    assert "Does not fit" in printed
    assert "Nothing that was tried fits" in printed
    assert unloadable.paths() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--global_batch_size", "3"], "3 is not a multiple"),
        ([], "has no weights in safe"),
    ],
    ids=["options", "weights"],
)
def test_a_dry_run_finds_faults(unloadable, options, message):
    (unloadable.checkpoint / "pytorch_model.bin").write_bytes(b"")
    status, printed = dry_run(unloadable.recipe, *options)
    assert status == 1
    assert message in printed


FULL_TRAINING = {}
QLORA = {
    "use_peft": True,
    "load_in_4bit": True,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("options", [FULL_TRAINING, QLORA], ids=["full", "adapters on 4 bits"])
def test_a_model_without_weights_takes_as_much_memory_as_with_them(checkpoint, tmp_path, options):
    plain_trainer = training.trainer(tmp_path, checkpoint, dry_run=True, **options)
    checkpointed = training.trainer(
        tmp_path,
        checkpoint,
        dry_run=True,
        gradient_checkpointing=True,
        **options,
    )
    for parameter_name, parameter in plain_trainer.model.named_parameters():
        assert parameter.is_meta or ".norm." in parameter_name
    estimate = plain_trainer.estimate_memory()
    checkpointed_estimate = checkpointed.estimate_memory()
    assert checkpointed_estimate.total < estimate.total
    for trainer in (plain_trainer, checkpointed, plain_trainer):
        assert trainer.estimate_memory(True) == checkpointed_estimate
        assert trainer.estimate_memory(False) == estimate
    loaded = training.trainer(tmp_path, checkpoint, **options)
    assert plain_trainer.facts["modules"] == loaded.facts["modules"]
    assert loaded.estimate_memory() == estimate


def test_checkpointing_every_second_layer_takes_less_than_none_and_more_than_all(
    checkpoint, tmp_path
):
    options = {"gradient_checkpointing": True, "dry_run": True}
    no_layer = training.trainer(tmp_path, checkpoint, dry_run=True)
    every_layer = training.trainer(tmp_path, checkpoint, **options)
    every_second = training.trainer(
        tmp_path,
        checkpoint,
        **options,
        gradient_checkpointing_kwargs={"every_n_layers": 2, "offload": True},
    )
    every_second_total = every_second.estimate_memory().total
    assert every_layer.estimate_memory().total < every_second_total
    assert every_second_total < no_layer.estimate_memory().total


def test_weights_count_as_many_bytes_without_being_loaded(checkpoint, tmp_path):
    estimate = training.trainer(tmp_path, checkpoint, dry_run=True).estimate_memory()
    loaded = training.trainer(tmp_path, checkpoint)
    assert estimate.parts["weights"] == stored_bytes(loaded.model)


def test_a_frozen_vision_tower_keeps_no_activations(checkpoint, tmp_path):
    trained = training.trainer(tmp_path, checkpoint, dry_run=True)
    frozen = training.trainer(tmp_path, checkpoint, dry_run=True, vision_learning_rate=0.0)
    trained_parts = trained.estimate_memory().parts
    frozen_parts = frozen.estimate_memory(False).parts
    assert frozen_parts["activations"] < trained_parts["activations"]


def tracked_bytes(trainer) -> dict[str, int]:
    """What torch's own tracker of memory sees at the peak of a real pass, gradients kept before."""
    batch = largest_batch(trainer.args, trainer.train_dataset, trainer.data_collator)
    if trainer.args.gradient_accumulation_steps > 1:
        for parameter in trainer.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable()
    trainer.model.train()
    tracker = MemTracker()
    tracker.track_external(trainer.model, *batch.values())
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer.args.bf16):
            train_loss = trainer.compute_loss(trainer.model, batch)
        train_loss.backward()
    (peak_memory,) = tracker.get_tracker_snapshot("peak").values()
    tracked = {}
    for memory_kind, size_bytes in peak_memory.items():
        kind_name = getattr(memory_kind, "name", memory_kind)
        tracked[kind_name] = size_bytes
    return tracked


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
    ],
    ids=str,
)
def test_a_step_takes_what_torch_s_tracker_sees(checkpoint, tmp_path, options):
    estimate = training.trainer(tmp_path, checkpoint, **options).estimate_memory()
    tracked = tracked_bytes(training.trainer(tmp_path, checkpoint, **options))
    passes = options.get("gradient_accumulation_steps", 1)
    assert estimate.parts["weights"] == tracked["PARAM"] + tracked["BUFFER"]
    assert estimate.parts.get("gradients", 0) == tracked["GRAD"]
    assert estimate.parts["batches"] == passes * tracked["OTH"]
    untracked = estimate.parts["optimizer"] + (passes - 1) * tracked["OTH"]
    assert estimate.total - untracked == pytest.approx(tracked["Total"], rel=0.01)


@pytest.mark.parametrize(("batch_size", "half_precision"), [(1, "bf16"), (4, "fp16")])
def test_weights_and_their_copies_are_the_same_for_one_row_and_for_four(
    checkpoint, tmp_path, batch_size, half_precision
):
    model = training.trainer(tmp_path, checkpoint).model
    copied_numbers = 0
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):  # autocast computes in bfloat16
            for parameter in module.parameters(recurse=False):
                copied_numbers += parameter.numel()
    options = {
        "dry_run": True,
        "device_memory": "24GiB",
        "per_device_train_batch_size": batch_size,
        half_precision: True,
    }
    estimate = training.trainer(tmp_path, checkpoint, **options).estimate_memory()
    assert estimate.parts["weights"] == stored_bytes(model)
    assert estimate.parts["half-precision copies of weights"] == 2 * copied_numbers


def test_training_goes_on_as_if_nothing_was_estimated(checkpoint, tmp_path):
    options = {
        "use_peft": True,
        "lora_dropout": 0.1,
        "gradient_checkpointing": True,
    }
    plain_trainer = training.trainer(tmp_path, checkpoint, **options)
    estimated = training.trainer(tmp_path, checkpoint, **options)
    random_state = torch.get_rng_state()
    estimated.estimate_memory()
    assert torch.equal(torch.get_rng_state(), random_state)
    for trainer in (plain_trainer, estimated):
        torch.manual_seed(0)
        trainer.train()
    training.assert_equal(training.weights(estimated.model), training.weights(plain_trainer.model))
    expected = plain_trainer.state.log_history[0]
    logged = estimated.state.log_history[0]
    for log_key in ("num_tokens", "entropy", "mean_token_accuracy", "loss"):
        assert logged[log_key] == expected[log_key]


@pytest.fixture
def frozen_trainer(checkpoint, tmp_path):
    """Trains only the projector on rows of many lengths; its weights are not loaded."""
    train_rows = training.rows(
        8,
        images=lambda number: 1 + number % 3,
        turns=lambda number: 1 + number % 4,
    )
    return training.trainer(
        tmp_path,
        checkpoint,
        train_rows,
        dry_run=True,
        gradient_accumulation_steps=2,
        vision_learning_rate=0.0,
        language_learning_rate=0.0,
    )


def batch_of(trainer):
    return largest_batch(trainer.args, trainer.train_dataset, trainer.data_collator)


def test_the_longest_rows_decide(frozen_trainer):
    batch = batch_of(frozen_trainer)
    tokens = batch["input_ids"].numel()
    images = len(batch["pixel_values"])
    assert batch["input_ids"].shape == (2, max(frozen_trainer.train_dataset["length"]))
    estimate = frozen_trainer.estimate_memory()
    assert estimate.batch == f"2 row(s), {tokens:,} tokens, {images:,} image(s)"


def test_images_are_counted_and_left_in_their_batch(frozen_trainer):
    batch = batch_of(frozen_trainer)
    pixel_values = batch["pixel_values"]
    before = pixel_values.clone()
    peak_memory = peak_bytes(frozen_trainer, batch, None, accumulates=False)
    assert peak_memory["batches"] == pixel_values.nbytes
    assert batch["pixel_values"] is pixel_values
    assert torch.equal(pixel_values, before)


def test_the_batches_of_a_step_wait_in_memory(frozen_trainer):
    batch = batch_of(frozen_trainer)
    image_bytes = len(batch["pixel_values"]) * 3 * 16 * 16 * 4  # float32 numbers
    token_bytes = batch["input_ids"].numel() * 3 * 8  # ids, mask and labels, 8 bytes each
    batch_bytes = image_bytes + token_bytes
    two_batches = frozen_trainer.estimate_memory()
    frozen_trainer.args.gradient_accumulation_steps = 8
    eight_batches = frozen_trainer.estimate_memory()
    assert two_batches.parts["batches"] == 2 * batch_bytes
    assert eight_batches.parts["batches"] == 8 * batch_bytes
    assert eight_batches.total - two_batches.total == 6 * batch_bytes


def test_activations_grow_with_the_rows_of_a_batch(frozen_trainer):
    frozen_trainer.args.gradient_accumulation_steps = 8
    two_rows = frozen_trainer.estimate_memory()
    frozen_trainer.args.per_device_train_batch_size = 8
    eight_rows = frozen_trainer.estimate_memory()
    assert two_rows.batch.startswith("2 row(s)")
    assert eight_rows.batch.startswith("8 row(s)")
    growth = eight_rows.parts["activations"] / two_rows.parts["activations"]
    assert 2 < growth < 5


def dry_trainer_of_four_rows(folder, checkpoint, use_peft):
    """A trainer of four rows in a pass, whose step does not fit."""
    return training.trainer(
        folder,
        checkpoint,
        dry_run=True,
        per_device_train_batch_size=4,
        global_batch_size=8,
        use_peft=use_peft,
    )


@pytest.fixture(scope="module")
def too_large(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    return dry_trainer_of_four_rows(folder, checkpoint, use_peft=False)


@pytest.fixture(scope="module")
def too_large_with_adapters(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    return dry_trainer_of_four_rows(folder, checkpoint, use_peft=True)


def estimate_of(weights: int, available: int) -> MemoryEstimate:
    return MemoryEstimate({"weights": weights}, "", "a card", available)


def changes_for(trainer, fitting=None, refused=()) -> tuple[list[str], str]:
    """The changes that are tried, in order, and what is said where one of them fits."""
    tried = []

    def make(options):
        change = " ".join(options)
        tried.append(change)
        if change in refused:
            if len(tried) % 2:
                raise ImportError("They do not go together.")
            raise ValueError("They do not go together.")
        estimate = estimate_of(weights=7, available=6)
        if change == fitting:
            estimate = estimate_of(weights=7, available=7)
        return SimpleNamespace(estimate_memory=lambda: estimate)

    proposal = remedy(trainer, make)
    return tried, proposal


def tried_changes(trainer) -> list[str]:
    """All changes that are tried, in order."""
    tried, _ = changes_for(trainer)
    return tried


TWO_ROWS = "--per_device_train_batch_size 2"
ONE_ROW = "--per_device_train_batch_size 1"
CHECKPOINTING = "--gradient_checkpointing true"
ADAPTERS = "--use_peft true"
IN_4_BITS = "--load_in_4bit true"
HALF = "--dtype bfloat16"


def with_one_row_too(*changes: str) -> list[str]:
    """Each with the rows as they are, and with one row in a pass."""
    tried = []
    for change in changes:
        tried.append(change)
        tried.append(f"{change} {ONE_ROW}")
    return tried


def test_changes_are_tried_from_small_to_large(too_large):
    tried, proposal = changes_for(too_large)
    assert tried == [
        TWO_ROWS,
        ONE_ROW,
        *with_one_row_too(
            CHECKPOINTING,
            ADAPTERS,
            f"{ADAPTERS} {IN_4_BITS} {HALF}",
            f"{CHECKPOINTING} {ADAPTERS} {IN_4_BITS} {HALF}",
        ),
    ]
    assert f"not even {tried[-1]}. " in proposal
    assert "--max_length" in proposal


def test_changes_are_tried_until_one_fits(too_large):
    changes = tried_changes(too_large)
    for change_number, change in enumerate(changes):
        tried, proposal = changes_for(too_large, fitting=change, refused=changes[:change_number])
        assert tried == changes[: change_number + 1]
        assert proposal.startswith(f"Would fit: {change}. Fits: ")


class RunWithChanges:
    """A run that has some of the changes already, and the larger ones that are left."""

    def __init__(self, trainer, language_learning_rate, dtype, larger, monkeypatch):
        monkeypatch.setitem(trainer.args.model_init_kwargs, "dtype", dtype)
        monkeypatch.setitem(trainer.learning_rates, "language", language_learning_rate)
        self.trainer = trainer
        self.larger = larger
        self.everything = f"{CHECKPOINTING} {larger[-1]}"


RUNS_WITH_CHANGES = {
    "bfloat16": {
        "use_peft": False,
        "language_learning_rate": 1e-3,
        "dtype": "bfloat16",
        "larger": [ADAPTERS, f"{ADAPTERS} {IN_4_BITS}"],
    },
    "frozen": {
        "use_peft": False,
        "language_learning_rate": 0.0,
        "dtype": "float32",
        "larger": [HALF, f"{IN_4_BITS} {HALF}"],
    },
    "frozen in bfloat16": {
        "use_peft": False,
        "language_learning_rate": 0.0,
        "dtype": "bfloat16",
        "larger": [IN_4_BITS],
    },
    "adapters": {
        "use_peft": True,
        "language_learning_rate": 1e-3,
        "dtype": "float32",
        "larger": [HALF, f"{IN_4_BITS} {HALF}"],
    },
    "adapters in bfloat16": {
        "use_peft": True,
        "language_learning_rate": 1e-3,
        "dtype": "bfloat16",
        "larger": [IN_4_BITS],
    },
}


@pytest.fixture(params=RUNS_WITH_CHANGES.values(), ids=RUNS_WITH_CHANGES.keys())
def changed(request, too_large, too_large_with_adapters, monkeypatch):
    options = dict(request.param)
    trainer = too_large
    if options.pop("use_peft"):
        trainer = too_large_with_adapters
    return RunWithChanges(trainer, **options, monkeypatch=monkeypatch)


def test_what_a_run_has_already_is_no_change(changed):
    tried = tried_changes(changed.trainer)
    larger = with_one_row_too(CHECKPOINTING, *changed.larger, changed.everything)
    assert tried == [TWO_ROWS, ONE_ROW, *larger]


def test_the_rows_of_a_pass_are_halved_down_to_one(changed, monkeypatch):
    monkeypatch.setattr(changed.trainer.args, "per_device_train_batch_size", 40)
    tried = tried_changes(changed.trainer)
    assert tried[:6] == [
        "--per_device_train_batch_size 20",
        "--per_device_train_batch_size 10",
        "--per_device_train_batch_size 5",
        TWO_ROWS,
        ONE_ROW,
        CHECKPOINTING,
    ]


def test_one_row_a_pass_is_no_change_of_a_run_with_one(changed, monkeypatch):
    monkeypatch.setattr(changed.trainer.args, "per_device_train_batch_size", 1)
    tried = tried_changes(changed.trainer)
    assert tried == [CHECKPOINTING, *changed.larger, changed.everything]


def test_checkpointing_is_no_change_of_a_run_with_it(changed, monkeypatch):
    monkeypatch.setattr(changed.trainer.args, "per_device_train_batch_size", 1)
    monkeypatch.setattr(changed.trainer.args, "gradient_checkpointing", True)
    tried = tried_changes(changed.trainer)
    assert tried == changed.larger


def test_4_bits_are_no_change_of_a_run_in_4_bits(changed, monkeypatch):
    monkeypatch.setattr(changed.trainer.args, "per_device_train_batch_size", 1)
    monkeypatch.setattr(changed.trainer.args, "gradient_checkpointing", True)
    unwrapped_model = base_model(changed.trainer.model)
    monkeypatch.setattr(unwrapped_model, "is_loaded_in_4bit", True, raising=False)
    tried = tried_changes(changed.trainer)
    assert tried == [change for change in changed.larger if IN_4_BITS not in change]


def test_without_the_package_4_bits_are_not_tried(too_large, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    tried = tried_changes(too_large)
    changes_of_options = tried[2:]
    assert changes_of_options == with_one_row_too(
        CHECKPOINTING,
        ADAPTERS,
        f"{CHECKPOINTING} {ADAPTERS}",
    )


class SummarizedTrainer:
    """As much of a trainer as `dry_run` uses; 2 GiB as it is set, and else 3 GiB."""

    def __init__(self, gradient_checkpointing, is_first, available):
        self.args = SimpleNamespace(gradient_checkpointing=gradient_checkpointing)
        self.is_first = is_first
        self.available = available

    def is_world_process_zero(self):
        return self.is_first

    def summary(self):
        return "the summary"

    def estimate_memory(self, gradient_checkpointing=None):
        as_set = self.args.gradient_checkpointing
        weights = 3 * GIB
        if gradient_checkpointing is None or gradient_checkpointing == as_set:
            weights = 2 * GIB
        return estimate_of(weights, self.available)


@pytest.fixture
def dry_run_of(monkeypatch):
    """Has `dry_run` make a trainer."""

    def dry_run_of(trainer):
        monkeypatch.setattr(run, "parse", lambda words, recipe: (words, recipe, None))
        monkeypatch.setattr(run, "make_trainer", lambda *parsed: (trainer, None))
        monkeypatch.setattr(run, "remedy", lambda trainer, make: "a change of the options")
        return run.dry_run(["--words"])

    return dry_run_of


@pytest.mark.parametrize(
    ("gradient_checkpointing", "other_estimate"),
    [
        (True, "Without gradient checkpointing: 3.0 GiB."),
        (False, "With gradient checkpointing: 3.0 GiB."),
    ],
)
@pytest.mark.parametrize("available", [2 * GIB, GIB], ids=["fits", "does not fit"])
def test_the_first_process_prints_a_dry_run(
    dry_run_of, capsys, gradient_checkpointing, other_estimate, available
):
    fits = available == 2 * GIB
    assert dry_run_of(SummarizedTrainer(gradient_checkpointing, True, available)) is fits
    printed = " ".join(capsys.readouterr().out.split())
    assert "the summary" in printed
    assert "2.0 GiB of the" in printed
    assert other_estimate in printed
    assert ("a change of" in printed) != fits


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
@pytest.mark.parametrize("available", [2 * GIB, GIB], ids=["fits", "does not fit"])
def test_other_processes_print_nothing_of_a_dry_run(
    dry_run_of, capsys, gradient_checkpointing, available
):
    fits = available == 2 * GIB
    assert dry_run_of(SummarizedTrainer(gradient_checkpointing, False, available)) is fits
    printed = " ".join(capsys.readouterr().out.split())
    assert "the summary" not in printed
    assert "2.0 GiB of the" not in printed
    assert "gradient checkpointing: 3.0 GiB." not in printed
    assert "a change of" not in printed


@pytest.fixture
def hooks(too_large):
    """Hooks of the modules whose outputs gradient checkpointing makes need gradients."""
    unwrapped_model = base_model(too_large.model)
    vision_tower = unwrapped_model.model.vision_tower
    handles = {}
    for module in (unwrapped_model.get_input_embeddings(), vision_tower.get_input_embeddings()):
        handles[module] = module.register_forward_hook(lambda *hook_arguments: None)
    yield handles
    for handle in handles.values():
        handle.remove()


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize(
    ("device_memory", "only_answers"),
    [
        (None, True),
        ("24GiB", False),  # a GPU's head sees all positions
    ],
)
def test_a_step_is_estimated_as_in_training_and_leaves_nothing_behind(
    too_large, hooks, monkeypatch, checkpointing, device_memory, only_answers
):
    monkeypatch.setattr(too_large.args, "device_memory", device_memory)
    model = too_large.model.eval()
    unwrapped_model = base_model(model)
    metrics = too_large._metrics["train"]
    random_state = torch.get_rng_state()
    with ExitStack() as stack:
        _take_as_trained(too_large, checkpointing, stack)
        assert model.training
        assert unwrapped_model.is_gradient_checkpointing == bool(checkpointing)
        assert unwrapped_model.only_answers == only_answers
        for module, handle in hooks.items():
            assert handle.id not in module._forward_hooks
        too_large.state.num_input_tokens_seen += 5
        too_large._metrics["train"]["entropy"].append(1.0)
        torch.rand(1)
    assert not model.training
    assert not unwrapped_model.is_gradient_checkpointing
    assert unwrapped_model.only_answers
    assert too_large.state.num_input_tokens_seen == 0
    assert too_large._metrics["train"] is metrics
    assert not metrics["entropy"]
    assert torch.equal(torch.get_rng_state(), random_state)
    for module, handle in hooks.items():
        assert handle.id in module._forward_hooks


def test_a_model_whose_memory_cannot_be_estimated_is_refused(too_large):
    def fail(*arguments):
        raise NotImplementedError("no shape of it is known")

    handle = too_large.model.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="memory cannot be estimated .*: no shape of it is known"):
        too_large.estimate_memory()
    handle.remove()


def test_the_rows_of_a_batch_without_padding_are_counted(checkpoint, tmp_path):
    trainer = training.trainer(tmp_path, checkpoint, dry_run=True, padding_free=True)
    estimate = trainer.estimate_memory()
    assert estimate.batch.startswith("2 row(s), ")
    assert all(estimate.parts.values())  # what takes nothing is not told
    trainer.train_dataset = training.rows(4, images=lambda number: 0)
    assert trainer.estimate_memory().batch.endswith(" tokens, 0 image(s)")


def test_a_dry_run_names_a_change_that_outweighs_the_options_given(tmp_path, parts):
    command_line = [
        training.recipe(tmp_path, parts),
        "--gradient_checkpointing=false",
        "--per_device_train_batch_size=4",
    ]
    smaller = ["--per_device_train_batch_size", "1"]
    trainer = make_trainer(*parse([*command_line, *smaller, "--dry_run"]))[0]
    enough = (trainer.estimate_memory().total + CONTEXT + 64) / GIB
    device = ["--device_memory", f"{enough:.12f}GiB"]
    status, printed = dry_run(*command_line, *device)
    assert status == 1
    assert "Would fit: --per_device_train_batch_size 1. Fits" in printed
    status, _ = dry_run(*command_line, *smaller, *device)
    assert status == 0


def test_the_first_dtype_of_a_module_is_the_one_of_most_of_its_parameters(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    projector = model.model.multi_modal_projector
    projector.linear_2.to(torch.bfloat16)
    projector.linear_1.weight.data = projector.linear_1.weight.to(torch.bfloat16)
    # More tensors, all small.
    small_parameters = [torch.ones(1) for _ in range(4)]
    projector.extra = torch.nn.ParameterList(small_parameters)
    assert table(model)["projector"]["dtypes"] == ["bfloat16", "float32"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Wide enough for bitsandbytes' states in 8 bits, and for 4-bit layers of several blocks."""
    return training.checkpoint(
        tmp_path_factory.mktemp("wide"),
        hidden_size=128,
        intermediate_size=192,
        head_dim=64,
    )


def table(model, learning_rates=LEARNING_RATES) -> dict[str, dict]:
    """The summary's rows of modules by their names."""
    return {module_row["module"]: module_row for module_row in modules(model, learning_rates)}


def column(module_rows, key="parameters") -> list:
    return [module_row[key] for module_row in module_rows.values()]


def elements(model, piece: str) -> int:
    """The numbers in parameters whose name has a piece."""
    total_bytes = 0
    for parameter_name, parameter in model.named_parameters():
        if piece in parameter_name:
            total_bytes += parameter.numel()
    return total_bytes


def test_every_parameter_counts_in_its_module_at_its_learning_rate(checkpoint, tmp_path):
    model = training.trainer(tmp_path, checkpoint, vision_learning_rate=0.0).model
    counted = table(model, {**LEARNING_RATES, "vision": 0.0})
    assert counted["vision tower"]["parameters"] == elements(model, "vision_tower")
    assert counted["projector"]["parameters"] == 16 * 32 + 32 + 32 * 32 + 32
    assert counted["norm"]["parameters"] == 2 * 32
    assert sum(column(counted)) == model.num_parameters()
    assert sum(column(counted, "trained")) == model.num_parameters(only_trainable=True)
    assert counted["vision tower"]["trained"] == 0
    assert column(counted, "learning_rate") == [0.0, 1e-3, 3e-4, 2e-5]


def test_adapters_count_beside_the_parameters_of_their_modules(checkpoint, tmp_path):
    plain_trainer = table(training.trainer(tmp_path, checkpoint).model)
    model = training.trainer(tmp_path, checkpoint, use_peft=True).model
    trainable, _ = model.get_nb_trainable_parameters()
    counted = table(model)
    assert sum(column(counted, "trained")) == trainable
    adapters = counted.pop("adapters")
    assert column(counted) == column(plain_trainer)
    assert adapters["parameters"] == elements(model, "lora_")
    assert adapters["trained"] == elements(model, "lora_")
    assert adapters["learning_rate"] == 2e-5
    assert counted["language model"]["trained"] == 0


@pytest.fixture(scope="module")
def in_bfloat16(wide):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(wide, dtype="bfloat16")


@pytest.fixture(scope="module")
def in_4_bits(wide):
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return NormAlignLlavaForConditionalGeneration.from_pretrained(
        wide,
        dtype="bfloat16",
        quantization_config=quantization,
    )


def test_four_bits_count_as_the_parameters_they_stand_for(in_bfloat16, in_4_bits):
    counted = table(in_4_bits)
    assert column(counted) == column(table(in_bfloat16))
    assert counted["language model"]["dtypes"] == ["nf4", "bfloat16"]
    assert counted["norm"]["dtypes"] == ["float32"]


def bytes_in_4_bits(numbers: int) -> int:
    blocks = numbers // 64
    blocks_of_blocks = -(-blocks // 256)
    tables = 4 * 16 + 4 * 256
    return numbers // 2 + blocks + 4 * blocks_of_blocks + tables


def test_weights_in_4_bits_take_half_a_byte_and_scales(in_bfloat16, in_4_bits, wide, tmp_path):
    """A byte for 64 weights, and a float for 256 of these; two tables."""
    arguments = training.trainer(tmp_path, wide).args
    expected = static_bytes(in_bfloat16, arguments)["weights"]
    for parameter_name, parameter in in_bfloat16.model.language_model.named_parameters():
        if parameter_name.endswith("_proj.weight"):
            expected += bytes_in_4_bits(parameter.numel()) - parameter.nbytes
    assert static_bytes(in_4_bits, arguments)["weights"] == expected


def test_gradients_count_as_such_where_most_memory_is_taken_late(tmp_path):
    # Its gradients outweigh a row's activations.
    large_checkpoint = training.checkpoint(
        tmp_path,
        hidden_size=256,
        intermediate_size=2048,
        head_dim=128,
    )
    trainer = training.trainer(tmp_path / "out", large_checkpoint, per_device_train_batch_size=1)
    estimate = trainer.estimate_memory()
    all_gradients = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert all_gradients / 2 < estimate.parts["gradients"] <= all_gradients


class GradientBytes(TrainerCallback):
    """Bytes of gradients when all are there."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.total = 0
        for parameter in model.parameters():
            if parameter.grad is not None:
                self.total += parameter.grad.nbytes


def state_bytes(trainer) -> int:
    """Bytes of the optimizer's states; tables that all tensors share, and the step, aside."""
    total_bytes = 0
    for parameter_state in trainer.optimizer.state.values():
        for state_name, value in parameter_state.items():
            is_table = state_name.startswith("qmap")
            if torch.is_tensor(value) and value.dim() and not is_table:
                total_bytes += value.nbytes
    return total_bytes


@pytest.mark.parametrize(
    ("optimizer", "use_peft"),
    [
        ("adamw_torch_fused", False),
        ("adamw_8bit", False),
        ("adafactor", False),
        ("paged_adamw_32bit", True),
        ("sgd", False),
        ("rmsprop", False),
    ],
)
def test_weights_gradients_and_states_take_what_was_counted(wide, tmp_path, optimizer, use_peft):
    gradient_bytes = GradientBytes()
    trainer = training.trainer(
        tmp_path,
        wide,
        vision_learning_rate=0.0,
        optim=optimizer,
        use_peft=use_peft,
        max_steps=1,
    )
    trainer.add_callback(gradient_bytes)
    counted = static_bytes(trainer.model, trainer.args)
    trainer.train()
    assert counted["weights"] + counted["adapters"] == stored_bytes(trainer.model)
    assert counted["gradients"] == gradient_bytes.total
    assert counted["optimizer"] == state_bytes(trainer)


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adafactor, {}),
    ],
    ids=["SGD", "SGD with momentum", "Adagrad", "AMSGrad", "Adafactor"],
)
def test_states_of_an_optimizer_that_is_given_are_counted(wide, tmp_path, optimizer_class, options):
    trainer = training.trainer(
        tmp_path,
        wide,
        optimizer=(optimizer_class, {"lr": 1e-3, **options}),
        max_steps=1,
        vision_learning_rate=0.0,
    )
    estimate = trainer.estimate_memory()
    weights = trained_bytes(trainer.model)
    trainer.train()
    assert estimate.parts.get("optimizer", 0) == state_bytes(trainer)
    assert trainer.facts["disk"]["checkpoint"] == weights + state_bytes(trainer)


class Unshaped(torch.optim.SGD):
    """Reads values, as some optimizers do."""

    def step(self, closure=None):
        for parameter_group in self.param_groups:
            if parameter_group["params"][0].sum().item():
                super().step(closure)
                return


def test_an_optimizer_that_needs_values_counts_as_adamw(wide, tmp_path):
    trainer = training.trainer(tmp_path, wide, optimizer=(Unshaped, {"lr": 1e-3}))
    expected = 2 * trained_bytes(trainer.model)
    assert trainer.estimate_memory().parts["optimizer"] == expected


@pytest.fixture
def divide(monkeypatch):
    """Has accelerate say how two processes share the model: one process cannot try it."""

    def divide(distributed_type, zero_stage=None):
        states = AcceleratorState._shared_state
        monkeypatch.setitem(states, "distributed_type", distributed_type)
        monkeypatch.setitem(PartialState._shared_state, "distributed_type", distributed_type)
        plugin = SimpleNamespace(zero_stage=zero_stage, selected=True)
        monkeypatch.setitem(states, "deepspeed_plugins", {"default": plugin})

    return divide


def of_two_processes(trainer):
    """The trainer's arguments that are read, as they are in one of two processes."""
    return SimpleNamespace(world_size=2, optim=trainer.args.optim)


def bucket_bytes(model) -> int:
    """The bytes of the buckets that DistributedDataParallel makes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        sizes = str(wrapped._get_ddp_logging_data()["bucket_sizes"])
    finally:
        dist.destroy_process_group()
    return sum(int(size_bytes) for size_bytes in sizes.split(","))


def test_ddp_keeps_gradients_in_buckets_too(checkpoint, tmp_path, divide):
    trainer = training.trainer(tmp_path, checkpoint)
    of_one_process = static_bytes(trainer.model, trainer.args)
    assert sharding() == "none"
    gradients = of_one_process["gradients"] + bucket_bytes(trainer.model)
    divide(DistributedType.MULTI_CPU)
    counted = static_bytes(trainer.model, trainer.args)
    assert counted == {**of_one_process, "gradients": gradients}
    trainer.args.gradient_accumulation_steps = 2  # gradients are there at the peak
    assert trainer.estimate_memory().parts["gradients"] == gradients
    assert sharding() == "none"


def test_fsdp_halves_everything_in_two_processes(checkpoint, tmp_path, divide):
    trainer = training.trainer(tmp_path, checkpoint)
    of_one_process = static_bytes(trainer.model, trainer.args)
    divide(DistributedType.FSDP)
    counted = static_bytes(trainer.model, of_two_processes(trainer))
    expected = {}
    for memory_part, size_bytes in of_one_process.items():
        expected[memory_part] = size_bytes // 2
    assert counted == expected
    assert sharding() == "FSDP"


def bytes_with_zero(trainer, divide, zero_stage) -> dict[str, int]:
    divide(DistributedType.DEEPSPEED, zero_stage)
    assert sharding() == "DeepSpeed"
    adamw_optimizer = (torch.optim.AdamW, {"lr": 1e-3})
    return static_bytes(trainer.model, of_two_processes(trainer), adamw_optimizer)


@pytest.mark.parametrize(
    ("zero_stage", "gradient_processes", "state_bytes_of_a_number", "weight_processes"),
    [
        (1, 1, 12, 1),
        (2, 2, 12, 1),
        (3, 2, 8, 2),
    ],
)
def test_zero_divides_what_its_paper_says(
    checkpoint,
    tmp_path,
    divide,
    zero_stage,
    gradient_processes,
    state_bytes_of_a_number,
    weight_processes,
):
    """Of each number 4 bytes of weight and of gradient, 8 of Adam's moments.

    Below stage 3 a float32 copy of 4 more is in the states that are divided.
    """
    trainer = training.trainer(tmp_path, checkpoint)
    numbers = trainer.model.num_parameters()
    weights = stored_bytes(trainer.model)
    counted = bytes_with_zero(trainer, divide, zero_stage)
    assert counted["optimizer"] == state_bytes_of_a_number * numbers // 2
    assert counted["gradients"] == 4 * numbers // gradient_processes
    assert counted["weights"] == weights // weight_processes


def test_a_container_s_limit_is_what_a_step_must_fit(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "memory.max").write_text(f"{GIB}\n")
    monkeypatch.setattr(precision, "GROUPS", tmp_path / "groups")
    estimate = training.trainer(tmp_path / "out", checkpoint, dry_run=True).estimate_memory()
    assert estimate.device == "this container"
    assert estimate.available == GIB
    assert "of the 1.0 GiB of this container." in estimate.verdict
