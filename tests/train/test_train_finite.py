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
from normalign_llava.train.callbacks.checks import weights_not_finite
from normalign_llava.train.keeping.checkpoints import missing_from
from normalign_llava.train.modules.model import projector_norm


pytestmark = pytest.mark.slow


@pytest.fixture
def make(tmp_path, checkpoint):
    """A trainer that saves every step; `nan_parameter` names a parameter that has a NaN."""

    def make(nan_parameter=None, **options):
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
        if nan_parameter:
            with torch.no_grad():
                model.get_parameter(nan_parameter).view(-1)[0] = math.nan
        train_options = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 1,
            **options,
        }
        return training.trainer(tmp_path / "out", checkpoint, model=model, **train_options)

    return make


def error_of(trainer) -> str:
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    return str(caught.value)


def with_infinite_gradients(trainer, steps):
    """The trainer, where the norm's input gets infinite gradients in these steps."""

    def multiply(module, input_gradients, output_gradients):
        factor = 1
        if trainer.state.global_step + 1 in steps:
            factor = math.inf
        return (input_gradients[0] * factor,)

    projector_norm(trainer.model).register_full_backward_hook(multiply)
    return trainer


@pytest.mark.parametrize("adapters", [False, True])
def test_damaged_weights_are_named_before_the_first_step(make, adapters):
    trainer = make("model.multi_modal_projector.norm.weight", use_peft=adapters)
    assert "norm.weight is not finite" in error_of(trainer)
    assert trainer.state.global_step == 0


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that is computed."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def module(request):
    """Layers of a data type, an empty one, and weights in 4 bits."""
    module = ModuleDict({"sound": Linear(9, 7), "bad": Linear(9, 7, bias=False)})
    module.to(request.param)
    module["empty"] = Linear(0, 7, bias=False)  # as a process's shard can be
    packed = torch.ones(3, dtype=torch.uint8)
    module.register_parameter("packed", Parameter(packed, requires_grad=False))
    return module


def test_weights_are_checked_without_a_copy_of_them(module):
    with LargestTensor() as largest:
        assert weights_not_finite(module) == []
    assert largest.numel == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(module, value):
    with torch.no_grad():
        module["bad"].weight[3, 2] = value
    assert weights_not_finite(module) == ["bad.weight"]


def test_a_run_that_blows_up_stops_and_what_it_saved_stays(make, tmp_path, caplog):
    output = tmp_path / "out"
    last_checkpoint = output / "checkpoint-1"
    error_message = error_of(make(learning_rate=1e30))
    assert error_message.startswith("Step 2 has values that are not finite")
    assert "--bad_steps skip" in error_message
    assert f"The last complete checkpoint is {last_checkpoint}." in error_message
    assert missing_from(last_checkpoint, 1) == []
    file_names = {path.name for path in output.glob("*")}
    assert file_names <= {"checkpoint-1", "runs", "loss.png"}
    assert "card" not in caplog.text  # only a result has one


@pytest.mark.parametrize(
    "module_name",
    [
        "vision_tower.encoder.layers.0.mlp.fc1",
        "multi_modal_projector.norm",
        "language_model.norm",
    ],
)
def test_the_module_that_it_came_from_is_named(make, module_name):
    trainer = make(gradient_accumulation_steps=2)
    module = trainer.model.model.get_submodule(module_name)
    call_count = 0

    def break_in_step_2(module, inputs):
        nonlocal call_count
        call_count += 1
        factor = 1
        if trainer.state.global_step == 1:
            factor = math.nan
        return (inputs[0] * factor,)

    module.register_forward_pre_hook(break_in_step_2)
    cause = f"first in the output of model.{module_name}. "
    assert error_of(trainer).startswith(f"Step 2 has values that are not finite, {cause}")
    assert call_count == 6  # two batches a step, the bad ones twice
    assert not module._forward_hooks


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_gradients_stop_it_too_if_the_loss_is_finite(make, max_grad_norm):
    trainer = with_infinite_gradients(make(max_grad_norm=max_grad_norm), {3})
    cause = "first in the gradients, with finite outputs. "
    assert error_of(trainer).startswith(f"Step 3 has values that are not finite, {cause}")


def test_weights_that_the_last_step_spoiled_are_not_saved(make, tmp_path):
    trainer = make(max_steps=1, learning_rate=1e39, save_strategy="no")
    trainer.train()
    with pytest.raises(FloatingPointError, match=r"step 1, \d+ tensors are not finite, first"):
        trainer.save_model()
    assert not list(tmp_path.rglob("*.safetensors"))


class CheckedSteps:
    """Steps of a trainer's check, with losses and norms that are given."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.check = trainer.finite
        self.model = trainer.model.train()
        self.batch = trainer.data_collator([trainer.train_dataset[0]])

    def begin_step(self) -> None:
        trainer = self.trainer
        self.check.on_step_begin(trainer.args, trainer.state, trainer.control)

    def check_loss(self, loss, batch=None) -> None:
        if batch is None:
            batch = self.batch
        self.check.check_loss(torch.tensor(loss), batch)

    def may_take_step(self, norm=1.0) -> bool:
        return self.check.may_take_step(self.model, norm, None)

    def is_finite(self, norm, loss=1.0, batch=None) -> bool:
        """Whether a step of one batch is taken."""
        self.begin_step()
        self.check_loss(loss, batch)
        return self.may_take_step(norm)

    def batch_without_labels(self) -> dict:
        labels = torch.full_like(self.batch["labels"], -100)
        return {**self.batch, "labels": labels}


@pytest.fixture
def steps(make):
    return CheckedSteps(make())


@pytest.mark.parametrize("norm", [torch.tensor(2.0), 0.0, None])
def test_a_norm_that_is_finite_or_unknown_is_taken(steps, norm):
    assert steps.is_finite(norm)


@pytest.mark.parametrize("norm", [-1.0, torch.tensor(-1.0), math.nan])
def test_a_norm_below_0_is_not_finite_as_deepspeed_means_it(steps, norm):
    with pytest.raises(FloatingPointError, match="in the gradients.* No checkpoint is compl"):
        steps.is_finite(norm)
    assert steps.model.training


def test_a_step_of_a_loss_that_takes_no_labels_is_taken(steps):
    batch = dict(steps.batch)
    del batch["labels"]
    assert steps.is_finite(2.0, batch=batch)


def test_only_the_batch_of_the_bad_step_is_run_again(steps):
    passes = []
    steps.model.model.register_forward_hook(lambda *hook_arguments: passes.append(1))
    steps.check_loss(1.0)  # of a step that is never taken
    with pytest.raises(FloatingPointError, match="first in the loss"):
        steps.is_finite(2.0, loss=math.nan)
    assert len(passes) == 1


def test_a_step_is_taken_if_one_of_its_batches_has_labels(steps):
    steps.begin_step()
    steps.check_loss(1.0)
    steps.check_loss(1.0, steps.batch_without_labels())
    assert steps.may_take_step()


def test_a_step_is_not_taken_if_none_of_its_batches_has_labels(steps):
    steps.begin_step()
    steps.check_loss(1.0, steps.batch_without_labels())
    steps.check_loss(1.0, steps.batch_without_labels())
    assert not steps.may_take_step()


def test_a_step_is_bad_if_one_of_its_batches_is(steps):
    steps.begin_step()
    steps.check_loss(math.nan)
    steps.check_loss(1.0)
    with pytest.raises(FloatingPointError, match="first in the loss"):
        steps.may_take_step()


def test_in_fp16_an_infinite_norm_is_left_to_deepspeed_and_a_bad_loss_is_not(steps, monkeypatch):
    monkeypatch.setattr(steps.trainer.args, "fp16", True)
    assert steps.is_finite(math.inf)  # DeepSpeed's own scaler passes the step over
    with pytest.raises(FloatingPointError, match="first in the loss"):
        steps.is_finite(2.0, loss=math.nan)


def test_a_loss_with_its_outputs_is_checked_too(steps, monkeypatch):
    monkeypatch.setattr(steps.trainer.args, "fp16", True)
    steps.begin_step()
    batch = dict(steps.batch)
    loss, outputs = steps.trainer.compute_loss(steps.model, batch, return_outputs=True)
    assert loss.isfinite()
    assert outputs.logits.isfinite().all()
    assert steps.may_take_step()


def changed_names(before, after) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_a_step_can_be_skipped(make, tmp_path, caplog):
    trainer = with_infinite_gradients(make(bad_steps="skip"), {2, 3})
    assert math.isfinite(trainer.train().training_loss)
    first_weights = stored.weights(tmp_path / "out" / "checkpoint-1")
    second_weights = stored.weights(tmp_path / "out" / "checkpoint-2")
    third_weights = stored.weights(tmp_path / "out" / "checkpoint-3")
    fourth_weights = stored.weights(tmp_path / "out" / "checkpoint-4")
    training.assert_equal(second_weights, first_weights)
    training.assert_equal(third_weights, first_weights)
    for tensor in fourth_weights.values():
        assert tensor.isfinite().all()
    assert changed_names(first_weights, fourth_weights)
    assert caplog.text.count("step is skipped.") == 2
    assert "first in the gradients" in caplog.text


def test_skipping_every_step_ends(make):
    trainer = make(bad_steps="skip", max_steps=30, save_strategy="no")
    with_infinite_gradients(trainer, range(3, 30))
    assert error_of(trainer).startswith("Step 12 has values")


def test_only_steps_that_are_skipped_in_a_row_count(make):
    trainer = make(bad_steps="skip", max_steps=20, save_strategy="no")
    bad_steps = {*range(2, 11), *range(12, 20)}  # of ten in a row one is sound
    with_infinite_gradients(trainer, bad_steps).train()
    assert trainer.state.global_step == 20


@pytest.fixture
def use_fp16(monkeypatch):
    """Has a trainer train in fp16 on the CPU; accelerate does so only on GPUs."""

    def use_fp16(trainer, scale) -> None:
        scaler = GradScaler("cpu", init_scale=scale)
        monkeypatch.setattr(trainer.args, "fp16", True)
        monkeypatch.setattr(trainer.accelerator, "native_amp", True)
        monkeypatch.setattr(trainer.accelerator, "scaler", scaler)
        monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")

    return use_fp16


def test_gradients_that_overflow_at_a_scale_below_1_stop_a_run(make, use_fp16):
    trainer = with_infinite_gradients(make(save_strategy="no", max_steps=1), {1})
    use_fp16(trainer, scale=0.5)
    assert "first in the gradients, with finite outputs" in error_of(trainer)


def test_gradients_that_overflow_at_a_scale_above_1_stop_no_run(make, use_fp16):
    trainer = with_infinite_gradients(make(save_strategy="no", max_steps=1), {1})
    use_fp16(trainer, scale=2.0)
    trainer.train()
    assert trainer.state.global_step == 1


def test_gradients_that_overflow_in_fp16_are_the_scalers_affair(make, use_fp16):
    trainer = make(save_strategy="no", max_steps=16)
    use_fp16(trainer, scale=2.0**24)
    gain = projector_norm(trainer.model).weight
    before = gain.detach().clone()
    assert math.isfinite(trainer.train().training_loss)
    gradient_norms = []
    for log_entry in trainer.state.log_history:
        if "grad_norm" in log_entry:
            gradient_norms.append(log_entry["grad_norm"])
    assert not math.isfinite(gradient_norms[0])
    assert math.isfinite(gradient_norms[-1])
    assert trainer.accelerator.scaler.get_scale() < 2.0**24
    assert not torch.equal(gain, before)
