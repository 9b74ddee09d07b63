"""Compensation is for training alone, whatever modes single modules are in; float64 throughout."""

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


def parts_of(model):
    """The model without PEFT's and its wrappers: NormAlignLlavaModel."""
    return next(part for part in model.modules() if type(part).__name__ == "NormAlignLlavaModel")


def norm_of(model):
    return parts_of(model).multi_modal_projector.norm


def evaluation(model):
    return model.eval()


def evaluation_after_training(model):
    model.train()
    loss_of(model, tiny.inputs()["pixel_values"].double().requires_grad_()).backward()
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
    assert not any(module.training for module in model.model.multi_modal_projector.modules())
    return model


def only_what_has_trained_parameters(model):
    """Each module by its own parameters, so no container is in training mode."""
    norm_of(model).requires_grad_(False)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        module.train(any(parameter.requires_grad for parameter in own))
    assert not model.model.training and not model.model.multi_modal_projector.training
    return model


def one_layer_of_the_tower(model):
    model.requires_grad_(False).eval()
    last = [
        part for part in model.model.vision_tower.modules() if isinstance(part, torch.nn.Linear)
    ]
    last[0].requires_grad_(True).train()
    return model


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
        loss_of(model, tiny.inputs()["pixel_values"].double())
    for module, mode in modes.items():
        module.training = mode
    return model


def with_lora(model):
    whole = ["multi_modal_projector"]
    config = LoraConfig(target_modules=r".*language_model.*q_proj", modules_to_save=whole)
    return get_peft_model(model, config).double()


def with_lora_norm_evaluated(model):
    adapted = with_lora(model).train()
    parts_of(adapted).multi_modal_projector.modules_to_save["default"].norm.eval()
    return adapted


def copied(model):
    model.train()
    norm_of(model).eval()
    return copy.deepcopy(model)


def recomputed(model, how):
    model.train()
    norm_of(model).eval()
    kinds = {"norm": type(norm_of(model)), "projector": type(model.model.multi_modal_projector)}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda part: checkpoint_wrapper(part, CheckpointImpl.NO_REENTRANT),
        check_fn=lambda part: type(part) is kinds[how],
    )
    return model


def norm_recomputed(model):
    return recomputed(model, "norm")


def projector_recomputed(model):
    return recomputed(model, "projector")


def decoder_recomputed(model):
    model.train()
    norm_of(model).eval()
    model.gradient_checkpointing_enable()
    return model


TRUE = [evaluation, evaluation_after_training, evaluation_with_lora]
COMPENSATED = [
    *(training, norm_evaluated, norm_frozen, only_the_tower_trains, one_layer_of_the_tower),
    *(only_what_has_trained_parameters, only_the_projector, modes_set_back, with_lora, copied),
    *(with_lora_norm_evaluated, norm_recomputed, projector_recomputed, decoder_recomputed),
    all_below_evaluated,
]


def loss_of(model, pixels):
    """The whole model's loss. Llama's norms compute in float32."""
    batch = {**tiny.inputs(), "pixel_values": pixels}
    logits = model(**batch, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:])


def sum_of_features(model, pixels):
    """A weighted sum of the visual tokens, in float64."""
    (features,) = parts_of(model).get_image_features(pixels).pooler_output
    return (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum()


def slopes(function, model, step):
    """The function's slope along a direction of the pixels: by its gradient, by differences."""
    torch.manual_seed(4)
    pixels = tiny.inputs()["pixel_values"].double()
    direction = torch.randn_like(pixels)
    leaf = pixels.clone().requires_grad_()
    function(model, leaf).backward()
    with torch.no_grad():
        ends = [function(model, pixels + sign * step * direction).item() for sign in (1, -1)]
    return (leaf.grad * direction).sum().item(), (ends[0] - ends[1]) / (2 * step)


def assert_slopes(model, factor):
    """That gradients at the pixels are `factor` times true ones."""
    for function, step, tolerance in ((sum_of_features, 1e-5, 1e-5), (loss_of, 3e-3, 2e-2)):
        by_gradient, by_differences = slopes(function, model, step)
        assert abs(by_differences) > 1e-3
        assert by_gradient == pytest.approx(factor * by_differences, rel=tolerance)


def made(norm):
    model = tiny.model(projector_norm=norm).double()
    with torch.no_grad():
        norm_of(model).weight.fill_(GAIN)
    return model


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("prepare", TRUE, ids=lambda function: function.__name__)
def test_gradients_are_true_in_evaluation_mode(norm, prepare):
    assert_slopes(prepare(made(norm)), 1.0)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("prepare", COMPENSATED, ids=lambda function: function.__name__)
def test_gradients_are_compensated_while_something_below_trains(norm, prepare):
    assert_slopes(prepare(made(norm)), 1.0 / GAIN)


def test_a_loaded_model_has_true_gradients(tmp_path):
    made("layer_norm").save_pretrained(tmp_path)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, dtype="float64")
    assert_slopes(model, 1.0)


def test_a_projector_by_itself_forgets_the_training_of_its_model():
    projector = evaluation_after_training(made("layer_norm")).model.multi_modal_projector
    features = torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(projector, features)
