"""Gradients are compensated only in training, whatever modes single modules are in.

Everything is computed in float64.
"""

import copy

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.train.modules.forward import eval_frozen


GAIN = 0.02


def make_pixel_values() -> torch.Tensor:
    return tiny.inputs()["pixel_values"].double()


def base_model_of(model):
    """The NormAlignLlavaModel inside PEFT's and other wrappers."""
    for module in model.modules():
        if type(module).__name__ == "NormAlignLlavaModel":
            return module
    raise AssertionError("no NormAlignLlavaModel is inside")


def norm_of(model):
    return base_model_of(model).multi_modal_projector.norm


def evaluation(model):
    return model.eval()


def evaluation_after_training(model):
    model.train()
    pixel_values = make_pixel_values().requires_grad_()
    loss_of(model, pixel_values).backward()
    return model.eval()


def evaluation_with_lora(model):
    return with_lora(model).eval()


def training(model):
    return model.train()


def norm_evaluated(model):
    model.train()
    norm_of(model).eval()
    return model


def norm_frozen(model):
    model.train()
    norm_of(model).requires_grad_(False).eval()
    return model


def only_the_tower_trains(model):
    """As our trainer does with `--projector_learning_rate 0 --norm_learning_rate 0`."""
    model.requires_grad_(False).train()
    model.model.vision_tower.requires_grad_(True)
    eval_frozen(model)
    for module in model.model.multi_modal_projector.modules():
        assert not module.training
    return model


def only_what_has_trained_parameters(model):
    """Each module by its own parameters, so no container is in training mode."""
    norm_of(model).requires_grad_(False)
    for module in model.modules():
        own_parameters = module.parameters(recurse=False)
        is_trained = any(parameter.requires_grad for parameter in own_parameters)
        module.train(is_trained)
    assert not model.model.training
    assert not model.model.multi_modal_projector.training
    return model


def one_layer_of_the_tower(model):
    model.requires_grad_(False).eval()
    for module in model.model.vision_tower.modules():
        if isinstance(module, torch.nn.Linear):
            module.requires_grad_(True).train()
            return model
    raise AssertionError("the tower has no linear layer")


def only_the_projector(model):
    model.eval()
    model.model.multi_modal_projector.train()
    norm_of(model).eval()
    return model


def all_below_evaluated(model):
    model.train()
    model.model.vision_tower.eval()
    model.model.multi_modal_projector.eval()
    return model


def modes_set_back(model):
    """As after an evaluation within training, which sets attributes and does not call `train`."""
    only_the_tower_trains(model)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        loss_of(model, make_pixel_values())
    for module, mode in modes.items():
        module.training = mode
    return model


def with_lora(model):
    lora = LoraConfig(
        target_modules=r".*language_model.*q_proj",
        modules_to_save=["multi_modal_projector"],
    )
    return get_peft_model(model, lora).double()


def with_lora_norm_evaluated(model):
    adapted_model = with_lora(model).train()
    projector = base_model_of(adapted_model).multi_modal_projector
    projector.modules_to_save["default"].norm.eval()
    return adapted_model


def copied(model):
    model.train()
    norm_of(model).eval()
    return copy.deepcopy(model)


def recompute(model, module_class):
    """Checkpoints the activations of modules of a class."""
    model.train()
    norm_of(model).eval()

    def wrap(module):
        return checkpoint_wrapper(module, CheckpointImpl.NO_REENTRANT)

    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrap,
        check_fn=lambda module: type(module) is module_class,
    )
    return model


def norm_recomputed(model):
    return recompute(model, type(norm_of(model)))


def projector_recomputed(model):
    return recompute(model, type(model.model.multi_modal_projector))


def decoder_recomputed(model):
    model.train()
    norm_of(model).eval()
    model.gradient_checkpointing_enable()
    return model


TRUE = [
    evaluation,
    evaluation_after_training,
    evaluation_with_lora,
]
COMPENSATED = [
    training,
    norm_evaluated,
    norm_frozen,
    only_the_tower_trains,
    one_layer_of_the_tower,
    only_what_has_trained_parameters,
    only_the_projector,
    modes_set_back,
    with_lora,
    copied,
    with_lora_norm_evaluated,
    norm_recomputed,
    projector_recomputed,
    decoder_recomputed,
    all_below_evaluated,
]


def loss_of(model, pixel_values):
    """The whole model's loss. Llama's norms compute in float32."""
    batch = tiny.inputs()
    batch["pixel_values"] = pixel_values
    logits = model(**batch, use_cache=False).logits[0, :-1]
    next_tokens = batch["input_ids"][0, 1:]
    return torch.nn.functional.cross_entropy(logits, next_tokens)


def sum_of_features(model, pixel_values):
    """A weighted sum of the visual tokens, in float64."""
    (features,) = base_model_of(model).get_image_features(pixel_values).pooler_output
    feature_weights = torch.linspace(-1, 1, features.numel()).view_as(features)
    return (features * feature_weights).sum()


def assert_slopes(model, factor):
    """Gradients at the pixels are `factor` times true ones."""
    assert_slope(
        sum_of_features,
        model,
        factor,
        step=1e-5,
        tolerance=1e-5,
    )
    assert_slope(
        loss_of,
        model,
        factor,
        step=3e-3,
        tolerance=2e-2,
    )


def assert_slope(function, model, factor, step, tolerance):
    """The slope along a direction of the pixels: by the gradient, and by finite differences."""
    torch.manual_seed(4)
    pixel_values = make_pixel_values()
    direction = torch.randn_like(pixel_values)
    leaf = pixel_values.clone().requires_grad_()
    function(model, leaf).backward()
    slope_by_gradient = (leaf.grad * direction).sum().item()

    with torch.no_grad():
        ahead = function(model, pixel_values + step * direction).item()
        behind = function(model, pixel_values - step * direction).item()
    true_slope = (ahead - behind) / (2 * step)
    assert abs(true_slope) > 1e-3
    assert slope_by_gradient == pytest.approx(factor * true_slope, rel=tolerance)


def make_model(norm):
    model = tiny.model(projector_norm=norm).double()
    with torch.no_grad():
        norm_of(model).weight.fill_(GAIN)
    return model


def function_name(function) -> str:
    return function.__name__


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("prepare", TRUE, ids=function_name)
def test_gradients_are_true_in_evaluation_mode(norm, prepare):
    model = prepare(make_model(norm))
    assert_slopes(model, 1.0)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("prepare", COMPENSATED, ids=function_name)
def test_gradients_are_compensated_while_something_below_trains(norm, prepare):
    model = prepare(make_model(norm))
    assert_slopes(model, 1.0 / GAIN)


def test_a_loaded_model_has_true_gradients(tmp_path):
    make_model("layer_norm").save_pretrained(tmp_path)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, dtype="float64")
    assert_slopes(model, 1.0)


def test_a_projector_by_itself_forgets_the_training_of_its_model():
    model = evaluation_after_training(make_model("layer_norm"))
    projector = model.model.multi_modal_projector
    features = torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(projector, features)
