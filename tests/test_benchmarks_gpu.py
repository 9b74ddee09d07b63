"""The recipes' figures on a tiny model on the CPU, and a script that fails is named."""

import json
import runpy
import sys

import pytest
from paths import ROOT


pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_recipes_on_a_tiny_model_and_a_script_that_fails(monkeypatch, tmp_path):
    command = runpy.run_path(str(ROOT / "benchmarks" / "__main__.py"), run_name="benchmarks")
    tiny = ["--parts", "tiny", "--rows", "2", "--steps", "1", "--lora_r", "4", "--bf16"]
    monkeypatch.setitem(command["main"].__globals__, "OPTIONS", {"norm": ["--tokens", "few"], "recipes": tiny})
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--output", str(tmp_path / "all.json")])
    with pytest.raises(SystemExit, match="Failed: norm"):
        command["main"]()
    written = json.loads((tmp_path / "all.json").read_text())
    assert list(written) == ["failed", "recipes"] and written["failed"] == ["norm"]
    assert all(len(row) == 3 and "|" not in "".join(row) for row in written["recipes"]["rows"])
    lora, qlora = written["recipes"]["figures"].values()
    for measured in (lora, qlora):
        assert measured["tokens"] == [measured["tokens"][0]] and measured["tokens_per_second"] > 0
        assert measured["share_of_peak"] > 0  # of two times: on a busy machine it may exceed 1
        assert 0 < measured["summary_bytes"] < measured["peak_bytes"]

    # Products with 4-bit weights count as others do.
    assert qlora["flops"] == lora["flops"]
    # By hand: each linear layer of the decoder three times, forward, again for its backward, and backward to its
    # input, without a gradient of its weight; the same for the adapters, with their weights' gradients.
    tokens, width, inner, layers, rank = lora["tokens"][0], 64, 128, 2, 4
    shapes = [(width, width)] * 4 + [(width, inner)] * 2 + [(inner, width)]
    decoder = sum(2 * 3 * tokens * layers * m * n for m, n in shapes)
    adapters = sum(2 * 4 * tokens * layers * rank * (m + n) for m, n in shapes)
    # The rest is attention, the head, the projector and the vision tower.
    assert decoder + adapters < lora["flops"] < 3 * (decoder + adapters)
