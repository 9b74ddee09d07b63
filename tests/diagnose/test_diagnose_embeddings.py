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


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "normalign_llava"])
def test_rows_are_those_on_disk(tmp_path, family):
    loading = {"quantization_config": FOUR_BITS} if family == "normalign_llava" else {}
    model, _ = vlm_families.make(family)
    weight = model.get_input_embeddings().weight
    sizes = torch.linspace(0.5, 1.0, len(weight))[:, None]
    with torch.no_grad():  # ids 40 to 49 are the largest, not in their order; two are zero
        weight.normal_(generator=torch.Generator().manual_seed(4)).mul_(sizes)
        weight[[4, 7]] = 0
        weight[40:50] *= torch.tensor([9, 3, 7, 5, 4, 8, 2.5, 6, 10, 11.0])[:, None]
    model.to(torch.bfloat16 if loading else torch.float32).save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, **loading)
    table = embedding_table_of(loaded, name="saved")
    assert table == replace(embedding_statistics(str(tmp_path)), model="saved", tensor="")
    assert {token.id for token in table.top} == set(range(40, 50)) and table.zero_rows == 2


def moved(model):
    """The model, its gain and bias away from their start."""
    model.align_projector_norm()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.norm.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def expected_start(model):
    return tiny.reference_n_text(model.get_input_embeddings().weight) / math.sqrt(tiny.WIDTH)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_against_hand_computation(kind):
    model = moved(tiny.model(projector_norm=kind))
    norm = model.model.multi_modal_projector.norm
    gain = norm.weight.detach().double().tolist()
    start = expected_start(model)
    stored = torch.tensor(start, dtype=torch.float32).item()
    expected = {"l2": math.hypot(*gain), "mean_abs": fmean(map(abs, gain)), "start": start}
    expected["distance"] = math.hypot(*(value - stored for value in gain))
    if kind == "layer_norm":
        bias = norm.bias.detach().double().tolist()
        expected |= {"bias_mean_abs": fmean(map(abs, bias)), "bias_distance": math.hypot(*bias)}
    measured = {name: value for name, value in vars(gain_of(model)).items() if value is not None}
    assert measured == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kwargs", [{}, {"projector_gain_init": "one"}, {"text": GRANITE}])
def test_what_never_moved_is_at_its_start(tmp_path, kwargs):
    model = tiny.model(**kwargs)
    model.align_projector_norm()
    model.save_pretrained(tmp_path)
    start = 1.0 if "projector_gain_init" in kwargs else expected_start(model)
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for measured in (gain_of(model), gain_of(saved)):
        assert measured.distance == measured.bias_distance == measured.bias_mean_abs == 0.0
        assert (measured.start, measured.mean_abs) == pytest.approx((start, start), rel=1e-6)
    with torch.no_grad():  # the start is the configuration's
        model.get_input_embeddings().weight *= 3
    assert gain_of(model).start == pytest.approx(start, rel=1e-9) and gain_of(model).distance == 0.0


def test_offloaded_quantized_and_with_adapters(tmp_path):
    assert gain_of(tiny.model(projector_norm="none")) is None and gain_of(tiny.llava()) is None
    model = moved(tiny.model())
    expected = gain_of(model)
    model.save_pretrained(tmp_path)
    quantized = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=FOUR_BITS)
    assert gain_of(quantized) == expected
    targets = r".*\.language_model\..*\.q_proj"
    for module in ("multi_modal_projector", "multi_modal_projector.norm"):
        lora = LoraConfig(target_modules=targets, modules_to_save=[module])
        adapted = get_peft_model(AutoModelForImageTextToText.from_pretrained(tmp_path), lora)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad and parameter.dim() == 1:  # of the norm
                    parameter += 0.5  # the copy that is trained counts
        measured = gain_of(adapted.get_base_model())
        assert measured.mean_abs > expected.mean_abs + 0.3
        assert measured.bias_mean_abs > expected.bias_mean_abs + 0.3
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.multi_modal_projector.norm.weight.is_meta and gain_of(model) == expected
