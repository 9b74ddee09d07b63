"""N_text and the gain of models whose embeddings are spread over two real processes."""

import importlib.util
import json

import pytest
import tiny
from paths import HELPERS


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "expected_kind"),
    [
        ("dtensor", "DTensor"),
        ("zero3", "ds"),
    ],
)
def test_sharded_embeddings_are_gathered(prepared, tmp_path, mode, expected_kind):
    if mode == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    llava = tiny.llava(tied=False)
    llava.save_pretrained(tmp_path / "llava")
    worker = [
        HELPERS / "sharded_worker.py",
        mode,
        tmp_path / "llava",
        tmp_path / "found",
    ]
    processes = prepared.run_ranks(
        worker,
        DS_ACCELERATOR="cpu",
        CUDA_VISIBLE_DEVICES="",
    )
    return_codes = [process.returncode for process in processes]
    assert return_codes == [0, 0], processes[0].stderr[-3000:]

    text_norm = tiny.reference_n_text(llava.get_input_embeddings().weight)
    expected_gain = [text_norm / tiny.WIDTH**0.5] * tiny.WIDTH
    for rank in range(2):
        measured = json.loads((tmp_path / f"found.{rank}").read_text())
        assert measured["world"] == 2
        assert measured["rows here"] < tiny.VOCABULARY
        assert measured["kind"] == expected_kind
        assert measured["aligned"] == pytest.approx(text_norm, rel=1e-9)
        assert measured["gain"] == pytest.approx(expected_gain, rel=1e-6)
        if mode == "zero3":
            assert measured["gain loaded"] == measured["gain"]
