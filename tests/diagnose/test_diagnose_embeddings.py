# SPDX-License-Identifier: Apache-2.0
"""Tables 6 to 8: norms of embedding rows, from disk and in memory, against plain sums in float64."""

import math
from types import SimpleNamespace

import pytest
import tiny
import tiny_parts as parts
import torch
import vlm_families
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    GraniteConfig,
)

from normalign_llava.assembly.gain import EmbeddingStatistics, TopToken
from normalign_llava.diagnose.measure.embeddings import embedding_table_of, probe_language


def reference(weight, name, excluded=(), top=10, text=lambda row: None) -> SimpleNamespace:
    """Row by row in plain Python floats."""
    norms = {
        row: math.sqrt(math.fsum(value * value for value in values))
        for row, values in enumerate(weight.detach().double().cpu().tolist())
        if row not in excluded
    }
    norms = {row: norm for row, norm in norms.items() if norm > 0}
    mean = math.fsum(norms.values()) / len(norms)
    std = math.sqrt(math.fsum((norm - mean) ** 2 for norm in norms.values()) / len(norms))
    largest = sorted(norms, key=norms.__getitem__, reverse=True)[:top]
    top = [TopToken(row, text(row), norms[row]) for row in largest]
    return SimpleNamespace(model=name, mean=mean, std=std, rows=len(norms), top=top)


def assert_same(found: EmbeddingStatistics, expected: SimpleNamespace):
    assert (found.model, found.rows) == (expected.model, expected.rows)
    assert (found.mean, found.std) == pytest.approx((expected.mean, expected.std), rel=1e-12)
    assert [(token.id, token.text) for token in found.top] == [(token.id, token.text) for token in expected.top]
    assert [t.norm for t in found.top] == pytest.approx([t.norm for t in expected.top], rel=1e-12)


def stretch(model):
    """Gives rows norms that differ, with ids 40 to 49 the largest in an order that is not theirs; two are zero."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight.normal_(generator=torch.Generator().manual_seed(4)).mul_(torch.linspace(0.5, 1.0, len(weight))[:, None])
        weight[[4, 7]] = 0
        weight[40:50] *= torch.tensor([9, 3, 7, 5, 4, 8, 2.5, 6, 10, 11.0])[:, None]
    return model


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_vision_language_models_as_transformers_saves_them(tmp_path, family):
    model, _ = vlm_families.make(family)
    stretch(model).save_pretrained(tmp_path / "saved")
    expected = reference(model.get_input_embeddings().weight, "saved", excluded={model.config.image_token_id})
    assert_same(probe_language(str(tmp_path / "saved"), name="saved").embeddings, expected)
    assert_same(embedding_table_of(model, name="saved"), expected)
    assert {token.id for token in expected.top} == set(range(40, 50))


def test_tokens_are_decoded_and_spare_rows_have_no_text(tmp_path):
    folder = parts.language(tmp_path / "language", rows=120)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), stretch(AutoModelForCausalLM.from_pretrained(folder))
    with torch.no_grad():
        model.get_input_embeddings().weight[115] *= 90
    model.save_pretrained(folder)
    vocabulary = {row: token for token, row in tokenizer.get_vocab().items()}
    expected = reference(model.get_input_embeddings().weight, "language", text=vocabulary.get)
    assert (expected.top[0].id, expected.top[0].text) == (115, None) and all(token.text for token in expected.top[1:])
    assert_same(probe_language(folder, name="language").embeddings, expected)
    assert_same(embedding_table_of(model, tokenizer, name="language"), expected)


def test_bfloat16_and_4_bits(tmp_path):
    stretch(tiny.model()).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", quantization_config=quantization)
    weight = loaded.get_input_embeddings().weight
    assert weight.dtype == torch.bfloat16
    expected = reference(weight, "saved", excluded={tiny.IMAGE})
    assert_same(embedding_table_of(loaded, name="saved"), expected)
    assert_same(probe_language(str(tmp_path / "saved"), name="saved").embeddings, expected)


@pytest.mark.parametrize("kwargs, scale", [({}, 1.0), ({"cls": GraniteConfig, "embedding_multiplier": 12.0}, 12.0)])
def test_a_language_model_alone(tmp_path, kwargs, scale):
    folder = parts.language(tmp_path / "language", **kwargs)
    model = stretch(AutoModelForCausalLM.from_pretrained(folder))
    model.to(torch.bfloat16).save_pretrained(folder)
    report = probe_language(folder, name="language", config=model.config)
    expected = reference(model.get_input_embeddings().weight, "language")
    for found, factor in ((report.interface.vocabulary_raw, 1.0), (report.interface.vocabulary, scale)):
        assert found.count == expected.rows
        assert (found.mean, found.std) == pytest.approx((factor * expected.mean, factor * expected.std))
    assert report.interface.scale == pytest.approx(scale)
    assert report.interface.visual is report.interface.ratio is report.depth is report.gain is None
    assert (report.model, report.model_type) == ("language", model.config.model_type)
    assert (report.dtype, report.hidden_size) == ("bfloat16", tiny.WIDTH)
    assert len(report.left_out) == 2 and "ratio" in report.left_out[0] and "depth" in report.left_out[1]
