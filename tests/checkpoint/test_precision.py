# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Whether half precision pays is measured on the processor, once, and remembered for all processes."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlavaConfig

from normalign_llava.checkpoint.precision import dtype_to_load, seconds_file


ASK = "from normalign_llava import half_precision_pays; print(half_precision_pays(device='cpu'))"


def test_processes_that_start_together_measure_once_and_agree(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMALIGN_CACHE", str(tmp_path))
    together = [prepared.start(["-c", ASK], NORMALIGN_CACHE=str(tmp_path)) for _ in range(2)]
    answers = [each.wait().stdout.strip() for each in together]
    (file,) = tmp_path.glob("precision/*.json")
    seconds = json.loads(file.read_text())
    assert seconds.keys() == {"float32", "bfloat16", "float16"} and min(seconds.values()) > 0
    assert answers == [str(seconds["float32"] > 2 * seconds["bfloat16"])] * 2
    assert file == seconds_file()
    for name, value in (("ONEDNN_MAX_CPU_ISA", "AVX2"), ("ATEN_CPU_CAPABILITY", "avx2")):
        monkeypatch.setenv(name, value)
        assert seconds_file() != file


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs every checkpoint in its own precision")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_is_run_in_float32_where_that_is_faster(processor, caplog, stored):
    config = LlavaConfig(text_config=LlamaConfig(), dtype=stored)
    processor(0.3)
    assert dtype_to_load("auto", config) == "auto" and not caplog.records
    processor(5.0)
    assert dtype_to_load("auto", config) == "float32"
    assert "Loading in float32" in caplog.messages[0]
    assert dtype_to_load("auto", LlavaConfig(dtype=torch.float32)) == dtype_to_load("auto", None) == "auto"
    assert dtype_to_load(stored, config) == dtype_to_load(stored, config) == stored
    assert len(caplog.messages) == 2 and "only emulates it" in caplog.messages[1]
