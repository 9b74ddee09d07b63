# SPDX-License-Identifier: Apache-2.0
"""Norms of embedding rows in memory against those on disk, which tests/assembly checks (tables 6
to 8); gain and bias by hand, where they start, and how far training took them (table 5)."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
import tiny
import torch
import vlm_families
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig, GraniteConfig

from normalign_llava.assembly.gain import embedding_statistics
from normalign_llava.diagnose.measure.interface import embedding_table_of, gain_of


FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True)
# It scales visual tokens too, so the gain is smaller than N_text / sqrt(d).
GRANITE = tiny.text_config(cls=GraniteConfig, embedding_multiplier=12.0)


def set_embeddings(model):
    """Makes ids 40 to 49 the largest, not in their order, and two rows zero."""
    weight = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(4)
    sizes = torch.linspace(0.5, 1.0, len(weight))[:, None]
    large_sizes = torch.tensor([9, 3, 7, 5, 4, 8, 2.5, 6, 10, 11.0])[:, None]
    with torch.no_grad():
        weight.normal_(generator=generator).mul_(sizes)
        weight[[4, 7]] = 0
        weight[40:50] *= large_sizes


@pytest.mark.parametrize(
    ("family", "dtype", "loading"),
    [
        pytest.param("llava", torch.float32, {}, id="llava"),
        pytest.param("qwen2_5_vl", torch.float32, {}, id="qwen2_5_vl"),
        pytest.param(
            "normalign_llava",
            torch.bfloat16,
            {"quantization_config": FOUR_BITS},
            id="normalign_llava",
        ),
    ],
)
def test_rows_are_the_same_as_on_disk(tmp_path, family, dtype, loading):
    model, _ = vlm_families.make(family)
    set_embeddings(model)
    model.to(dtype).save_pretrained(tmp_path)

    loaded_model = AutoModelForImageTextToText.from_pretrained(tmp_path, **loading)
    table = embedding_table_of(loaded_model, name="saved")
    on_disk = embedding_statistics(str(tmp_path))
    assert table == replace(on_disk, model="saved", tensor="")
    assert {token.id for token in table.top} == set(range(40, 50))
    assert table.zero_rows == 2


def trained_model(**options):
    """A model whose gain and bias are away from their start."""
    model = tiny.model(**options)
    model.align_projector_norm()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.norm.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def expected_start(model):
    n_text = tiny.reference_n_text(model.get_input_embeddings().weight)
    return n_text / math.sqrt(tiny.WIDTH)


def mean_abs(values):
    return fmean([abs(value) for value in values])


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_gain_and_bias_against_hand_computation(kind):
    model = trained_model(projector_norm=kind)
    norm = model.model.multi_modal_projector.norm
    gain = norm.weight.detach().double().tolist()
    start = expected_start(model)
    stored_start = torch.tensor(start, dtype=torch.float32).item()
    differences = [value - stored_start for value in gain]
    expected = {
        "l2": math.hypot(*gain),
        "mean_abs": mean_abs(gain),
        "start": start,
        "distance": math.hypot(*differences),
    }
    if kind == "layer_norm":
        bias = norm.bias.detach().double().tolist()
        expected["bias_mean_abs"] = mean_abs(bias)
        expected["bias_distance"] = math.hypot(*bias)
    measured = {}
    for name, value in vars(gain_of(model)).items():
        if value is not None:
            measured[name] = value
    assert measured == pytest.approx(expected, rel=1e-9)


@pytest.fixture(
    params=[
        pytest.param({}, id="default"),
        pytest.param({"projector_gain_init": "one"}, id="one"),
        pytest.param({"text": GRANITE}, id="granite"),
    ]
)
def untrained(request):
    """A model whose gain never moved, and where the gain starts."""
    model = tiny.model(**request.param)
    model.align_projector_norm()
    start = expected_start(model)
    if "projector_gain_init" in request.param:
        start = 1.0
    return model, start


def check_at_start(measured, start):
    assert measured.distance == 0.0
    assert measured.bias_distance == 0.0
    assert measured.bias_mean_abs == 0.0
    assert measured.start == pytest.approx(start, rel=1e-6)
    assert measured.mean_abs == pytest.approx(start, rel=1e-6)


def test_what_never_moved_is_at_its_start(untrained):
    model, start = untrained
    check_at_start(gain_of(model), start)


def test_what_never_moved_is_at_its_start_in_bfloat16(untrained, tmp_path):
    model, start = untrained
    model.save_pretrained(tmp_path)
    saved_model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    check_at_start(gain_of(saved_model), start)


def test_the_start_is_the_configuration_s(untrained):
    """So it stays if embeddings change."""
    model, start = untrained
    with torch.no_grad():
        model.get_input_embeddings().weight *= 3
    measured = gain_of(model)
    assert measured.start == pytest.approx(start, rel=1e-9)
    assert measured.distance == 0.0


def test_a_model_without_the_norm_has_no_gain():
    assert gain_of(tiny.model(projector_norm="none")) is None
    assert gain_of(tiny.llava()) is None


def test_the_gain_of_a_quantized_model_is_the_same(tmp_path):
    model = trained_model()
    model.save_pretrained(tmp_path)
    quantized_model = AutoModelForImageTextToText.from_pretrained(
        tmp_path, quantization_config=FOUR_BITS
    )
    assert gain_of(quantized_model) == gain_of(model)


def test_the_gain_of_an_offloaded_model_is_the_same():
    model = trained_model()
    expected = gain_of(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.multi_modal_projector.norm.weight.is_meta
    assert gain_of(model) == expected


@pytest.mark.parametrize("module", ["multi_modal_projector", "multi_modal_projector.norm"])
def test_with_adapters_the_copy_of_the_norm_that_is_trained_counts(module):
    model = trained_model()
    before = gain_of(model)
    lora = LoraConfig(
        target_modules=r".*\.language_model\..*\.q_proj",
        modules_to_save=[module],
    )
    adapted_model = get_peft_model(model, lora)
    with torch.no_grad():
        for parameter in adapted_model.parameters():
            is_of_norm = parameter.dim() == 1
            if parameter.requires_grad and is_of_norm:
                parameter += 0.5
    measured = gain_of(adapted_model.get_base_model())
    assert measured.mean_abs > before.mean_abs + 0.3
    assert measured.bias_mean_abs > before.bias_mean_abs + 0.3
