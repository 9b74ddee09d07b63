# SPDX-License-Identifier: Apache-2.0
"""Table 5: gain and bias against hand computation, where they start, and how far training took them."""

import math

import pytest
import tiny
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig, GraniteConfig

from normalign_llava.diagnose.measure.embeddings import gain_of


def norm_of(model):
    return model.model.multi_modal_projector.norm


def moved(model, seed=1):
    """The model, its gain and bias away from their start."""
    model.align_projector_norm()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm_of(model).parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def l2(values):
    return math.sqrt(math.fsum(value * value for value in values))


def assert_by_hand(found, gain, bias, start):
    """Against sums of Python floats."""
    gain, stored = gain.detach().double().tolist(), torch.tensor(start, dtype=torch.float32).item()
    assert (found.l2, found.mean_abs) == pytest.approx((l2(gain), math.fsum(map(abs, gain)) / len(gain)), rel=1e-12)
    assert (found.start, found.distance) == pytest.approx((start, l2(g - stored for g in gain)), rel=1e-9)
    if bias is None:
        assert found.bias_mean_abs is found.bias_distance is None
        return
    bias = bias.detach().double().tolist()
    expected = (math.fsum(map(abs, bias)) / len(bias), l2(bias))
    assert (found.bias_mean_abs, found.bias_distance) == pytest.approx(expected, rel=1e-12)


def expected_start(model):
    return tiny.reference_n_text(model.get_input_embeddings().weight) / math.sqrt(tiny.WIDTH)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_against_hand_computation(kind):
    model = moved(tiny.model(projector_norm=kind))
    norm, found = norm_of(model), gain_of(model)
    assert_by_hand(found, norm.weight, dict(norm.named_parameters()).get("bias"), expected_start(model))
    assert found.distance > 0.1


@pytest.mark.parametrize(
    "kwargs, start",
    [
        ({}, None),
        ({"projector_gain_init": "one"}, 1.0),
        # Granite multiplies visual tokens too, so that the gain is smaller than N_text / sqrt(d).
        ({"text": tiny.text_config(cls=GraniteConfig, embedding_multiplier=12.0)}, None),
    ],
)
def test_what_never_moved_is_at_its_start(tmp_path, kwargs, start):
    model = tiny.model(**kwargs)
    model.align_projector_norm()
    model.save_pretrained(tmp_path)
    expected = expected_start(model)
    for each in (model, AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        found = gain_of(each)
        assert found.distance == found.bias_distance == found.bias_mean_abs == 0.0
        assert found.start == pytest.approx(start or expected, rel=1e-9)
        assert found.mean_abs == pytest.approx(found.start, rel=1e-6)
        assert found.l2 == pytest.approx(found.start * math.sqrt(tiny.WIDTH), rel=1e-6)
    with torch.no_grad():  # the start is the configuration's
        model.get_input_embeddings().weight *= 3
    assert gain_of(model).start == pytest.approx(start or expected, rel=1e-9) and gain_of(model).distance == 0.0


def test_none_without_a_norm_of_this_package():
    assert gain_of(tiny.model(projector_norm="none")) is None
    assert gain_of(tiny.llava()) is None
    assert gain_of(AutoModelForCausalLM.from_config(tiny.text_config())) is None
    assert gain_of(tiny.model().model) is not None  # the base class has it


def test_offloaded_and_quantized(tmp_path):
    model = moved(tiny.model())
    expected = gain_of(model)
    model.save_pretrained(tmp_path)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert norm_of(model).weight.is_meta
    assert gain_of(model) == expected
    quantized = AutoModelForImageTextToText.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    assert gain_of(quantized) == expected


def test_of_a_model_with_adapters_the_trained_copy_counts():
    model = tiny.model()
    model.align_projector_norm()
    targets = r".*\.language_model\..*\.q_proj"
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, modules_to_save=["multi_modal_projector"]))
    before = gain_of(adapted.get_base_model())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name and name.endswith("norm.weight"):
                parameter += 0.5
    after = gain_of(adapted.get_base_model())
    assert before.distance == 0.0 and after.start == before.start
    assert after.distance == pytest.approx(0.5 * math.sqrt(tiny.WIDTH), rel=1e-6)
