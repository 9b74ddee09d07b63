# SPDX-License-Identifier: Apache-2.0
"""What is counted before training: parameters, memory; what a dry run needs, writes, proposes."""

import shutil
import sys
from contextlib import ExitStack
from functools import partial
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
from normalign_llava.train.memory import CONTEXT, MemoryEstimate, largest_batch
from normalign_llava.train.modules.model import base_model
from normalign_llava.train.modules.sharding import sharding
from normalign_llava.train.modules.sizes import static_bytes
from normalign_llava.train.parsing import parse
from normalign_llava.train.run import make_trainer, remedy
from normalign_llava.train.shapes import _take_as_trained, peak_bytes


pytestmark = pytest.mark.slow
RATES = {"vision": 2e-6, "projector": 1e-3, "norm": 3e-4, "language": 2e-5}


def dry_run(*words):
    """The exit status of a dry run, and what it prints, on one line."""
    done = CliRunner().invoke(app, ["train", *words, "--dry_run"])
    return done.exit_code, " ".join(done.output.split())


def test_a_dry_run_reads_no_weights_writes_nothing_and_finds_faults(tmp_path, parts):
    checkpoint = tmp_path / "without-weights"
    shutil.copytree(parts / "model", checkpoint, ignore=shutil.ignore_patterns("*.safetensors*"))
    file = training.recipe(tmp_path, parts, model_name_or_path=str(checkpoint))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dropped_rows.jsonl").touch()  # of an earlier run
    before = sorted(tmp_path.rglob("*"))
    status, shown = dry_run(file, "--device_memory", "24GiB")
    assert status == 0 and "Without gradient checkpointing: " in shown and "activations" in shown
    assert "of the 24.0 GiB of device_memory (1.0 GiB are kept free)." in shown
    least = ["--per_device_train_batch_size", "1", "--gradient_checkpointing", "--load_in_4bit"]
    least += ["--dtype", "bfloat16", "--stage", "align", "--device_memory", "1GiB"]
    status, shown = dry_run(file, *least)
    assert status == 1 and "Does not fit" in shown and "Nothing that was tried fits" in shown
    assert sorted(tmp_path.rglob("*")) == before
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    faults = {"3 is not a multiple": ["--global_batch_size", "3"], "has no weights in safe": []}
    for message, words in faults.items():
        status, shown = dry_run(file, *words)
        assert status == 1 and message in shown


@pytest.mark.parametrize("options", [{}, dict(use_peft=True, load_in_4bit=True, dtype="bfloat16")])
def test_shapes_alone_take_what_weights_take_checkpointed_or_not(checkpoint, tmp_path, options):
    def dry(**own):
        return training.trainer(tmp_path, checkpoint, dry_run=True, **options, **own)

    without = dry()
    checkpointed = dry(gradient_checkpointing=True)
    named = without.model.named_parameters()
    assert all(parameter.is_meta for name, parameter in named if ".norm." not in name)
    more = without.estimate_memory()
    less = checkpointed.estimate_memory()
    assert less.total < more.total
    for trainer in (without, checkpointed, without):
        assert trainer.estimate_memory(True) == less
        assert trainer.estimate_memory(False) == more
    loaded = training.trainer(tmp_path, checkpoint, **options)
    assert without.facts["modules"] == loaded.facts["modules"]
    assert loaded.estimate_memory() == more
    if not options:
        every_second = dict(gradient_checkpointing_kwargs={"every_n_layers": 2, "offload": True})
        some = dry(gradient_checkpointing=True, **every_second).estimate_memory()
        assert less.total < some.total < more.total
        assert more.parts["weights"] == stored_bytes(loaded.model)
        frozen = dry(vision_learning_rate=0.0).estimate_memory(False)
        assert frozen.parts["activations"] < more.parts["activations"]


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
            loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return {getattr(kind, "name", kind): size for kind, size in peak.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(gradient_checkpointing=True),
        dict(bf16=True),
        dict(gradient_accumulation_steps=2),
        dict(gradient_accumulation_steps=2, per_device_train_batch_size=1),
    ],
    ids=str,
)
def test_a_step_takes_what_torch_s_tracker_sees(checkpoint, tmp_path, options):
    estimate = training.trainer(tmp_path, checkpoint, **options).estimate_memory()
    seen = tracked_bytes(training.trainer(tmp_path, checkpoint, **options))
    assert estimate.parts["weights"] == seen["PARAM"] + seen["BUFFER"]
    assert estimate.parts.get("gradients", 0) == seen["GRAD"]
    passes = options.get("gradient_accumulation_steps", 1)
    assert estimate.parts["batches"] == passes * seen["OTH"]
    beside = estimate.parts["optimizer"] + (passes - 1) * seen["OTH"]
    assert estimate.total - beside == pytest.approx(seen["Total"], rel=0.01)


def test_weights_and_their_copies_are_the_same_for_one_row_and_for_four(checkpoint, tmp_path):
    options = dict(device_memory="24GiB", dry_run=True)
    model = training.trainer(tmp_path, checkpoint).model
    kinds = (torch.nn.Linear, torch.nn.Conv2d)  # what autocast computes in bfloat16
    cast = [module for module in model.modules() if isinstance(module, kinds)]
    copied = sum(value.numel() for module in cast for value in module.parameters(recurse=False))
    for rows, half in ((1, "bf16"), (4, "fp16")):
        own = {"per_device_train_batch_size": rows, half: True}
        estimate = training.trainer(tmp_path, checkpoint, **options, **own).estimate_memory()
        assert estimate.parts["weights"] == stored_bytes(model)
        assert estimate.parts["half-precision copies of weights"] == 2 * copied


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


def test_the_longest_rows_decide_and_the_batches_of_a_step_wait_in_memory(checkpoint, tmp_path):
    rows = training.rows(8, images=lambda number: 1 + number % 3, turns=lambda row: 1 + row % 4)
    frozen = dict(vision_learning_rate=0.0, language_learning_rate=0.0)
    options = dict(dry_run=True, gradient_accumulation_steps=2, **frozen)
    trainer = training.trainer(tmp_path, checkpoint, rows, **options)
    batch = largest_batch(trainer.args, trainer.train_dataset, trainer.data_collator)
    assert batch["input_ids"].shape == (2, max(rows["length"]))
    # Images of 3 x 16 x 16 float32 numbers; ids, mask and labels, 8 bytes each.
    size = len(batch["pixel_values"]) * 3 * 16 * 16 * 4 + batch["input_ids"].numel() * 3 * 8
    images = batch["pixel_values"]
    kept = batch["pixel_values"].clone()
    assert peak_bytes(trainer, batch, None, accumulates=False)["batches"] == images.nbytes
    assert batch["pixel_values"] is images and torch.equal(images, kept)
    two = trainer.estimate_memory()
    tokens = batch["input_ids"].numel()
    images = len(batch["pixel_values"])
    assert two.batch == f"2 row(s), {tokens:,} tokens, {images:,} image(s)"
    trainer.args.gradient_accumulation_steps = 8
    eight = trainer.estimate_memory()
    assert (two.parts["batches"], eight.parts["batches"]) == (2 * size, 8 * size)
    assert eight.total - two.total == 6 * size
    trainer.args.per_device_train_batch_size = 8
    large = trainer.estimate_memory()
    assert (eight.batch[:8], large.batch[:8]) == ("2 row(s)", "8 row(s)")
    assert 2 < large.parts["activations"] / eight.parts["activations"] < 5


@pytest.fixture(scope="module")
def too_large(checkpoint, tmp_path_factory):
    """Trainers of four rows in a pass, with adapters and without, whose step does not fit."""
    made = {}
    for use_peft in (False, True):
        options = dict(per_device_train_batch_size=4, global_batch_size=8, use_peft=use_peft)
        folder = tmp_path_factory.mktemp("large")
        made[use_peft] = training.trainer(folder, checkpoint, dry_run=True, **options)
    return made


def changes_for(trainer, fitting=None, refused=()) -> tuple[list[str], str]:
    """The changes that are tried, in order, and what is said where one of them fits."""
    tried = []

    def make(words):
        tried.append(" ".join(words))
        if tried[-1] in refused:
            kind = (ValueError, ImportError)[len(tried) % 2]
            raise kind("They do not go together.")
        available = 7 if tried[-1] == fitting else 6
        estimate = MemoryEstimate({"weights": 7}, "", "a card", available)
        return SimpleNamespace(estimate_memory=lambda: estimate)

    said = remedy(trainer, make)
    return tried, said


TWO, ONE = (f"--per_device_train_batch_size {rows}" for rows in (2, 1))
CHECKPOINTING = "--gradient_checkpointing true"
ADAPTERS = "--use_peft true"
IN_4_BITS = "--load_in_4bit true"
HALF = "--dtype bfloat16"


def each(*changes: str) -> list[str]:
    """Each with the rows as they are, and with one row in a pass."""
    tried = []
    for change in changes:
        tried += [change, f"{change} {ONE}"]
    return tried


def test_changes_are_tried_from_small_to_large_until_one_fits(too_large):
    tried, said = changes_for(too_large[False])
    quantized = f"{ADAPTERS} {IN_4_BITS} {HALF}"
    larger = (CHECKPOINTING, ADAPTERS, quantized, f"{CHECKPOINTING} {quantized}")
    assert tried == [TWO, ONE, *each(*larger)]
    assert f"not even {tried[-1]}. " in said and "--max_length" in said
    for place, change in enumerate(tried):
        before, said = changes_for(too_large[False], fitting=change, refused=tried[:place])
        assert before == tried[: place + 1]
        assert said.startswith(f"Would fit: {change}. Fits: ")


@pytest.mark.parametrize(
    ("use_peft", "language", "dtype", "larger"),
    [
        (False, 1e-3, "bfloat16", (ADAPTERS, f"{ADAPTERS} {IN_4_BITS}")),
        (False, 0.0, "float32", (HALF, f"{IN_4_BITS} {HALF}")),
        (False, 0.0, "bfloat16", (IN_4_BITS,)),
        (True, 1e-3, "float32", (HALF, f"{IN_4_BITS} {HALF}")),
        (True, 1e-3, "bfloat16", (IN_4_BITS,)),
    ],
)
def test_what_a_run_has_already_is_no_change(
    too_large, monkeypatch, use_peft, language, dtype, larger
):
    trainer = too_large[use_peft]
    monkeypatch.setitem(trainer.args.model_init_kwargs, "dtype", dtype)
    monkeypatch.setitem(trainer.learning_rates, "language", language)
    all_of_it = f"{CHECKPOINTING} {larger[-1]}"
    assert changes_for(trainer)[0] == [TWO, ONE, *each(CHECKPOINTING, *larger, all_of_it)]
    monkeypatch.setattr(trainer.args, "per_device_train_batch_size", 40)
    halves = [f"--per_device_train_batch_size {rows}" for rows in (20, 10, 5, 2, 1)]
    assert changes_for(trainer)[0][:6] == [*halves, CHECKPOINTING]
    monkeypatch.setattr(trainer.args, "per_device_train_batch_size", 1)
    assert changes_for(trainer)[0] == [CHECKPOINTING, *larger, all_of_it]
    monkeypatch.setattr(trainer.args, "gradient_checkpointing", True)
    assert changes_for(trainer)[0] == [*larger]
    monkeypatch.setattr(base_model(trainer.model), "is_loaded_in_4bit", True, raising=False)
    assert changes_for(trainer)[0] == [words for words in larger if IN_4_BITS not in words]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_a_dry_run_is_told_by_the_first_process(monkeypatch, capsys, is_first, checkpointing, fits):
    sizes = {None: 2 * 2**30, checkpointing: 2 * 2**30, not checkpointing: 3 * 2**30}
    available = 2 * 2**30 if fits else 2**30

    def estimate(asked=None):
        return MemoryEstimate({"weights": sizes[asked]}, "", "a card", available)

    trainer = SimpleNamespace(estimate_memory=estimate, summary=lambda: "the summary")
    trainer.args = SimpleNamespace(gradient_checkpointing=checkpointing)
    trainer.is_world_process_zero = lambda: is_first
    monkeypatch.setattr(run, "parse", lambda words, recipe: (words, recipe, None))
    monkeypatch.setattr(run, "make_trainer", lambda *parsed: (trainer, None))
    monkeypatch.setattr(run, "remedy", lambda made, make: f"a change of {type(made).__name__}")
    assert run.dry_run(["--words"]) is fits
    shown = " ".join(capsys.readouterr().out.split())
    other = "Without" if checkpointing else "With"
    for said in ("the summary", "2.0 GiB of the", f"{other} gradient checkpointing: 3.0 GiB."):
        assert (said in shown) is is_first
    assert ("a change of" in shown) is (is_first and not fits)


def test_without_the_package_4_bits_are_not_tried(too_large, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    tried, _ = changes_for(too_large[False])
    assert tried[2:] == each(CHECKPOINTING, ADAPTERS, f"{CHECKPOINTING} {ADAPTERS}")


def test_a_step_is_estimated_as_in_training_and_leaves_nothing_behind(too_large, monkeypatch):
    trainer = too_large[False]
    model = trainer.model
    base = base_model(trainer.model)
    metrics = trainer._metrics["train"]
    inputs = (base.get_input_embeddings(), base.model.vision_tower.get_input_embeddings())
    handles = {module: module.register_forward_hook(lambda *args: None) for module in inputs}
    model.eval()
    random = torch.get_rng_state()
    for size in (None, "24GiB"):
        monkeypatch.setattr(trainer.args, "device_memory", size)
        for checkpointing in (None, True, False):
            with ExitStack() as stack:
                _take_as_trained(trainer, checkpointing, stack)
                assert model.training
                assert base.is_gradient_checkpointing == bool(checkpointing)
                assert base.only_answers == (size is None)  # a GPU's head sees all positions
                for module, handle in handles.items():
                    assert handle.id not in module._forward_hooks
                trainer.state.num_input_tokens_seen += 5
                trainer._metrics["train"]["entropy"].append(1.0)
                torch.rand(1)
            assert not model.training and not base.is_gradient_checkpointing
            assert base.only_answers and trainer.state.num_input_tokens_seen == 0
            assert trainer._metrics["train"] is metrics and not metrics["entropy"]
            assert torch.equal(torch.get_rng_state(), random)
            for module, handle in handles.items():
                assert handle.id in module._forward_hooks
    for handle in handles.values():
        handle.remove()


def test_a_model_that_cannot_be_estimated_is_told_as_such(too_large):
    trainer = too_large[False]

    def fail(*args):
        raise NotImplementedError("no shape of it is known")

    handle = trainer.model.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="memory cannot be estimated .*: no shape of it is known"):
        trainer.estimate_memory()
    handle.remove()


def test_the_rows_of_a_batch_without_padding_are_counted(checkpoint, tmp_path):
    trainer = training.trainer(tmp_path, checkpoint, dry_run=True, padding_free=True)
    estimate = trainer.estimate_memory()
    assert estimate.batch.startswith("2 row(s), ")
    assert all(estimate.parts.values())  # what takes nothing is not told
    trainer.train_dataset = training.rows(4, images=lambda number: 0)
    assert trainer.estimate_memory().batch.endswith(" tokens, 0 image(s)")


def test_a_dry_run_names_a_change_that_outweighs_the_options_given(tmp_path, parts):
    file = training.recipe(tmp_path, parts)
    given = [file, "--gradient_checkpointing", "false", "--per_device_train_batch_size", "4"]
    smaller = ["--per_device_train_batch_size", "1"]
    trainer = make_trainer(*parse([*given, *smaller, "--dry_run"]))[0]
    enough = (trainer.estimate_memory().total + CONTEXT + 64) / 2**30
    status, shown = dry_run(*given, "--device_memory", f"{enough:.12f}GiB")
    assert status == 1 and "Would fit: --per_device_train_batch_size 1. Fits" in shown
    assert dry_run(*given, *smaller, "--device_memory", f"{enough:.12f}GiB")[0] == 0


def test_the_first_dtype_of_a_module_is_that_of_most_of_its_parameters(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    projector = model.model.multi_modal_projector
    projector.linear_2.to(torch.bfloat16)
    projector.linear_1.weight.data = projector.linear_1.weight.to(torch.bfloat16)
    # More tensors, all small.
    projector.extra = torch.nn.ParameterList(torch.ones(1) for _ in range(4))
    (row,) = (row for row in modules(model, RATES) if row["module"] == "projector")
    assert row["dtypes"] == ["bfloat16", "float32"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Wide enough for bitsandbytes' states in 8 bits, and for 4-bit layers of several blocks."""
    sizes = dict(hidden_size=128, intermediate_size=192, head_dim=64)
    return training.checkpoint(tmp_path_factory.mktemp("wide"), **sizes)


def table(model, rates=RATES):
    return {row["module"]: row for row in modules(model, rates)}


def column(rows, key="parameters") -> list:
    return [row[key] for row in rows.values()]


def elements(model, piece: str) -> int:
    return sum(value.numel() for name, value in model.named_parameters() if piece in name)


def stored_bytes(model) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def test_every_parameter_counts_in_its_module_at_its_learning_rate(checkpoint, tmp_path):
    model = training.trainer(tmp_path, checkpoint, vision_learning_rate=0.0).model
    rows = table(model, {**RATES, "vision": 0.0})
    assert rows["vision tower"]["parameters"] == elements(model, "vision_tower")
    assert rows["projector"]["parameters"] == 16 * 32 + 32 + 32 * 32 + 32
    assert rows["norm"]["parameters"] == 2 * 32
    assert sum(column(rows)) == model.num_parameters()
    assert sum(column(rows, "trained")) == model.num_parameters(only_trainable=True)
    assert rows["vision tower"]["trained"] == 0
    assert column(rows, "learning_rate") == [0.0, 1e-3, 3e-4, 2e-5]

    model = training.trainer(tmp_path, checkpoint, use_peft=True).model
    adapted = table(model)
    assert sum(column(adapted, "trained")) == model.get_nb_trainable_parameters()[0]
    adapters = adapted.pop("adapters")
    assert column(adapted) == column(rows)
    assert adapters["parameters"] == adapters["trained"] == elements(model, "lora_")
    assert adapters["learning_rate"] == 2e-5 and adapted["language model"]["trained"] == 0


def test_four_bits_count_as_the_parameters_they_stand_for(wide, tmp_path):
    load = partial(NormAlignLlavaForConditionalGeneration.from_pretrained, wide, dtype="bfloat16")
    nf4 = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4["bnb_4bit_compute_dtype"] = torch.bfloat16
    plain = load()
    model = load(quantization_config=BitsAndBytesConfig(load_in_4bit=True, **nf4))
    found = table(model)
    assert column(found) == column(table(plain))
    assert found["language model"]["dtypes"] == ["nf4", "bfloat16"]
    assert found["norm"]["dtypes"] == ["float32"]
    arguments = training.trainer(tmp_path, wide).args
    named = plain.model.language_model.named_parameters()
    linears = [value.numel() for name, value in named if name.endswith("_proj.weight")]
    # Half a byte a weight; a byte for 64 weights, and a float for 256 of these; two tables.
    quantized = sum(n // 2 + n // 64 + 4 * -(-n // 64 // 256) + 4 * 16 + 4 * 256 for n in linears)
    expected_bytes = static_bytes(plain, arguments)["weights"] - 2 * sum(linears) + quantized
    assert static_bytes(model, arguments)["weights"] == expected_bytes


def test_gradients_count_as_such_where_most_memory_is_taken_late(tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=2048, head_dim=128)
    large = training.checkpoint(tmp_path, **sizes)  # whose gradients outweigh a row's activations
    trainer = training.trainer(tmp_path / "out", large, per_device_train_batch_size=1)
    estimate = trainer.estimate_memory()
    trained = sum(value.nbytes for value in trainer.model.parameters())
    assert trained / 2 < estimate.parts["gradients"] <= trained


class Bytes(TrainerCallback):
    """Bytes of gradients when all are there."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


BY_NAME = ["adamw_torch_fused", "adamw_8bit", "adafactor", "paged_adamw_32bit", "sgd", "rmsprop"]
BY_CLASS = [
    (torch.optim.SGD, {"lr": 1e-3}),
    (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 1e-3}),
    (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
    (torch.optim.Adafactor, {"lr": 1e-3}),
]


def states_of(trainer) -> int:
    """Bytes of the optimizer's states; tables that all tensors share, and the step, aside."""
    return sum(
        value.nbytes
        for state in trainer.optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and value.dim() and not name.startswith("qmap")
    )


@pytest.mark.parametrize("optimizer", BY_NAME)
def test_weights_gradients_and_states_take_what_was_counted(wide, tmp_path, optimizer):
    counted = Bytes()
    options = dict(optim=optimizer, use_peft="paged" in optimizer, max_steps=1)
    trainer = training.trainer(tmp_path, wide, vision_learning_rate=0.0, **options)
    trainer.add_callback(counted)
    found = static_bytes(trainer.model, trainer.args)
    trainer.train()
    assert found["weights"] + found["adapters"] == stored_bytes(trainer.model)
    assert (found["gradients"], found["optimizer"]) == (counted.gradients, states_of(trainer))


@pytest.mark.parametrize("optimizer", BY_CLASS, ids=str)
def test_states_of_an_optimizer_that_is_given_are_counted(wide, tmp_path, optimizer):
    options = dict(optimizer=optimizer, max_steps=1, vision_learning_rate=0.0)
    trainer = training.trainer(tmp_path, wide, **options)
    estimate = trainer.estimate_memory()
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    trainer.train()
    assert estimate.parts.get("optimizer", 0) == states_of(trainer)
    assert trainer.facts["disk"]["checkpoint"] == trained + states_of(trainer)


class Unshaped(torch.optim.SGD):
    """Reads values, as some optimizers do."""

    def step(self, closure=None):
        if any(group["params"][0].sum().item() for group in self.param_groups):
            super().step(closure)


def test_an_optimizer_that_needs_values_counts_as_adamw(wide, tmp_path):
    trainer = training.trainer(tmp_path, wide, optimizer=(Unshaped, {"lr": 1e-3}))
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    assert trainer.estimate_memory().parts["optimizer"] == 2 * trained


@pytest.fixture
def divided(monkeypatch):
    """Has accelerate say how two processes share the model, which one process cannot try."""

    def divide(kind, stage=None, processes=2):
        states = AcceleratorState._shared_state
        monkeypatch.setitem(states, "distributed_type", kind)
        monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
        plugin = SimpleNamespace(zero_stage=stage, selected=True)
        monkeypatch.setitem(states, "deepspeed_plugins", {"default": plugin})

    return divide


def test_ddp_keeps_gradients_in_buckets_too(checkpoint, tmp_path, divided):
    trainer = training.trainer(tmp_path, checkpoint)
    alone = static_bytes(trainer.model, trainer.args)
    assert sharding() == "none"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(trainer.model)
        sizes = wrapped._get_ddp_logging_data()["bucket_sizes"]
    finally:
        dist.destroy_process_group()
    buckets = sum(int(size) for size in str(sizes).split(","))
    divided(DistributedType.MULTI_CPU)
    together = static_bytes(trainer.model, trainer.args)
    assert together == {**alone, "gradients": alone["gradients"] + buckets}
    trainer.args.gradient_accumulation_steps = 2  # gradients are there at the peak
    assert trainer.estimate_memory().parts["gradients"] == together["gradients"]
    assert sharding() == "none"
    divided(DistributedType.FSDP)
    args = SimpleNamespace(world_size=2, optim=trainer.args.optim)
    halves = static_bytes(trainer.model, args)
    assert halves == {name: size // 2 for name, size in alone.items()}
    assert sharding() == "FSDP"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_divides_what_its_paper_says(checkpoint, tmp_path, divided, stage):
    trainer = training.trainer(tmp_path, checkpoint)
    numbers = trainer.model.num_parameters()
    stored = stored_bytes(trainer.model)
    divided(DistributedType.DEEPSPEED, stage)
    assert sharding() == "DeepSpeed"
    args = SimpleNamespace(world_size=2, optim=trainer.args.optim)
    found = static_bytes(trainer.model, args, (torch.optim.AdamW, {"lr": 1e-3}))
    # Of each number 4 bytes of weight and of gradient, 8 of Adam's moments, and below stage 3 a
    # float32 copy of 4 more in the states that are divided.
    states = 8 * numbers if stage == 3 else 12 * numbers
    assert found["optimizer"] == states // 2
    assert found["gradients"] == (4 * numbers if stage == 1 else 4 * numbers // 2)
    assert found["weights"] == (stored // 2 if stage == 3 else stored)


def test_a_container_s_limit_is_what_a_step_must_fit(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "memory.max").write_text(f"{2**30}\n")
    monkeypatch.setattr(precision, "GROUPS", tmp_path / "groups")
    estimate = training.trainer(tmp_path / "out", checkpoint, dry_run=True).estimate_memory()
    assert (estimate.device, estimate.available) == ("this container", 2**30)
    assert "of the 1.0 GiB of this container." in estimate.verdict
