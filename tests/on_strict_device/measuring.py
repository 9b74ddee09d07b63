"""Diagnosis and the demo: the same numbers and answers as on the CPU."""

from dataclasses import asdict

import demo_parts
import pytest
import tiny
import vlm_families
from strict_device import STRICT, assert_same_report

from normalign_llava import probe
from normalign_llava.checkpoint.opening import check_processor
from normalign_llava.diagnose.measure.attention import attention_maps
from normalign_llava.diagnose.measure.interface import embedding_table_of, gain_of
from normalign_llava.hub_cards import demo_app
from normalign_llava.hub_cards.push.clean_process import difference, first_logits


def assert_same_on_device(model, measure):
    expected = measure()
    model.to(STRICT)
    assert_same_report(measure(), expected)


@pytest.mark.parametrize("family", ["normalign_llava", "qwen3_vl", "ovis2"])
def test_probe(family):
    model, batch = vlm_families.make(family)

    def measure():
        return asdict(probe(model, [batch]))

    assert_same_on_device(model, measure)


@pytest.fixture
def aligned_model():
    model = tiny.model()
    model.align_projector_norm()
    return model


def test_attention(aligned_model):
    batch = tiny.inputs()

    def measure():
        return attention_maps(aligned_model, batch, question="?").__dict__

    assert_same_on_device(aligned_model, measure)


def test_tables(aligned_model):
    def measure():
        gain = gain_of(aligned_model)
        embedding_table = embedding_table_of(aligned_model, name="tiny")
        return [gain.__dict__, embedding_table.__dict__]

    assert_same_on_device(aligned_model, measure)


def test_the_demo_answers_and_looks_as_on_the_cpu(checkpoint, tmp_path):
    model, processor = demo_parts.load(checkpoint)
    image_path = str(tmp_path / "image.png")
    demo_parts.noise((16, 16)).save(image_path)

    def measure():
        *_, last_update = demo_app.answer(model, processor, image_path, "what is it", 4)
        text, attention_images = last_update
        assert text
        captions = [caption for _, caption in attention_images]
        return [text, *captions]

    assert_same_on_device(model, measure)


def test_a_clean_process_asks_a_model_that_is_not_on_the_cpu(checkpoint):
    """transformers places bitsandbytes' models on the GPU."""
    model, processor = demo_parts.load(checkpoint)
    expected = first_logits(model, processor)
    logits = first_logits(model.to(STRICT), processor)
    assert difference(logits, expected) is None
    assert check_processor(processor, model) == 4
