"""A run stops at the first step whose loss or gradients are not finite, and says where."""

import math

import pytest
import stored
import torch
import training
from accelerate.state import AcceleratorState
from torch.amp import GradScaler
from torch.nn import Linear, ModuleDict, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.train.callbacks.finite import weights_not_finite
from normalign_llava.train.keeping.checkpoints import missing_from
from normalign_llava.train.modules.model import projector_norm


pytestmark = pytest.mark.slow


@pytest.fixture
def make(tmp_path, checkpoint):
    """A trainer that saves every step; `weight` names a parameter that is NaN."""

    def make(weight=None, **options):
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
        if weight:
            with torch.no_grad():
                model.get_parameter(weight).view(-1)[0] = math.nan
        saved = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
        return training.trainer(tmp_path / "out", checkpoint, model=model, **{**saved, **options})

    return make


def stopped(trainer) -> str:
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    return str(caught.value)


def with_infinite_gradients(trainer, steps):
    """The trainer, where the norm's input gets infinite gradients in these steps."""

    def multiply(module, inputs, outputs):
        return (inputs[0] * (math.inf if trainer.state.global_step + 1 in steps else 1),)

    projector_norm(trainer.model).register_full_backward_hook(multiply)
    return trainer


@pytest.mark.parametrize("adapters", [False, True])
def test_damaged_weights_are_named_before_the_first_step(make, adapters):
    trainer = make("model.multi_modal_projector.norm.weight", use_peft=adapters)
    said = stopped(trainer)
    assert "norm.weight is not finite" in said and trainer.state.global_step == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_are_checked_without_a_copy_of_them(dtype, value):
    class Largest(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.made = max(self.made, result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    model = ModuleDict({"sound": Linear(9, 7), "bad": Linear(9, 7, bias=False)}).to(dtype)
    model["empty"] = Linear(0, 7, bias=False)  # as a process's shard can be
    packed = torch.ones(3, dtype=torch.uint8)  # as weights in 4 bits
    model.register_parameter("packed", Parameter(packed, requires_grad=False))
    with Largest() as largest:
        assert weights_not_finite(model) == []
    assert largest.made == 1
    with torch.no_grad():
        model["bad"].weight[3, 2] = value
    assert weights_not_finite(model) == ["bad.weight"]


def test_a_run_that_blows_up_stops_and_what_it_saved_stays(make, tmp_path, caplog):
    said = stopped(make(learning_rate=1e30))
    last = tmp_path / "out" / "checkpoint-1"
    assert said.startswith("Step 2 has values that are not finite") and "--bad_steps skip" in said
    assert f"The last complete checkpoint is {last}." in said and missing_from(last, 1) == []
    assert {path.name for path in (tmp_path / "out").glob("*")} <= {
        *("checkpoint-1", "runs", "loss.png")
    }
    assert "card" not in caplog.text  # which is written of a result alone


@pytest.mark.parametrize(
    "name",
    ["vision_tower.encoder.layers.0.mlp.fc1", "multi_modal_projector.norm", "language_model.norm"],
)
def test_the_module_that_it_came_from_is_named(make, name):
    trainer = make(gradient_accumulation_steps=2)
    module = trainer.model.model.get_submodule(name)
    calls = []

    def break_(module, inputs):
        calls.append(1)
        return (inputs[0] * (math.nan if trainer.state.global_step == 1 else 1),)

    module.register_forward_pre_hook(break_)
    start = f"Step 2 has values that are not finite, first in the output of model.{name}. "
    assert stopped(trainer).startswith(start)
    assert len(calls) == 6 and not module._forward_hooks  # two batches a step, the bad ones twice


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_gradients_alone_stop_it_too(make, max_grad_norm):
    trainer = make(max_grad_norm=max_grad_norm)
    start = "Step 3 has values that are not finite, first in the gradients, with finite outputs. "
    assert stopped(with_infinite_gradients(trainer, {3})).startswith(start)


def test_weights_that_the_last_step_spoiled_are_not_saved(make, tmp_path):
    trainer = make(max_steps=1, learning_rate=1e39, save_strategy="no")
    trainer.train()
    with pytest.raises(FloatingPointError, match=r"step 1, \d+ tensors are not finite, first"):
        trainer.save_model()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_norm_below_0_is_not_finite_as_deepspeed_means_it(make, monkeypatch):
    trainer = make()
    finite = trainer.finite
    model = trainer.model.train()
    inputs = trainer.data_collator([trainer.train_dataset[0]])

    def is_finite(norm, loss=1.0, batch=inputs):
        finite.on_step_begin(trainer.args, trainer.state, trainer.control)
        finite.check_loss(torch.tensor(loss), batch)
        return finite.is_step_finite(model, norm, None)

    for norm in (torch.tensor(2.0), 0.0, None):
        assert is_finite(norm)
    for norm in (-1.0, torch.tensor(-1.0), math.nan):
        with pytest.raises(FloatingPointError, match="in the gradients.* No checkpoint is compl"):
            is_finite(norm)
    assert model.training
    without_labels = {name: value for name, value in inputs.items() if name != "labels"}
    assert is_finite(2.0, batch=without_labels)  # as of a loss that takes none
    passes = []
    model.model.register_forward_hook(lambda *args: passes.append(1))
    finite.check_loss(torch.tensor(1.0), inputs)  # of a step that is never taken
    with pytest.raises(FloatingPointError, match="first in the loss"):
        is_finite(2.0, loss=math.nan)
    assert len(passes) == 1  # of the batch of the bad step alone
    # Of a step's batches one is enough to make it bad, and one with labels to take it.
    unlearned = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    for losses, batches, is_taken in (
        ((1.0, 1.0), (inputs, unlearned), True),
        ((1.0, 1.0), (unlearned, unlearned), False),
        ((math.nan, 1.0), (inputs, inputs), None),
    ):
        finite.on_step_begin(trainer.args, trainer.state, trainer.control)
        for value, batch in zip(losses, batches, strict=True):
            finite.check_loss(torch.tensor(value), batch)
        if is_taken is None:
            with pytest.raises(FloatingPointError, match="first in the loss"):
                finite.is_step_finite(model, 1.0, None)
        else:
            assert finite.is_step_finite(model, 1.0, None) == is_taken
    monkeypatch.setattr(trainer.args, "fp16", True)
    assert is_finite(math.inf)  # DeepSpeed's own scaler passes the step over
    with pytest.raises(FloatingPointError, match="first in the loss"):
        is_finite(2.0, loss=math.nan)
    finite.on_step_begin(trainer.args, trainer.state, trainer.control)
    loss, outputs = trainer.compute_loss(model, dict(inputs), return_outputs=True)
    assert loss.isfinite() and outputs.logits.isfinite().all()
    assert finite.is_step_finite(model, 1.0, None)


def test_a_step_can_be_skipped(make, tmp_path, caplog):
    trainer = with_infinite_gradients(make(bad_steps="skip"), {2, 3})
    assert math.isfinite(trainer.train().training_loss)
    folders = [tmp_path / "out" / f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    first, second, third, fourth = map(stored.weights, folders)
    assert all(torch.equal(first[name], value) for name, value in {**second, **third}.items())
    assert any(not torch.equal(first[name], value) for name, value in fourth.items())
    assert all(value.isfinite().all() for value in fourth.values())
    assert caplog.text.count("step is skipped.") == 2 and "first in the gradients" in caplog.text


def test_skipping_every_step_ends(make):
    trainer = make(bad_steps="skip", max_steps=30, save_strategy="no")
    assert stopped(with_infinite_gradients(trainer, range(3, 30))).startswith("Step 12 has values")


def test_steps_that_are_skipped_count_in_a_row_alone(make):
    trainer = make(bad_steps="skip", max_steps=20, save_strategy="no")
    bad = {*range(2, 11), *range(12, 20)}  # of ten in a row one is sound
    with_infinite_gradients(trainer, bad).train()
    assert trainer.state.global_step == 20


@pytest.mark.parametrize(("scale", "stops"), [(0.5, True), (2.0, False)])
def test_gradients_that_overflow_at_a_scale_below_1_stop_a_run(make, monkeypatch, scale, stops):
    trainer = make(save_strategy="no", max_steps=1)
    monkeypatch.setattr(trainer.args, "fp16", True)
    monkeypatch.setattr(trainer.accelerator, "native_amp", True)
    monkeypatch.setattr(trainer.accelerator, "scaler", GradScaler("cpu", init_scale=scale))
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    broken = with_infinite_gradients(trainer, {1})
    if stops:
        assert "first in the gradients, with finite outputs" in stopped(broken)
    else:
        broken.train()


def test_gradients_that_overflow_in_fp16_are_the_scalers_affair(make, monkeypatch):
    # accelerate has fp16 for GPUs alone; CPUs multiply in it too.
    trainer = make(save_strategy="no", max_steps=16)
    monkeypatch.setattr(trainer.args, "fp16", True)
    monkeypatch.setattr(trainer.accelerator, "native_amp", True)
    monkeypatch.setattr(trainer.accelerator, "scaler", GradScaler("cpu", init_scale=2.0**24))
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    gain = projector_norm(trainer.model).weight
    before = gain.detach().clone()
    assert math.isfinite(trainer.train().training_loss)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert not math.isfinite(norms[0]) and math.isfinite(norms[-1])
    assert trainer.accelerator.scaler.get_scale() < 2.0**24 and not torch.equal(gain, before)
