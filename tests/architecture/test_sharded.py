"""N_text and the gain of models whose embeddings are spread over two real processes."""

import importlib.util
import json

import pytest
import tiny
from paths import HELPERS


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["dtensor", "zero3"])
def test_sharded_embeddings_are_gathered(prepared, tmp_path, mode):
    if mode == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    llava = tiny.llava(tied=False)
    llava.save_pretrained(tmp_path / "llava")
    worker = [HELPERS / "sharded_worker.py", mode, tmp_path / "llava", tmp_path / "found"]
    processes = prepared.run_ranks(worker, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    assert [process.returncode for process in processes] == [0, 0], processes[0].stderr[-3000:]
    expected = tiny.reference_n_text(llava.get_input_embeddings().weight)
    for rank in range(2):
        measured = json.loads((tmp_path / f"found.{rank}").read_text())
        assert measured["world"] == 2 and measured["rows here"] < tiny.VOCABULARY
        assert measured["kind"] == {"dtensor": "DTensor", "zero3": "ds"}[mode]
        assert measured["aligned"] == pytest.approx(expected, rel=1e-9)
        gain = [expected / tiny.WIDTH**0.5] * tiny.WIDTH
        assert measured["gain"] == pytest.approx(gain, rel=1e-6)
        assert measured.get("gain loaded", measured["gain"]) == measured["gain"]
