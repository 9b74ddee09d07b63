"""Diagnosis and the demo: the same numbers and answers as on the CPU."""

from dataclasses import asdict

import demo_parts
import pytest
import tiny
import vlm_families
from strict_device import STRICT

from normalign_llava.checkpoint.opening import check_processor
from normalign_llava.diagnose import probe
from normalign_llava.diagnose.measure.attention import attention_maps
from normalign_llava.diagnose.measure.interface import embedding_table_of, gain_of
from normalign_llava.hub_cards import demo_app
from normalign_llava.hub_cards.push.clean_process import difference, first_logits


def same(found, expected):
    """Numbers of two reports, at any depth."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    else:
        assert found == expected


@pytest.mark.parametrize("family", ["normalign_llava", "qwen3_vl", "ovis2"])
def test_probe(family):
    model, batch = vlm_families.make(family)
    expected = asdict(probe(model, [batch]))
    same(asdict(probe(model.to(STRICT), [batch])), expected)


def test_attention_and_tables():
    model, batch = tiny.model(), tiny.inputs()
    model.align_projector_norm()

    def measured():
        attention = attention_maps(model, batch, question="?")
        table = embedding_table_of(model, name="tiny")
        return [attention.__dict__, gain_of(model).__dict__, table.__dict__]

    expected = measured()
    model.to(STRICT)
    same(measured(), expected)


def test_the_demo_answers_and_looks_as_on_the_cpu(checkpoint, tmp_path):
    model, processor = demo_parts.load(checkpoint)
    demo_parts.noise((16, 16)).save(tmp_path / "image.png")

    def answers():
        *_, (text, maps) = demo_app.answer(model, processor, str(tmp_path / "image.png"), "what is it", 4)
        return text, [caption for _, caption in maps]

    expected = answers()
    model.to(STRICT)
    assert answers() == expected and all(expected)


def test_a_clean_process_asks_a_model_that_is_not_on_the_cpu(checkpoint):
    """As bitsandbytes' are, which transformers places on the GPU."""
    model, processor = demo_parts.load(checkpoint)
    expected = first_logits(model, processor)
    assert difference(first_logits(model.to(STRICT), processor), expected) is None


def test_a_processor_is_checked_on_the_model_s_device(checkpoint):
    model, processor = demo_parts.load(checkpoint)
    assert check_processor(processor, model.to(STRICT)) == 4
