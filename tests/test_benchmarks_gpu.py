"""What runs on a GPU, on a tiny model on the CPU: the recipes' figures, and the checks, with an error as a row."""

import importlib
import json
import re
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


def test_a_check_that_fails_is_a_row_and_the_exit_status(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    check_gpu = importlib.import_module("check_gpu")
    align = ["--stage", "align"]
    runs = {"right": (align, []), "wrong": ([*align, "--max_length", "9"], []), "absent": (align, ["cuda"])}
    monkeypatch.setattr(check_gpu, "OPTIONS", runs)
    monkeypatch.setattr(check_gpu, "TESTS", ["checkpoint/test_find.py"])
    monkeypatch.setattr(sys, "argv", ["check_gpu", "--device", "cpu", "--output", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as end:
        check_gpu.main()
    rows = {row["check"]: row for row in json.loads((tmp_path / "found.json").read_text())["checks"]}
    assert end.value.code == 1 and rows["wrong"]["status"] == "failed"
    assert re.match(r"ValueError: .*longer than", rows["wrong"]["found"]), rows["wrong"]
    assert rows["absent"]["found"] == rows["memory: full, 1b"]["found"] == "needs cuda"
    assert all(rows[name]["status"] == "ok" for name in ("norm", "right", "ask in 4 bits", "tests"))
    assert re.match(r"losses \d.*; [\d,]+ tokens/s$", rows["right"]["found"])
