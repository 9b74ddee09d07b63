# SPDX-License-Identifier: Apache-2.0
"""Tables 6 to 8: norms of embedding rows in memory, against those on disk, which tests/assembly checks with numpy."""

from dataclasses import replace

import pytest
import tiny
import tiny_parts as parts
import torch
import vlm_families
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, BitsAndBytesConfig

from normalign_llava.assembly.gain import embedding_statistics
from normalign_llava.diagnose.measure.embeddings import embedding_table_of


def stretch(model):
    """Gives rows norms that differ, with ids 40 to 49 the largest in an order that is not theirs; two are zero."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight.normal_(generator=torch.Generator().manual_seed(4)).mul_(torch.linspace(0.5, 1.0, len(weight))[:, None])
        weight[[4, 7]] = 0
        weight[40:50] *= torch.tensor([9, 3, 7, 5, 4, 8, 2.5, 6, 10, 11.0])[:, None]
    return model


def assert_as_on_disk(table, folder):
    assert replace(table, tensor="") == replace(embedding_statistics(str(folder)), model="saved", tensor="")
    assert {token.id for token in table.top} == set(range(40, 50)) and table.zero_rows == 2


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_vision_language_models(tmp_path, family):
    model, _ = vlm_families.make(family)
    stretch(model).save_pretrained(tmp_path)
    assert_as_on_disk(embedding_table_of(model, name="saved"), tmp_path)


def test_bfloat16_and_4_bits(tmp_path):
    stretch(tiny.model()).to(torch.bfloat16).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=quantization)
    assert loaded.get_input_embeddings().weight.dtype == torch.bfloat16
    assert_as_on_disk(embedding_table_of(loaded, name="saved"), tmp_path)


def test_tokens_are_decoded_and_spare_rows_have_no_text(tmp_path):
    folder = parts.language(tmp_path / "language", rows=120)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[[30, 115]] *= torch.tensor([[80.0], [90.0]])
    top = embedding_table_of(model, tokenizer, name="language").top
    assert [(token.id, token.text) for token in top[:2]] == [(115, None), (30, tokenizer.decode([30]))]
