"""A checkpoint served in a process that cannot import the package: by transformers, asked by the openai client, and by
vLLM, if `VLLM_PYTHON` names a Python that has it; test_remote_code.py does what an engine does."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest
import tiny
import tiny_parts as parts
from asking import generate, request
from paths import DOCS
from PIL import Image
from remote_code import BLOCK
from transformers import AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint


pytestmark = [pytest.mark.slow, pytest.mark.nightly]


PAGE = (DOCS / "serving.md").read_text()
IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the page takes as given: `my-model` and `kite.png`."""
    root = tmp_path_factory.mktemp("serving")
    build_checkpoint(parts.vision(root / "vision"), parts.language(root / "language", tied=False), root / "built")
    model = AutoModelForImageTextToText.from_pretrained(root / "built")
    tiny.heeding(model).save_pretrained(root / "my-model")
    AutoProcessor.from_pretrained(root / "built").save_pretrained(root / "my-model")
    IMAGES[0].save(root / "kite.png")
    return root


@pytest.fixture(scope="module")
def url(folder):
    """The address of a server, begun by the page's command."""
    (command,) = re.findall(r"^transformers (serve my-model .*)$", PAGE, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, log = f"http://127.0.0.1:{port}", folder / "log"
    code = BLOCK + "from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", code, *command.split(), "--device", "cpu", "--port", str(port)]
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        server = subprocess.Popen(
            [*words, "--host", "127.0.0.1"], env=environment, cwd=folder, stdout=file, stderr=file
        )
    try:
        while True:
            assert server.poll() is None, log.read_text()
            try:
                httpx.get(f"{address}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


def ask(url, messages, **options):
    client = pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    return client.chat.completions.create(
        model="my-model", messages=messages, max_tokens=8, temperature=0, **options
    )  # fmt: skip


def test_answers_are_those_of_generate(folder, url):
    answers = []
    for images in ([], IMAGES[:1], IMAGES[1:], IMAGES):
        expected, prompt, ids, _ = generate(folder / "my-model", "what is it", *images)
        answer = ask(url, request("what is it", *images))
        assert answer.choices[0].message.content == expected
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(ids))
        streamed = ask(url, request("what is it", *images), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == expected
        answers.append(expected)
    assert answers[1] != answers[2]  # the images arrive


def test_the_page_s_client_is_answered(folder, url):
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = snippet.replace("http://localhost:8000", url)
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    expected, *_ = generate(folder / "my-model", "What is in the image?", IMAGES[0], tokens=64)
    assert process.stdout == f"{expected}\n", process.stderr


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
