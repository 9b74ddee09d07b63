"""vLLM on a checkpoint, if `VLLM_PYTHON` names a Python that has it; test_remote_code.py does what an engine does."""

import json
import os
import subprocess

import pytest
import tiny_parts as parts
from asking import generate, request
from PIL import Image

from normalign_llava.assembly.build import build_checkpoint


pytestmark = pytest.mark.slow


IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (40, 30), "red")]
VLLM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, asked = sys.argv[1], json.load(open(sys.argv[2]))
    llm = LLM(model, trust_remote_code=True, model_impl="transformers", dtype="float32", enforce_eager=True,
              max_model_len=128, limit_mm_per_prompt={"image": 2})
    answers = [x.outputs[0] for x in llm.chat(asked, SamplingParams(temperature=0, max_tokens=8, logprobs=1))]
    pairs = [list(zip(x.token_ids, x.logprobs)) for x in answers]
    print(json.dumps([[[token for token, _ in x], [options[token].logprob for token, options in x]] for x in pairs]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python that has vLLM")
@pytest.mark.parametrize("kind, norm", [("siglip", "layer_norm"), ("registers", "rms_norm")])
def test_vllm_answers_as_transformers(tmp_path, kind, norm):
    language = parts.language(
        tmp_path / "l", tied=kind == "siglip", hidden_size=64, num_key_value_heads=2, head_dim=32
    )  # of the sizes that vLLM's attention has
    build_checkpoint(parts.vision(tmp_path / "v", kind), language, tmp_path / "model", norm=norm)
    (tmp_path / "ask.py").write_text(VLLM)
    asked = [request("what is it", *images) for images in (IMAGES[:1], [], IMAGES)]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [os.environ["VLLM_PYTHON"], tmp_path / "ask.py", tmp_path / "model", tmp_path / "asked.json"],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-5000:]
    answers = json.loads([line for line in process.stdout.splitlines() if line.startswith("[[")][-1])
    for images, (ids, logprobs) in zip((IMAGES[:1], [], IMAGES), answers, strict=True):
        _, _, expected_ids, expected_logprobs = generate(tmp_path / "model", "what is it", *images)
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
