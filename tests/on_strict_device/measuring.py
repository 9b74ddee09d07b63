"""Diagnosis and the demo: the same numbers and answers as on the CPU."""

from dataclasses import asdict

import demo_parts
import pytest
import tiny
import vlm_families
from strict_device import STRICT, same

from normalign_llava import probe
from normalign_llava.checkpoint.opening import check_processor
from normalign_llava.diagnose.measure.attention import attention_maps
from normalign_llava.diagnose.measure.interface import embedding_table_of, gain_of
from normalign_llava.hub_cards import demo_app
from normalign_llava.hub_cards.push.clean_process import difference, first_logits


def check(model, measure):
    """That what is measured is the same on the device."""
    expected = measure()
    model.to(STRICT)
    same(measure(), expected)


@pytest.mark.parametrize("family", ["normalign_llava", "qwen3_vl", "ovis2"])
def test_probe(family):
    model, batch = vlm_families.make(family)
    check(model, lambda: asdict(probe(model, [batch])))


def test_attention_and_tables():
    model = tiny.model()
    batch = tiny.inputs()
    model.align_projector_norm()
    check(model, lambda: attention_maps(model, batch, question="?").__dict__)
    model.to("cpu")
    check(model, lambda: [gain_of(model).__dict__, embedding_table_of(model, name="tiny").__dict__])


def test_the_demo_answers_and_looks_as_on_the_cpu(checkpoint, tmp_path):
    model, processor = demo_parts.load(checkpoint)
    image = str(tmp_path / "image.png")
    demo_parts.noise((16, 16)).save(image)

    def answer():
        *_, (text, maps) = demo_app.answer(model, processor, image, "what is it", 4)
        assert text
        return [text, *(caption for _, caption in maps)]

    check(model, answer)


def test_a_clean_process_asks_a_model_that_is_not_on_the_cpu(checkpoint):
    """As bitsandbytes' are, which transformers places on the GPU."""
    model, processor = demo_parts.load(checkpoint)
    expected = first_logits(model, processor)
    assert difference(first_logits(model.to(STRICT), processor), expected) is None
    assert check_processor(processor, model) == 4
